"""Who is served when: without a lock, in order of arrival, in turn, in rounds; and what a snapshot holds meanwhile."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from pase.easgd.algorithms import Algorithm, Array, Change, Exchange, MasterState, Rates, algorithm_named
from pase.easgd.job import begun
from pase.easgd.messages import Inbox, Kind, Message
from pase.easgd.ranks import LocalTransport, Outcome, run_ranks, train_in_threads
from pase.errors import TrainingError
from tests.training.objectives import WAIT_S, Doing, hasty, no_thread_is_left
from tests.training.plain import (
    ASYNCHRONOUS,
    BEGIN,
    ETA,
    RHO,
    job_of,
    noisies,
    trained,
)


@pytest.fixture(autouse=True)
def _all_threads_end() -> Iterator[None]:
    with no_thread_is_left():
        yield


# ------------------------------------------------------------------------------------------------------ lock-free


def with_master_rule(algorithm: Algorithm, wait: Callable[[], object]) -> Algorithm:
    """Return an algorithm that does something between finding a change of the centre and making it."""

    def rule(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
        change = algorithm.master(rates, state, total, num_workers)
        wait()
        return change

    return replace(algorithm, master=rule)


class Meeting:
    """Holds whoever comes until two are here at once; from then on nobody."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._num_here = 0
        self._have_met = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self._num_here += 1
            if self._num_here == 2:
                self._have_met.set()
        if not self._have_met.wait(self._patience_s):
            raise TimeoutError("nobody else came")
        with self._lock:
            self._num_here -= 1


@pytest.mark.parametrize("name", ["hogwild-easgd", "hogwild-sgd"])
def test_hogwild_changes_the_centre_without_a_lock(name: str) -> None:
    # The first event does not end before another one is in the middle of it, too: with a lock none ever would.
    job = job_of(with_master_rule(algorithm_named(name), Meeting(WAIT_S)), 2, 10)
    outcome = train_in_threads(job, begun(job, BEGIN), objectives=noisies(2))
    assert outcome.num_events == 20


@pytest.mark.parametrize("exchange", [Exchange.FIRST_COME, Exchange.ROUND_ROBIN])
def test_the_others_change_it_one_at_a_time(exchange: Exchange) -> None:
    locked = replace(algorithm_named("hogwild-easgd"), exchange=exchange)
    job = job_of(with_master_rule(locked, Meeting(0.1)), 2, 10)
    with pytest.raises(TrainingError, match="the master: TimeoutError: nobody else came"):
        train_in_threads(job, begun(job, BEGIN), objectives=noisies(2))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_master_that_fails_says_so(name: str) -> None:
    def fail() -> None:
        raise ValueError("out of paper")

    job = job_of(with_master_rule(algorithm_named(name), fail), 2, 10)
    with pytest.raises(TrainingError, match="the master: ValueError: out of paper"):
        train_in_threads(job, begun(job, BEGIN), objectives=noisies(2))


