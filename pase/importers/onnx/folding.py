"""Operators on constants, worked out: what exporters compute shapes, axes and positions with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_ELEMENTS = 1 << 16
"""Of a constant that is worked out; larger ones have shapes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """An operator whose inputs are all constants. inputs: None for those left out; attributes: plain values."""

    operator: str
    inputs: tuple[Array | None, ...]
    attributes: Mapping[str, Any]
    num_outputs: int
    opset: int

    @property
    def x(self) -> Array:
        """The first input; ValueError where it is left out."""
        return self.input(0)

    def input(self, position: int) -> Array:
        """Return an input; ValueError where it is left out."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if found is None:
            raise ValueError(f"{self.operator} lacks an input")
        return found

    def wholes(self, name: str, position: int) -> tuple[int, ...] | None:
        """Return the whole numbers that are given as an attribute or as the input at a position, if any."""
        if name in self.attributes:
            return tuple(self.attributes[name])
        found = self.inputs[position] if position < len(self.inputs) else None
        return None if found is None else tuple(int(number) for number in found.ravel())


def fold(call: Folding) -> tuple[Array, ...] | None:
    """Return what an operator gives, or None where that is not known, or has too many elements to be worth it.

    Raises ValueError, IndexError, TypeError or the like where its inputs do not fit.
    """
    found: Array | tuple[Array, ...] | None = None
    if call.operator in _SPECIAL:
        found = _SPECIAL[call.operator](call)
    elif call.operator in _PLAIN and all(array is not None for array in call.inputs):
        arrays = [array for array in call.inputs if array is not None]
        if prod(np.broadcast_shapes(*(array.shape for array in arrays))) > MAX_ELEMENTS:
            return None
        keeps = call.operator not in _TRUTHS and bool(arrays)
        found = np.asarray(_PLAIN[call.operator](*arrays), dtype=arrays[0].dtype if keeps else None)
    if found is None:
        return None
    # NumPy makes numbers, not arrays, of some without dims.
    arrays = list(found) if isinstance(found, tuple) else [np.asarray(found)]
    return None if any(array.size > MAX_ELEMENTS for array in arrays) else tuple(arrays)


def _whole(a: Array, b: Array) -> Array:
    """Divide; whole numbers round towards 0, as in C."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    quotient: Array = (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(_divisor(b)))).astype(a.dtype)
    return quotient


def _divisor(b: Array) -> Array:
    if not np.all(b):
        raise ValueError("a shape is divided by 0")
    return b


def _constant(call: Folding) -> Array | None:
    for name, dtype in _CONSTANTS.items():
        if name in call.attributes:
            return np.asarray(call.attributes[name], dtype=dtype)
    value = call.attributes.get("value")
    return value if isinstance(value, np.ndarray) else None


def _constant_of_shape(call: Folding) -> Array | None:
    extents = tuple(int(extent) for extent in call.x.ravel())
    if prod(extents) > MAX_ELEMENTS:
        return None
    value = call.attributes.get("value")
    filled = np.zeros(1, dtype=np.float32) if not isinstance(value, np.ndarray) else value
    return np.full(extents, filled.ravel()[0], dtype=filled.dtype)


def _cast(call: Folding) -> Array | None:
    dtype = _CAST.get(call.attributes.get("to", 0))
    return None if dtype is None or call.inputs[0] is None else call.inputs[0].astype(dtype)


def _range(call: Folding) -> Array | None:
    start, limit, delta = (array.ravel()[0] for array in call.inputs if array is not None)
    if delta == 0 or abs((float(limit) - float(start)) / float(delta)) > MAX_ELEMENTS:
        return None
    return np.arange(start, limit, delta, dtype=np.asarray(start).dtype)


def _gather(call: Folding) -> Array | None:
    x, indices = call.x, call.input(1)
    if indices.size * max(1, x.size) > MAX_ELEMENTS * 16:
        return None
    return np.take(x, indices.astype(np.int64), axis=call.attributes.get("axis", 0))


def _reshape(call: Folding) -> Array:
    x = call.x
    return x.reshape([x.shape[i] if extent == 0 else int(extent) for i, extent in enumerate(call.input(1).ravel())])


def _slice(call: Folding) -> Array:
    where = [slice(None)] * call.x.ndim
    for start, end, axis, step in zip(*slices_of(call, call.x.ndim), strict=True):
        begin, stop = clamped(start, end, step, call.x.shape[axis])
        where[axis] = slice(begin, None if stop < 0 else stop, step)
    return call.x[tuple(where)]


