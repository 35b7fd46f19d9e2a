"""A process's ranks, each in a thread: workers, the master, and the coordinator, who shows, tests, saves and ends.

The loops are the same whatever carries the messages: between threads of one process, or between processes.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.easgd import asynchronous, synchronous
from pase.easgd.actors import Clock, Evaluator, Objective, StopAskedError, Trace, Worker, WorkerOutcome, parted
from pase.easgd.algorithms import Array, MasterState, Place, WorkerState
from pase.easgd.job import Job, Snapshot, WorkerProgress
from pase.easgd.messages import Endpoint, Inbox, Kind, LocalTransport, Message, Transport
from pase.easgd.synchronous import RoundKeeper, keeper_of
from pase.errors import PaseError, TrainingError

Report = Callable[[dict[str, Any]], None]
Save = Callable[[Snapshot], Path]

_END_S = 5.0
"""How long ranks have to end when the training has failed; they may be in the middle of a computation."""


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
    master_parts: where its time went (`Clock.parts`), None where the centre is with a worker.
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
    master_parts: dict[str, float] | None = None


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
                message = self.endpoint.receive()
                _HEARD[message.kind](self, message)
        except BaseException:
            # Have every rank end at once: what they still exchange is of no use.
            for rank in range(self.job.num_workers + 1):
                self.endpoint.send(rank, Kind.STOP)
            raise
        while self._waiting_tests:
            self._test(self._waiting_tests.popleft())
        return self._outcome()

    def _is_over(self) -> bool:
        if self._end is None or any(gathering.missing for gathering in self._gatherings.values()):
            return False
        return {*self._workers, *self._lost} >= set(range(self.job.num_workers))

    def _tell(self, event: dict[str, Any]) -> None:
        if self.report:
            self.report(event)

    # -- what is told

    def _show(self, message: Message) -> None:
        self._tell(json.loads(message.text))

    def _refuse(self, message: Message) -> None:
        self._num_refused += 1
        self._tell({"event": "refused", **json.loads(message.text)})

    def _fail(self, message: Message) -> None:
        """A rank cannot go on: without a worker the others can, where they do not wait for it."""
        worker = message.sender
        if self.job.algorithm.is_synchronous or worker >= self.job.num_workers:
            raise TrainingError(message.text or f"{self.job.called(worker)} is gone")
        if worker in self._lost or worker in self._workers:
            return
        self._lost.append(worker)
        what = message.text or "its process is gone"
        self._tell({"event": "lost", "worker": worker, "rank": worker, "what": what})
        for gathering in self._gatherings.values():
            gathering.missing.discard(worker)
        self._write_complete()

    def _gather(self, message: Message) -> None:
        """Take a part of a checkpoint."""
        if self.save is None:
            return
        told = json.loads(message.text)
        everybody = set(range(self.job.num_workers)) - set(self._lost)
        gathering = self._gatherings.setdefault(message.number, _Gathering(missing=everybody))
        assert message.vector is not None
        if told["role"] == "master":
            gathering.master = self._master_state(message.vector)
            gathering.missing &= set(told["workers"])
        else:
            weights, velocity = parted(message.vector, has_velocity=self.job.algorithm.worker_velocity)
            state = WorkerState(weights=weights, velocity=velocity)
            gathering.workers[message.sender] = WorkerProgress(state=state, num_steps=told["num_steps"])
            gathering.missing.discard(message.sender)
        self._write_complete()

    def _write_complete(self) -> None:
        for number, gathering in sorted(self._gatherings.items()):
            if gathering.missing or gathering.master is None:
                continue
            del self._gatherings[number]
            assert self.save is not None
            self._latest |= gathering.workers
            workers = tuple(self._latest.get(i, progress) for i, progress in enumerate(self.start.workers))
            path = self.save(Snapshot(master=gathering.master, workers=workers, num_events=number))
            self._tell({"event": "saved", "after": number, "path": str(path)})

    def _master_state(self, vector: Array) -> MasterState:
        centre, velocity = parted(vector, has_velocity=self.job.algorithm.master_velocity)
        return MasterState(centre=centre, velocity=velocity)

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
            time_s=json.loads(message.text)["time_s"],
            loss=loss,
            accuracy=accuracy,
            num_examples=num_examples,
        )
        self._tests.append(test)
        self._tell({"event": "tested", "after": test.event, **{k: v for k, v in asdict(test).items() if k != "event"}})
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
        told = json.loads(message.text)
        if told.pop("role") == "master":
            self._end = message
        else:
            self._workers[message.sender] = WorkerOutcome(**told)

    def _outcome(self) -> Outcome:
        end = self._end
        assert end is not None
        assert end.vector is not None
        state = self._master_state(end.vector)
        told = json.loads(end.text)
        # A centre that is kept with a worker is exchanged by that worker, and counted with it.
        has_master = self.job.algorithm.place is Place.MASTER
        return Outcome(
            centre=state.centre,
            velocity=state.velocity,
            num_events=end.number,
            num_samples=self._num_samples(end.number),
            time_s=told["time_s"],
            num_messages=has_master * told["num_messages"] + sum(each.num_messages for each in self._workers.values()),
            num_bytes=has_master * told["num_bytes"] + sum(each.num_bytes for each in self._workers.values()),
            workers=tuple(self._workers.get(worker) for worker in range(self.job.num_workers)),
            tests=tuple(self._tests),
            lost=tuple(self._lost),
            num_refused=self._num_refused,
            master_parts=told["parts"] if has_master else None,
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


# -- running


def run_ranks(
    job: Job,
    start: Snapshot,
    *,
    ranks: Collection[int],
    inboxes: Mapping[int, Inbox],
    transport: Transport,
    layout: Sequence[tuple[int, int]],
    objectives: Mapping[int, Objective],
    batch_size: int,
    evaluator: Evaluator | None = None,
    report: Report | None = None,
    save: Save | None = None,
    trace: Trace | None = None,
) -> Outcome | None:
    """Run some ranks until they end: workers and the master in threads, the coordinator in this one.

    layout: how exchanged vectors are cut into messages, [(begin, end)]. objectives: by worker, of those that are here.
    batch_size: examples of a worker's step. evaluator, report, save: the coordinator's. trace: the workers'.

    Returns None where the coordinator is not among the ranks. Raises TrainingError where a synchronous method cannot go
    on, or nobody is left of an asynchronous one.
    """
    endpoints = {rank: Endpoint(rank, inboxes[rank], transport, layout) for rank in ranks}
    threads = [
        threading.Thread(
            target=_run_rank, args=(job, start, endpoint, objectives.get(rank), trace), name=f"rank {rank}", daemon=True
        )
        for rank, endpoint in endpoints.items()
        if rank != job.coordinator
    ]
    for thread in threads:
        thread.start()
    outcome = None
    is_over = False
    try:
        if job.coordinator in endpoints:
            outcome = Coordinator(
                job=job,
                endpoint=endpoints[job.coordinator],
                start=start,
                batch_size=batch_size,
                evaluator=evaluator,
                report=report,
                save=save,
            ).run()
        is_over = True
    finally:
        for thread in threads:
            # Lost ones may never end.
            thread.join(_END_S if outcome is not None or not is_over else None)
    return outcome


def _run_rank(job: Job, start: Snapshot, endpoint: Endpoint, objective: Objective | None, trace: Trace | None) -> None:
    """Do a worker's part, or the master's; what goes wrong is told to the master and the coordinator."""
    try:
        if endpoint.rank != job.master:
            assert objective is not None, f"worker {endpoint.rank} has no objective"
            _work(job, start, endpoint, objective, trace)
        elif not job.algorithm.is_synchronous:
            master = asynchronous.MASTERS[job.algorithm.exchange]
            master(job=job, endpoint=endpoint, state=start.master, num_events=start.num_events).run()
        elif keeper_of(job) == endpoint.rank:
            synchronous.run_master(_round_keeper(job, start, endpoint, Clock()))
    except StopAskedError:
        return
    except Exception as error:  # noqa: BLE001 an objective's code may raise anything
        text = f"{job.called(endpoint.rank)}: {type(error).__name__}: {error}"
        for rank in (job.master, job.coordinator):
            endpoint.send(rank, Kind.FAILED, text=str(error) if isinstance(error, PaseError) else text)


def _work(job: Job, start: Snapshot, endpoint: Endpoint, objective: Objective, trace: Trace | None) -> None:
    rank = endpoint.rank
    worker = Worker(
        job=job, number=rank, objective=objective, endpoint=endpoint, progress=start.workers[rank], trace=trace
    )
    if job.algorithm.is_synchronous:
        keeper = _round_keeper(job, start, endpoint, worker.clock) if keeper_of(job) == rank else None
        synchronous.run_worker(worker, keeper, start.num_events)
    else:
        asynchronous.run_worker(worker)


def _round_keeper(job: Job, start: Snapshot, endpoint: Endpoint, clock: Clock) -> RoundKeeper:
    return RoundKeeper(job=job, endpoint=endpoint, state=start.master, num_events=start.num_events, clock=clock)


def train_in_threads(
    job: Job,
    start: Snapshot,
    *,
    objectives: Sequence[Objective],
    layout: Sequence[tuple[int, int]] | None = None,
    **told: Any,
) -> Outcome:
    """Train with every worker in a thread of this process.

    objectives: [workers]. layout: how exchanged vectors are cut into messages, by default not at all. told: evaluator,
    report, save and trace, as for `run_ranks`.
    """
    if len(objectives) != job.num_workers:
        raise TrainingError(f"{len(objectives)} objectives were given; expected {job.num_workers}, one for each worker")
    inboxes = {rank: Inbox() for rank in range(job.coordinator + 1)}
    outcome = run_ranks(
        job,
        start,
        ranks=range(job.coordinator + 1),
        inboxes=inboxes,
        transport=LocalTransport(inboxes),
        layout=layout or ((0, len(start.master.centre)),),
        objectives=dict(enumerate(objectives)),
        batch_size=objectives[0].batch_size,
        **told,
    )
    assert outcome is not None
    return outcome
