"""The update rules of the reference: plain TensorFlow on whole weights, written apart from those of programs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.optimisers import Rule, name_of, options_of

Slot = Callable[..., Any]
"""Takes a name and a shape (by default the weight's) and returns the variable that is kept under it, at first zeros."""

Changes = list[tuple[Any, Any]]
"""Variables that are kept, with their new values."""


@dataclass(slots=True)
class ReferenceUpdates:
    """The updates of all weights by one rule.

    step, learning_rate: placeholders of the number of the step, from 1, and of its rate. operations: that assign.
    kept: the variables beside the weights, to be initialised.
    """

    rule: Rule
    step: Any = field(default_factory=lambda: tf.placeholder(tf.float64, []))
    learning_rate: Any = field(default_factory=lambda: tf.placeholder(tf.float64, []))
    operations: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def add(self, variable: Any, value: Any, gradient: Any) -> None:
        """Declare the update of a weight; value: what the gradient was taken at."""
        options = options_of(self.rule)
        pairs: Changes = []

        def slot(name: str, shape: tuple[int, ...] | None = None) -> Any:
            shape = tuple(value.shape.as_list()) if shape is None else shape
            variable = tf.get_variable(
                f"{name}_{len(self.kept)}", shape, value.dtype, initializer=tf.zeros_initializer(), use_resource=True
            )
            self.kept.append(variable)
            return variable

        def scalar(x: Any) -> Any:
            # From 64 bits: a power of a number near 1 is not for 32.
            return tf.cast(tf.convert_to_tensor(x, tf.float64), value.dtype)

        change = _Change(options=options, step=self.step, scalar=scalar, slot=slot, pairs=pairs)
        gradient = tf.convert_to_tensor(gradient)
        new_value = _RULES[name_of(self.rule)](change, value, gradient, scalar(self.learning_rate))
        self.operations += [tf.assign(old, new) for old, new in [*pairs, (variable, new_value)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a rule may use for one weight."""

    options: Mapping[str, Any]
    step: Any
    scalar: Callable[[Any], Any]
    slot: Slot
    pairs: Changes

    def keep(self, variable: Any, value: Any) -> Any:
        """Have a variable assigned a value, and return the value."""
        self.pairs.append((variable, value))
        return value


_Apply = Callable[[_Change, Any, Any, Any], Any]
"""Takes what there is, a weight, its gradient and the learning rate; returns the new weight."""


def _sgd(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    return w - rate * (g + change.options["weight_decay"] * w)


def _momentum(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Sutskever et al. 2013; Nesterov's weights are the points ahead, θ + μ v, at which gradients are taken."""
    mu, variable = change.options["momentum"], change.slot("velocity")
    before = variable.read_value()
    after = change.keep(variable, mu * before - rate * (g + change.options["weight_decay"] * w))
    if not change.options["nesterov"]:
        return w + after
    theta = w - mu * before + after
    return theta + mu * after


def _adam_direction(change: _Change, g: Any) -> Any:
    """Kingma and Ba 2015, Algorithm 1: m̂ / (√v̂ + ε)."""
    corrected = []
    for name, beta, moment in (("m", "beta1", g), ("v", "beta2", tf.square(g))):
        variable, decay = change.slot(name), change.options[beta]
        after = change.keep(variable, decay * variable.read_value() + (1 - decay) * moment)
        corrected.append(after / change.scalar(1 - tf.constant(decay, tf.float64) ** change.step))
    first, second = corrected
    return first / (tf.sqrt(second) + change.options["epsilon"])


def _adam(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    return w - rate * _adam_direction(change, g)


def _adamw(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Loshchilov and Hutter 2019, Algorithm 2, line 12, the rate in the schedule's factor."""
    return w - rate * (_adam_direction(change, g) + change.options["weight_decay"] * w)


def _adafactor(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Shazeer and Stern 2018, Algorithms 4 and 5, with the sums of the paper: V = R C / 1ᵀR."""
    options, shape = change.options, tuple(w.shape.as_list())
    taken = change.scalar(change.step ** options["decay"])

    def averaged(name: str, now: Any) -> Any:
        variable = change.slot(name, tuple(now.shape.as_list()))
        return change.keep(variable, variable.read_value() * (1 - taken) + now * taken)

    squares = tf.square(g) + options["epsilon1"]
    if len(shape) < 2:
        direction = g / tf.sqrt(averaged("v", squares))
    else:
        rows, columns = sorted(np.argsort(shape, kind="stable")[-2:])
        r = averaged("r", tf.reduce_sum(squares, axis=columns, keepdims=True))
        c = averaged("c", tf.reduce_sum(squares, axis=rows, keepdims=True))
        direction = g / tf.sqrt(r / tf.reduce_sum(r, axis=rows, keepdims=True)) / tf.sqrt(c)
    clipped = direction / tf.maximum(change.scalar(1.0), _rms(direction) / options["clip"])
    relative = tf.minimum(rate, change.scalar(change.step**-0.5))
    return w - tf.maximum(change.scalar(options["epsilon2"]), _rms(w)) * relative * clipped


def _rms(x: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(x)))


_RULES: Mapping[str, _Apply] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "adafactor": _adafactor,
}
