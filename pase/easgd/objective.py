"""`Objective`: what a worker computes gradients with; the rest of training knows nothing else of networks."""

from dataclasses import dataclass
from typing import Protocol

from pase.easgd.equations import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What a replica found of a batch. vector: [n]. loss, accuracy: before the step; None where there is none."""

    loss: float
    vector: Array
    accuracy: float | None = None


class Objective(Protocol):
    """One worker's replica and its share of the data.

    batch_size: examples of a step. May be called by one thread at a time, not always the same one.
    """

    @property
    def batch_size(self) -> int: ...

    def gradient(self, weights: Array, step: int) -> Gradient:
        """Return the gradient at weights [n] on this worker's batch of a step, counted from 0."""
        ...


class Evaluator(Protocol):
    """Tests weights on data that are not trained on."""

    def evaluate(self, weights: Array) -> tuple[float, float | None, int]:
        """Return (loss, accuracy, number of examples) of weights [n]."""
        ...
