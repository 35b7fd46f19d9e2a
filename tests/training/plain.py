"""Noisy quadratics, and where every algorithm must go on them: plain simulations, written from the paper.

In serialised order an asynchronous method is a sequence of events, and a synchronous one is a sequence of rounds: a
loop of a few lines each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import Algorithm, Array, Rates, algorithm_named
from pase.easgd.job import Job, Snapshot, begun
from pase.easgd.ranks import Outcome, train_in_threads

NUM_WEIGHTS = 5
ETA, RHO, MU = 0.11, 0.7, 0.6
RATES = Rates(learning_rate=ETA, rho=RHO, momentum=MU)
ASYNCHRONOUS = (
    *("original-easgd", "async-easgd", "async-measgd", "hogwild-easgd"),
    *("async-sgd", "async-msgd", "hogwild-sgd"),
)
SYNC_EASGD = ("sync-easgd1", "sync-easgd2", "sync-easgd3")
SYNCHRONOUS = (*SYNC_EASGD, "sync-sgd")


class Noisy:
    """A quadratic of a worker's own about a point of its own, with noise that depends on the worker and the step."""

    batch_size = 3

    def __init__(self, worker: int, dtype: Any = np.float64) -> None:
        rng = np.random.default_rng([17, worker])
        root = rng.normal(size=(NUM_WEIGHTS, NUM_WEIGHTS))
        self.worker = worker
        self.dtype = dtype
        self.bowl = root @ root.T / NUM_WEIGHTS + np.eye(NUM_WEIGHTS)
        self.point = rng.normal(size=NUM_WEIGHTS)

    def slope(self, weights: Array, step: int) -> Array:
        noise = np.random.default_rng([23, self.worker, step]).normal(size=NUM_WEIGHTS)
        found: Array = self.bowl @ (weights - self.point) + noise / 4
        return found

    def gradient(self, weights: Array, step: int) -> Gradient:
        return Gradient(loss=float(weights @ weights), vector=self.slope(weights, step).astype(self.dtype))


def noisies(num_workers: int) -> list[Noisy]:
    return [Noisy(worker) for worker in range(num_workers)]


BEGIN = np.linspace(-1, 1, NUM_WEIGHTS)


def job_of(name: str | Algorithm, num_workers: int, num_steps: int, **others: Any) -> Job:
    algorithm = algorithm_named(name) if isinstance(name, str) else name
    values = {"rates": RATES} | others
    return Job(algorithm=algorithm, num_workers=num_workers, num_steps=num_steps, **values)


@dataclass
class Kept:
    """Keeps every snapshot in memory."""

    snapshots: list[Snapshot]

    def __call__(self, snapshot: Snapshot) -> Path:
        self.snapshots.append(snapshot)
        return Path(f"event-{snapshot.num_events}")


def trained(job: Job, start: Snapshot | None = None, **others: Any) -> tuple[Outcome, list[Snapshot]]:
    """Train on the noisy quadratics, with a snapshot after every step of each worker."""
    kept = Kept([])
    values = {"objectives": noisies(job.num_workers)} | others
    outcome = train_in_threads(replace(job, save_every=1), start or begun(job, BEGIN), save=kept, **values)
    return outcome, kept.snapshots


# ------------------------------------------------------------------------------------------------ plain simulations


@dataclass
class Plain:
    """What there is after an event: everybody's weights and velocities, and how many batches each has used up."""

    centre: Array
    workers: list[Array]
    velocities: list[Array]
    centre_velocity: Array
    num_steps: list[int]


def plain_start(num_workers: int) -> Plain:
    zero = np.zeros(NUM_WEIGHTS)
    return Plain(BEGIN, [BEGIN] * num_workers, [zero] * num_workers, zero, [0] * num_workers)


def elastic_event(now: Plain, i: int, slope: Array) -> None:
    """Algorithm 1, lines 11 to 15; Section 5.1: Eq. 1 and one term of Eq. 2, of the weights before the step."""
    apart = now.workers[i] - now.centre
    now.workers[i] = now.workers[i] - ETA * (slope + RHO * apart)
    now.centre = now.centre + ETA * RHO * apart


