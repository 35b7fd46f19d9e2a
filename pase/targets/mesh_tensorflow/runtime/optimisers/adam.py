"""Adam, and Adam with weight decay of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from pase.targets.mesh_tensorflow.runtime.optimisers.rule import Maths, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam with both bias corrections (Kingma and Ba 2015, Algorithm 1).

    m ← β1 m + (1 - β1) g, v ← β2 v + (1 - β2) g², w ← w - α m̂ / (√v̂ + ε) with m̂ = m / (1 - β1^t),
    v̂ = v / (1 - β2^t).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_range("adam", "beta1", self.beta1, below=1)
        check_range("adam", "beta2", self.beta2, below=1)
        check_range("adam", "epsilon", self.epsilon)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the two moments, of the weight's shape."""
        dims = tuple(range(len(shape)))
        return {"first_moment": dims, "second_moment": dims}

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return α / (1 - β1^t) and 1 / √(1 - β2^t)."""
        return {
            "rate": learning_rate / (1 - self.beta1**step),
            "second_correction": 1 / sqrt(1 - self.beta2**step),
        }

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and moments."""
        first = state["first_moment"] * self.beta1 + gradient * (1 - self.beta1)
        second = state["second_moment"] * self.beta2 + gradient * gradient * (1 - self.beta2)
        scale = maths.sqrt(second) * scalars["second_correction"] + self.epsilon
        change = first / scale * scalars["rate"]
        return weight - change, {"first_moment": first, "second_moment": second}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2).

    The change of `Adam`, and α λ w subtracted beside it; α, the learning rate, carries the schedule.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_range("adamw", "weight decay", self.weight_decay)
        check_range("adamw", "beta1", self.beta1, below=1)
        check_range("adamw", "beta2", self.beta2, below=1)
        check_range("adamw", "epsilon", self.epsilon)

    @property
    def _adam(self) -> Adam:
        return Adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the two moments, of the weight's shape."""
        return self._adam.slots(shape)

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return those of `Adam`, and α λ."""
        return {**self._adam.scalars(step, learning_rate), "decay": learning_rate * self.weight_decay}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and moments."""
        moved, state_after = self._adam.update(maths, weight, gradient, state, scalars)
        return moved - weight * scalars["decay"], state_after