def slices_of(call: Folding, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return (starts, ends, axes from 0, steps) of a Slice, from attributes or from inputs."""
    given = [None if array is None else tuple(int(v) for v in array.ravel()) for array in call.inputs[1:5]]
    given += [None] * (4 - len(given))
    if "starts" in call.attributes:
        given = [tuple(call.attributes["starts"]), tuple(call.attributes["ends"]), call.attributes.get("axes"), None]
    starts, ends, axes, steps = given
    if starts is None or ends is None:
        raise ValueError("a slice's starts or ends are not constants")
    axes = tuple(range(len(starts))) if axes is None else axes
    return starts, ends, tuple(axis % rank for axis in axes), steps or (1,) * len(starts)


def clamped(start: int, end: int, step: int, extent: int) -> tuple[int, int]:
    """Return a slice's start and end within a dim; for steps backwards, -1 is the end before its first element."""
    if step == 0:
        raise ValueError("a slice has steps of 0")
    start, end = (value + extent if value < 0 else value for value in (start, end))
    if step > 0:
        return min(max(start, 0), extent), min(max(end, 0), extent)
    return min(max(start, 0), extent - 1), min(max(end, -1), extent - 1)


def _expand(call: Folding) -> Array | None:
    shape = np.broadcast_shapes(call.x.shape, tuple(int(extent) for extent in call.input(1).ravel()))
    return None if prod(shape) > MAX_ELEMENTS else np.broadcast_to(call.x, shape)


def _tile(call: Folding) -> Array | None:
    counts = [int(count) for count in call.input(1).ravel()]
    return None if call.x.size * prod(counts) > MAX_ELEMENTS else np.tile(call.x, counts)


def _split(call: Folding) -> tuple[Array, ...]:
    axis, sizes = call.attributes.get("axis", 0), call.wholes("split", 1)
    if sizes is None:
        sizes = (-(-call.x.shape[axis] // max(1, call.num_outputs)),) * call.num_outputs
    return tuple(np.split(call.x, np.cumsum(sizes)[:-1].tolist(), axis=axis))


def _non_zero(call: Folding) -> Array:
    x = call.x
    return np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((0, int(bool(x))), dtype=np.int64)


def _reduce(function: Callable[..., Any]) -> Callable[[Folding], Array]:
    def evaluate(call: Folding) -> Array:
        axes = call.wholes("axes", 1)
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            return call.x
        keeps = bool(call.attributes.get("keepdims", 1))
        return np.asarray(function(call.x, axis=axes or None, keepdims=keeps), dtype=call.x.dtype)

    return evaluate


def _cumulate(call: Folding) -> Array | None:
    axis = int(call.input(1).ravel()[0])
    is_plain = not call.attributes.get("exclusive", 0) and not call.attributes.get("reverse", 0)
    return np.cumsum(call.x, axis=axis, dtype=call.x.dtype) if is_plain else None


def _trilu(call: Folding) -> Array:
    shift = int(call.input(1).ravel()[0]) if len(call.inputs) > 1 and call.inputs[1] is not None else 0
    return (np.triu if call.attributes.get("upper", 1) else np.tril)(call.x, shift)


_CONSTANTS: Mapping[str, type] = MappingProxyType(
    {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
)
"""Attributes of a Constant, and their types."""

_CAST: Mapping[int, type] = MappingProxyType(
    {
        1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
        10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64,
    }
)  # fmt: skip
"""By ONNX's number of an element type."""

_TRUTHS = frozenset(
    {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf", "Where"}
)
"""These give another type than they are given."""

_PLAIN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _whole, "Neg": np.negative, "Abs": np.abs,
        "Sqrt": np.sqrt, "Exp": np.exp, "Log": np.log, "Pow": np.power, "Floor": np.floor, "Ceil": np.ceil,
        "Round": np.rint, "Sign": np.sign, "Reciprocal": np.reciprocal, "Sin": np.sin, "Cos": np.cos, "Tanh": np.tanh,
        "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater, "IsNaN": np.isnan,
        "GreaterOrEqual": np.greater_equal, "Not": np.logical_not, "IsInf": np.isinf, "And": np.logical_and,
        "Or": np.logical_or, "Xor": np.logical_xor, "Where": np.where,
        "Max": lambda *a: np.maximum.reduce(np.broadcast_arrays(*a)),
        "Min": lambda *a: np.minimum.reduce(np.broadcast_arrays(*a)),
        "Sum": lambda *a: np.add.reduce(np.broadcast_arrays(*a)),
        "Mod": lambda a, b: np.mod(a, _divisor(b)),
    }
)  # fmt: skip

_SPECIAL: Mapping[str, Callable[[Folding], Array | tuple[Array, ...] | None]] = MappingProxyType(
    {
        "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Cast": _cast, "Range": _range,
        "Gather": _gather, "Reshape": _reshape, "Slice": _slice, "Expand": _expand, "Tile": _tile, "Split": _split,
        "NonZero": _non_zero, "CumSum": _cumulate, "Trilu": _trilu,
        "Identity": lambda call: call.x,
        "Concat": lambda call: np.concatenate(
            [call.input(i) for i in range(len(call.inputs))], axis=call.attributes["axis"]
        ),
        "Unsqueeze": lambda call: np.expand_dims(call.x, call.wholes("axes", 1) or ()),
        "Squeeze": lambda call: np.squeeze(call.x, axis=call.wholes("axes", 1)),
        "Transpose": lambda call: np.transpose(call.x, call.attributes.get("perm")),
        "ReduceSum": _reduce(np.sum), "ReduceProd": _reduce(np.prod), "ReduceMax": _reduce(np.max),
        "ReduceMin": _reduce(np.min), "ReduceMean": _reduce(np.mean),
    }
)  # fmt: skip
