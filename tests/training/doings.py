"""Objectives that do what a test says, and how long a test waits for what must happen."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pase.easgd.actors import Gradient
from pase.easgd.algorithms import Array

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
