"""Functions of points of one or more tensors with named dims: what lacks a dim is the same for all of its points.

`functions_of_points` computes them of slices and numbers; `dropout` is a function of a point's number too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import pi, prod, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise
from pase.targets.training.counted import ROUND, WORD, layer_key, threshold

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


def apply(function: str, *operands: Any) -> Any:
    """Return a function of tensors of one mesh and numbers; its dims are those of all tensors, in order.

    Raises ProgramError for a function that is not known, and for dims of one name with different extents.
    """
    local = functions_of_points().get(function)
    tensors = [operand for operand in operands if isinstance(operand, mtf.Tensor)]
    if local is None or not tensors:
        names = ", ".join(functions_of_points())
        raise ProgramError(f"{function!r} of {len(tensors)} tensors cannot be computed; use {names}")
    dims = joined_dims(tensors)

    def compute(*slices: Any) -> Any:
        rest = iter(slices)
        own = [
            _spread(next(rest), operand, dims) if isinstance(operand, mtf.Tensor) else operand for operand in operands
        ]
        return local(*own)

    dtype = tensors[0].dtype
    return Shardwise(
        lambda *slices: tf.cast(compute(*slices), dtype),
        tensors,
        shape=dims,
        name=function,
        recompute=function in _OF_ARGUMENTS,
        is_constant=function in _CONSTANT,
    ).outputs[0]


_OF_ARGUMENTS = frozenset(
    {
        "celu", "clip", "elu", "gelu", "gelu_tanh", "hard_sigmoid", "hard_swish", "leaky_relu", "log_sigmoid", "mish",
        "prelu", "quick_gelu", "relu6", "silu", "softplus", "softsign", "tanh_shrink", "thresholded_relu",
    }
)  # fmt: skip
"""Functions made of several: their arguments are kept for the gradient, not what stands between."""

_CONSTANT = frozenset(
    {
        "ceil", "equal", "floor", "floor_divide", "greater", "greater_equal", "less", "less_equal", "not_equal",
        "round", "sign",
    }
)  # fmt: skip
"""Functions that change by jumps alone: nothing flows back."""


class _Functions:
    """Functions of points, by name: ``fn.add(x, y)``."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(apply, name)


fn = _Functions()


def joined_dims(tensors: Sequence[Any]) -> list[Any]:
    """Return the dims of several tensors, the most dims first, each once; ProgramError where extents differ."""
    found: dict[str, Any] = {}
    for tensor in sorted(tensors, key=lambda x: -len(x.shape.dims)):
        for dim in tensor.shape.dims:
            if found.setdefault(dim.name, dim) != dim:
                raise ProgramError(
                    f"layer {tensor.mesh.layer!r} brings tensors together whose dim {dim.name} has {dim.size} points "
                    f"and {found[dim.name].size}; give them one extent"
                )
    return list(found.values())


def arrange(x: Any, dims: Sequence[Any]) -> Any:
    """Return a tensor with its dims in another order; it is repeated along those that it lacks."""
    if list(x.shape.dims) == list(dims):
        return x
    lacking = [dim for dim in x.shape.dims if dim not in dims]
    if any(dim.size > 1 for dim in lacking):
        raise ProgramError(f"layer {x.mesh.layer!r}: {x.shape.to_string} cannot be laid out as {written(dims)}")
    devices = x.mesh.devices
    shape = [dim.size // devices.size(dim.name) for dim in dims]

    def compute(local: Any) -> Any:
        return tf.broadcast_to(_spread(local, x, dims), shape)

    return Shardwise(compute, [x], shape=list(dims), name="arrange", is_move=True).outputs[0]


def written(dims: Sequence[Any]) -> str:
    """Return dims as messages have them."""
    return ", ".join(f"{dim.name}={dim.size}" for dim in dims)


def _spread(local: Any, x: Any, dims: Sequence[Any]) -> Any:
    """Return a slice with the dims in that order, one point for those that its tensor lacks."""
    own = [dim.name for dim in x.shape.dims]
    kept = [dim.name for dim in dims if dim.name in own]
    squeezed = [i for i, name in enumerate(own) if name not in kept]
    extents = dict(zip(own, local.shape.as_list(), strict=True))
    if squeezed:
        local = tf.squeeze(local, squeezed)
        own = [name for name in own if name in kept]
    if own != kept:
        local = tf.transpose(local, [own.index(name) for name in kept])
    shape = [extents.get(dim.name, 1) for dim in dims]
    return local if local.shape.as_list() == shape else tf.reshape(local, shape)


Ranges = tuple[tuple[int, int], ...]
"""Where a part begins and ends along each dim."""


def dropout(x: Any, key: Any, *, rate: float) -> Any:
    """Return ``x / (1 - rate)`` where a point is kept and 0 where it is dropped, the same points in the gradient.

    key: the step's, `Program.mask_key`. Points are dropped by it, the name of x's layer and their number in the whole
    tensor; with the key `masks.NOTHING_DROPPED` the result is x.
    """
    if not 0 <= rate < 1:
        raise ProgramError(f"layer {x.mesh.layer!r} drops a fraction of {rate}; give a rate from 0 to below 1")
    shape = tuple(x.shape.to_integer_list)
    name = x.mesh.layer
    scale = 1 / (1 - rate)

    def masked(part: Ranges, x: Any) -> Any:
        drawn = _drawn(part, shape, tf.bitwise.bitwise_xor(key, tf.constant(layer_key(name))))
        is_evaluated = key[0] < 0
        factor = tf.where_v2(is_evaluated, tf.ones([], x.dtype), tf.constant(scale, x.dtype))
        is_kept = (drawn >= threshold(rate)) | is_evaluated
        return tf.where_v2(is_kept, x * factor, tf.zeros_like(x))

    def parts() -> list[Ranges]:
        return [_part(x, point) for point in x.mesh.devices.coordinates]

    # The mask is drawn again for the gradient: to keep it would cost as much as x.
    return Shardwise(masked, [x], shape=x.shape, name="dropout", per_position=parts, recompute=True).outputs[0]


def _part(x: Any, point: dict[str, int]) -> Ranges:
    sizes = [(dim.name, dim.size // x.mesh.devices.size(dim.name)) for dim in x.shape.dims]
    return tuple((point.get(name, 0) * size, (point.get(name, 0) + 1) * size) for name, size in sizes)


def _drawn(part: Ranges, shape: tuple[int, ...], key: Any) -> Any:
    """Return a word of 32 bits for each point of a part of a tensor, in 64 bits."""
    number = tf.zeros([1] * len(shape), tf.int64)
    for i, (begin, end) in enumerate(part):
        along = tf.range(begin, end, dtype=tf.int64) * prod(shape[i + 1 :])
        number += tf.reshape(along, [-1 if j == i else 1 for j in range(len(shape))])
    low = tf.bitwise.bitwise_and(number, np.int64(WORD - 1))
    words = tf.bitwise.bitwise_xor(_mixed(tf.bitwise.bitwise_xor(low, key[0])), key[1])
    if prod(shape) > WORD:
        high = _mixed(tf.bitwise.right_shift(number, np.int64(32)))
        words = tf.bitwise.bitwise_xor(words, high)
    return _mixed(words)


def _mixed(words: Any) -> Any:
    for shift, factor in ROUND:
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, np.int64(shift)))
        if factor != 1:
            words = tf.bitwise.bitwise_and(words * factor, np.int64(WORD - 1))
    return words
