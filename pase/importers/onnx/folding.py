"""Operators on constants, worked out: what exporters compute shapes, axes and positions with."""

from collections.abc import Callable, Mapping, Sequence
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

    def axes(self) -> tuple[int, ...] | None:
        """Return the axes that are given as an attribute or as the second input, if any."""
        if "axes" in self.attributes:
            return tuple(self.attributes["axes"])
        if len(self.inputs) > 1 and self.inputs[1] is not None:
            return tuple(int(axis) for axis in self.inputs[1].ravel())
        return None


def fold(call: Folding) -> tuple[Array, ...] | None:
    """Return what an operator gives, or None where that is not known, or has too many elements to be worth it.

    Raises ValueError, IndexError, TypeError or the like where its inputs do not fit.
    """
    first = call.inputs[0] if call.inputs else None
    if call.operator in _SPECIAL:
        found = _SPECIAL[call.operator](call)
    elif call.operator in _PLAIN and all(array is not None for array in call.inputs):
        arrays = [array for array in call.inputs if array is not None]
        if prod(np.broadcast_shapes(*(array.shape for array in arrays))) > MAX_ELEMENTS:
            return None
        result = _PLAIN[call.operator](*arrays)
        keeps = call.operator not in _TRUTHS and first is not None
        found = (np.asarray(result, dtype=first.dtype if keeps and first is not None else None),)
    else:
        return None
    return None if found is None or any(array.size > MAX_ELEMENTS for array in found) else found


