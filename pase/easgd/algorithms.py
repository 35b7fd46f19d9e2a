"""The algorithms, each declared once: who exchanges what with whom when, by which rules, of which equations.

The equations of You, Buluç and Demmel (2017) are pure functions of arrays. All arrays of a call have one shape; they
may hold any numbers, exact fractions too, and so may the rates. Every weight on a right-hand side is the one before the
step, W_t and W̄_t.

What declares an algorithm is all that there is of it: workers, masters and transports follow the declaration, and so do
checkpoints, options, the reference page and the cost model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import TrainingError, unknown_name

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The numbers in the equations.

    learning_rate: η. rho: ρ, so that the elastic rate is η·ρ. momentum: μ. averages: take the mean of the workers'
    gradients where Section 2.3 takes their sum.
    """

    learning_rate: Any
    rho: Any = 0
    momentum: Any = 0
    averages: bool = False


def eq1(rates: Rates, weights: Array, gradient: Array, centre: Array) -> Array:
    """Return the weights of a worker after a step: W − η(ΔW + ρ(W − W̄)). Eq. 1."""
    after: Array = weights - rates.learning_rate * (gradient + rates.rho * (weights - centre))
    return after


def eq2_change(rates: Rates, total: Array, num_workers: int, centre: Array) -> Array:
    """Return what Eq. 2 adds to the centre: η Σ ρ(W^i − W̄), of the sum of the workers' weights.

    With one worker it is the term that an asynchronous event applies (Algorithm 1, line 15).
    """
    after: Array = rates.learning_rate * (rates.rho * (total - num_workers * centre))
    return after


def eq3(rates: Rates, velocity: Array, gradient: Array) -> Array:
    """Return the momentum after a step: μV − ηΔW. Eq. 3 and 5."""
    after: Array = rates.momentum * velocity - rates.learning_rate * gradient
    return after


def eq6(rates: Rates, weights: Array, velocity: Array, centre: Array) -> Array:
    """Return the weights of a worker after a step with momentum: W + V − ηρ(W − W̄), V being after the step. Eq. 6."""
    after: Array = weights + velocity - rates.learning_rate * (rates.rho * (weights - centre))
    return after


def sgd_change(rates: Rates, total: Array, num_workers: int) -> Array:
    """Return what a sum of gradients adds to the weights: −η ΣΔW, or −η/P ΣΔW. Section 2.3; one of them: 3.1."""
    after: Array = -(rates.learning_rate * (total / num_workers if rates.averages else total))
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker keeps. weights: [n] its own, or its copy of the master's. velocity: [n], None without momentum."""

    weights: Array
    velocity: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """What the master keeps. centre: [n] W̄, or the weights of SGD. velocity: [n], None without momentum."""

    centre: Array
    velocity: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What the master does with something that it received. centre: [n] to be added. velocity: [n] the new one."""

    centre: Array
    velocity: Array | None = None


def changed(state: MasterState, change: Change) -> MasterState:
    """Return the master's state after a change."""
    return MasterState(centre=state.centre + change.centre, velocity=change.velocity)


WorkerRule = Callable[[Rates, WorkerState, Array, Array], WorkerState]
"""(rates, state, gradient [n], centre [n]) → the state after a step."""
MasterRule = Callable[[Rates, MasterState, Array, int], Change]
"""(rates, state, sum [n] of what some workers sent, how many) → what to do with it."""


class Exchange(Enum):
    """Who is served when.

    ROUND_ROBIN: one worker after the other, each beginning when the one before has ended. FIRST_COME: one at a time,
    in the order in which they arrive. LOCK_FREE: all that arrive, at the same time. TOGETHER: all in every round.
    """

    ROUND_ROBIN = "round-robin"
    FIRST_COME = "first come, first served"
    LOCK_FREE = "lock-free"
    TOGETHER = "together"


class Sends(Enum):
    """What a worker sends, and with it which centre it gets: the one before (weights) or after it (gradients)."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"


class Place(Enum):
    """Where the centre is kept: with a master of its own, or with worker 0."""

    MASTER = "master"
    WORKER = "worker 0"


# -- the rules of workers and masters, made of the equations


def elastic_worker(rates: Rates, state: WorkerState, gradient: Array, centre: Array) -> WorkerState:
    """Eq. 1: a step along the gradient and towards the centre."""
    return WorkerState(weights=eq1(rates, state.weights, gradient, centre))


def elastic_momentum_worker(rates: Rates, state: WorkerState, gradient: Array, centre: Array) -> WorkerState:
    """Eq. 5 and 6: a step along the momentum and towards the centre."""
    assert state.velocity is not None
    velocity = eq3(rates, state.velocity, gradient)
    return WorkerState(weights=eq6(rates, state.weights, velocity, centre), velocity=velocity)


def copying_worker(_rates: Rates, _state: WorkerState, _gradient: Array, centre: Array) -> WorkerState:
    """Take the master's weights (Section 3.1)."""
    return WorkerState(weights=centre)


