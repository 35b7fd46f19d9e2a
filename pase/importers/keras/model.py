"""Keras models, walked by their layers; `.keras` files, of which the configuration alone is read."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath
from typing import Any

from pase.errors import missing_extra
from pase.graph import Scalar
from pase.importers.front_end import framework
from pase.importers.ir import Trace, Value, check_trace
from pase.importers.keras.file import read_model
from pase.importers.keras.graph import Reader
from pase.importers.keras.inputs import Specification, specifications
from pase.importers.keras.layers.call import UntranslatableError, trained_of

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
            if isinstance(source, str):
                return trace_model(keras, read_model(keras, source), batch=batch, arguments=arguments)
            model, inputs = source if isinstance(source, tuple) else (source, None)
            return trace_model(keras, model, inputs, batch=batch, arguments=arguments)

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


def trace_model(
    keras: Any, model: Any, inputs: Any = None, *, batch: int | None, arguments: Mapping[str, Scalar]
) -> Trace:
    """Return the trace of a model of Keras; no weight's value is read.

    Every layer is one operator of the source. Raises ModelError where the shape of an input is not known, or where the
    model's own code cannot be followed.
    """
    return read_trace(keras, model, inputs, batch=batch, arguments=arguments)[0]


def read_trace(
    keras: Any, model: Any, inputs: Any, *, batch: int | None, arguments: Mapping[str, Scalar]
) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of a model, and its variables by the names of their leaves."""
    notes: list[str] = []
    found = specifications(keras, model, inputs, batch=batch, arguments=arguments, notes=notes)
    reader = Reader(keras, model)

    def leaf(item: Any) -> Any:
        if not isinstance(item, Specification):
            return item
        return reader.writer.leaf(item.name, item.shape, item.dtype, "input")

    outputs = reader.model(model, keras.tree.map_structure(leaf, found))
    outputs = [*outputs, *_losses(keras, reader, model, outputs)]
    trace = Trace(
        name=model.name,
        leaves=tuple(reader.writer.leaves),
        nodes=tuple(reader.writer.nodes),
        outputs=tuple(dict.fromkeys(value.name for value in outputs)),
        notes=(*notes, *_notes(reader, model)),
        num_source_operators=reader.num_operations,
    )
    return check_trace(trace), reader.writer.variables


def _losses(keras: Any, reader: Reader, model: Any, outputs: list[Value]) -> Iterator[Value]:
    """Yield the losses that a model was compiled with, one for each output that has one; targets are inputs."""
    given = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    names = list(getattr(model, "output_names", ()))
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
    frozen = sum(_size(variable) for variable in trained if not variable.trainable)
    if frozen:
        notes.append(f"{frozen:,} parameters are frozen in the model; they are charged as if they were trained")
    unread = [variable for variable in trained if not reader.writer.reads(variable)]
    if unread:
        total = sum(map(_size, unread))
        notes.append(f"{total:,} parameters are read by no operator and not counted, {unread[0].path!r} among them")
    return notes


def _size(variable: Any) -> int:
    size = 1
    for extent in variable.shape:
        size *= extent
    return size
