"""`Algorithm`: what tells a way to train across workers from another, declared as data and applied elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pase.easgd.equations import Array, Rates
from pase.easgd.states import Change, MasterState, WorkerState

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A way to train across workers.

    equations: those of the paper that it applies. counterpart: the method without elastic averaging that it is
    compared with, "" for one that is such a method. overlaps: the exchange with the gradient (Section 6.1.3).
    has_rho, has_momentum, has_average: which options it takes. worker_velocity, master_velocity: who keeps one.
    """

    name: str
    title: str
    equations: str
    exchange: Exchange
    sends: Sends
    worker: WorkerRule
    master: MasterRule
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
