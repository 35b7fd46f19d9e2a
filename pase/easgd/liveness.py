"""Who is gone, and who takes too long: what TensorFlow itself would wait for without end."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pase.easgd.job import Job
from pase.easgd.messages import EXCHANGED, Kind, Piece
from pase.targets.mesh_tensorflow.runtime.cluster import Cluster
from pase.targets.mesh_tensorflow.runtime.probing import PROBE_EVERY_S, is_lost


class Progress(Protocol):
    """What the messages that pass through task 0 say of who is at work."""

    def note(self, to: int, piece: Piece) -> None:
        """Note a piece that passed."""
        ...

    def overdue(self, limit_s: float) -> tuple[int, ...]:
        """Return the workers that have not answered for longer than a limit."""
        ...


@dataclass(slots=True)
class Answers:
    """Asynchronous methods: a worker owes an answer from when the centre goes to it until its next message comes."""

    job: Job
    _owed_since_s: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, to: int, piece: Piece) -> None:
        """Note a piece that passed."""
        kind, sender = piece.message.kind, piece.message.sender
        with self._lock:
            if sender < self.job.num_workers:
                self._owed_since_s.pop(sender, None)
            elif to < self.job.num_workers and kind in (Kind.CENTRE, Kind.STOP):
                self._owed_since_s[to] = time.monotonic()

    def overdue(self, limit_s: float) -> tuple[int, ...]:
        """Return the workers that owe an answer for longer than a limit."""
        now_s = time.monotonic()
        with self._lock:
            return tuple(worker for worker, since_s in self._owed_since_s.items() if now_s - since_s > limit_s)


@dataclass(slots=True)
class Rounds:
    """Synchronous methods: nobody goes on without the others, so that who holds up a round cannot be told.

    The time counts from the last message, from the first exchange on until every worker has ended.
    """

    job: Job
    _last_s: float | None = None
    _ended: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, to: int, piece: Piece) -> None:
        """Note a piece that passed."""
        with self._lock:
            if piece.message.kind is Kind.ENDED:
                self._ended.add(piece.message.sender)
            if self._last_s is not None or piece.message.kind in EXCHANGED:
                self._last_s = time.monotonic()

    def overdue(self, limit_s: float) -> tuple[int, ...]:
        """Return all workers that have not ended, where no message came for longer than a limit."""
        with self._lock:
            if self._last_s is None or time.monotonic() - self._last_s <= limit_s:
                return ()
            return tuple(sorted(set(range(self.job.num_workers)) - self._ended))


def progress_of(job: Job) -> Progress:
    """Return what notes the progress of a job."""
    return Rounds(job) if job.algorithm.is_synchronous else Answers(job)


@dataclass(slots=True)
class Neighbours:
    """Watches over some tasks.

    gone: called once with each task that is gone. late: called every second; whoever is too late is its to find out.
    """

    cluster: Cluster
    tasks: tuple[int, ...]
    gone: Callable[[int], None]
    late: Callable[[], None] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch from now on, in a thread."""
        threading.Thread(target=self._run, name="neighbours", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: the others may go."""
        self._ended.set()

    def _run(self) -> None:
        left = set(self.tasks)
        while not self._ended.wait(PROBE_EVERY_S):
            for task in sorted(left):
                if is_lost(self.cluster.addresses[task]) and not self._ended.is_set():
                    left.discard(task)
                    self.gone(task)
            if self.late:
                self.late()
