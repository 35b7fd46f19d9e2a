"""The processes of a training on this machine: started, watched over, and ended when it is over.

This process loads no framework. The chief, task 0, has its output and its errors; what another task writes is shown
where it was the one that failed. When one ends before its time, all do, but for asynchronous training: that goes on
without the task, and it is said which it was.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pase.common.processes import dying_with_us, end_all, ending_text, package_environment
from pase.easgd.cluster import LOOPBACK, VARIABLE, Cluster, answers, kept_text
from pase.errors import TrainingError
from pase.targets.mesh_tensorflow import check_packages

POLL_S = 0.05
"""How often processes are asked how they are."""

_STOP_S = 10.0
"""How long an interrupted chief has to end its step."""
_LONGEST_LINE = 1000
_GRACE_S = 2.0
"""How long the chief has to say itself what went wrong, where another task fails with a status of its own."""
_END_S = 10.0
"""How long the others have to end when the chief has ended well."""


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
        said = ""
        if status >= 0 and self.errors is not None:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "")[:_LONGEST_LINE]
        return ending_text(status) + (f": {said.removeprefix('error: ')}" if said else "")


class Stopped(BaseException):
    """A signal asked for the end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def local_clusters(num_tasks: int, *, step_timeout_s: float | None) -> list[Cluster]:
    """Return what each task on this machine is to know, the last task first: the others wait for the chief."""
    if num_tasks < 1:
        raise TrainingError(f"{num_tasks} processes were asked for; expected 1 or more")
    addresses = tuple(f"{LOOPBACK}:{port}" for port in _free_ports(num_tasks))
    cluster = Cluster(addresses=addresses, task=0, step_timeout_s=step_timeout_s)
    return [replace(cluster, task=task) for task in reversed(range(num_tasks))]


def supervise(
    command: Sequence[str], clusters: Sequence[Cluster], *, goes_on: bool, checkpoints: Path | None = None
) -> int:
    """Start a command once for each cluster and return the chief's exit status, or 128 + the number of a signal.

    The chief has our output and errors; those of others are kept in a file. At the end no process is left.

    Args:
        command: each process has its cluster in PASE_CLUSTER.
        clusters: what each task is to know; a step's time limit is theirs.
        goes_on: whether the others go on without a task that ends or is stopped, once it was up.
        checkpoints: their folder, for messages.

    Raises:
        TrainingError: the job ended before its time; with the task, the signal and the last checkpoint.
        MissingExtraError: what is needed is not installed.
    """
    check_packages()
    supervisor = _Supervisor(
        addresses=clusters[0].addresses,
        limit_s=clusters[0].step_timeout_s,
        checkpoints=checkpoints,
        goes_on=goes_on,
    )
    with ExitStack() as opened:
        processes: list[Process] = []
        # A server has nothing to tidy up, and one that is stopped would not hear of less.
        opened.callback(lambda: end_all(process.popen for process in processes))
        try:
            with _signals():
                for cluster in clusters:
                    errors = None if cluster.task == 0 else opened.enter_context(tempfile.TemporaryFile())
                    processes.append(_start(command, cluster, errors))
                return supervisor.watch(processes)
        except Stopped as stopped:
            _stop(processes, stopped.number)
            if stopped.number != signal.SIGINT:
                # Of an interrupt the chief speaks itself.
                name = signal.Signals(stopped.number).name
                sys.stderr.write(f"ended by {name}{kept_text(checkpoints)}\n")
            return 128 + stopped.number


