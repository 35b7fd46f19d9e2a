"""The coordinator: shows what happens, tests the centre, puts checkpoints together, and knows when all is over."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.easgd.algorithms import Place
from pase.easgd.equations import Array
from pase.easgd.job import Job, Snapshot, WorkerProgress
from pase.easgd.messages import Endpoint, Kind, Message
from pase.easgd.objective import Evaluator
from pase.easgd.states import MasterState, WorkerState
from pase.easgd.telling import parted
from pase.easgd.worker import WorkerOutcome
from pase.errors import TrainingError

Report = Callable[[dict[str, Any]], None]
Save = Callable[[Snapshot], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The centre on data that are not trained on. num_samples, time_s: of the training up to there."""

    event: int
    num_samples: int
    time_s: float
    loss: float
    accuracy: float | None
    num_examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training came to.

    centre: [n]. workers: [workers] what each did, None for one that was lost. lost: workers, in the order in which they
    were. num_refused: steps that were not taken, for values that were not finite. time_s: of the training itself.
    num_messages, num_bytes: of all exchanges, the master's included; not those of workers that were lost.
    """

    centre: Array
    velocity: Array | None
    num_events: int
    num_samples: int
    time_s: float
    workers: tuple[WorkerOutcome | None, ...]
    tests: tuple[Tested, ...] = ()
    lost: tuple[int, ...] = ()
    num_refused: int = 0
    num_messages: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _Gathering:
    """A checkpoint that is being put together. missing: workers whose state has not come yet."""

    missing: set[int]
    master: MasterState | None = None
    workers: dict[int, WorkerProgress] = field(default_factory=dict)


@dataclass(slots=True)
class Coordinator:
    """Receives what all ranks tell.

    start: workers that are lost keep the state of it in checkpoints, where they had no later one. evaluator, report,
    save: None where there is nothing to test, to show or to write.
    """

    job: Job
    endpoint: Endpoint
    start: Snapshot
    batch_size: int
    evaluator: Evaluator | None = None
    report: Report | None = None
    save: Save | None = None
    _workers: dict[int, WorkerOutcome] = field(default_factory=dict)
    _latest: dict[int, WorkerProgress] = field(default_factory=dict)
    _lost: list[int] = field(default_factory=list)
    _gatherings: dict[int, _Gathering] = field(default_factory=dict)
    _waiting_tests: deque[Message] = field(default_factory=deque)
    _tests: list[Tested] = field(default_factory=list)
    _end: Message | None = None
    _num_refused: int = 0

    def run(self) -> Outcome:
        """Listen until everybody has ended; TrainingError where the training cannot go on."""
        try:
            while not self._is_over():
                self._hear(self.endpoint.receive())
        except BaseException:
            self._end_all()
            raise
        while self._waiting_tests:
            self._test(self._waiting_tests.popleft())
        return self._outcome()

    def _is_over(self) -> bool:
        if self._end is None or any(gathering.missing for gathering in self._gatherings.values()):
            return False
        return {*self._workers, *self._lost} >= set(range(self.job.num_workers))

    def _end_all(self) -> None:
        """Have every rank end at once: what they still exchange is of no use."""
        for rank in range(self.job.num_workers + 1):
            self.endpoint.send(rank, Kind.STOP)

    def _hear(self, message: Message) -> None:
        _HEARD[message.kind](self, message)

    # -- what is told

    def _show(self, message: Message) -> None:
        self._tell(_read(message))

    def _tell(self, event: dict[str, Any]) -> None:
        if self.report:
            self.report(event)

    def _refuse(self, message: Message) -> None:
        self._num_refused += 1
        self._tell({"event": "refused", **_read(message)})

    def _fail(self, message: Message) -> None:
        """A rank cannot go on: without a worker the others can, where they do not wait for it."""
        is_worker = message.sender < self.job.num_workers
        if self.job.algorithm.is_synchronous or not is_worker:
            raise TrainingError(message.text or f"{self._called(message.sender)} is gone")
        if message.sender in self._lost or message.sender in self._workers:
            return
        self._lost.append(message.sender)
        what = message.text or "its process is gone"
        self._tell({"event": "lost", "worker": message.sender, "rank": message.sender, "what": what})
        for gathering in self._gatherings.values():
            gathering.missing.discard(message.sender)
        self._write_complete()

    def _called(self, rank: int) -> str:
        if rank < self.job.num_workers:
            return f"worker {rank}"
        return "the master"

    def _gather(self, message: Message) -> None:
        """Take a part of a checkpoint."""
        if self.save is None:
            return
        number, told = message.number, _read(message)
        everybody = set(range(self.job.num_workers)) - set(self._lost)
        gathering = self._gatherings.setdefault(number, _Gathering(missing=everybody))
        assert message.vector is not None
        if told["role"] == "master":
            gathering.master = self._master_state(message.vector)
            gathering.missing &= set(told["workers"])
        else:
            progress = WorkerProgress(state=self._worker_state(message.vector), num_steps=told["num_steps"])
            gathering.workers[message.sender] = progress
            gathering.missing.discard(message.sender)
        self._write_complete()

    def _write_complete(self) -> None:
        for number, gathering in sorted(self._gatherings.items()):
            if gathering.missing or gathering.master is None:
                continue
            del self._gatherings[number]
            assert self.save is not None
            self._latest |= gathering.workers
            workers = tuple(
                self._latest.get(worker, self.start.workers[worker]) for worker in range(self.job.num_workers)
            )
            path = self.save(Snapshot(master=gathering.master, workers=workers, num_events=number))
            self._tell({"event": "saved", "after": number, "path": str(path)})

    def _master_state(self, kept: Array) -> MasterState:
        centre, velocity = parted(kept, has_velocity=self.job.algorithm.master_velocity)
        return MasterState(centre=centre, velocity=velocity)

    def _worker_state(self, kept: Array) -> WorkerState:
        weights, velocity = parted(kept, has_velocity=self.job.algorithm.worker_velocity)
        return WorkerState(weights=weights, velocity=velocity)

    # -- tests

    def _test_or_keep(self, message: Message) -> None:
        if self.evaluator is None:
            self._judge(message.sender, None)
        elif self.job.tests_wait:
            self._waiting_tests.append(message)
        else:
            self._test(message)

    def _test(self, message: Message) -> None:
        assert self.evaluator is not None
        assert message.vector is not None
        loss, accuracy, num_examples = self.evaluator.evaluate(message.vector)
        test = Tested(
            event=message.number,
            num_samples=self._num_samples(message.number),
            time_s=_read(message)["time_s"],
            loss=loss,
            accuracy=accuracy,
            num_examples=num_examples,
        )
        self._tests.append(test)
        self._tell(
            {
                "event": "tested",
                "after": test.event,
                "num_samples": test.num_samples,
                "loss": loss,
                "accuracy": accuracy,
                "num_examples": num_examples,
                "time_s": test.time_s,
            }
        )
        self._judge(message.sender, accuracy)

    def _judge(self, sender: int, accuracy: float | None) -> None:
        """Tell who waits for a test whether it reached what was asked for."""
        target = self.job.until_accuracy
        if target is not None:
            has_reached = accuracy is not None and accuracy >= target
            self.endpoint.send(sender, Kind.TESTED, number=int(has_reached))

    def _num_samples(self, event: int) -> int:
        workers = self.job.num_workers if self.job.algorithm.is_synchronous else 1
        return event * workers * self.batch_size

    # -- the end

    def _note_end(self, message: Message) -> None:
        told = _read(message)
        if told.pop("role") == "master":
            self._end = message
        else:
            self._workers[message.sender] = WorkerOutcome(**told)

    def _outcome(self) -> Outcome:
        assert self._end is not None
        assert self._end.vector is not None
        state = self._master_state(self._end.vector)
        told = _read(self._end)
        # A centre that is kept with a worker is exchanged by that worker, and counted with it.
        has_master = self.job.algorithm.place is Place.MASTER
        return Outcome(
            centre=state.centre,
            velocity=state.velocity,
            num_events=self._end.number,
            num_samples=self._num_samples(self._end.number),
            time_s=told["time_s"],
            num_messages=has_master * told["num_messages"] + sum(each.num_messages for each in self._workers.values()),
            num_bytes=has_master * told["num_bytes"] + sum(each.num_bytes for each in self._workers.values()),
            workers=tuple(self._workers.get(worker) for worker in range(self.job.num_workers)),
            tests=tuple(self._tests),
            lost=tuple(self._lost),
            num_refused=self._num_refused,
        )


_HEARD: Mapping[Kind, Callable[[Coordinator, Message], None]] = MappingProxyType(
    {
        Kind.REPORT: Coordinator._show,
        Kind.REFUSED: Coordinator._refuse,
        Kind.FAILED: Coordinator._fail,
        Kind.LOST: Coordinator._fail,
        Kind.STATE: Coordinator._gather,
        Kind.TEST: Coordinator._test_or_keep,
        Kind.ENDED: Coordinator._note_end,
    }
)
"""Who hears what."""


def _read(message: Message) -> dict[str, Any]:
    told = json.loads(message.text)
    assert isinstance(told, dict)
    return told