def test_two_events_at_once_are_of_the_same_centre() -> None:
    # Both terms are found before either is added: so they add up to Eq. 2 of the two workers.
    both_sent, both_found = threading.Barrier(2), threading.Barrier(2)

    def when_both_sent(weights: Array, step: int) -> Array:
        if step == 0:
            both_sent.wait(WAIT_S)
        return weights

    algorithm = with_master_rule(algorithm_named("hogwild-easgd"), lambda: both_found.wait(WAIT_S))
    job = job_of(algorithm, 2, 1)
    at = [BEGIN + 1, BEGIN * 3]
    start = begun(job, BEGIN)
    workers = [replace(p, state=replace(p.state, weights=w)) for p, w in zip(start.workers, at, strict=True)]
    start = replace(start, workers=tuple(workers))
    outcome = train_in_threads(job, start, objectives=[Doing(when_both_sent), Doing(when_both_sent)])
    together = BEGIN + ETA * RHO * (at[0] - BEGIN) + ETA * RHO * (at[1] - BEGIN)
    np.testing.assert_allclose(outcome.centre, together, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------- in order of arrival


class Watched(LocalTransport):
    """Notes in which order what workers send arrives at the master."""

    def __init__(self, inboxes: Mapping[int, Inbox], master: int) -> None:
        super().__init__(inboxes)
        self.arrived: list[int] = []
        self._master = master
        self._lock = threading.Lock()

    def deliver(self, to: int, message: Message) -> None:
        with self._lock:
            if to == self._master and message.kind is Kind.SENT:
                self.arrived.append(message.sender)
            super().deliver(to, message)


def service(name: str, num_workers: int, num_steps: int, **others: Any) -> tuple[list[int], list[int]]:
    """Run a method with workers of different haste and a slow master; return who arrived and who was served."""
    served: list[int] = []
    algorithm = algorithm_named(name)

    def rule(rates: Rates, state: MasterState, total: Array, num: int) -> Change:
        served.append(int(total[0]))  # a worker's number is all that its weights or gradients say
        time.sleep(0.001)
        return algorithm.master(rates, state, total, num)

    def haste(worker: int) -> Callable[[Array, int], Array]:
        pause = random.Random(worker)

        def do(weights: Array, step: int) -> Array:
            time.sleep(pause.choice([0, 0, 0.001, 0.003]) * (worker + 1))
            return np.full_like(weights, 0 if algorithm.has_rho else worker)

        return do

    job = job_of(replace(algorithm, master=rule), num_workers, num_steps, rates=Rates(learning_rate=0.1), **others)
    start = begun(job, BEGIN)
    if algorithm.has_rho:
        states = [replace(p.state, weights=np.full_like(BEGIN, i)) for i, p in enumerate(start.workers)]
        start = replace(start, workers=tuple(replace(start.workers[0], state=state) for state in states))
    inboxes = {rank: Inbox() for rank in range(job.coordinator + 1)}
    transport = Watched(inboxes, job.master)
    run_ranks(
        job,
        start,
        ranks=range(job.coordinator + 1),
        inboxes=inboxes,
        transport=transport,
        layout=((0, len(BEGIN)),),
        objectives={worker: Doing(haste(worker)) for worker in range(num_workers)},
        batch_size=1,
    )
    assert len(served) == job.num_events
    return transport.arrived[: len(served)], served


@pytest.mark.parametrize("name", ["async-easgd", "async-measgd", "async-sgd", "async-msgd"])
def test_first_come_first_served(name: str) -> None:
    arrived, served = service(name, 4, 12)
    assert served == arrived
    assert served != list(islice(cycle(range(4)), 48))


@pytest.mark.parametrize("name", [name for name in ASYNCHRONOUS if not name.startswith("original")])
def test_in_the_order_that_was_asked_for(name: str) -> None:
    arrived, served = service(name, 3, 8, arrivals=(2, 2, 0, 1))
    assert served == list(islice(cycle((2, 2, 0, 1)), 24))
    assert arrived != served


def test_original_easgd_serves_in_turn() -> None:
    arrived, served = service("original-easgd", 4, 6)
    assert arrived == served == list(islice(cycle(range(4)), 24))


def test_in_original_easgd_nobody_begins_before_the_one_before_has_ended() -> None:
    log: list[tuple[int, str]] = []

    def noted(worker: int) -> Callable[[Array, int], Array]:
        def do(weights: Array, step: int) -> Array:
            log.append((worker, "begins"))
            time.sleep(0.004 if worker == 1 else 0.001)
            log.append((worker, "ends"))
            return weights

        return do

    job = job_of("original-easgd", 3, 5)
    train_in_threads(job, begun(job, BEGIN), objectives=[Doing(noted(i)) for i in range(3)])
    assert log == [(i, what) for _ in range(5) for i in range(3) for what in ("begins", "ends")]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_who_sleeps_is_overtaken_but_in_original_easgd(name: str) -> None:
    # Worker 0 sleeps until worker 1 has begun its 6th step. Where workers take turns, that is never.
    is_awake = threading.Event()
    patience_s = 0.2 if name == "original-easgd" else WAIT_S

    def sleep(weights: Array, step: int) -> Array:
        if not is_awake.wait(patience_s):
            raise TimeoutError("nobody overtook")
        return weights

    def wake(weights: Array, step: int) -> Array:
        if step == 5:
            is_awake.set()
        return weights

    job = job_of(name, 2, 20)
    outcome = train_in_threads(job, begun(job, BEGIN), objectives=[Doing(sleep), Doing(wake)])
    assert outcome.lost == ((0,) if name == "original-easgd" else ())


# ------------------------------------------------------------------------------------------------------ snapshots


@pytest.mark.parametrize("layout", [((0, 5),), ((0, 2), (2, 3), (3, 5))], ids=["packed", "per layer"])
@pytest.mark.parametrize("name", ["original-easgd", "async-easgd", "async-measgd"])
def test_a_snapshot_is_a_moment_that_was_elastic(name: str, layout: tuple[tuple[int, int], ...]) -> None:
    # Without gradients an event takes from the worker what it gives to the centre: the sum of all is as it was in the
    # beginning, unless a snapshot has one side of an event without the other.
    job = job_of(name, 4, 15)
    start = begun(job, BEGIN)
    at = [BEGIN * (worker - 1) + worker for worker in range(4)]
    workers = [replace(p, state=replace(p.state, weights=w)) for p, w in zip(start.workers, at, strict=True)]
    objectives = [hasty(worker, lambda weights, _: weights * 0) for worker in range(4)]
    _, snapshots = trained(job, replace(start, workers=tuple(workers)), objectives=objectives, layout=layout)
    assert len(snapshots) == 15
    for snapshot in snapshots:
        total = snapshot.master.centre + sum(progress.state.weights for progress in snapshot.workers)
        np.testing.assert_allclose(total, BEGIN + sum(at), rtol=1e-12, atol=1e-12)
        assert sum(progress.num_steps for progress in snapshot.workers) == snapshot.num_events


@pytest.mark.parametrize("name", ["async-sgd", "hogwild-sgd"])
def test_a_snapshot_is_a_moment_that_was_of_gradients(name: str) -> None:
    # Worker i's gradients are unit vectors along i, so the weights count whose steps are in them.
    job = job_of(name, 4, 15, rates=Rates(learning_rate=1.0))

    def unit(worker: int) -> Callable[[Array, int], Array]:
        vector = np.eye(5)[worker]
        return lambda weights, _step: weights * 0 + vector

    objectives = [hasty(worker, unit(worker)) for worker in range(4)]
    _, snapshots = trained(job, begun(job, np.zeros(5)), objectives=objectives)
    assert len(snapshots) == 15
    for snapshot in snapshots:
        steps = [progress.num_steps for progress in snapshot.workers]
        assert list(-snapshot.master.centre) == [*steps, 0]
        assert sum(steps) == snapshot.num_events
        for worker, progress in enumerate(snapshot.workers):
            assert -progress.state.weights[worker] == steps[worker]  # its copy is of right after its own last event


# --------------------------------------------------------------------------------------------------------- overlap


class Counted(LocalTransport):
    """Lets others wait until so many messages of a kind were delivered."""

    def __init__(self, inboxes: Mapping[int, Inbox], kind: Kind) -> None:
        super().__init__(inboxes)
        self._kind = kind
        self._num = 0
        self._more = threading.Condition()

    def deliver(self, to: int, message: Message) -> None:
        super().deliver(to, message)
        with self._more:
            self._num += message.kind is self._kind
            self._more.notify_all()

    def wait(self, num: int, patience_s: float) -> None:
        with self._more:
            if not self._more.wait_for(lambda: self._num >= num, patience_s):
                raise TimeoutError("the exchange waits for the gradient")


@pytest.mark.parametrize("name", ["sync-easgd2", "sync-easgd3"])
def test_in_sync_easgd3_gradients_and_exchange_overlap(name: str) -> None:
    # Section 6.1.3: no gradient of a round is found before all weights of that round are with worker 0.
    job = job_of(name, 4, 5)
    inboxes = {rank: Inbox() for rank in range(job.coordinator + 1)}
    transport = Counted(inboxes, Kind.SENT)
    patience_s = WAIT_S if name == "sync-easgd3" else 0.1

    def after_the_exchange(weights: Array, step: int) -> Array:
        transport.wait(3 * (step + 1), patience_s)
        return weights

    def run() -> Outcome | None:
        return run_ranks(
            job,
            begun(job, BEGIN),
            ranks=range(job.coordinator + 1),
            inboxes=inboxes,
            transport=transport,
            layout=((0, len(BEGIN)),),
            objectives={worker: Doing(after_the_exchange) for worker in range(4)},
            batch_size=1,
        )

    if name == "sync-easgd3":
        outcome = run()
        assert outcome is not None
        assert outcome.num_events == 5
    else:
        with pytest.raises(TrainingError, match="TimeoutError: the exchange waits for the gradient"):
            run()
