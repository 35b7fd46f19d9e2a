"""Built-in optimisers, by name, as pure functions of arrays that a program applies shard by shard."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import sqrt
from types import MappingProxyType
from typing import Any, Protocol

from pase.errors import ProgramError, unknown_name


class Maths(Protocol):
    """Operations on the arrays of one weight, independent of how it is sharded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the weight."""

    def sqrt(self, x: Any) -> Any:
        """Return the square root of each element."""

    def at_least(self, x: Any, floor: float) -> Any:
        """Return the maximum of each element and a number."""

    def mean(self, x: Any, dims: Sequence[int]) -> Any:
        """Return the mean over some of the weight's dims, reduced over all shards where they are split.

        The result lacks these dims. It is broadcast along them in products and quotients with other arrays.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An update rule: new weights and optimiser state as a pure function of weight, gradient and state.

    Options are the fields of the class, so that the command line and checkpoints can list them. Raises ProgramError for
    an option that is out of range.
    """

    def __post_init__(self) -> None:
        for option, value in options_of(self).items():
            low, below = _RANGES.get(option, (0.0, None))
            # Adafactor's decay is an exponent, with another range.
            value = -value if option == "decay" else value
            if not low <= value < (float("inf") if below is None else below):
                expected = f"{low:g} or more" if below is None else f"from {low:g} to below {below:g}"
                called = option.replace("_", " ")
                raise ProgramError(f"{called} of optimiser {name_of(self)} is {value:g}; expected {expected}")

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return, by name, which of a weight's dims each of its state arrays has; they are initialised to zeros."""
        return {}

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return the numbers of a step, counted from 1, that all weights share."""
        return {"rate": learning_rate}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and the new state."""
        raise NotImplementedError


_RANGES: Mapping[str, tuple[float, float | None]] = MappingProxyType(
    {**dict.fromkeys(("momentum", "beta1", "beta2"), (0.0, 1.0)), "clip": (1e-12, None)}
)
"""Ranges [low, below) of options; all others are 0 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Rule):
    """Gradient descent, w ← w - ε g (Robbins and Monro 1951); weight_decay: λ of an L2 term, g + λ w for g."""

    weight_decay: float = 0.0

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight."""
        return weight - decayed(gradient, weight, self.weight_decay) * scalars["rate"], {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(Rule):
    """Momentum (Sutskever et al. 2013): v ← μ v - ε g, w ← w + v (Eq. 1 and 2).

    nesterov: Eq. 3 and 4, written for the point at which the gradient is taken, w ← w + μ v - ε g with the new v
    (Bengio et al. 2013, Eq. 7). weight_decay: as for `Sgd`.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the velocity, of the weight's shape."""
        return {"velocity": tuple(range(len(shape)))}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments(Rule):
    """What Adam and AdamW have in common."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the two moments, of the weight's shape."""
        dims = tuple(range(len(shape)))
        return {"first_moment": dims, "second_moment": dims}

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return α / (1 - β1^t) and 1 / √(1 - β2^t)."""
        return {"rate": learning_rate / (1 - self.beta1**step), "second_correction": 1 / sqrt(1 - self.beta2**step)}

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
class Adam(_Moments):
    """Adam with both bias corrections (Kingma and Ba 2015, Algorithm 1).

    m ← β1 m + (1 - β1) g, v ← β2 v + (1 - β2) g², w ← w - α m̂ / (√v̂ + ε) with m̂ = m / (1 - β1^t),
    v̂ = v / (1 - β2^t).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(_Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2).

    Adds the update of `Adam` and subtracts α λ w; α, the learning rate, includes the schedule.
    """

    weight_decay: float = 0.01

    def scalars(self, step: int, learning_rate: float) -> dict[str, float]:
        """Return those of `Adam`, and α λ."""
        return {**_Moments.scalars(self, step, learning_rate), "decay": learning_rate * self.weight_decay}

    def update(
        self, maths: Maths, weight: Any, gradient: Any, state: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the new weight and moments."""
        moved, state_after = _Moments.update(self, maths, weight, gradient, state, scalars)
        return moved - weight * scalars["decay"], state_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(Rule):
    """Adafactor (Shazeer and Stern 2018, Algorithms 4 and 5).

    The step size is max(ε2, RMS(w)) · min(learning rate, 1/√t); with a rate of 0.01 that is the paper's. R and C are
    means of g² + ε1 over the last and the first of the two largest dims, which decay with β2 = 1 - t^decay;
    V = R C / mean(R). The change is g / √V, divided by its RMS / clip where that is above 1. Vectors keep V itself.
    """

    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    clip: float = 1.0
    decay: float = -0.8

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


OPTIMISERS: Mapping[str, Any] = MappingProxyType(
    {"sgd": Sgd, "momentum": Momentum, "adam": Adam, "adamw": AdamW, "adafactor": Adafactor}
)


def make_rule(name: str, options: Mapping[str, float | bool | None]) -> Rule:
    """Return an update rule; options that are None keep their defaults.

    Raises ProgramError for an unknown name, an option that the rule does not have, or a value out of range.
    """
    if name not in OPTIMISERS:
        raise ProgramError(unknown_name("optimiser", name, OPTIMISERS))
    known = [field.name for field in fields(OPTIMISERS[name])]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in known:
            takers = [other for other, rule in OPTIMISERS.items() if option in {field.name for field in fields(rule)}]
            raise ProgramError(
                f"optimiser {name} has no {option.replace('_', ' ')}; it has {', '.join(known).replace('_', ' ')}"
                + (f"; {' and '.join(takers)} would" if takers else "")
            )
    rule: Rule = OPTIMISERS[name](**given)
    return rule


def name_of(rule: Rule) -> str:
    """Return the name of a rule."""
    return next(name for name, kind in OPTIMISERS.items() if type(rule) is kind)


def options_of(rule: Rule) -> dict[str, float | bool]:
    """Return the options of a rule, for a record."""
    return asdict(rule)
