"""The runtime in threads: where it goes, what is saved, who is lost, and when it ends."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import Array, Rates, algorithm_named
from pase.easgd.job import Job, Reduction, begun
from pase.easgd.ranks import train_in_threads
from pase.errors import TrainingError
from tests.training.objectives import quadratics
from tests.training.plain import Kept


def job_of(name: str, *, num_workers: int = 3, num_steps: int = 300, **others: Any) -> Job:
    algorithm = algorithm_named(name)
    rates = Rates(learning_rate=0.1 if algorithm.has_rho else 0.03, rho=1.0, momentum=0.3)
    return Job(algorithm=algorithm, rates=rates, num_workers=num_workers, num_steps=num_steps, **others)


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("name", ["sync-easgd1", "sync-easgd3", "sync-sgd"])
def test_messages_of_a_round_are_counted(name: str, reduction: Reduction) -> None:
    """Down and up: 2 P with a master of its own, 2 (P - 1) where worker 0 has the centre; whole and in 2 pieces."""
    num_links = 5 if algorithm_named(name).place.name == "MASTER" else 4
    for layout in (((0, 5),), ((0, 2), (2, 5))):
        job = job_of(name, num_workers=5, num_steps=7, reduction=reduction)
        outcome = train_in_threads(job, begun(job, np.zeros(5)), objectives=quadratics(5), layout=layout)
        assert outcome.num_messages == 7 * 2 * num_links * len(layout)
        assert outcome.num_bytes == 7 * 2 * num_links * 5 * 8


def test_messages_of_events_are_counted() -> None:
    job = job_of("async-sgd", num_steps=9, arrivals=(0, 1, 2))
    outcome = train_in_threads(job, begun(job, np.zeros(5)), objectives=quadratics(3), layout=((0, 5),))
    # 27 answers of the master; the workers' last messages find it gone, if they still come to it.
    assert 2 * 27 <= outcome.num_messages <= 2 * 27 + 3
    assert outcome.num_bytes == outcome.num_messages * 40


@dataclass
class FixedAccuracy:
    """Says that a centre is better the further it went."""

    seen: list[int]

    def evaluate(self, weights: Array) -> tuple[float, float | None, int]:
        self.seen.append(len(self.seen))
        return float(weights @ weights), min(1.0, 0.25 * len(self.seen)), 10


@pytest.mark.parametrize(
    "name", ["sync-easgd3", "sync-easgd1", "sync-sgd", "async-easgd", "hogwild-sgd", "original-easgd"]
)
def test_it_ends_when_a_test_reaches_what_was_asked_for(name: str) -> None:
    job = job_of(name, num_steps=100_000, test_every=5, until_accuracy=0.75, save_every=10)
    kept = Kept([])
    outcome = train_in_threads(
        job, begun(job, np.zeros(5)), objectives=quadratics(3), evaluator=FixedAccuracy([]), save=kept
    )
    per_step = job.events_per_step
    assert [(test.event, test.accuracy) for test in outcome.tests] == [
        (5 * per_step, 0.25),
        (10 * per_step, 0.5),
        (15 * per_step, 0.75),
    ]
    # It ended with the very centre that was tested, and that is kept, though no checkpoint was due.
    assert outcome.num_events == 15 * per_step
    assert outcome.tests[-1].loss == float(outcome.centre @ outcome.centre)
    assert [snapshot.num_events for snapshot in kept.snapshots] == [10 * per_step, 15 * per_step]
    np.testing.assert_array_equal(kept.snapshots[-1].master.centre, outcome.centre)


@pytest.mark.parametrize("name", ["sync-easgd1", "sync-easgd3", "sync-sgd", "hogwild-easgd"])
def test_it_ends_once_where_a_checkpoint_is_due_with_the_test(name: str) -> None:
    job = job_of(name, num_workers=1, num_steps=100, test_every=3, until_accuracy=0.25, save_every=3)
    kept = Kept([])
    outcome = train_in_threads(
        job, begun(job, np.zeros(5)), objectives=quadratics(1), evaluator=FixedAccuracy([]), save=kept
    )
    assert outcome.num_events == 3
    assert [snapshot.num_events for snapshot in kept.snapshots] == [3]
    assert [worker.num_steps for worker in kept.snapshots[0].workers] == [3]


@pytest.mark.parametrize("name", ["sync-easgd2", "async-sgd"])
def test_without_data_to_test_on_it_goes_to_its_end(name: str) -> None:
    job = job_of(name, num_steps=7, test_every=2, until_accuracy=0.5)
    outcome = train_in_threads(job, begun(job, np.zeros(5)), objectives=quadratics(3))
    assert outcome.num_events == job.num_events


def test_tests_that_wait_are_of_the_same_centres() -> None:
    found = []
    for waits in (False, True):
        job = job_of("sync-easgd2", num_steps=20, test_every=6, tests_wait=waits)
        outcome = train_in_threads(job, begun(job, np.zeros(5)), objectives=quadratics(3), evaluator=FixedAccuracy([]))
        found.append([(test.event, test.num_samples, test.loss) for test in outcome.tests])
    assert found[0] == found[1]
    assert [event for event, _, _ in found[0]] == [6, 12, 18, 20]


class Huge:
    """A worker whose gradients are finite, but too large to step along."""

    batch_size = 2

    def gradient(self, weights: Array, step: int) -> Gradient:
        return Gradient(loss=1.0, vector=np.full(len(weights), 1e308 if step == 3 else 0.0))


@pytest.mark.parametrize("name", ["async-easgd", "async-measgd", "original-easgd"])
def test_a_worker_whose_weights_overflow_takes_no_more_part(name: str) -> None:
    job = replace(job_of(name, num_workers=2, num_steps=20), rates=Rates(learning_rate=100.0, rho=0.001))
    still = replace(quadratics(1)[0], centre=np.zeros(5))
    outcome = train_in_threads(job, begun(job, np.zeros(5)), objectives=[still, Huge()])
    assert outcome.lost == (1,)
    assert outcome.num_events == job.num_events
    np.testing.assert_array_equal(outcome.centre, np.zeros(5))


def test_a_round_in_which_weights_overflow_is_not_taken() -> None:
    job = replace(job_of("sync-easgd3", num_workers=2, num_steps=20), rates=Rates(learning_rate=100.0, rho=0.001))
    with pytest.raises(
        TrainingError, match="worker 1, step 4: the weights after the step are not finite; use a smaller"
    ):
        train_in_threads(
            job, begun(job, np.zeros(5)), objectives=[replace(quadratics(1)[0], centre=np.zeros(5)), Huge()]
        )


def test_there_is_an_objective_for_each_worker() -> None:
    job = job_of("sync-sgd")
    with pytest.raises(TrainingError, match="2 objectives were given; expected 3"):
        train_in_threads(job, begun(job, np.zeros(5)), objectives=quadratics(2))
