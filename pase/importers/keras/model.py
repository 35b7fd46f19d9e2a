"""Keras models, traced by JAX; only the configuration of `.keras` files is read."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pase.errors import ModelError, missing_extra
from pase.graph import Scalar
from pase.importers.front_end import first_line, framework
from pase.importers.ir.trace import Leaf, Names, Trace, frozen_notes
from pase.importers.jax.function import Source, traced, weights_of
from pase.importers.keras.file import clean_copy, read_losses, read_model
from pase.importers.keras.program import Following, is_keras, trained_of

_FILES = frozenset({".keras", ".h5", ".hdf5"})


class KerasFrontEnd:
    """Accepts a model, (model, its inputs) if it has never been called, and `.keras` files."""

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
            return read_trace(keras, _opened(keras, source), batch=batch, arguments=arguments)

    @contextmanager
    def without_weights(self) -> Iterator[None]:
        """Return a context in which variables have only shapes."""
        keras = keras_module()
        global_state = import_module("keras.src.backend.common.global_state")
        kept = list(global_state.get_global_attribute("uninitialized_variables") or [])
        compiled = keras.Model.compile

        def compile_with_values(model: Any, *arguments: Any, **keywords: Any) -> Any:
            # An optimiser's own variables (its rate) need their values immediately.
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


def keras_module() -> Any:
    """Return Keras; MissingExtraError where it, or its configured backend, is not installed."""
    try:
        return framework("keras", "keras")
    except ModuleNotFoundError as error:
        raise missing_extra(
            f"Keras needs {error.name}, which is not installed",
            "keras",
            also=", or set KERAS_BACKEND to a backend that is: tensorflow, jax or torch",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A model to trace.

    Attributes:
        inputs: Inputs to call it with, if known.
        losses: As `compile` takes them.
        notes: Notes about the losses.
    """

    model: Any
    inputs: Any
    losses: Any
    notes: Sequence[str] = ()


def _opened(keras: Any, source: Any) -> _Opened:
    """Return the model that a source is, or that its file describes."""
    if isinstance(source, str):
        notes: list[str] = []
        model = read_model(keras, source)
        return _Opened(model=model, inputs=None, losses=read_losses(source, notes), notes=notes)
    model, inputs = source if isinstance(source, tuple) else (source, None)
    losses = getattr(model, "loss", None) if getattr(model, "compiled", False) else None
    return _Opened(model=model, inputs=inputs, losses=losses)


