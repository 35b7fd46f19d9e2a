"""`launch`: the processes of a training on this machine, started and watched; when one ends, all do.

This process loads no framework. The chief, task 0, has its output and its errors, and so has a task that is alone here;
what a server beside the chief writes is shown where it was the one that failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.child_tasks import POLL_S, Process, StopWatch, local_clusters, run_tasks
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, Cluster, kept_text

_GRACE_S = 2.0
"""How long the chief has to say itself what went wrong, where a server fails with a status of its own."""


def launch_here(
    program: Sequence[str], *, num_processes: int, bind: str = LOOPBACK, step_timeout_s: float | None = None
) -> int:
    """Run a program in several processes of this machine and return its exit status, or 128 + a signal's number.

    program: a Python file and its arguments. bind: the IP address to listen on. step_timeout_s: how long a step may
    take. Raises RuntimeFailure where a process died, with its name and the last checkpoint.
    """
    if num_processes < 1:
        raise RuntimeFailure(f"{num_processes} processes were asked for; expected 1 or more")
    return _supervise(program, local_clusters(num_processes, bind=bind, step_timeout_s=step_timeout_s))


def launch_task(program: Sequence[str], cluster: Cluster) -> int:
    """Run one task of a cluster of several machines and return its exit status, like `launch_here`."""
    return _supervise(program, [cluster])


def _supervise(program: Sequence[str], clusters: Sequence[Cluster]) -> int:
    checkpoints = _checkpoint_folder(program)
    watch = partial(_watch, checkpoints=checkpoints, stop_timeout_s=clusters[0].step_timeout_s)
    return run_tasks(_command(program), clusters, watch, checkpoints)


def _watch(processes: Sequence[Process], *, checkpoints: Path | None, stop_timeout_s: float | None) -> int:
    """Wait until a process ends, or is stopped for too long, and return the exit status of the job."""
    stop_watch = StopWatch(stop_timeout_s, {})
    while not _ended(processes):
        time.sleep(POLL_S)
        if stopped := stop_watch.too_long(processes, time.monotonic()):
            raise _failure(stopped, "was stopped by a signal, for longer than --timeout", processes, checkpoints)
    chief = next((process for process in processes if process.task == 0), processes[0])
    end_s = time.monotonic() + _GRACE_S
    # Where a server ends with a status of its own, the same mistake may end the chief, which then says it.
    while chief.status is None and time.monotonic() < end_s and _killed(processes) is None:
        time.sleep(POLL_S)
    first = _killed(processes) or (chief if chief.status is not None else _ended(processes)[0])
    status: int = first.popen.returncode
    if first is not chief or status < 0:
        raise _failure(first, first.how, processes, checkpoints)
    if status:
        # It has said why.
        names = [process.name for process in processes if process.status is None and process.is_stopped]
        sys.stderr.write(f"note: {', '.join(names)} was stopped by a signal\n" if names else "")
    return status


def _ended(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if process.status is not None]


def _killed(processes: Sequence[Process]) -> Process | None:
    """Return a process that a signal ended, None where there is none."""
    return next((process for process in _ended(processes) if process.popen.returncode < 0), None)


def _failure(process: Process, how: str, processes: Sequence[Process], checkpoints: Path | None) -> RuntimeFailure:
    others = "; the other processes were ended" if len(processes) > 1 else ""
    return RuntimeFailure(f"{process.name} {how}{others}{kept_text(checkpoints)}")


def _command(program: Sequence[str]) -> list[str]:
    script = Path(program[0])
    if not script.is_file():
        raise RuntimeFailure(f"there is no program {script}; give the file that pase emit wrote, such as train.py")
    return [sys.executable, str(script), *program[1:]]


def _checkpoint_folder(program: Sequence[str]) -> Path | None:
    """Return the folder that the program's own arguments name for its checkpoints."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--checkpoint", type=Path)
    try:
        known, _ = parser.parse_known_args(list(program[1:]))
    except (argparse.ArgumentError, SystemExit):
        return None
    folder: Path | None = known.checkpoint
    return folder
