"""The equations of You, Buluç and Demmel (2017), as pure functions of arrays.

All arrays of a call have one shape; they may hold any numbers, exact fractions too, and so may the rates. Every weight
on a right-hand side is the one before the step, W_t and W̄_t.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

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
