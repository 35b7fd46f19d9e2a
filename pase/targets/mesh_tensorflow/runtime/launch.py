"""`launch`: the processes of a training on this machine, started and watched; when one ends, all do.

This process loads no framework. The chief, task 0, has its output and its errors, and so has a task that is alone here;
what a server beside the chief writes is shown where it was the one that failed."""

import ctypes
import json
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import click

from pase.errors import ProgramError, missing_extra
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, VARIABLE, Cluster, kept_text

_LAST_LINES = 15


def check_packages() -> None:
    """Raise MissingExtraError where what programs run on is not installed; nothing is imported."""
    if find_spec("tensorflow") is None or find_spec("mesh_tensorflow") is None:
        raise missing_extra("running a program needs TensorFlow and Mesh-TensorFlow", "mesh")


def program_events(source: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run a program with some arguments and --json, and yield its lines of JSON as they come.

    What is no object of JSON comes as an event "text". Raises ProgramError with the program's last lines where it
    fails, MissingExtraError where it could not. The process is ended when the iterator is closed, or fails.
    """
    check_packages()
    with tempfile.TemporaryDirectory(prefix="pase-run-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(source, encoding="utf-8")
        # The child must find the very package that wrote the program.
        here = str(Path(__file__).resolve().parents[4])
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        with (Path(folder) / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments, "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path},
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    yield _event(line)
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            errors.seek(0)
            if status != 0:
                raise ProgramError(_why_it_ended(status, errors.read()))


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": "text", "text": line}


def _why_it_ended(status: int, errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    if status == 1 and lines and lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    if status < 0:
        return f"the program was ended by signal {-status}" + (
            " (perhaps for want of memory: use a smaller batch or fewer devices)" if status == -9 else ""
        )
    shown = "\n".join(lines[-_LAST_LINES:]) or "it wrote nothing"
    return f"the program ended with status {status}; its last lines:\n{shown}"


POLL_S = 0.05
"""How often processes are asked how they are."""

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

    @property
    def status(self) -> int | None:
        """Its exit status, below 0 for a signal; None while it runs."""
        return self.popen.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, for the time being."""
        try:
            state = (
                Path(f"/proc/{self.popen.pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[0]
            )
        except (OSError, IndexError):
            return False
        return state in ("T", "t")

    @property
    def how(self) -> str:
        """In what way it ended: the signal, or the status with the last line that it wrote."""
        status = self.popen.returncode
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = "unknown"
            return f"was ended by signal {-status} ({name})"
        said = ""
        if self.errors is not None:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "")[:_LONGEST_LINE]
        return f"ended with status {status}" + (f": {said.removeprefix('error: ')}" if said else "")


@dataclass(slots=True)
class StopWatch:
    """Finds processes that a signal has stopped for longer than a limit; None for no limit."""

    limit_s: float | None
    _since_s: dict[int, float]

    def too_long(self, processes: Sequence[Process], now_s: float) -> Process | None:
        """Return such a process, None where there is none. To be asked often."""
        for process in processes if self.limit_s is not None else ():
            if not process.is_stopped:
                self._since_s.pop(process.task, None)
            elif now_s - self._since_s.setdefault(process.task, now_s) > (self.limit_s or 0):
                return process
        return None


class Stopped(BaseException):
    """A signal asked for the end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def local_clusters(num_tasks: int, *, bind: str, step_timeout_s: float | None) -> list[Cluster]:
    """Return what each task on this machine is to know, the last task first: the others wait for the chief."""
    addresses = tuple(f"{LOOPBACK}:{port}" for port in _free_ports(num_tasks))
    cluster = Cluster(addresses=addresses, task=0, bind=bind, step_timeout_s=step_timeout_s)
    return [replace(cluster, task=task, local_task=task) for task in reversed(range(num_tasks))]


def run_tasks(
    command: Sequence[str],
    clusters: Sequence[Cluster],
    watch: Callable[[Sequence[Process]], int],
    checkpoints: Path | None,
) -> int:
    """Start a command once for each cluster and return what `watch` does, or 128 + the number of a signal.

    The chief, and a task that is alone here, has our output and errors; those of others are kept in a file. At the end
    no process is left. checkpoints: folder, named where a signal asked for the end. Raises MissingExtraError.
    """
    check_packages()
    with ExitStack() as opened:
        processes: list[Process] = []
        opened.callback(_end_all, processes)
        try:
            with _signals():
                for cluster in clusters:
                    has_our_output = cluster.task == 0 or len(clusters) == 1
                    errors = None if has_our_output else opened.enter_context(tempfile.TemporaryFile())
                    processes.append(_start(command, cluster, errors))
                return watch(processes)
        except Stopped as stopped:
            _stop(processes, stopped.number)
            if stopped.number != signal.SIGINT:
                # Of an interrupt the chief speaks itself.
                name = signal.Signals(stopped.number).name
                sys.stderr.write(f"ended by {name}{kept_text(checkpoints)}\n")
            return 128 + stopped.number


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
    here = str(Path(__file__).resolve().parents[4])
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


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now; held together, so that they differ."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


_GRACE_S = 2.0
"""How long the chief has to say itself what went wrong, where a server fails with a status of its own."""


def launch_here(
    program: Sequence[str], *, num_processes: int, bind: str = LOOPBACK, step_timeout_s: float | None = None
) -> int:
    """Run a program in several processes of this machine and return its exit status, or 128 + a signal's number.

    program: a Python file and its arguments. bind: the IP address to listen on. step_timeout_s: how long a step may
    take. Raises ProgramError where a process died, with its name and the last checkpoint.
    """
    if num_processes < 1:
        raise ProgramError(f"{num_processes} processes were asked for; expected 1 or more")
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


def _failure(process: Process, how: str, processes: Sequence[Process], checkpoints: Path | None) -> ProgramError:
    others = "; the other processes were ended" if len(processes) > 1 else ""
    return ProgramError(f"{process.name} {how}{others}{kept_text(checkpoints)}")


def _command(program: Sequence[str]) -> list[str]:
    script = Path(program[0])
    if not script.is_file():
        raise ProgramError(f"there is no program {script}; give the file that pase emit wrote, such as train.py")
    return [sys.executable, str(script), *program[1:]]


def _checkpoint_folder(program: Sequence[str]) -> Path | None:
    """Return the folder that the program's own arguments name for its checkpoints."""
    command = click.Command(
        "program",
        params=[click.Option(["--checkpoint"], type=click.Path(path_type=Path))],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    try:
        folder: Path | None = command.make_context("program", list(program[1:])).params["checkpoint"]
    except click.ClickException:
        return None
    return folder
