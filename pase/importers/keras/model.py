"""Keras models, walked by their layers; `.keras` files, of which the configuration alone is read."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pase.errors import ModelError, missing_extra
from pase.graph import Scalar
from pase.importers.front_end import first_line, framework
from pase.importers.ir import Trace, Value, check_trace
from pase.importers.ir.trace import frozen_notes
from pase.importers.keras.call import UntranslatableError, trained_of
from pase.importers.keras.file import clean_copy, read_losses, read_model
from pase.importers.keras.graph import Reader

_FILES = frozenset({".keras", ".h5", ".hdf5"})


class KerasFrontEnd:
    """Takes a model, (model, its inputs) where it has never been called, and `.keras` files."""

    package = "keras"
    extra = "keras"

    def takes(self, source: object) -> bool:
        """Return whether a source is a model of Keras, alone or with inputs, or a file of one."""
        if isinstance(source, str):
            return PurePath(source).suffix.lower() in _FILES
        keras = sys.modules.get("keras")
        first = source[0] if isinstance(source, tuple) and len(source) == 2 else source
        return keras is not None and isinstance(first, keras.Model | keras.Layer)

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a model; arguments: shapes of inputs without the batch ("224x224x3"), by name."""
        keras = keras_module()
        with self.without_weights():
            return read_trace(keras, _opened(keras, source), batch=batch, arguments=arguments)[0]

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context in which variables have shapes alone."""
        return _without_weights(keras_module())


def keras_module() -> Any:
    """Return Keras; MissingExtraError where it, or the backend that it is set to, is not installed."""
    try:
        return framework("keras", "keras")
    except ModuleNotFoundError as error:
        raise missing_extra(
            f"Keras needs {error.name}, which is not installed",
            "keras",
            also=", or set KERAS_BACKEND to a backend that is: tensorflow, jax or torch",
        ) from None


@contextmanager
def _without_weights(keras: Any) -> Iterator[None]:
    from keras.src.backend.common import global_state

    kept = list(global_state.get_global_attribute("uninitialized_variables") or [])
    compiled = keras.Model.compile

    def compile_with_values(model: Any, *arguments: Any, **keywords: Any) -> Any:
        # An optimiser's own variables (its rate) need their values at once.
        scope = global_state.get_global_attribute("stateless_scope")
        global_state.set_global_attribute("stateless_scope", None)
        try:
            return compiled(model, *arguments, **keywords)
        finally:
            global_state.set_global_attribute("stateless_scope", scope)

    keras.Model.compile = compile_with_values
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        keras.Model.compile = compiled
        # Or the next scope of the user's own would make up for it.
        global_state.set_global_attribute("uninitialized_variables", kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A model. inputs: what it is called with, where that is told; losses: as `compile` takes them; notes: of these."""

    model: Any
    inputs: Any
    losses: Any
    notes: Sequence[str] = ()


def _opened(keras: Any, source: Any) -> _Opened:
    """Return the model that a source is, or that its file describes."""
    if isinstance(source, str):
        notes: list[str] = []
        model = read_model(keras, source)
        return _Opened(model=model, inputs=None, losses=read_losses(keras, source, notes), notes=notes)
    model, inputs = source if isinstance(source, tuple) else (source, None)
    losses = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    return _Opened(model=model, inputs=inputs, losses=losses)


def read_trace(
    keras: Any, opened: _Opened, *, batch: int | None, arguments: Mapping[str, Scalar]
) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of a model, and its variables by the names of their leaves; no weight's value is read.

    Every layer is one operator of the source. Raises ModelError where the shape of an input is not known, or where the
    model's own code cannot be followed.
    """
    model, notes = opened.model, list(opened.notes)
    found = specifications(keras, model, opened.inputs, batch=batch, arguments=arguments, notes=notes)
    reader = Reader(keras, model)

    def leaf(item: Any) -> Any:
        return reader.writer.leaf(item.name, item.shape, item.dtype, "input") if isinstance(item, _Input) else item

    outputs = reader.model(model, keras.tree.map_structure(leaf, found))
    outputs = [*outputs, *_losses(keras, reader, opened, outputs)]
    trace = Trace(
        name=model.name,
        leaves=tuple(reader.writer.leaves),
        nodes=tuple(reader.writer.nodes),
        outputs=tuple(dict.fromkeys(value.name for value in outputs)),
        notes=(*notes, *_notes(reader, model)),
        num_source_operators=reader.num_operations,
    )
    return check_trace(trace), reader.writer.variables


def _losses(keras: Any, reader: Reader, opened: _Opened, outputs: list[Value]) -> Iterator[Value]:
    """Yield the losses that a model was compiled with, one for each output that has one; targets are inputs."""
    given, names = opened.losses, list(getattr(opened.model, "output_names", ()))
    if len(names) != len(outputs):
        names = [f"output_{i}" for i in range(len(outputs))]
    if isinstance(given, Mapping):
        losses = [given.get(name) for name in names]
    else:
        losses = list(given) if isinstance(given, list | tuple) else [given] * len(outputs)
    for name, output, item in zip(names, outputs, losses, strict=False):
        if item is None:
            continue
        function = keras.losses.get(item)
        is_sparse = any(name in _name_of(function).lower().replace("_", "") for name in _OF_CLASSES)
        shape, dtype = (output.shape[:-1], "int32") if is_sparse else (output.shape, output.dtype)
        of = f" of {name}" if len(outputs) > 1 else ""
        target = reader.writer.leaf(f"targets{of}", shape, dtype, "input")
        try:
            (found,) = reader.trace(_meaned(keras, function), [target, output], f"loss{of}")
        except UntranslatableError:
            reader.notes.append(f"the loss of {name!r} is left out")
            continue
        yield found


_OF_CLASSES = ("sparsecategorical", "categoricalgeneralized")
"""In names of losses whose targets are the classes' numbers."""


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", getattr(function, "name", type(function).__name__)))


