"""Shapes of a Keras model's inputs: what it was made with, the batch, and what the user says of the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pase.errors import ModelError
from pase.graph import Scalar

_BATCH = 32
"""Examples in a step where nothing tells: what Keras itself trains with by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """An input; shape: with the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def specifications(
    keras: Any, model: Any, inputs: Any, *, batch: int | None, arguments: Mapping[str, Scalar], notes: list[str]
) -> Any:
    """Return the inputs of a model, in the structure in which it is called.

    inputs: tensors or arrays, where the model was never called. arguments: shapes without the batch, by the input's
    name, or of the only one as "shape". notes: takes what was assumed. Raises ModelError where a dim has no value.
    """
    given = _given(keras, model, inputs, arguments)
    flat = keras.tree.flatten(given)
    names = [item.name for item in flat]
    for name in arguments:
        if name not in names and not (name == "shape" and len(flat) == 1):
            raise ModelError(
                f"Keras model {model.name!r} has no input {name!r}; its inputs are {', '.join(names)}: give the shape "
                f"of one without the batch, as in --arg {names[0]}=224x224x3"
            )
    if batch is None and any(item.shape[:1] == (None,) for item in flat):
        notes.append(f"a batch of {_BATCH} was assumed; --batch gives another")

    def whole(item: _Open) -> Specification:
        told = arguments.get(item.name, arguments.get("shape"))
        shape = item.shape if told is None else (*item.shape[:1], *_told(item, str(told)))
        if shape:
            shape = (batch or shape[0] or _BATCH, *shape[1:])
        if any(extent is None for extent in shape):
            raise ModelError(
                f"input {item.name!r} of Keras model {model.name!r} has shape {_text(item.shape)}, with dims of "
                f"unknown size; give the shape without the batch: --arg {item.name}="
                + "x".join(str(extent or "N") for extent in item.shape[1:])
            )
        return Specification(name=item.name, shape=tuple(e for e in shape if e is not None), dtype=item.dtype)

    return keras.tree.map_structure(whole, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """An input some of whose extents may not be known; the first is the batch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def _given(keras: Any, model: Any, inputs: Any, arguments: Mapping[str, Scalar]) -> Any:
    if inputs is not None:
        count = iter(range(1, 2 + len(keras.tree.flatten(inputs))))
        return keras.tree.map_structure(lambda item: _open(keras, item, f"input_{next(count)}"), inputs)
    tensors = getattr(model, "_inputs_struct", None)
    if tensors is None and getattr(model, "built", False) and _inputs_of(model):
        tensors = _inputs_of(model)[0] if len(_inputs_of(model)) == 1 else _inputs_of(model)
    if tensors is not None:
        return keras.tree.map_structure(lambda item: _open(keras, item, _name(item)), tensors)
    shape = getattr(model, "_build_shapes_dict", None)
    known = list((shape or {}).values())
    if len(known) == 1 and isinstance(known[0], tuple | list):
        return _Open(name="inputs", shape=tuple(known[0]), dtype=str(model.input_dtype))
    if "shape" in arguments:
        extents = _extents("inputs", str(arguments["shape"]))
        return _Open(name="inputs", shape=(None, *extents), dtype=str(model.compute_dtype))
    raise ModelError(
        f"Keras model {model.name!r} has never been called, so that the shape of its inputs is not known; give "
        "(model, inputs), keras.Input tensors or arrays, or the shape without the batch: --arg shape=224x224x3"
    )


def _name(tensor: Any) -> str:
    """Return the name of an input: that of its layer, which a file keeps."""
    history = getattr(tensor, "_keras_history", None)
    layer = getattr(history, "operation", None)
    return str(layer.name if layer is not None else tensor.name)


def _inputs_of(model: Any) -> list[Any]:
    try:
        return list(model.inputs or [])
    except (AttributeError, ValueError):
        return []


def _open(keras: Any, item: Any, name: str) -> _Open:
    if not hasattr(item, "shape") or not hasattr(item, "dtype"):
        raise ModelError(f"a Keras model is given a {type(item).__name__} as input; expected keras.Input or an array")
    return _Open(name=name, shape=tuple(item.shape), dtype=keras.backend.standardize_dtype(item.dtype))


def _told(item: _Open, text: str) -> tuple[int, ...]:
    extents = _extents(item.name, text)
    rest: Sequence[int | None] = item.shape[1:]
    if len(extents) != len(rest) or any(old not in (None, new) for old, new in zip(rest, extents, strict=True)):
        raise ModelError(
            f"input {item.name!r} is given the shape {text!r}; the model has {_text(rest)} there, without the batch"
        )
    return extents


def _extents(name: str, text: str) -> tuple[int, ...]:
    words = text.replace(",", "x").lower().strip("()[] ").split("x")
    if not all(word.strip().isdecimal() and 0 < int(word) < 2**31 for word in words):
        raise ModelError(f"the shape {text!r} of input {name!r} is not usable; expected whole numbers as in 224x224x3")
    return tuple(int(word) for word in words)


def _text(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"
