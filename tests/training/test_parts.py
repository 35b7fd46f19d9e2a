"""Where the time of steps goes: parts with a clock of the test's own, that moves only where the test moves it."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pase.easgd import asynchronous, synchronous
from pase.easgd.actors import Clock, Gradient, Keeper, Part, Worker
from pase.easgd.algorithms import ALGORITHMS, Algorithm, Array, Change, MasterState, Rates, WorkerState
from pase.easgd.job import Job, begun
from pase.easgd.messages import EXCHANGED, Endpoint, Inbox, LocalTransport, Message

STEPS = 6
DATA_S, COMPUTE_S, WORKER_S, MASTER_S, SEND_S, TELL_S = 2.0, 3.0, 5.0, 7.0, 11.0, 0.25
"""What each thing takes; small whole numbers and quarters add up exactly."""


class Watch:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s

    def move(self, seconds: float) -> None:
        self.time_s += seconds


class SlowTransport(LocalTransport):
    """Takes a while to send, of the time of who sends."""

    def __init__(self, inboxes: Mapping[int, Inbox], watches: Mapping[int, Watch]) -> None:
        super().__init__(inboxes)
        self.watches = watches

    def deliver(self, to: int, message: Message) -> None:
        if message.sender in self.watches:
            self.watches[message.sender].move(SEND_S if message.kind in EXCHANGED else TELL_S)
        super().deliver(to, message)


@dataclass(frozen=True)
class SlowObjective:
    watch: Watch
    batch_size: int = 1

    def gradient(self, weights: Array, step: int) -> Gradient:
        self.watch.move(DATA_S + COMPUTE_S)
        return Gradient(loss=1.0, vector=weights * 0, data_s=DATA_S)


def slowed(algorithm: Algorithm, worker: Watch, keeper: Watch) -> Algorithm:
    """The algorithm, with rules that take a while."""

    def worker_rule(rates: Rates, state: WorkerState, gradient: Array, centre: Array) -> WorkerState:
        worker.move(WORKER_S)
        return algorithm.worker(rates, state, gradient, centre)

    def master_rule(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
        keeper.move(MASTER_S)
        return algorithm.master(rates, state, total, num_workers)

    return replace(algorithm, worker=worker_rule, master=master_rule)


def parts_of(name: str) -> tuple[dict[str, float], dict[str, float]]:
    """The parts of the one worker of a training, and of who keeps its centre."""
    of_worker = Watch()
    is_apart = ALGORITHMS[name].place.name == "MASTER"
    of_keeper = Watch() if is_apart else of_worker
    job = Job(
        algorithm=slowed(ALGORITHMS[name], of_worker, of_keeper),
        rates=Rates(learning_rate=0.1, rho=0.1),
        num_workers=1,
        num_steps=STEPS,
        report_every=2,
    )
    start = begun(job, np.ones(3))
    inboxes = {rank: Inbox() for rank in range(3)}
    transport = SlowTransport(inboxes, {0: of_worker, 1: of_keeper})
    ends = [Endpoint(rank, inboxes[rank], transport, [(0, 3)]) for rank in range(2)]
    worker = Worker(
        job=job,
        number=0,
        objective=SlowObjective(of_worker),
        endpoint=ends[0],
        progress=start.workers[0],
        clock=Clock(of_worker),
    )
    if not job.algorithm.is_synchronous:
        kind = asynchronous.MASTERS[job.algorithm.exchange]
        keeper: Keeper = kind(job=job, endpoint=ends[1], state=start.master, clock=Clock(of_keeper))
        leading = threading.Thread(target=keeper.run)  # type: ignore[attr-defined]
        leading.start()
        asynchronous.run_worker(worker)
        leading.join()
        return worker.clock.parts(), keeper.clock.parts()
    clock = Clock(of_keeper) if is_apart else worker.clock
    round_keeper = synchronous.RoundKeeper(job=job, endpoint=ends[is_apart], state=start.master, clock=clock)
    if is_apart:
        leading = threading.Thread(target=synchronous.run_master, args=(round_keeper,))
        leading.start()
    synchronous.run_worker(worker, None if is_apart else round_keeper, 0)
    if is_apart:
        leading.join()
    return worker.clock.parts(), round_keeper.clock.parts()


@pytest.mark.parametrize("name", ["async-easgd", "async-sgd", "original-easgd", "sync-easgd1", "sync-sgd"])
def test_a_worker_with_a_master_exchanges_with_the_host(name: str) -> None:
    worker, master = parts_of(name)
    # An asynchronous worker that sends first learns only from the answer to one message more that it is over.
    extra = 1 if name in ("async-easgd", "async-sgd") else 0
    assert worker["worker_exchange_s"] == master["worker_exchange_s"] == 0
    assert worker["data_s"] == (STEPS + extra) * DATA_S
    assert worker["compute_s"] == (STEPS + extra) * COMPUTE_S
    assert worker["worker_update_s"] == STEPS * WORKER_S
    assert worker["host_exchange_s"] == (STEPS + extra) * SEND_S
    assert worker["host_update_s"] == master["worker_update_s"] == master["compute_s"] == 0
    assert master["host_update_s"] == STEPS * MASTER_S
    assert master["host_exchange_s"] == STEPS * SEND_S


@pytest.mark.parametrize("name", ["sync-easgd2", "sync-easgd3"])
def test_a_centre_with_a_worker_is_updated_by_it(name: str) -> None:
    worker, keeper = parts_of(name)
    assert worker == keeper
    # One worker has nobody to exchange with.
    assert [worker[part] for part in ("worker_exchange_s", "host_exchange_s", "host_update_s", "hidden_s")] == [0] * 4
    assert worker["worker_update_s"] == STEPS * (WORKER_S + MASTER_S)
    assert worker["compute_s"] == STEPS * COMPUTE_S


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.startswith("hogwild")])
def test_parts_and_what_is_left_add_up_to_the_time(name: str) -> None:
    for parts in parts_of(name):
        assert sum(parts[part] for part in Part) + parts["other_s"] == parts["time_s"]
    worker, _ = parts_of(name)
    # What it tells: three reports of two steps each, its end, and that of a centre which is with it.
    num_told = STEPS // 2 + 1 + (name in ("sync-easgd2", "sync-easgd3"))
    assert worker["other_s"] == num_told * TELL_S


def test_laps_add_up_to_the_whole() -> None:
    watch = Watch()
    clock = Clock(watch)
    laps = []
    for seconds in (1.0, 2.0, 4.0):
        with clock.measuring(Part.COMPUTE):
            watch.move(seconds)
        clock.move(seconds / 4, Part.COMPUTE, Part.DATA)
        watch.move(0.5)
        laps.append(clock.lap())
    assert [(lap["compute_s"], lap["data_s"], lap["other_s"], lap["time_s"]) for lap in laps] == [
        (0.75, 0.25, 0.5, 1.5),
        (1.5, 0.5, 0.5, 2.5),
        (3.0, 1.0, 0.5, 4.5),
    ]
    assert {name: sum(lap[name] for lap in laps) for name in laps[0]} == clock.parts()


@dataclass(frozen=True)
class Overlapped:
    """A gradient that takes longer than the exchange beside it."""

    watch: Watch
    batch_size: int = 1

    def gradient(self, weights: Array, step: int) -> Gradient:
        # Until this worker has sent what it sends in this round.
        while self.watch.time_s < 100 + step * (SEND_S + COMPUTE_S) + SEND_S:
            time.sleep(0.001)
        self.watch.move(COMPUTE_S)
        return Gradient(loss=1.0, vector=weights * 0)


def test_what_goes_on_beside_the_gradient_is_hidden() -> None:
    watches = [Watch(), Watch()]
    job = Job(
        algorithm=ALGORITHMS["sync-easgd3"],
        rates=Rates(learning_rate=0.1, rho=0.1),
        num_workers=2,
        num_steps=STEPS,
        report_every=STEPS + 1,
    )
    start = begun(job, np.ones(3))
    inboxes = {rank: Inbox() for rank in range(4)}
    transport = SlowTransport(inboxes, dict(enumerate(watches)))
    workers = [
        Worker(
            job=job,
            number=number,
            objective=Overlapped(watch),
            endpoint=Endpoint(number, inboxes[number], transport, [(0, 3)]),
            progress=start.workers[number],
            clock=Clock(watch),
        )
        for number, watch in enumerate(watches)
    ]
    keeper = synchronous.RoundKeeper(job=job, endpoint=workers[0].endpoint, state=start.master, clock=workers[0].clock)
    other = threading.Thread(target=synchronous.run_worker, args=(workers[1], None, 0))
    other.start()
    synchronous.run_worker(workers[0], keeper, 0)
    other.join()
    for parts in (worker.clock.parts() for worker in workers):
        assert parts["worker_exchange_s"] == 0
        assert STEPS * SEND_S <= parts["hidden_s"] <= STEPS * (SEND_S + COMPUTE_S)