def _meaned(keras: Any, function: Any) -> Callable[[Any, Any], Any]:
    """Return a loss as one number."""

    def computed(target: Any, output: Any) -> Any:
        found = function(target, output)
        return keras.ops.mean(found) if len(found.shape) else found

    return computed


def _notes(reader: Reader, model: Any) -> list[str]:
    trained = trained_of(model)
    notes = list(reader.notes)
    notes += frozen_notes((prod(variable.shape), bool(variable.trainable)) for variable in trained)
    unread = [variable for variable in trained if not reader.writer.reads(variable)]
    if unread:
        total = sum(prod(variable.shape) for variable in unread)
        notes.append(f"{total:,} parameters are read by no operator and not counted, {unread[0].path!r} among them")
    return notes


# -- shapes of inputs: what a model was made with, the batch, and what the user says of the rest

_BATCH = 32
"""Examples in a step where nothing tells: what Keras itself trains with by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """An input; shape: with the batch, which comes first; None where an extent is not known."""

    name: str
    shape: tuple[Any, ...]
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

    def whole(item: _Input) -> _Input:
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
        return replace(item, shape=shape)

    return keras.tree.map_structure(whole, given)


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
        return _Input(name="inputs", shape=tuple(known[0]), dtype=str(model.input_dtype))
    if "shape" in arguments:
        extents = _extents("inputs", str(arguments["shape"]))
        return _Input(name="inputs", shape=(None, *extents), dtype=str(model.compute_dtype))
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


def _open(keras: Any, item: Any, name: str) -> _Input:
    if not hasattr(item, "shape") or not hasattr(item, "dtype"):
        raise ModelError(f"a Keras model is given a {type(item).__name__} as input; expected keras.Input or an array")
    return _Input(name=name, shape=tuple(item.shape), dtype=keras.backend.standardize_dtype(item.dtype))


def _told(item: _Input, text: str) -> tuple[int, ...]:
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


# -- values of weights


def load_with_weights(path: str) -> Any:
    """Return the model of a `.keras` file with its weights, of a copy of what was checked; ModelError as `trace`."""
    keras = keras_module()
    model = read_model(keras, path)
    with clean_copy(keras, path) as clean:
        try:
            model.load_weights(clean)
        except Exception as error:
            raise ModelError(f"the weights in {path!r} cannot be read: {first_line(error)}") from error
    return model


def read_weights(
    source: Any, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None
) -> dict[str, NDArray[Any]]:
    """Return the values that the leaves of a model's trace have: weights, moving statistics, those of the data.

    source: a model, (model, inputs), or a `.keras` file; with the other arguments as for its trace. Raises ModelError
    where the file's weights are damaged or not those of its configuration, or where a model has none.
    """
    keras = keras_module()
    opened = _opened(keras, load_with_weights(source) if isinstance(source, str) else source)
    with KerasFrontEnd().without_weights():
        trace, variables = read_trace(keras, opened, batch=batch, arguments=arguments or {})
    for variable in variables.values():
        if variable._value is None:
            raise ModelError(f"model {opened.model.name!r} was made without weights: {variable.path!r} has no values")
    found = {name: np.asarray(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}
    return found | _statistics(opened.model, trace)


def _statistics(model: Any, trace: Trace) -> dict[str, NDArray[Any]]:
    """Return the means and deviations of layers that normalise the data."""
    layers = {layer.name: layer for layer in model._flatten_layers() if type(layer).__name__ == "Normalization"}
    found: dict[str, NDArray[Any]] = {}
    for leaf in trace.leaves:
        scope, _, statistic = leaf.value.name.rpartition("/")
        layer = layers.get(scope.rpartition("/")[2])
        if layer is None or statistic not in ("mean", "deviation"):
            continue
        if layer.mean is None:
            layer.finalize_state()
        deviation = np.maximum(np.sqrt(np.asarray(layer.variance, np.float32)), 1e-7)
        found[leaf.value.name] = np.asarray(layer.mean, np.float32) if statistic == "mean" else deviation
    return found
