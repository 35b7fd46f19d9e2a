"""`Tensors`: what is known of a model's tensors while its operators are walked; `Inference`: of results, their shapes.

Shapes are those of ONNX's own inference of that one operator, as the file declares them, or as is known here of
onnxruntime's operators.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.ir import Value
from pase.importers.ir.steps import Shape
from pase.importers.onnx.model import Declared, OnnxModel, declared, dtype_name, dtype_number, values_of
from pase.importers.onnx.native import Native, NativeError
from pase.importers.onnx.operators import Array, OnnxCall

_MAX_ELEMENTS = 1 << 62
_MAX_DATA = 4096
"""Elements of a constant that shapes can follow from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that an attribute holds; array: None where its values were left out."""

    shape: Shape
    dtype: str
    array: Array | None


@dataclass(frozen=True, kw_only=True)
class Walked:
    """calls: in order, without what was worked out. values: all tensors by name. constants: those that are known.

    outputs: of the model. changes: what was changed for another batch.
    """

    calls: tuple[OnnxCall, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Array]
    outputs: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebatch:
    """A walk with the exported batch, the old one, for a walk with a new one."""

    reference: Walked
    old: int
    new: int


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """values: by name. constants: values that are known. symbols: what the names of dims stand for.

    trained: names of the weights, which are no constants even where their values are known.
    """

    trained: frozenset[str]
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)

    def define(self, name: str, shape: Sequence[int], dtype: str, array: Array | None = None) -> Value:
        """Add a tensor, perhaps with its values; ModelError where there is one of its name, or its shape is none."""
        value = Value(name=name, shape=tuple(shape), dtype=dtype)
        if name in self.values:
            raise ModelError(f"two tensors are named {name!r}; the file is damaged")
        if any(extent < 0 for extent in value.shape) or prod(value.shape) > _MAX_ELEMENTS:
            raise ModelError(f"tensor {name!r} has shape {value.shape}; the file is damaged")
        self.values[name] = value
        if array is not None:
            self.constants[name] = array
        return value

    def feed(self, given: Declared, shape: Shape) -> None:
        """Add an input, and what the names of its dims stand for."""
        self.define(given.name, shape, given.dtype)
        self.symbols.update({d: e for d, e in zip(given.dims, shape, strict=True) if isinstance(d, str)})

    def store(self, name: str, tensor: Any) -> None:
        """Add an initialiser."""
        self.define(name, tensor.dims, dtype_name(tensor.data_type), values_of(tensor))

    def know(self, name: str, array: Array) -> None:
        """Add a tensor whose values are known."""
        self.define(name, array.shape, str(array.dtype), array)

    def know_shape(self, name: str, shape: Shape) -> str:
        """Add a shape as a tensor; return its name."""
        self.know(name, np.asarray(shape, dtype=np.int64))
        return name

    def known(self, name: str) -> Array | None:
        """Return the values of a tensor that is a constant."""
        return None if name in self.trained else self.constants.get(name)


class Inference:
    """Infers results while operators are walked."""

    def __init__(self, model: OnnxModel, tensors: Tensors, native: Native, rebatch: Rebatch | None) -> None:
        self._model, self._tensors, self._native, self._rebatch = model, tensors, native, rebatch
        self._declared = {str(i.name): i for i in (*model.graph.value_info, *model.graph.output)}
        self._types: dict[str, bytes] = {}
        self._onnx = framework("onnx", "onnx")
        self._newest = framework("onnx.defs", "onnx").onnx_opset_version()

    def results(self, call: OnnxCall, node: Any, outputs: Sequence[str]) -> list[Value | None]:
        """Return an operator's results; ModelError where their shapes do not follow from those of its inputs.

        Args:
            call: The operator, whose outputs are not known yet.
            node: As the model has it.
            outputs: Names of the results, "" for those left out.
        """
        types = self._inferred(call, node, outputs)
        found: list[Value | None] = []
        for position, output in enumerate(outputs):
            inferred = types.get(output)
            # What nobody reads need not be known: dropout's mask, running statistics of the training mode.
            is_left_out = not output or (position > 0 and output not in call.read and not _has_shape(inferred))
            found.append(None if is_left_out else self._result(call, output, position, inferred))
        if call.operator == "Reshape" and found and found[0] is not None:
            before, after = call.x.shape, found[0].shape
            if prod(before) != prod(after):
                reason = "the file is damaged"
                if self._rebatch is not None:
                    reason = "the batch is written into the model there: export it with a batch that is left open"
                raise ModelError(f"{call.where} makes {list(after)} of {list(before)}; {reason}")
        return found

    def _inferred(self, call: OnnxCall, node: Any, outputs: Sequence[str]) -> Mapping[str, Any]:
        """Return the types of an operator's results as ONNX's own shape inference has them, by name."""
        own = self._onnx.NodeProto()
        own.CopyFrom(node)
        own.input[:], own.output[:] = ["" if value is None else value.name for value in call.inputs], outputs
        constants = self._tensors.constants
        newest = self._newest if not call.domain else 1 << 30
        try:
            found = self._native.infer(
                (call.operator, min(call.opset, newest), call.domain),
                own.SerializeToString(),
                {value.name: self._type(value) for value in call.tensors},
                {
                    value.name: self._data(value.name)
                    for value in call.tensors
                    if value.name in constants and constants[value.name].size <= _MAX_DATA
                },
                {str(entry.domain): int(entry.version) for entry in self._model.proto.opset_import},
                int(self._model.proto.ir_version),
            )
        except NativeError as error:
            shapes = ", ".join(str(list(value.shape)) for value in call.tensors)
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            hint = "; the batch may be written into the model: export it with one left open" if self._rebatch else ""
            raise ModelError(f"{call.where} cannot take tensors of shapes {shapes}: {text}{hint}") from error
        return {name: self._onnx.TypeProto.FromString(text) for name, text in (found or {}).items()}

    def _type(self, value: Value) -> bytes:
        if value.name not in self._types:
            helper = framework("onnx.helper", "onnx")
            made = helper.make_tensor_type_proto(dtype_number(value.dtype), list(value.shape))
            self._types[value.name] = made.SerializeToString()
        return self._types[value.name]

    def _data(self, name: str) -> bytes:
        made = framework("onnx.numpy_helper", "onnx").from_array(self._tensors.constants[name], name)
        data: bytes = made.SerializeToString()
        return data

    def _result(self, call: OnnxCall, output: str, position: int, inferred: Any) -> Value:
        """Return a result, as inferred, as declared in the file, or as what is known of the operator has it."""
        dims: tuple[int | None, ...] | None = None
        dtype = dtype_name(inferred.tensor_type.elem_type) if inferred is not None else ""
        if _has_shape(inferred):
            dims = tuple(int(d.dim_value) if d.HasField("dim_value") else None for d in inferred.tensor_type.shape.dim)
        told = self._told(output)
        if told is not None and (dims is None or len(dims) == len(told.shape)):
            known = dims or (None,) * len(told.shape)
            dims = tuple(t if d is None else d for d, t in zip(known, told.shape, strict=True))
            dtype = dtype or told.dtype
        if dims is None:
            dims = _shape_of_result(call, position)
        if dims is None:
            raise ModelError(
                f"nothing tells the shape of {output!r}, which {call.where} makes; write it into the file's value_info"
            )
        shape = tuple(extent for extent in dims if extent is not None)
        if len(shape) < len(dims):
            raise ModelError(
                f"the shape of {output!r}, which {call.where} makes, depends on values: dim {dims.index(None)} is "
                "not known; export the model up to there, without it (a selection by a mask, found objects)"
            )
        floats = (value.dtype for value in call.tensors if value.is_float)
        first = "int32" if (call.operator, position) in _WHOLE_RESULTS else next(floats, "float32")
        return Value(name=output, shape=shape, dtype=dtype or first)

    def _told(self, output: str) -> Value | None:
        """Return a tensor as the file declares it, with the new batch; None where it does not, or leaves dims open."""
        info = self._declared.get(output)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        found = declared(info)
        dims = [self._tensors.symbols.get(dim) if isinstance(dim, str) else dim for dim in found.dims]
        shape = tuple(dim for dim in dims if dim is not None)
        if len(shape) < len(dims):
            return None
        if self._rebatch is not None and shape[:1] == (self._rebatch.old,):
            shape = (self._rebatch.new, *shape[1:])
        return Value(name=output, shape=shape, dtype=found.dtype)


def _has_shape(inferred: Any) -> bool:
    return inferred is not None and inferred.HasField("tensor_type") and inferred.tensor_type.HasField("shape")


# -- shapes of results that ONNX infers none of: those of onnxruntime's operators, and of two of its own

_Of = Callable[[Any, Mapping[str, Any]], Shape]


def _shape_of_result(call: OnnxCall, position: int) -> Shape | None:
    """Return the shape of an operator's result at a position; None where it is not known."""
    found = _SHAPES.get((call.operator, position))
    try:
        return None if found is None else found([None if x is None else x.shape for x in call.inputs], call.attributes)
    except (ValueError, IndexError, TypeError):
        # An input is left out, or is not as it has to be.
        return None


