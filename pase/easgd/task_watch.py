"""`TaskWatch`: what a task of a training does about others that are gone, or take too long."""

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pase.easgd.job import Job
from pase.easgd.liveness import Neighbours, Progress
from pase.easgd.messages import Inbox, Kind, Message, Piece
from pase.easgd.server_transport import ServerTransport, Wiring
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster
from pase.targets.mesh_tensorflow.runtime.cluster_server import leave

_GRACE_S = 10.0
"""How long task 0 has to end a training that cannot go on; a thread of it may wait for a process that is stopped."""


@dataclass(slots=True)
class TaskWatch:
    """Task 0 watches over all others, these over task 0, which ends without any that it needs.

    inboxes: of this task's ranks. progress: told of what passes through the transport. last_checkpoint: what to add to
    the message of an early end.
    """

    job: Job
    cluster: Cluster
    wiring: Wiring
    inboxes: Mapping[int, Inbox]
    transport: ServerTransport
    progress: Progress
    last_checkpoint: Callable[[], str]
    _neighbours: Neighbours | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _given_up: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Watch from now on."""
        if self.cluster.task != 0:
            self._neighbours = Neighbours(self.cluster, (0,), self._master_gone)
        else:
            others = tuple(range(1, len(self.cluster.addresses)))
            late = self._give_up_late if self.cluster.step_timeout_s is not None else None
            self._neighbours = Neighbours(self.cluster, others, self._gone, late)
        self._neighbours.start()

    def stop(self) -> None:
        """Watch no more: the training is over, well or not."""
        self._over.set()
        if self._neighbours:
            self._neighbours.stop()

    def _master_gone(self, task: int) -> None:
        sys.stderr.write(f"error: {self._called(task)} ended or cannot be reached{self.last_checkpoint()}\n")
        leave(1)

    def _gone(self, task: int) -> None:
        self._give_up(task, f"{self._called(task)} ended or cannot be reached")

    def _give_up_late(self) -> None:
        limit_s = self.cluster.step_timeout_s
        assert limit_s is not None
        late = self.progress.overdue(limit_s)
        if late and self.job.algorithm.is_synchronous:
            self._end(f"no step ended within {limit_s:g} s; a process may be stopped, or --timeout is too short")
        for task, ranks in enumerate(self.wiring.ranks):
            if task != 0 and not self.job.algorithm.is_synchronous and set(ranks) & set(late):
                self._give_up(task, f"{self._called(task)} did not answer within {limit_s:g} s")

    def _give_up(self, task: int, what: str) -> None:
        """Go on without a task, or end where the method needs it."""
        if task in self._given_up or self._over.is_set():
            return
        self._given_up.add(task)
        self.transport.give_up(task)
        if self.job.algorithm.is_synchronous:
            self._end(what)
            return
        for rank in self.wiring.ranks[task]:
            for to in (self.job.master, self.job.coordinator):
                self._tell(to, Message(sender=rank, kind=Kind.LOST, text=what))

    def _end(self, what: str) -> None:
        """Have the coordinator end the training; this process where it cannot."""
        text = f"{what}{self.last_checkpoint()}"
        self._tell(self.job.coordinator, Message(sender=self.job.master, kind=Kind.LOST, text=text))
        if not self._over.wait(_GRACE_S):
            sys.stderr.write(f"error: {text}\n")
            leave(1)

    def _tell(self, to: int, message: Message) -> None:
        if to in self.inboxes:
            self.inboxes[to].put(Piece(message=message))

    def _called(self, task: int) -> str:
        workers = [str(rank) for rank in self.wiring.ranks[task] if rank < self.job.num_workers]
        those = f"worker{'s' if len(workers) > 1 else ''} {', '.join(workers)}"
        return f"task {task}, {self.cluster.addresses[task]}" + (f", with {those}," if workers else ",")