def elastic_momentum_event(now: Plain, i: int, slope: Array) -> None:
    """Eq. 5 and 6 for the worker, Eq. 2 for the master."""
    apart = now.workers[i] - now.centre
    now.velocities[i] = MU * now.velocities[i] - ETA * slope
    now.workers[i] = now.workers[i] + now.velocities[i] - ETA * RHO * apart
    now.centre = now.centre + ETA * RHO * apart


def sgd_event(now: Plain, i: int, slope: Array) -> None:
    """Section 3.1: W − ηΔW on the master, sent back to the worker."""
    now.centre = now.centre - ETA * slope
    now.workers[i] = now.centre


def momentum_event(now: Plain, i: int, slope: Array) -> None:
    """Eq. 3 and 4 on the master, sent back to the worker."""
    now.centre_velocity = MU * now.centre_velocity - ETA * slope
    now.centre = now.centre + now.centre_velocity
    now.workers[i] = now.centre


EVENTS: Mapping[str, Callable[[Plain, int, Array], None]] = {
    "original-easgd": elastic_event,
    "async-easgd": elastic_event,
    "hogwild-easgd": elastic_event,
    "async-measgd": elastic_momentum_event,
    "async-sgd": sgd_event,
    "hogwild-sgd": sgd_event,
    "async-msgd": momentum_event,
}


def simulate_events(name: str, num_workers: int, order: Iterable[int]) -> Iterator[Plain]:
    """Yield what there is after each event; the worker's gradient is at its weights, or at its last copy."""
    now, objectives = plain_start(num_workers), noisies(num_workers)
    for i in order:
        EVENTS[name](now, i, objectives[i].slope(now.workers[i], now.num_steps[i]))
        now.num_steps[i] += 1
        yield replace(now, workers=[*now.workers], velocities=[*now.velocities], num_steps=[*now.num_steps])


def simulate_rounds(name: str, num_workers: int, num_rounds: int, *, mean: bool = False) -> Iterator[Plain]:
    """Yield what there is after each round: Eq. 1 and 2 with everything before the round, or Section 2.3's sum."""
    now, objectives = plain_start(num_workers), noisies(num_workers)
    for t in range(num_rounds):
        slopes = [objective.slope(weights, t) for objective, weights in zip(objectives, now.workers, strict=True)]
        if name == "sync-sgd":
            centre = now.centre - ETA / (num_workers if mean else 1) * np.sum(slopes, axis=0)
            workers = [centre] * num_workers
        else:
            aparts = [weights - now.centre for weights in now.workers]
            workers = [w - ETA * (s + RHO * a) for w, s, a in zip(now.workers, slopes, aparts, strict=True)]
            centre = now.centre + ETA * RHO * np.sum(aparts, axis=0)
        now = replace(now, centre=centre, workers=workers, num_steps=[t + 1] * num_workers)
        yield now


def assert_close(found: Snapshot, expected: Plain) -> None:
    """Everything that a snapshot holds is as simulated, to 1e-12."""

    def close(a: Array, b: Array) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)

    close(found.master.centre, expected.centre)
    if found.master.velocity is not None:
        close(found.master.velocity, expected.centre_velocity)
    for progress, weights, velocity in zip(found.workers, expected.workers, expected.velocities, strict=True):
        close(progress.state.weights, weights)
        if progress.state.velocity is not None:
            close(progress.state.velocity, velocity)
    assert [progress.num_steps for progress in found.workers] == expected.num_steps


def arrays(snapshot: Snapshot) -> list[Array]:
    """Return all arrays of a snapshot."""
    states = [snapshot.master.centre, snapshot.master.velocity]
    states += [array for p in snapshot.workers for array in (p.state.weights, p.state.velocity)]
    return [array for array in states if array is not None]


def assert_same(some: Sequence[Snapshot], others: Sequence[Snapshot]) -> None:
    """Both runs left the same, bit for bit."""
    assert [s.num_events for s in some] == [s.num_events for s in others]
    for one, other in zip(some, others, strict=True):
        assert [p.num_steps for p in one.workers] == [p.num_steps for p in other.workers]
        for a, b in zip(arrays(one), arrays(other), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