def read_trace(keras: Any, opened: _Opened, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Trace:
    """Return the trace of a model; no weight's value is read.

    Every layer is one operator of the source. Raises ModelError where the shape of an input is not known, or where the
    model's own code cannot be followed.
    """
    followed = _follow(keras, opened, batch=batch, arguments=arguments)
    with _followed_on_jax(followed.following):
        trace = traced(followed.source).trace
    read = {use.value for node in trace.nodes for use in node.inputs}
    trained, scope = followed.trained, followed.following.scope

    def changed(leaf: Leaf) -> Leaf:
        variable = trained.get(leaf.value.name)
        return leaf if variable is None else replace(leaf, is_trained=bool(variable.trainable))

    return replace(
        trace,
        leaves=tuple(changed(leaf) for leaf in trace.leaves if leaf.role == "input" or leaf.value.name in read),
        nodes=tuple(replace(n, origin=replace(n.origin, scope=scope(n.origin.scope))) for n in trace.nodes),
        notes=(*followed.notes, *trace.notes, *followed.following.notes, *_notes(trained, read)),
        num_source_operators=followed.following.num_operations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """A model as a function that JAX traces. trained: its variables that training changes, by the names of leaves."""

    following: Following
    source: Source
    trained: Mapping[str, Any]
    others: Mapping[str, Any]
    notes: Sequence[str]


def _follow(keras: Any, opened: _Opened, *, batch: int | None, arguments: Mapping[str, Scalar]) -> _Followed:
    """Return a model as a function of its variables and its inputs, followed by the targets of its losses."""
    jax, model, notes = framework("jax", "keras"), opened.model, list(opened.notes)
    found = specifications(keras, model, opened.inputs, batch=batch, arguments=arguments, notes=notes)
    inputs = keras.tree.flatten(found)
    following = Following(keras=keras, jax=jax, model=model)
    if not (model.built and is_keras(type(model).call)):
        # Its variables are made when it is called.
        with _followed_on_jax(following):
            import_module("keras.src.backend.jax").compute_output_spec(model, found)
    names, trained = Names("~"), trained_of(model)
    kept = {id(variable) for variable in trained}
    # 64-bit integers, which JAX only supports if enabled, are counters of seen examples.
    rest = [v for v in model.weights if id(v) not in kept and not str(v.dtype).endswith("int64")]
    parts = (trained, rest)
    parameters, others = ({names.new(variable.path): variable for variable in part} for part in parts)

    def called(p: Mapping[str, Any], c: Mapping[str, Any], *given: Any) -> Any:
        values = iter(given)
        mapping = [(parameters[name], value) for name, value in p.items()] + [(others[n], v) for n, v in c.items()]
        with keras.StatelessScope(mapping, initialize_variables=False):
            following.num_operations, following.notes = 0, []
            # As outside training.
            options = {"training": False} if getattr(model, "_call_has_training_arg", False) else {}
            return model.call(keras.tree.map_structure(lambda _: next(values), found), **options)

    shapes = [{name: _shape(jax, variable) for name, variable in part.items()} for part in (parameters, others)]
    source = Source(
        function=called,
        parameters=shapes[0],
        constants=shapes[1],
        inputs=tuple(_shape(jax, item) for item in inputs),
        input_names=tuple(item.name for item in inputs),
        name=model.name,
        has_statistics=False,
    )
    following.is_long = any(str(item.dtype).endswith("64") for item in (*parameters.values(), *inputs))
    followed = _Followed(following=following, source=source, trained=parameters, others=others, notes=notes)
    return replace(followed, source=_with_losses(keras, followed, opened))


def _shape(jax: Any, item: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(item.shape), str(item.dtype))


@contextmanager
def _followed_on_jax(following: Following) -> Iterator[None]:
    """Make a model's code compute with JAX; ModelError where it cannot be followed."""
    try:
        with following.on_jax():
            yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error
        if cause is None:
            raise
        raise ModelError(
            f"Keras model {following.model.name!r} cannot be followed: "
            f"{first_line(cause).partition('. ')[0].rstrip('.')}; what its layers do has to be written with "
            "keras.layers and keras.ops"
        ) from error


def _with_losses(keras: Any, followed: _Followed, opened: _Opened) -> Source:
    """Return the function of a model with the losses that it was compiled with, one for each output that has one."""
    jax, source = followed.following.jax, followed.source
    if opened.losses is None:
        return source
    with _followed_on_jax(followed.following):
        found = jax.eval_shape(source.function, source.parameters, source.constants, *source.inputs)
    outputs = keras.tree.flatten(found)
    names = list(getattr(opened.model, "output_names", ()))
    if len(names) != len(outputs):
        names = [f"output_{i}" for i in range(len(outputs))]
    given = opened.losses
    if isinstance(given, Mapping):
        losses = [given.get(name) for name in names]
    else:
        losses = list(given) if isinstance(given, list | tuple) else [given] * len(outputs)
    told = [
        (place, f" of {name}" if len(outputs) > 1 else "", name, keras.losses.get(item))
        for place, (name, item) in enumerate(zip(names, losses, strict=False))
        if item is not None
    ]
    targets = [_target(jax, function, outputs[place]) for place, *_, function in told]

    def called(p: Any, c: Any, *given: Any) -> Any:
        count = len(given) - len(targets)
        results = source.function(p, c, *given[:count])
        flat, found = keras.tree.flatten(results), []
        for (place, of, name, function), target in zip(told, given[count:], strict=True):
            try:
                with jax.named_scope(f"loss{of}"):
                    loss = function(target, flat[place])
                    found.append(keras.ops.mean(loss) if len(loss.shape) else loss)
            except Exception as error:  # noqa: BLE001 of a stranger's code
                followed.following.notes += [
                    f"loss{of} is not taken apart: {first_line(error)}",
                    f"the loss of {name!r} is left out",
                ]
        return results, found

    return replace(
        source,
        function=called,
        inputs=(*source.inputs, *targets),
        input_names=(*source.input_names, *(f"targets{of}" for _, of, *_ in told)),
    )


def _target(jax: Any, function: Any, output: Any) -> Any:
    """Return the shape of a loss's target: class indices, or the shape of the output."""
    name = str(getattr(function, "__name__", getattr(function, "name", type(function).__name__)))
    is_sparse = any(part in name.lower().replace("_", "") for part in _OF_CLASSES)
    return jax.ShapeDtypeStruct(output.shape[:-1], "int32") if is_sparse else output


_OF_CLASSES = ("sparsecategorical", "categoricalgeneralized")
"""In names of losses whose targets are the classes' numbers."""


def _notes(trained: Mapping[str, Any], read: Collection[str]) -> list[str]:
    notes = list(frozen_notes((prod(variable.shape), bool(variable.trainable)) for variable in trained.values()))
    unread = [variable for name, variable in trained.items() if name not in read]
    if unread:
        total = sum(prod(variable.shape) for variable in unread)
        notes.append(f"{total:,} parameters are read by no operator and not counted, {unread[0].path!r} among them")
    return notes


# -- shapes of inputs: those the model was built with, the batch, and the user's arguments for the rest

_BATCH = 32
"""Default number of examples in a step: Keras's default for training."""


def specifications(
    keras: Any, model: Any, inputs: Any, *, batch: int | None, arguments: Mapping[str, Scalar], notes: list[str]
) -> Any:
    """Return the inputs of a model as named Keras tensors, in the structure in which it is called.

    Args:
        keras: The module.
        model: The model.
        inputs: Tensors or arrays, if the model was never called.
        batch: Examples in a step.
        arguments: Shapes without the batch, by the input's name, or as "shape" for a single input.
        notes: Receives assumptions.

    Raises:
        ModelError: A dim has no value.
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

    def whole(item: Any) -> Any:
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
        return keras.KerasTensor(shape, item.dtype, name=item.name)

    return keras.tree.map_structure(whole, given)


def _given(keras: Any, model: Any, inputs: Any, arguments: Mapping[str, Scalar]) -> Any:
    if inputs is not None:
        count = iter(range(1, 2 + len(keras.tree.flatten(inputs))))
        return keras.tree.map_structure(lambda item: _open(keras, item, f"input_{next(count)}"), inputs)
    tensors = getattr(model, "_inputs_struct", None)
    if tensors is None and getattr(model, "built", False):
        found = _inputs_of(model)
        tensors = found[0] if len(found) == 1 else found or None
    if tensors is not None:
        return keras.tree.map_structure(lambda item: _open(keras, item, _name(item)), tensors)
    shape = getattr(model, "_build_shapes_dict", None)
    known = list((shape or {}).values())
    if len(known) == 1 and isinstance(known[0], tuple | list):
        return keras.KerasTensor(known[0], str(model.input_dtype), name="inputs")
    if "shape" in arguments:
        extents = _extents("inputs", str(arguments["shape"]))
        return keras.KerasTensor((None, *extents), str(model.compute_dtype), name="inputs")
    raise ModelError(
        f"Keras model {model.name!r} has never been called, so that the shape of its inputs is not known; give "
        "(model, inputs), keras.Input tensors or arrays, or the shape without the batch: --arg shape=224x224x3"
    )


def _name(tensor: Any) -> str:
    """Return the name of an input: that of its layer, which a file preserves."""
    history = getattr(tensor, "_keras_history", None)
    layer = getattr(history, "operation", None)
    return str(layer.name if layer is not None else tensor.name)


def _inputs_of(model: Any) -> list[Any]:
    try:
        return list(model.inputs or [])
    except (AttributeError, ValueError):
        return []


def _open(keras: Any, item: Any, name: str) -> Any:
    if not hasattr(item, "shape") or not hasattr(item, "dtype"):
        raise ModelError(f"a Keras model is given a {type(item).__name__} as input; expected keras.Input or an array")
    return keras.KerasTensor(tuple(item.shape), item.dtype, name=name)


def _told(item: Any, text: str) -> tuple[int, ...]:
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
    source: Any,
    names: Iterable[str] | None = None,
    *,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the values of weights, statistics, and values derived from these in a model's trace.

    Args:
        source: A model, (model, inputs), or a `.keras` file.
        names: Names of the values; default: all.
        batch: As for the trace.
        arguments: As for the trace.

    Raises:
        ModelError: The file's weights are damaged or do not match its configuration, or a model has none.
    """
    keras = keras_module()
    opened = _opened(keras, load_with_weights(source) if isinstance(source, str) else source)
    with KerasFrontEnd().without_weights():
        followed = _follow(keras, opened, batch=batch, arguments=arguments or {})
        if names is None:
            leaves = read_trace(keras, opened, batch=batch, arguments=arguments or {}).leaves
            names = [leaf.value.name for leaf in leaves if leaf.role != "input" and leaf.storage]

    def arrays(variables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        unset = next((variable for variable in variables.values() if variable._value is None), None)
        if unset is not None:
            raise ModelError(f"model {opened.model.name!r} was made without weights: {unset.path!r} has no values")
        return {name: np.asarray(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}

    given = replace(followed.source, parameters=arrays(followed.trained), constants=arrays(followed.others))
    with KerasFrontEnd().without_weights(), followed.following.on_jax():
        found = weights_of(followed.following.jax, given, names)
    return {name: np.asarray(array) for name, array in found.items()}
