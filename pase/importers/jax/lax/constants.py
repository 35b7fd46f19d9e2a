"""Small whole numbers that a program computes from nothing: positions, masks, the places of slices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_ELEMENTS = 1 << 16
"""Of an array that is computed here: larger ones are never an index that must be known."""


def evaluate(name: str, params: Mapping[str, Any], inputs: Sequence[Any], shape: Sequence[int], dtype: str) -> Any:
    """Return the array that a primitive computes of known ones; None where it cannot be told here.

    Only whole numbers and truth values of at most MAX_ELEMENTS elements are computed.
    """
    if name not in _COMPUTE or dtype not in _DTYPES or int(np.prod(shape)) > MAX_ELEMENTS:
        return None
    with np.errstate(all="ignore"):
        found = np.asarray(_COMPUTE[name](params, *inputs))
    return found.astype(dtype) if found.shape == tuple(shape) else None


_DTYPES = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})


def _broadcast(params: Mapping[str, Any], x: Any, *_: Any) -> Any:
    shape = tuple(int(n) for n in params["shape"])
    seen = [1] * len(shape)
    for dim, place in enumerate(params["broadcast_dimensions"]):
        seen[int(place)] = x.shape[dim]
    return np.broadcast_to(np.reshape(x, seen), shape)


def _iota(params: Mapping[str, Any], *_: Any) -> Any:
    shape, axis = tuple(int(n) for n in params["shape"]), int(params["dimension"])
    seen = [shape[axis] if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(seen), shape)


def _slice(params: Mapping[str, Any], x: Any) -> Any:
    steps = params["strides"] or (1,) * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(int(a), int(b), int(c)) for a, b, c in limits)]


def _remainder(_: Mapping[str, Any], x: Any, y: Any) -> Any:
    return np.fmod(x, np.where(y == 0, 1, y))


def _quotient(_: Mapping[str, Any], x: Any, y: Any) -> Any:
    return np.trunc(x / np.where(y == 0, 1, y))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *inputs: function(*inputs)


_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "neg": _plain(np.negative),
    "sign": _plain(np.sign),
    "abs": _plain(np.abs),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "rem": _remainder,
    "div": _quotient,
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "clamp": _plain(lambda low, x, high: np.clip(x, low, high)),
    "select_n": _plain(lambda which, *cases: np.choose(which.astype(int), cases)),
    "convert_element_type": _plain(lambda x: x),
    "copy": _plain(lambda x: x),
    "stop_gradient": _plain(lambda x: x),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "reduce_sum": lambda params, x: np.sum(x, axis=tuple(params["axes"])),
    "reduce_max": lambda params, x: np.max(x, axis=tuple(params["axes"])),
    "reduce_min": lambda params, x: np.min(x, axis=tuple(params["axes"])),
    "cumsum": lambda params, x: np.cumsum(x, axis=params["axis"]),
}
