"""Objectives without a network, and how long a test waits for what must happen."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import Array


@dataclass(slots=True)
class Quadratic:
    """Half the squared distance from a point of the worker's own. delay_s: how long a gradient takes."""

    centre: Array
    delay_s: float = 0.0
    noise: float = 0.0
    batch_size: int = 2

    def gradient(self, weights: Array, step: int) -> Gradient:
        """Return the gradient, which depends on the step where there is noise."""
        if self.delay_s:
            time.sleep(self.delay_s)
        vector = weights - self.centre
        if self.noise:
            vector = vector + self.noise * np.random.default_rng(step).normal(size=len(weights))
        return Gradient(loss=float(vector @ vector) / 2, vector=vector)


def quadratics(num_workers: int, num_weights: int = 5, **others: float) -> list[Quadratic]:
    """Return one for each worker, each about another point."""
    return [
        Quadratic(np.random.default_rng(worker).normal(size=num_weights), **others)  # type: ignore[arg-type]
        for worker in range(num_workers)
    ]


WAIT_S = 120.0
"""How long a test waits for what must happen before it gives up."""


@dataclass
class Doing:
    """A worker whose gradient is what a function makes of (weights, step)."""

    do: Callable[[Array, int], Array]
    batch_size: int = 1

    def gradient(self, weights: Array, step: int) -> Gradient:
        return Gradient(loss=0.0, vector=self.do(weights, step))


def hasty(worker: int, found: Callable[[Array, int], Array]) -> Doing:
    """Return an objective that takes some time, now more, now less."""
    pause = random.Random(worker)

    def do(weights: Array, step: int) -> Array:
        time.sleep(pause.choice([0, 0, 0.0005, 0.002]))
        return found(weights, step)

    return Doing(do)


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Make sure that every thread of a run has ended soon after it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + WAIT_S
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.002)
