"""`read_weights`: the values of a model's weights, under the names that programs of its plan use.

Weights are read only here: a search needs only their shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from os import PathLike, fspath
from typing import Any

import numpy as np

from pase.common.words import short
from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.frameworks import FRONT_ENDS, ImportedModel, import_model
from pase.importers.front_end import call_factory, framework, is_factory
from pase.importers.ir.trace import Piece, Trace, Use, piece_shape
from pase.importers.ir.views import View
from pase.importers.jax import function as jax_function
from pase.importers.keras import model as keras_model
from pase.importers.onnx import model as onnx_model
from pase.importers.torch.export import values_of

Array = np.ndarray[Any, Any]

_MAX_COMPUTED = 1 << 28
"""Elements of a tensor that is computed of few stored ones."""

Values = Callable[[Any, Iterable[str], Trace, int | None, Mapping[str, Scalar]], Mapping[str, Array]]
"""Takes a model, names of values of its trace, the trace, its batch and arguments; returns the available values."""


def read_weights(
    source: object, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None
) -> dict[str, Array]:
    """Return the weights and constants of a model's forward pass, by (layer, tensor) joined to one name.

    Args:
        source: As for `load`; a factory is called, and its framework initialises the weights as usual.
        batch: As for `load`.
        arguments: As for `load`.

    Raises:
        ModelError: A value is unavailable.
    """
    source = fspath(source) if isinstance(source, PathLike) else source
    given = dict(arguments or {})
    if isinstance(source, str) and is_factory(source):
        source, took_batch = call_factory(source, batch=batch, arguments=given, front_ends=())
        batch, given = None if took_batch else batch, {}
    kind = next((front_end.package for front_end in FRONT_ENDS if front_end.takes(source)), "")
    if kind not in _VALUES:
        raise ModelError(
            "weights are read of ONNX files, Keras models, torch modules and JAX functions (as a file, or made by "
            f"package.module:function); {_called(source)} is none of them"
        )
    if kind == "keras" and isinstance(source, str):
        source = keras_model.load_with_weights(source)
    model = import_model(source, batch=batch, arguments=given)
    uses = {(w.layer, w.tensor): Use(value=w.source, piece=w.piece) for w in model.lowered.weights}
    constants = _constants(model)
    uses |= constants
    values = _VALUES[kind](source, sorted({use.value for use in uses.values()}), model.traces[0], batch, given)
    _check_sizes(source, uses.values(), values)
    found: dict[str, Array] = {}
    for (layer, tensor), use in uses.items():
        if use.value not in values:
            if (layer, tensor) in constants:
                raise ModelError(
                    f"layer {layer!r} is computed with {use.value!r}, whose values the source does not hold as such; "
                    "make it a weight or a constant of the model"
                )
            if kind == "jax":
                raise ModelError(
                    "weights are read of arrays: a JAX function, whose arguments hold them, is given the shape of "
                    f"{short(use.value)!r} alone; give it the array"
                )
            continue
        array = np.asarray(values[use.value])
        # Truth values are read as 0 and 1, numbers of rows as numbers.
        array = array if np.issubdtype(array.dtype, np.inexact) else array.astype(np.float32)
        found[f"{layer}/{tensor}"] = read_as(array, use)
    return found


def _constants(model: ImportedModel) -> dict[tuple[str, str], Use]:
    """Return the arrays of the source that constants of PyTorch programs consist of, by (layer, constant).

    A layer's own body may use the same name for another constant. Programs without the module use that body if the
    module computes none of its constants.
    """
    found: dict[tuple[str, str], Use] = {}
    for operator in model.graph.operators:
        own = operator.body and operator.body.own
        is_own = own is not None and not any(constant.is_given for constant in own.constants)
        told = model.lowered.own_constants if is_own else model.lowered.constants
        found |= {key: use for key, use in told.items() if key[0] == operator.name}
    return found


def _check_sizes(source: object, uses: Iterable[Use], values: Mapping[str, Array]) -> None:
    """Raise ModelError where few stored values are repeated so often that they fill the memory."""
    stored = sum(_stored_points(array) for array in values.values())
    points = 0
    for use in uses:
        if use.value in values:
            shape = np.shape(values[use.value])
            points += prod(use.view.shape if use.view else piece_shape(shape, use.piece))
    if points > max(_MAX_COMPUTED, 4 * stored):
        raise ModelError(
            f"the weights of {_called(source)} have {points:,} elements, many more than the {stored:,} that are "
            "stored; check the model"
        )


def _stored_points(array: Any) -> int:
    """Return how many elements of an array are not another one, repeated."""
    if not isinstance(array, np.ndarray):
        return prod(np.shape(array))
    return prod(extent for extent, stride in zip(array.shape, array.strides, strict=True) if stride)


def read_as(array: Array, use: Use) -> Array:
    """Return an array as a use reads it: a slice of it, in another order of its elements."""
    array = _cut(array, use.piece)
    return array if use.view is None else _viewed(array, use.view)


def _cut(array: Array, piece: Piece | None) -> Array:
    if piece is None:
        return array
    index = [slice(None)] * array.ndim
    index[piece.dim] = slice(piece.start, piece.start + piece.size)
    return array[tuple(index)]


def _viewed(array: Array, view: View) -> Array:
    factors = [factor for dim in view.dims for factor in dim]
    order = [factor.base for factor in factors if factor.base is not None]
    seen = array.reshape(view.factors).transpose(order)
    seen = seen.reshape([1 if factor.base is None else factor.extent for factor in factors])
    return np.broadcast_to(seen, [factor.extent for factor in factors]).reshape(view.shape)


def _called(source: object) -> str:
    """Return the name of a source for messages, without its values."""
    first = source[0] if isinstance(source, list | tuple) and source else source
    return repr(source) if isinstance(source, str) else f"a {type(first).__name__}"


def _onnx_values(
    source: Any, names: Iterable[str], trace: Trace, _batch: int | None, _arguments: Mapping[str, Scalar]
) -> Mapping[str, Array]:
    """Return stored tensors, and values computed only from them, by running that part of the model."""
    onnx = framework("onnx", "onnx")
    wanted = set(names)
    stored = onnx_model.read_weights(source)
    found = {name: np.asarray(stored[name]) for name in sorted(wanted) if name in stored}
    if len(found) < len(wanted):
        proto = onnx.load(source) if isinstance(source, str) else source
        made = {name for node in proto.graph.node for name in node.output}
        computed = sorted((wanted - set(found)) & made)
        if computed:
            try:
                found |= _run_in_part(onnx, proto, computed, trace)
            except Exception as error:  # of the operators of a stranger's file
                raise ModelError(
                    f"{computed[0]!r} cannot be computed of the stored tensors: {type(error).__name__}: {error}; "
                    "check the file with onnx.checker"
                ) from error
    return found


def _run_in_part(onnx: Any, proto: Any, names: list[str], trace: Trace) -> Mapping[str, Array]:
    """Return values that depend on no input's values; inputs are zeros of their shapes."""
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    del part.graph.output[:]
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    part = onnx.ModelProto.FromString(part.SerializeToString())
    needed = _needed(part.graph, set(names))
    kept = [node for node in part.graph.node if any(name in needed for name in node.output)]
    del part.graph.node[:]
    part.graph.node.extend(kept)
    stored = sum(prod(tensor.dims) for tensor in part.graph.initializer)
    made = (trace.values[name].shape for node in kept for name in node.output if name in trace.values)
    largest = max(map(prod, made), default=0)
    if largest > max(_MAX_COMPUTED, 4 * stored):
        raise ValueError(f"that takes {largest:,} elements, many more than the {stored:,} that are stored")
    reference = framework("onnx.reference", "onnx")
    inputs = {
        leaf.value.name: np.zeros(leaf.value.shape, leaf.value.dtype)
        for leaf in trace.leaves
        if leaf.role == "input" and leaf.value.name in {i.name for i in part.graph.input}
    }
    with np.errstate(all="ignore"):
        values = reference.ReferenceEvaluator(part).run(None, inputs)
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}


def _needed(graph: Any, names: set[str]) -> set[str]:
    makers = {name: node for node in graph.node for name in node.output}
    found, frontier = set[str](), list(names)
    while frontier:
        name = frontier.pop()
        if name not in found:
            found.add(name)
            frontier += [other for other in makers[name].input if other] if name in makers else []
    return found


_VALUES: Mapping[str, Values] = {
    "jax": lambda source, names, _, batch, __: jax_function.read_weights(source, names, batch=batch),
    "keras": lambda source, names, _, batch, given: {
        name: np.asarray(array, np.float32)
        for name, array in keras_model.read_weights(source, names, batch=batch, arguments=given).items()
    },
    "onnx": _onnx_values,
    "torch": lambda source, names, _, batch, __: {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in values_of(source, names, batch=batch).items()
    },
}
"""Where the values are."""