def elastic_master(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
    """Eq. 2: the centre goes towards the workers whose weights were summed."""
    return Change(centre=eq2_change(rates, total, num_workers, state.centre), velocity=state.velocity)


def sgd_master(rates: Rates, state: MasterState, total: Array, num_workers: int) -> Change:
    """Section 2.3: a step along the sum of gradients, or their mean."""
    return Change(centre=sgd_change(rates, total, num_workers), velocity=state.velocity)


def momentum_master(rates: Rates, state: MasterState, total: Array, _num_workers: int) -> Change:
    """Eq. 3 and 4: a step along the momentum that the master keeps."""
    assert state.velocity is not None
    velocity = eq3(rates, state.velocity, total)
    return Change(centre=velocity, velocity=velocity)


# -- the declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A way to train across workers; by default elastic, as Eq. 1 and 2 have it.

    equations: those of the paper that it applies. counterpart: the method without elastic averaging that it is
    compared with, "" for one that is such a method. overlaps: the exchange with the gradient (Section 6.1.3).
    has_rho, has_momentum, has_average: which options it takes. worker_velocity, master_velocity: who keeps one.
    """

    name: str
    title: str
    equations: str
    exchange: Exchange
    sends: Sends = Sends.WEIGHTS
    worker: WorkerRule = elastic_worker
    master: MasterRule = elastic_master
    counterpart: str = ""
    place: Place = Place.MASTER
    overlaps: bool = False
    has_average: bool = False
    worker_velocity: bool = False
    master_velocity: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Whether all workers take every step together."""
        return self.exchange is Exchange.TOGETHER

    @property
    def has_rho(self) -> bool:
        """Whether workers are tied to the centre elastically."""
        return self.sends is Sends.WEIGHTS

    @property
    def has_momentum(self) -> bool:
        """Whether anybody keeps a momentum."""
        return self.worker_velocity or self.master_velocity

    def worker_state(self, weights: Array) -> WorkerState:
        """Return what a worker begins with: weights, and no momentum yet."""
        return WorkerState(weights=weights, velocity=weights * 0 if self.worker_velocity else None)

    def master_state(self, weights: Array) -> MasterState:
        """Return what the master begins with."""
        return MasterState(centre=weights, velocity=weights * 0 if self.master_velocity else None)


_SGD: Mapping[str, Any] = {"sends": Sends.GRADIENTS, "worker": copying_worker, "master": sgd_master}
_MOMENTUM: Mapping[str, Any] = {"worker": elastic_momentum_worker, "worker_velocity": True}
_MASTER_MOMENTUM: Mapping[str, Any] = {**_SGD, "master": momentum_master, "master_velocity": True}
_AT_WORKER: Mapping[str, Any] = {"place": Place.WORKER}

_IN_TURN, _FIRST, _FREE, _TOGETHER = Exchange.ROUND_ROBIN, Exchange.FIRST_COME, Exchange.LOCK_FREE, Exchange.TOGETHER

_EVENT = "Eq. 2, one term an event"

_ROWS: tuple[tuple[str, str, Exchange, str, str, Mapping[str, Any]], ...] = (
    # Algorithm 1: workers in turn
    ("original-easgd", "Original EASGD", _IN_TURN, "async-sgd", "Eq. 1; Algorithm 1, line 15", {}),
    # Section 5.1: a parameter server of the centre; workers that have momentum; without the lock on the centre
    ("async-easgd", "Async EASGD", _FIRST, "async-sgd", f"Eq. 1; {_EVENT}", {}),
    ("async-measgd", "Async MEASGD", _FIRST, "async-msgd", f"Eq. 5 and 6; {_EVENT}", _MOMENTUM),
    ("hogwild-easgd", "Hogwild EASGD", _FREE, "hogwild-sgd", f"Eq. 1; {_EVENT}", {}),
    # Algorithm 2: all workers in rounds, the centre with the master; Algorithm 3: with worker 0, nothing on the host;
    # section 6.1.3, Algorithm 4: the exchange beside the gradient
    ("sync-easgd1", "Sync EASGD1", _TOGETHER, "sync-sgd", "Eq. 1 and 2", {}),
    ("sync-easgd2", "Sync EASGD2", _TOGETHER, "sync-sgd", "Eq. 1 and 2", _AT_WORKER),
    ("sync-easgd3", "Sync EASGD3", _TOGETHER, "sync-sgd", "Eq. 1 and 2", {**_AT_WORKER, "overlaps": True}),
    # Section 3.1: a parameter server of the weights; Eq. 3 and 4: its momentum; section 3.2: without the lock
    ("async-sgd", "Async SGD", _FIRST, "", "Section 3.1", _SGD),
    ("async-msgd", "Async MSGD", _FIRST, "", "Eq. 3 and 4", _MASTER_MOMENTUM),
    ("hogwild-sgd", "Hogwild SGD", _FREE, "", "Section 3.2", _SGD),
    # Section 2.3: one step along the sum of all gradients
    ("sync-sgd", "Sync SGD", _TOGETHER, "", "Section 2.3", {**_SGD, "has_average": True}),
)
"""Name, title, who is served when, counterpart, equations, and what is not as `Algorithm` has it by default."""

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        name: Algorithm(name=name, title=title, exchange=exchange, counterpart=other, equations=equations, **more)
        for name, title, exchange, other, equations, more in _ROWS
    }
)
"""All of them, by name."""


def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm; TrainingError lists them where there is none of that name."""
    if name not in ALGORITHMS:
        raise TrainingError(unknown_name("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]


def num_rounds(num_workers: int) -> int:
    """Return ⌈log2 P⌉: the rounds of a broadcast or a sum by tree among P, the one with the centre included."""
    return (num_workers - 1).bit_length()