@dataclass(slots=True, kw_only=True)
class _Supervisor:
    """What is done about processes that end, or are stopped.

    limit_s: for how long one may be stopped, None for ever. left: those that the job goes on with. not_up: tasks of it
    that do not listen yet. stopped_s: since when tasks are stopped. Others: as for `supervise`.
    """

    addresses: Sequence[str]
    limit_s: float | None
    checkpoints: Path | None
    goes_on: bool
    left: list[Process] = field(default_factory=list)
    not_up: set[int] = field(default_factory=set)
    stopped_s: dict[int, float] = field(default_factory=dict)

    def watch(self, processes: Sequence[Process]) -> int:
        """Wait until the job is over and return its exit status."""
        self.left = list(processes)
        self.not_up = {process.task for process in processes}
        chief = next(process for process in processes if process.task == 0)
        while chief.status is None:
            time.sleep(POLL_S)
            for process in [each for each in self.left if each is not chief and each.status is not None]:
                if process.status:
                    self._fallen(process, chief)
            if stopped := self._stopped_too_long():
                self._go_on_without(stopped, "was stopped by a signal, for longer than --timeout", chief)
                # If it went on, it would only learn that it is too late.
                stopped.popen.kill()
            self.not_up -= {task for task in self.not_up if answers(self.addresses[task])}
        status: int = chief.popen.returncode
        if status and not self.goes_on and (killed := self._killed()):
            # What the chief says of it is that it cannot be reached.
            raise self._failure(killed, killed.how)
        if status < 0:
            raise self._failure(chief, chief.how)
        if status == 0:
            self._wait_for_the_end()
        if status:
            # It has said why.
            names = [process.name for process in self.left if process.status is None and process.is_stopped]
            sys.stderr.write(f"note: {', '.join(names)} was stopped by a signal\n" if names else "")
        return status

    def _killed(self) -> Process | None:
        """Return a process that a signal ended, None where there is none."""
        return next((process for process in self.left if (process.status or 0) < 0), None)

    def _stopped_too_long(self) -> Process | None:
        """Return a process that a signal has stopped for longer than the limit, None where there is none."""
        now_s = time.monotonic()
        for process in self.left if self.limit_s is not None else ():
            if not process.is_stopped:
                self.stopped_s.pop(process.task, None)
            elif now_s - self.stopped_s.setdefault(process.task, now_s) > (self.limit_s or 0):
                return process
        return None

    def _fallen(self, process: Process, chief: Process) -> None:
        """Go on after a process has ended, or have all end: the chief says why, if the same mistake ends it, too."""
        end_s = time.monotonic() + _GRACE_S
        while (killed := self._killed()) is None and time.monotonic() < end_s:
            if chief.status is not None:
                return
            time.sleep(POLL_S)
        first = killed or process
        if first is not chief:
            self._go_on_without(first, first.how, chief)

    def _go_on_without(self, process: Process, how: str, chief: Process) -> None:
        # The others wait for one another to come up, whatever the method.
        if process is chief or not self.goes_on or process.task in self.not_up:
            raise self._failure(process, how)
        self.left.remove(process)
        sys.stderr.write(f"note: {process.name} {how}; the others go on without its workers\n")
        sys.stderr.flush()

    def _failure(self, process: Process, how: str) -> TrainingError:
        others = "; the other processes were ended" if len(self.left) > 1 else ""
        return TrainingError(f"{process.name} {how}{others}{kept_text(self.checkpoints)}")

    def _wait_for_the_end(self) -> None:
        """Let the others end by themselves; a moment is enough, they have nothing left to do."""
        end_s = time.monotonic() + _END_S
        while any(each.status is None and not each.is_stopped for each in self.left) and time.monotonic() < end_s:
            time.sleep(POLL_S)


def _stop(processes: Sequence[Process], number: int) -> None:
    """Have the chief end its step and say so; a second signal ends it at once."""
    for process in processes:
        if process.task == 0:
            process.popen.send_signal(number)
            try:
                with _signals():
                    process.popen.wait(_STOP_S)
            except (subprocess.TimeoutExpired, Stopped):
                pass


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
    popen = subprocess.Popen(
        dying_with_us(command),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        env=package_environment({VARIABLE: cluster.to_json()}),
        # An interrupt is for us to pass on.
        start_new_session=True,
    )
    return Process(task=cluster.task, popen=popen, errors=errors)


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now; held together, so that they differ."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