def _first(shapes: Any, _: Mapping[str, Any]) -> Shape:
    return tuple(shapes[0])


def _packed(shapes: Any, attributes: Mapping[str, Any]) -> Shape:
    """Attention of queries, keys and values that one product makes; they may have widths of their own."""
    sizes = attributes.get("qkv_hidden_sizes")
    return (*shapes[0][:-1], sizes[2] if sizes else shapes[1][1] // 3)


def _embedded(shapes: Any, _: Mapping[str, Any]) -> Shape:
    """Rows of the words' table for tokens."""
    return (*shapes[0], shapes[2][1])


def _product(shapes: Any, attributes: Mapping[str, Any]) -> Shape:
    x, y = shapes[:2]
    x = (*x[:-2], x[-1], x[-2]) if attributes.get("transA") else x
    y = (*y[:-2], y[-1], y[-2]) if attributes.get("transB") else y
    return (*np.broadcast_shapes(x[:-2], y[:-2]), x[-2], y[-1])


_LIKE_FIRST = """
    BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding MultiHeadAttention LayerNormalization SimplifiedLayerNormalization
    SkipLayerNormalization SkipSimplifiedLayerNormalization GroupQueryAttention GroupNormalization
    MeanVarianceNormalization
"""

_SHAPES: Mapping[tuple[str, int], _Of] = MappingProxyType(
    {
        **{(name, 0): _first for name in _LIKE_FIRST.split()},
        ("Attention", 0): _packed,
        ("EmbedLayerNormalization", 0): _embedded,
        # Of each example, how many tokens are not masked.
        ("EmbedLayerNormalization", 1): lambda shapes, _: tuple(shapes[0][:1]),
        ("EmbedLayerNormalization", 2): _embedded,
        ("FusedMatMul", 0): _product,
        ("TransposeMatMul", 0): _product,
        ("SkipLayerNormalization", 3): _first,
        ("SkipSimplifiedLayerNormalization", 3): _first,
    }
)
"""By the operator's name and the result's position."""

_WHOLE_RESULTS = frozenset({("EmbedLayerNormalization", 1)})
"""Results, by name and position, that are whole numbers."""
