"""What functions of points compute, of tensors whose dims already lie over each other and of numbers."""

from collections.abc import Callable, Mapping
from math import pi, sqrt
from types import MappingProxyType
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import tf

Local = Callable[..., Any]


def functions_of_points() -> Mapping[str, Local]:
    """Return what each function computes of slices; numbers come after them."""
    return MappingProxyType(
        {
            "abs": tf.abs, "acos": tf.acos, "acosh": tf.acosh, "asin": tf.asin, "asinh": tf.asinh, "atan": tf.atan,
            "atanh": tf.atanh, "ceil": tf.ceil, "cos": tf.cos, "cosh": tf.cosh, "erf": tf.erf, "erfc": tf.erfc,
            "exp": tf.exp, "expm1": tf.expm1, "floor": tf.floor, "gelu": _gelu, "gelu_tanh": _gelu_tanh,
            "hard_swish": lambda x: x * _between(x / 6 + 0.5, 0.0, 1.0), "identity": tf.identity, "log": tf.log,
            "log1p": tf.log1p, "log_sigmoid": tf.log_sigmoid, "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
            "negate": tf.negative, "reciprocal": lambda x: 1 / x, "relu": tf.nn.relu,
            "relu6": lambda x: _between(x, 0.0, 6.0), "round": tf.round, "rsqrt": lambda x: 1 / tf.sqrt(x),
            "selu": tf.nn.selu, "sigmoid": tf.sigmoid, "sign": tf.sign, "silu": lambda x: x * tf.sigmoid(x),
            "sin": tf.sin, "sinh": tf.sinh, "softsign": lambda x: x / (1 + tf.abs(x)), "sqrt": tf.sqrt,
            "square": tf.square, "tan": tf.tan, "tanh": tf.tanh, "tanh_shrink": lambda x: x - tf.tanh(x),
            "add": _folded(lambda x, y: x + y), "multiply": _folded(lambda x, y: x * y),
            "average": lambda *xs: _folded(lambda x, y: x + y)(*xs) / len(xs),
            "maximum": _folded(tf.maximum), "minimum": _folded(tf.minimum),
            "subtract": lambda x, y: x - y, "divide": lambda x, y: x / y, "power": _power,
            "floor_divide": lambda x, y: tf.floor(x / y),
            "equal": tf.equal, "not_equal": tf.not_equal, "less": lambda x, y: x < y, "less_equal": lambda x, y: x <= y,
            "greater": lambda x, y: x > y, "greater_equal": lambda x, y: x >= y,
            "prelu": lambda x, slope: tf.nn.relu(x) - slope * tf.nn.relu(-x),
            "leaky_relu": lambda x, slope: tf.nn.relu(x) - slope * tf.nn.relu(-x),
            "elu": lambda x, alpha: tf.nn.relu(x) + alpha * tf.expm1(tf.minimum(x, _like(x, 0.0))),
            "celu": lambda x, alpha: tf.nn.relu(x) + alpha * tf.expm1(tf.minimum(x / alpha, _like(x, 0.0))),
            "thresholded_relu": lambda x, least: x * tf.cast(x > least, x.dtype),
            "clip": _between, "hard_sigmoid": lambda x, slope, offset: _between(x * slope + offset, 0.0, 1.0),
            "quick_gelu": lambda x, alpha: x * tf.sigmoid(alpha * x),
            "softplus": lambda x, beta=1.0: tf.nn.softplus(x * beta) / beta,
            "where": lambda condition, x, y: _chosen(condition, x, y),
        }
    )  # fmt: skip


def _chosen(condition: Any, x: Any, y: Any) -> Any:
    return tf.where_v2(tf.not_equal(condition, _like(condition, 0.0)), _like(condition, x), _like(condition, y))


def _like(x: Any, number: Any) -> Any:
    return tf.convert_to_tensor(number, x.dtype)


def _between(x: Any, low: float, high: float) -> Any:
    # As numbers of its type: tf.cast would take them for float32 first.
    return tf.minimum(tf.maximum(x, _like(x, low)), _like(x, high))


def _power(x: Any, y: Any) -> Any:
    # Whole powers by products: that of a negative number is none otherwise on some devices.
    return tf.square(x) if isinstance(y, float) and y == 2 else tf.pow(x, y)


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tf.erf(x / sqrt(2)))


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + tf.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))


def _folded(function: Callable[[Any, Any], Any]) -> Local:
    def fold(*operands: Any) -> Any:
        # A number takes the type of the tensor before it.
        first, *others = sorted(operands, key=lambda operand: isinstance(operand, int | float))
        for other in others:
            first = function(first, other)
        return first

    return fold
