"""Tasks of a cluster as processes of this machine: started, asked, told to stop, ended. Loads no framework."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pase.targets.mesh_tensorflow.runtime.children import check_packages
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, VARIABLE, Cluster, kept_text

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
