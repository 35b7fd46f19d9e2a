"""Objectives without a network: quadratics, whose every step can be worked out by hand."""

import time
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
