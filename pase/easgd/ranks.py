"""A process's ranks, each in a thread: the same loops whatever carries the messages."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pase.easgd import asynchronous, synchronous
from pase.easgd.coordinator import Coordinator, Outcome, Report, Save
from pase.easgd.job import Job, Snapshot
from pase.easgd.master import MASTERS
from pase.easgd.messages import Endpoint, Inbox, Kind, Transport
from pase.easgd.objective import Evaluator, Objective
from pase.easgd.synchronous import Keeper, keeper_of
from pase.easgd.worker import StopAskedError, Trace, Worker
from pase.errors import PaseError

_END_S = 5.0
"""How long ranks have to end when the training has failed; they may be in the middle of a computation."""


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
    threads = []
    for rank, endpoint in endpoints.items():
        if rank == job.coordinator:
            continue
        part = _Part(job=job, start=start, rank=rank, endpoint=endpoint, objective=objectives.get(rank), trace=trace)
        threads.append(threading.Thread(target=part.run, name=f"rank {rank}", daemon=True))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One rank's part: a worker's, where it has an objective, or the master's."""

    job: Job
    start: Snapshot
    rank: int
    endpoint: Endpoint
    objective: Objective | None
    trace: Trace | None

    def run(self) -> None:
        """Do it; what goes wrong is told to the master and the coordinator."""
        try:
            if self.rank < self.job.num_workers:
                self._work()
            else:
                self._lead()
        except StopAskedError:
            pass
        except PaseError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 an objective's code may raise anything
            self._fail(f"{self._called}: {type(error).__name__}: {error}")

    @property
    def _called(self) -> str:
        return f"worker {self.rank}" if self.rank < self.job.num_workers else "the master"

    def _fail(self, text: str) -> None:
        for rank in (self.job.master, self.job.coordinator):
            self.endpoint.send(rank, Kind.FAILED, text=text)

    def _work(self) -> None:
        assert self.objective is not None, f"worker {self.rank} has no objective"
        worker = Worker(
            job=self.job,
            number=self.rank,
            objective=self.objective,
            endpoint=self.endpoint,
            progress=self.start.workers[self.rank],
            trace=self.trace,
        )
        if not self.job.algorithm.is_synchronous:
            asynchronous.run_worker(worker)
            return
        keeper = self._keeper() if keeper_of(self.job) == self.rank else None
        synchronous.run_worker(worker, keeper, self.start.num_events)

    def _lead(self) -> None:
        if self.job.algorithm.is_synchronous:
            if keeper_of(self.job) == self.rank:
                synchronous.run_master(self.job, self._keeper())
            return
        MASTERS[self.job.algorithm.exchange](
            job=self.job, endpoint=self.endpoint, state=self.start.master, num_events=self.start.num_events
        ).run()

    def _keeper(self) -> Keeper:
        return Keeper(job=self.job, endpoint=self.endpoint, state=self.start.master, num_events=self.start.num_events)
