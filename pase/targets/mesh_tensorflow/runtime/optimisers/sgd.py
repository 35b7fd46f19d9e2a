"""Stochastic gradient descent, plain and with momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pase.targets.mesh_tensorflow.runtime.optimisers.rule import Maths, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent, w ← w - ε g (Robbins and Monro 1951); weight_decay: λ of an L2 term, g + λ w for g."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_range("sgd", "weight decay", self.weight_decay)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return nothing: it keeps nothing."""
        return {}

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the learning rate."""
        return {"rate": learning_rate}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight."""
        return weight - decayed(gradient, weight, self.weight_decay) * scalars["rate"], {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    """Momentum (Sutskever et al. 2013): v ← μ v - ε g, w ← w + v (Eq. 1 and 2).

    nesterov: Eq. 3 and 4, written for the point at which the gradient is taken, w ← w + μ v - ε g with the new v
    (Bengio et al. 2013, Eq. 7). weight_decay: as for `Sgd`.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_range("momentum", "momentum", self.momentum, below=1)
        check_range("momentum", "weight decay", self.weight_decay)

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the velocity, of the weight's shape."""
        return {"velocity": tuple(range(len(shape)))}

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the learning rate."""
        return {"rate": learning_rate}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and velocity."""
        move = decayed(gradient, weight, self.weight_decay) * scalars["rate"]
        velocity = state["velocity"] * self.momentum - move
        change = velocity * self.momentum - move if self.nesterov else velocity
        return weight + change, {"velocity": velocity}


def decayed(gradient: Any, weight: Any, decay: float) -> Any:
    """Return the gradient of the loss plus ``decay/2 · |w|²``."""
    return gradient + weight * decay if decay else gradient
