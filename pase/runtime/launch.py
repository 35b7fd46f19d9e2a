"""`launch`: the processes of a training on this machine, started and watched; when one ends, all do.

This process loads no framework. The chief, task 0, has its output and its errors, and so has a task that is alone here;
what a server beside the chief writes is shown where it was the one that failed.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pase.errors import RuntimeFailure
from pase.runtime.cluster import LOOPBACK, VARIABLE, Cluster, kept_text

_POLL_S = 0.05
_GRACE_S = 2.0
"""How long the chief has to say itself what went wrong, where a server fails with a status of its own."""
_STOP_S = 10.0
"""How long an interrupted chief has to end its step."""
_LONGEST_LINE = 1000

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A task that was started here. errors: the file that its standard error goes to, None for our own."""

    task: int
    popen: "subprocess.Popen[bytes]"
    errors: IO[bytes] | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"task {self.task} (pid {self.popen.pid})"


class Stopped(BaseException):
    """A signal asked for the end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch_here(
    program: Sequence[str], *, num_processes: int, bind: str = LOOPBACK, step_timeout_s: float | None = None
) -> int:
    """Run a program in several processes of this machine and return its exit status, or 128 + a signal's number.

    program: a Python file and its arguments. bind: the IP address to listen on. step_timeout_s: how long a step may
    take. Raises RuntimeFailure where a process died, with its name and the last checkpoint.
    """
    if num_processes < 1:
        raise RuntimeFailure(f"{num_processes} processes were asked for; expected 1 or more")
    addresses = tuple(f"{LOOPBACK}:{port}" for port in _free_ports(num_processes))
    cluster = Cluster(addresses=addresses, task=0, bind=bind, step_timeout_s=step_timeout_s)
    return _supervise(
        program, [replace(cluster, task=task, local_task=task) for task in reversed(range(num_processes))]
    )


def launch_task(program: Sequence[str], cluster: Cluster) -> int:
    """Run one task of a cluster of several machines and return its exit status, like `launch_here`."""
    return _supervise(program, [cluster])


def _supervise(program: Sequence[str], clusters: Sequence[Cluster]) -> int:
    command = _command(program)
    with ExitStack() as opened:
        processes: list[Process] = []
        opened.callback(_end_all, processes)
        try:
            with _signals():
                for cluster in clusters:
                    has_our_output = cluster.task == 0 or len(clusters) == 1
                    errors = None if has_our_output else opened.enter_context(tempfile.TemporaryFile())
                    processes.append(_start(command, cluster, errors))
                return _watch(processes, program, clusters[0].step_timeout_s)
        except Stopped as stopped:
            _stop(processes, stopped.number)
            if stopped.number != signal.SIGINT:
                # Of an interrupt the chief speaks itself.
                name = signal.Signals(stopped.number).name
                sys.stderr.write(f"ended by {name}{kept_text(_checkpoint_folder(program))}\n")
            return 128 + stopped.number


def _watch(processes: Sequence[Process], program: Sequence[str], stop_timeout_s: float | None) -> int:
    """Wait until a process ends, or is stopped for too long, and return the exit status of the job."""
    stopped_since_s: dict[int, float] = {}
    while not _ended(processes):
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        for process in processes if stop_timeout_s is not None else ():
            if not _is_stopped(process):
                stopped_since_s.pop(process.task, None)
            elif now_s - stopped_since_s.setdefault(process.task, now_s) > (stop_timeout_s or 0):
                raise _failure(process, "was stopped by a signal, for longer than --timeout", processes, program)
    chief = next((process for process in processes if process.task == 0), processes[0])
    end_s = time.monotonic() + _GRACE_S
    # Where a server ends with a status of its own, the same mistake may end the chief, which then says it.
    while chief.popen.poll() is None and time.monotonic() < end_s and _killed(processes) is None:
        time.sleep(_POLL_S)
    first = _killed(processes) or (chief if chief.popen.poll() is not None else _ended(processes)[0])
    status = first.popen.returncode
    if first is not chief or status < 0:
        raise _failure(first, _how(first), processes, program)
    if status:
        # It has said why.
        stopped = [process.name for process in processes if process.popen.poll() is None and _is_stopped(process)]
        sys.stderr.write(f"note: {', '.join(stopped)} was stopped by a signal\n" if stopped else "")
    return status


def _ended(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if process.popen.poll() is not None]


def _killed(processes: Sequence[Process]) -> Process | None:
    """Return a process that a signal ended, None where there is none."""
    return next((process for process in _ended(processes) if process.popen.returncode < 0), None)


def _failure(process: Process, how: str, processes: Sequence[Process], program: Sequence[str]) -> RuntimeFailure:
    others = "; the other processes were ended" if len(processes) > 1 else ""
    return RuntimeFailure(f"{process.name} {how}{others}{kept_text(_checkpoint_folder(program))}")


def _how(process: Process) -> str:
    status = process.popen.returncode
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        return f"was ended by signal {-status} ({name})"
    said = ""
    if process.errors is not None:
        process.errors.seek(0)
        lines = process.errors.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")[:_LONGEST_LINE]
    return f"ended with status {status}" + (f": {said.removeprefix('error: ')}" if said else "")


def _stop(processes: Sequence[Process], number: int) -> None:
    """Have the chief end its step and say so; a second signal ends it at once."""
    for process in processes:
        if process.task == 0 or len(processes) == 1:
            process.popen.send_signal(number)
            try:
                with _signals():
                    process.popen.wait(_STOP_S)
            except (subprocess.TimeoutExpired, Stopped):
                pass


def _end_all(processes: Sequence[Process]) -> None:
    """End what is left: a server has nothing to tidy up, and one that is stopped would not hear of less."""
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
    for process in processes:
        process.popen.wait()


@contextmanager
def _signals() -> Iterator[None]:
    """Have the signals that ask for the end raise `Stopped`."""

    def stopped(number: int, _: object) -> None:
        raise Stopped(number)

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored, as under nohup, stays so.
    heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stopped) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], cluster: Cluster, errors: IO[bytes] | None) -> Process:
    # The program must find the very package that started it.
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": path, VARIABLE: cluster.to_json()},
        # An interrupt is for us to pass on.
        start_new_session=True,
        preexec_fn=_dies_with_us(),
    )
    return Process(task=cluster.task, popen=popen, errors=errors)


def _dies_with_us() -> Callable[[], None] | None:
    """Return what a new process does so that the kernel ends it when this one is gone, however it went."""
    if not sys.platform.startswith("linux"):
        return None
    prctl: Any = ctypes.CDLL(None).prctl
    ours = os.getpid()

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != ours:
            os._exit(1)

    return call


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


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now; held together, so that they differ."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def _is_stopped(process: Process) -> bool:
    try:
        state = (
            Path(f"/proc/{process.popen.pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
