"""The runtime in serialised order and in rounds: the numbers of the paper, and the same ones however they are moved."""

from dataclasses import replace
from fractions import Fraction
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import ALGORITHMS, Array, algorithm_named
from pase.easgd.job import Job, Reduction, Snapshot, WorkerProgress, begun
from pase.easgd.ranks import train_in_threads
from tests.training.by_hand import GRADIENTS, WORKED
from tests.training.plain import (
    ASYNCHRONOUS,
    BEGIN,
    RATES,
    SYNC_EASGD,
    SYNCHRONOUS,
    Kept,
    Noisy,
    arrays,
    assert_close,
    assert_same,
    job_of,
    simulate_events,
    simulate_rounds,
    trained,
)

# ------------------------------------------------------------------------------------------- the runtime's numbers


class ByHand:
    """The quadratic of a worker whose steps were taken by hand."""

    batch_size = 1

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def gradient(self, weights: Array, step: int) -> Gradient:
        return Gradient(loss=0.0, vector=GRADIENTS[self.worker](weights))


def _exact(value: int) -> Array:
    return np.array([Fraction(value)], dtype=object)


def test_every_algorithm_was_stepped_by_hand() -> None:
    assert {name for name, _ in WORKED.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("case", WORKED)
def test_the_runtime_takes_the_steps_taken_by_hand(case: str) -> None:
    name, worked = WORKED[case]
    algorithm, num_workers = algorithm_named(name), len(worked.workers)
    job = Job(
        algorithm=algorithm,
        rates=worked.rates,
        num_workers=num_workers,
        num_steps=2,
        arrivals=worked.order,
        save_every=1,
    )
    start = Snapshot(
        master=algorithm.master_state(_exact(worked.centre)),
        workers=tuple(WorkerProgress(state=algorithm.worker_state(_exact(weights))) for weights in worked.workers),
    )
    kept = Kept([])
    outcome = train_in_threads(job, start, objectives=[ByHand(i) for i in range(num_workers)], save=kept)
    assert list(outcome.centre) == [worked.left[-1][-1 if not worked.order else 1]]
    for snapshot in kept.snapshots:
        left = worked.left[: snapshot.num_events]
        weights = [progress.state.weights[0] for progress in snapshot.workers]
        if not worked.order:
            assert (*weights, snapshot.master.centre[0]) == left[-1]
            continue
        # The last event of each worker left its weights; the last one of all left the centre.
        last = dict(zip(worked.order, left, strict=False))
        assert weights == [last[i][0] for i in range(num_workers)]
        assert snapshot.master.centre[0] == left[-1][1]
        if algorithm.worker_velocity:
            assert [p.state.velocity[0] for p in snapshot.workers if p.state.velocity is not None] == [
                last[i][2] for i in range(num_workers)
            ]
        if algorithm.master_velocity:
            assert snapshot.master.velocity is not None
            assert snapshot.master.velocity[0] == left[-1][2]


ORDERS = ((0,), (0, 1, 0, 1), (1, 0), (0, 0, 1), (2, 0, 1, 1), (0, 1, 2, 3, 3, 2, 1, 0))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_serialised_events_are_the_plain_ones(name: str, order: tuple[int, ...]) -> None:
    num_workers = max(order) + 1
    job = job_of(name, num_workers, 8, arrivals=order)
    outcome, snapshots = trained(job)
    expected = list(simulate_events(name, num_workers, islice(cycle(order), job.num_events)))
    assert [snapshot.num_events for snapshot in snapshots] == [num_workers * k for k in range(1, 9)]
    for snapshot in snapshots:
        assert_close(snapshot, expected[snapshot.num_events - 1])
    np.testing.assert_array_equal(outcome.centre, snapshots[-1].master.centre)
    assert [w.num_steps for w in outcome.workers if w] == expected[-1].num_steps
    assert (outcome.num_events, outcome.num_refused, outcome.lost) == (job.num_events, 0, ())


@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_original_easgd_takes_turns_without_being_told(num_workers: int) -> None:
    job = job_of("original-easgd", num_workers, 7)
    _, snapshots = trained(job)
    expected = list(simulate_events("original-easgd", num_workers, islice(cycle(range(num_workers)), job.num_events)))
    for snapshot in snapshots:
        assert_close(snapshot, expected[snapshot.num_events - 1])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_rounds_are_the_plain_ones(name: str, num_workers: int) -> None:
    for averages in {False, algorithm_named(name).has_average}:
        outcome, snapshots = trained(job_of(name, num_workers, 6, rates=replace(RATES, averages=averages)))
        expected = list(simulate_rounds(name, num_workers, 6, mean=averages))
        assert len(snapshots) == 6
        for snapshot, plain in zip(snapshots, expected, strict=True):
            assert_close(snapshot, plain)
        np.testing.assert_array_equal(outcome.centre, snapshots[-1].master.centre)


# --------------------------------------------------------------------------------------------- the same bit for bit

LAYERS = ((0, 2), (2, 3), (3, 5))
PACKED = ((0, 5),)


def serial(name: str, num_workers: int, num_steps: int, **others: Any) -> Job:
    """Return a job whose run is determined: in serialised order, or in rounds."""
    order = () if name in SYNCHRONOUS else tuple(range(num_workers))
    return job_of(name, num_workers, num_steps, arrivals=order, **others)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 7])
def test_sync_easgd_1_2_and_3_are_the_same(num_workers: int) -> None:
    runs = [
        trained(job_of(name, num_workers, 8, reduction=reduction), layout=layout)[1]
        for name in SYNC_EASGD
        for reduction in Reduction
        for layout in (PACKED, LAYERS)
    ]
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.parametrize("num_workers", [3, 6])
def test_sync_sgd_is_the_same_however_it_is_summed(num_workers: int) -> None:
    runs = [trained(job_of("sync-sgd", num_workers, 8, reduction=reduction))[1] for reduction in Reduction]
    assert_same(*runs)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packed_and_per_layer_and_twice_are_the_same(name: str) -> None:
    job = serial(name, 3, 6)
    (_, first), (_, again), (_, layers) = (trained(job, layout=layout) for layout in (PACKED, PACKED, LAYERS))
    assert_same(first, again)
    assert_same(first, layers)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    job = serial(name, 3, 6)
    outcome, snapshots = trained(job)
    assert len(snapshots) == 6
    for i, snapshot in enumerate(snapshots[:-1]):
        resumed, rest = trained(job, snapshot)
        assert_same(rest, snapshots[i + 1 :])
        np.testing.assert_array_equal(resumed.centre, outcome.centre)
        assert resumed.num_events == outcome.num_events


def test_a_run_is_resumed_within_an_order() -> None:
    # The order of 4 is longer than a step of 3 events, so snapshots are at every place of it.
    job = job_of("async-measgd", 3, 8, arrivals=(2, 0, 1, 1))
    _, snapshots = trained(job)
    for i, snapshot in enumerate(snapshots[:-1]):
        assert_same(trained(job, snapshot)[1], snapshots[i + 1 :])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_stays_float32(name: str) -> None:
    job = serial(name, 2, 3)
    objectives = [Noisy(worker, np.float32) for worker in range(2)]
    outcome, snapshots = trained(job, begun(job, BEGIN.astype(np.float32)), objectives=objectives)
    assert outcome.centre.dtype == np.float32
    assert {array.dtype for snapshot in snapshots for array in arrays(snapshot)} == {np.dtype(np.float32)}
