"""The processes of a training across workers on this machine: started, watched over, and ended when it is over.

This process loads no framework. What a worker's process writes is shown where it failed; task 0 speaks for the job.
Where a synchronous method loses a process, all end. An asynchronous one goes on without a worker's process, and it is
said which it was.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pase.errors import TrainingError
from pase.targets.mesh_tensorflow.runtime.cluster import LOOPBACK, Cluster, answers, kept_text
from pase.targets.mesh_tensorflow.runtime.launch import POLL_S, Process, StopWatch, local_clusters, run_tasks

_GRACE_S = 2.0
"""How long task 0 has to say itself what went wrong, where a worker's process fails with a status of its own."""
_END_S = 10.0
"""How long the others have to end when task 0 has ended well."""


def pase_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a process that does what `pase` does with some arguments, in this very Python."""
    return [sys.executable, "-c", "from pase.cli.main import main; main()", *arguments]


def train_here(
    command: Sequence[str],
    *,
    num_tasks: int,
    is_synchronous: bool,
    bind: str = LOOPBACK,
    step_timeout_s: float | None = None,
    checkpoints: Path | None = None,
) -> int:
    """Run a command once for each task of a job on this machine and return task 0's exit status, or 128 + a signal's.

    Each process has its cluster in PASE_CLUSTER. bind: the IP address to listen on. step_timeout_s: how long a step may
    take, None for ever. checkpoints: their folder, for messages. Raises TrainingError where the job ended before its
    time, with the task, the signal and the last checkpoint.
    """
    clusters = local_clusters(num_tasks, bind=bind, step_timeout_s=step_timeout_s)
    return _supervise(command, clusters, is_synchronous=is_synchronous, checkpoints=checkpoints)


def train_task(
    command: Sequence[str], cluster: Cluster, *, is_synchronous: bool, checkpoints: Path | None = None
) -> int:
    """Run one task of a job on several hosts and return its exit status, like `train_here`."""
    return _supervise(command, [cluster], is_synchronous=is_synchronous, checkpoints=checkpoints)


def _supervise(
    command: Sequence[str], clusters: Sequence[Cluster], *, is_synchronous: bool, checkpoints: Path | None
) -> int:
    supervisor = _Supervisor(
        is_synchronous=is_synchronous,
        checkpoints=checkpoints,
        addresses=clusters[0].addresses,
        stop_watch=StopWatch(clusters[0].step_timeout_s, {}),
    )
    return run_tasks(command, clusters, supervisor.watch, checkpoints)


@dataclass(slots=True)
class _Supervisor:
    """What is done about processes that end, or are stopped.

    left: those that the job goes on with. not_up: tasks of it that do not listen yet.
    """

    is_synchronous: bool
    checkpoints: Path | None
    addresses: Sequence[str]
    stop_watch: StopWatch
    left: list[Process] = field(default_factory=list)
    not_up: set[int] = field(default_factory=set)

    def watch(self, processes: Sequence[Process]) -> int:
        """Wait until the job is over and return its exit status."""
        self.left = list(processes)
        self.not_up = {process.task for process in processes}
        # On a host without task 0, its one process is all that there is to watch.
        chief = next((process for process in processes if process.task == 0), processes[0])
        while chief.status is None:
            time.sleep(POLL_S)
            for process in [each for each in self.left if each is not chief and each.status]:
                self._fallen(process, chief)
            if stopped := self.stop_watch.too_long(self.left, time.monotonic()):
                self._stopped(stopped, chief)
            self._look_who_is_up()
        status: int = chief.popen.returncode
        if status < 0:
            raise self._failure(chief, chief.how)
        if status == 0:
            self._wait_for_the_end()
        return status

    def _look_who_is_up(self) -> None:
        for task in tuple(self.not_up):
            if answers(self.addresses[task]):
                self.not_up.discard(task)

    def _fallen(self, process: Process, chief: Process) -> None:
        """A worker's process has ended, and not well."""
        if process.popen.returncode > 0:
            # The same mistake may end task 0, which then says it; or it was task 0 that ended it.
            end_s = time.monotonic() + _GRACE_S
            while time.monotonic() < end_s:
                if chief.status is not None:
                    return
                time.sleep(POLL_S)
        self._go_on_without(process, process.how)

    def _stopped(self, process: Process, chief: Process) -> None:
        how = "was stopped by a signal, for longer than --timeout"
        if process is chief:
            raise self._failure(process, how)
        self._go_on_without(process, how)
        # If it went on, it would only learn that it is too late.
        process.popen.kill()

    def _go_on_without(self, process: Process, how: str) -> None:
        # The others wait for one another to come up, whatever the method.
        if self.is_synchronous or process.task in self.not_up:
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
