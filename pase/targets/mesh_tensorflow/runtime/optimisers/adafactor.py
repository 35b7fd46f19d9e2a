"""Adafactor: a second moment kept as the means of its rows and columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from pase.targets.mesh_tensorflow.runtime.optimisers.rule import Maths, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, Algorithms 4 and 5).

    The step size is max(ε2, RMS(w)) · min(learning rate, 1/√t); with a rate of 0.01 that is the paper's. R and C are
    means of g² + ε1 over the last and the first of the two largest dims, which decay with β2 = 1 - t^decay;
    V = R C / mean(R). The change is g / √V, divided by its RMS / clip where that is above 1. Vectors keep V itself.
    """

    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    clip: float = 1.0
    decay: float = -0.8

    def __post_init__(self) -> None:
        check_range("adafactor", "epsilon1", self.epsilon1)
        check_range("adafactor", "epsilon2", self.epsilon2)
        check_range("adafactor", "clip", self.clip, low=1e-12)
        check_range("adafactor", "decay", -self.decay)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the means of rows and columns, or for a vector its second moment."""
        every = tuple(range(len(shape)))
        pair = _factored(shape)
        if pair is None:
            return {"second_moment": every}
        rows, columns = pair
        return {
            "row_means": tuple(dim for dim in every if dim != columns),
            "column_means": tuple(dim for dim in every if dim != rows),
        }

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return ρ, β2 and 1 - β2 of the step."""
        remaining = float(step) ** self.decay
        return {"rate": min(learning_rate, 1 / sqrt(step)), "kept": 1 - remaining, "taken": remaining}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and statistics."""
        every = tuple(range(len(maths.shape)))
        square = gradient * gradient + self.epsilon1
        after: dict[str, Any] = {}
        for slot, kept in self.slots(maths.shape).items():
            mean = maths.mean(square, [dim for dim in every if dim not in kept])
            after[slot] = state[slot] * scalars["kept"] + mean * scalars["taken"]
        pair = _factored(maths.shape)
        if pair is None:
            change = gradient / maths.sqrt(after["second_moment"])
        else:
            # One factor after the other: the product of two second moments may be too small for a float32.
            share = after["row_means"] / maths.mean(after["row_means"], [pair[0]])
            change = gradient / maths.sqrt(share) / maths.sqrt(after["column_means"])
        clipped = change / maths.at_least(self._rms(maths, change, every) / self.clip, 1.0)
        size = maths.at_least(self._rms(maths, weight, every), self.epsilon2) * scalars["rate"]
        return weight - clipped * size, after

    @staticmethod
    def _rms(maths: Maths, x: Any, dims: tuple[int, ...]) -> Any:
        return maths.sqrt(maths.mean(x * x, dims))


def _factored(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the two largest dims in their order, the later ones of equal ones; None for a vector."""
    if len(shape) < 2:
        return None
    first, second = sorted(sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))[-2:])
    return first, second