def _whole(a: Array, b: Array) -> Array:
    """Divide; whole numbers round towards 0, as in C."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    if not np.all(b):
        raise ValueError("a shape is divided by 0")
    quotient: Array = (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
    return quotient


def _constant(call: Folding) -> tuple[Array, ...] | None:
    attributes = call.attributes
    for name, dtype in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if name in attributes:
            return (np.asarray(attributes[name], dtype=dtype),)
    value = attributes.get("value")
    return None if not isinstance(value, np.ndarray) else (value,)


def _constant_of_shape(call: Folding) -> tuple[Array, ...] | None:
    (shape,) = _present(call, 1)
    extents = tuple(int(extent) for extent in shape.ravel())
    if prod(extents) > MAX_ELEMENTS:
        return None
    value = call.attributes.get("value")
    filled = np.zeros(1, dtype=np.float32) if not isinstance(value, np.ndarray) else value
    return (np.full(extents, filled.ravel()[0], dtype=filled.dtype),)


def _cast(call: Folding) -> tuple[Array, ...] | None:
    dtype = _CAST.get(call.attributes.get("to", 0))
    if dtype is None or call.inputs[0] is None:
        return None
    return (call.inputs[0].astype(dtype),)


def _range(call: Folding) -> tuple[Array, ...] | None:
    start, limit, delta = (array.ravel()[0] for array in call.inputs if array is not None)
    if delta == 0 or abs((float(limit) - float(start)) / float(delta)) > MAX_ELEMENTS:
        return None
    return (np.arange(start, limit, delta, dtype=np.asarray(start).dtype),)


def _gather(call: Folding) -> tuple[Array, ...] | None:
    x, indices = _present(call, 2)
    if indices.size * max(1, x.size) > MAX_ELEMENTS * 16:
        return None
    return (np.take(x, indices.astype(np.int64), axis=call.attributes.get("axis", 0)),)


def _concat(call: Folding) -> tuple[Array, ...] | None:
    return (np.concatenate(_present(call, len(call.inputs)), axis=call.attributes["axis"]),)


def _unsqueeze(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    return (np.expand_dims(x, call.axes() or ()),)


def _squeeze(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    return (np.squeeze(x, axis=call.axes()),)


def _reshape(call: Folding) -> tuple[Array, ...] | None:
    x, target = _present(call, 2)
    shape = [x.shape[i] if extent == 0 else int(extent) for i, extent in enumerate(target.ravel())]
    return (x.reshape(shape),)


def _slice(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    starts, ends, axes, steps = slices_of(call, x.ndim)
    where = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        begin, stop = clamped(start, end, step, x.shape[axis])
        where[axis] = slice(begin, None if stop < 0 else stop, step)
    return (x[tuple(where)],)


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


def _transpose(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    return (np.transpose(x, call.attributes.get("perm")),)


def _expand(call: Folding) -> tuple[Array, ...] | None:
    x, target = _present(call, 2)
    shape = np.broadcast_shapes(x.shape, tuple(int(extent) for extent in target.ravel()))
    return None if prod(shape) > MAX_ELEMENTS else (np.broadcast_to(x, shape),)


def _tile(call: Folding) -> tuple[Array, ...] | None:
    x, repeats = _present(call, 2)
    counts = [int(count) for count in repeats.ravel()]
    return None if x.size * prod(counts) > MAX_ELEMENTS else (np.tile(x, counts),)


def _split(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    axis = call.attributes.get("axis", 0)
    sizes = call.attributes.get("split")
    if sizes is None and len(call.inputs) > 1 and call.inputs[1] is not None:
        sizes = [int(size) for size in call.inputs[1].ravel()]
    if sizes is None:
        size = -(-x.shape[axis] // max(1, call.num_outputs))
        sizes = [size] * call.num_outputs
    return tuple(np.split(x, np.cumsum(sizes)[:-1].tolist(), axis=axis))


def _non_zero(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    return (np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((0, int(bool(x))), dtype=np.int64),)


def _reduce(function: Callable[..., Any]) -> Callable[[Folding], tuple[Array, ...] | None]:
    def evaluate(call: Folding) -> tuple[Array, ...] | None:
        (x,) = _present(call, 1)
        keeps = bool(call.attributes.get("keepdims", 1))
        axes = call.axes()
        if not axes and call.attributes.get("noop_with_empty_axes", 0):
            return (x,)
        return (np.asarray(function(x, axis=axes or None, keepdims=keeps), dtype=x.dtype),)

    return evaluate


def _cumulate(call: Folding) -> tuple[Array, ...] | None:
    x, axis = _present(call, 2)
    if call.attributes.get("exclusive", 0) or call.attributes.get("reverse", 0):
        return None
    return (np.cumsum(x, axis=int(axis.ravel()[0]), dtype=x.dtype),)


def _trilu(call: Folding) -> tuple[Array, ...] | None:
    (x,) = _present(call, 1)
    shift = call.inputs[1].ravel()[0] if len(call.inputs) > 1 and call.inputs[1] is not None else 0
    return (np.triu(x, int(shift)) if call.attributes.get("upper", 1) else np.tril(x, int(shift)),)


def _identity(call: Folding) -> tuple[Array, ...] | None:
    return tuple(_present(call, 1))


def _present(call: Folding, count: int) -> Sequence[Array]:
    found = [array for array in call.inputs[:count] if array is not None]
    if len(found) < count:
        raise ValueError(f"{call.operator} lacks an input")
    return found


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
        "Mod": lambda a, b: np.mod(a, b) if np.all(b) else _refused(),
    }
)  # fmt: skip


def _refused() -> Array:
    raise ValueError("a shape is divided by 0")


_SPECIAL: Mapping[str, Callable[[Folding], tuple[Array, ...] | None]] = MappingProxyType(
    {
        "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Cast": _cast, "Range": _range,
        "Gather": _gather, "Concat": _concat, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Reshape": _reshape,
        "Slice": _slice, "Transpose": _transpose, "Expand": _expand, "Tile": _tile, "Split": _split,
        "NonZero": _non_zero, "CumSum": _cumulate, "Trilu": _trilu, "Identity": _identity,
        "ReduceSum": _reduce(np.sum), "ReduceProd": _reduce(np.prod), "ReduceMax": _reduce(np.max),
        "ReduceMin": _reduce(np.min), "ReduceMean": _reduce(np.mean),
    }
)  # fmt: skip
