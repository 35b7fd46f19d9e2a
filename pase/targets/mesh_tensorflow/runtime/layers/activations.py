"""Activations: functions of single points, which keep any layout."""

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise


def relu(x: Any) -> Any:
    """Return max(x, 0)."""
    return _pointwise("relu", x, tf.nn.relu, lambda _, y, dy: tf.raw_ops.ReluGrad(gradients=dy, features=y))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of x."""
    return _pointwise("tanh", x, tf.tanh, lambda _, y, dy: tf.raw_ops.TanhGrad(y=y, dy=dy))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return _pointwise("sigmoid", x, tf.sigmoid, lambda _, y, dy: tf.raw_ops.SigmoidGrad(y=y, dy=dy))


def gelu(x: Any) -> Any:
    """Return x Φ(x), Φ the normal distribution function."""
    return _pointwise("gelu", x, lambda z: z * _normal_distribution(z), _gelu_gradient)


def _normal_distribution(x: Any) -> Any:
    return 0.5 * (1 + tf.erf(x / sqrt(2)))


def _gelu_gradient(x: Any, _: Any, dy: Any) -> Any:
    density = tf.exp(-0.5 * tf.square(x)) / sqrt(2 * pi)
    return dy * (_normal_distribution(x) + x * density)


def _pointwise(name: str, x: Any, function: Callable[[Any], Any], derivative: Callable[[Any, Any, Any], Any]) -> Any:
    """derivative: the gradient of x from slices of x, y and the gradient of y."""

    def gradient(dy: Any) -> Any:
        return Shardwise(derivative, [x, y, dy], shape=x.shape, name=f"{name}_gradient").outputs

    y = Shardwise(function, [x], shape=x.shape, name=name, gradient=gradient).outputs[0]
    return y
