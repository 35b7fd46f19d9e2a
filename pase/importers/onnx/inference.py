"""`OnnxCall`: an operator of an ONNX model; `Tensors`, `Inference`, `fold`: what is known of its results.

Shapes are those of ONNX's own inference of that one operator, as the file declares them, or as is known here of
onnxruntime's operators; what depends on shapes alone is computed by ONNX's reference evaluator.
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
from pase.importers.ir.call import Array, Call, Shape
from pase.importers.onnx.model import Declared, OnnxModel, declared, dtype_name, dtype_number, values_of
from pase.importers.onnx.native import Native, NativeError


@dataclass(frozen=True, kw_only=True)
class OnnxCall(Call):
    """An operator of the model. Its arguments are its attributes: numbers, texts, tuples of them, stored tensors.

    domain: of the operator, "" for ONNX's own. node: its name in the model. opset: of the domain. read: results that
    are read.
    """

    domain: str
    node: str
    opset: int
    read: frozenset[str]

    @property
    def where(self) -> str:
        """The operator, for messages."""
        return f"operator {self.name} {self.node!r}" + (f" of domain {self.domain}" if self.domain else "")

    @property
    def result(self) -> Value:
        """The first result; ValueError where it is left out."""
        found = self.outputs[0] if self.outputs else None
        if found is None:
            raise ValueError(f"{self.name} has no first result")
        return found

    def further(self, position: int) -> Value | None:
        """Return a result; None where nobody reads it."""
        found = self.outputs[position] if position < len(self.outputs) else None
        return found if found is not None and found.name in self.read else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute; TypeError where it is of another type than its default."""
        found = self.arguments.get(name, default)
        expected = int | float if isinstance(default, float) else type(default)
        if default is not None and not isinstance(found, expected):
            what = {int: "a whole number", str: "a text"}.get(type(default), "a number")
            raise TypeError(f"attribute {name} is {found!r}; expected {what}")
        return found

    def wholes(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return whole numbers, given as an attribute or as the constant input at a position; None if not given."""
        found = self.arguments.get(name)
        if found is None and position is not None:
            found = self.integers(position)
        if found is not None and (not isinstance(found, tuple) or not all(isinstance(value, int) for value in found)):
            raise TypeError(f"{name} is {found!r}; expected whole numbers")
        return found

    def axis(self, default: int) -> int:
        """Return the attribute axis, counted from 0."""
        return self.dim(default, "axis")


UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RuntimeError)
"""What is raised where attributes, inputs and shapes do not fit together, or take more memory than there is."""

# -- constants

MAX_ELEMENTS = 1 << 16
"""Of a constant that is worked out; larger ones have shapes alone."""

_BY_POINT = """
    Add Sub Mul Div Neg Abs Sqrt Exp Log Pow Floor Ceil Round Sign Reciprocal Sin Cos Tanh Equal Less LessOrEqual
    Greater GreaterOrEqual Not IsNaN IsInf And Or Xor Where Max Min Sum Mod
"""
_OTHERS = """
    Constant ConstantOfShape Cast Range Gather Reshape Slice Expand Tile Split NonZero CumSum Trilu Identity Concat
    Unsqueeze Squeeze Transpose ReduceSum ReduceProd ReduceMax ReduceMin ReduceMean
"""
_FOLDED = {name: name in _BY_POINT.split() for name in (_BY_POINT + _OTHERS).split()}
"""Operators that are worked out where all inputs are constants, as shapes and positions are; whether point by point."""

_NO_NUMBERS = frozenset({"sparse_value", "value_string", "value_strings"})
"""Attributes of a Constant that are no plain array."""

_INPUTS_ONCE_ATTRIBUTES = {"Squeeze": "axes", "Unsqueeze": "axes", "Split": "split"}


def fold(node: Any, arrays: Sequence[Array | None], opset: int) -> tuple[Array, ...] | None:
    """Return what an operator of ONNX's own gives; None where that is not known, or too large to be worth it.

    arrays: Values of its inputs, None for those left out. Raises ValueError or the like where they do not fit.
    """
    operator = str(node.op_type)
    given = [array for array in arrays if array is not None]
    if operator not in _FOLDED or _num_results(operator, arrays, given) > MAX_ELEMENTS:
        return None
    if any(attribute.name in _NO_NUMBERS for attribute in node.attribute):
        return None
    if operator in ("Div", "Mod") and given[1].dtype.kind in "iu" and not np.all(given[1]):
        raise ValueError("a shape is divided by 0")
    onnx = framework("onnx", "onnx")
    helper = framework("onnx.helper", "onnx")
    names = [f"i{k}" if array is not None else "" for k, array in enumerate(arrays)]
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    attributes = [attribute for attribute in node.attribute if attribute.name != _INPUTS_ONCE_ATTRIBUTES.get(operator)]
    for attribute in node.attribute:
        if attribute.name == _INPUTS_ONCE_ATTRIBUTES.get(operator):
            # An attribute of old opsets, which has been an input since.
            names.append("moved")
            feeds["moved"] = np.asarray(helper.get_attribute_value(attribute), dtype=np.int64)
            opset = max(opset, 13)
    outputs = [f"o{k}" for k in range(len(node.output))]
    own = onnx.NodeProto(op_type=operator, input=names, output=outputs, attribute=attributes)
    graph = onnx.GraphProto(node=[own], output=[onnx.ValueInfoProto(name=name) for name in outputs])
    newest = framework("onnx.defs", "onnx").onnx_opset_version()
    evaluator = framework("onnx.reference", "onnx").ReferenceEvaluator(graph, opsets={"": min(opset, newest)})
    found = tuple(np.asarray(value) for value in evaluator.run(None, feeds))
    is_numbers = all(array.dtype.kind not in "OSU" and array.size <= MAX_ELEMENTS for array in found)
    return found if is_numbers else None


def _num_results(operator: str, arrays: Sequence[Array | None], given: Sequence[Array]) -> int:
    """Return how many elements an operator gives, at most."""
    if _FOLDED[operator]:
        return prod(np.broadcast_shapes(*(array.shape for array in given)))
    sizes = [array.size for array in given]
    match operator:
        case "ConstantOfShape":
            return _size(given[0])
        case "Expand":
            return prod(np.broadcast_shapes(given[0].shape, tuple(map(int, given[1].ravel()))))
        case "Tile":
            return sizes[0] * _size(given[1])
        case "Gather":
            return max(sizes[0], sizes[1], sizes[0] * sizes[1] // 16)
        case "Range":
            start, limit, delta = (float(array.ravel()[0]) for array in given)
            return int(abs((limit - start) / delta)) if delta else MAX_ELEMENTS + 1
        case _:
            return sum(sizes)


def _size(extents: Array) -> int:
    """Return the product of a shape; ValueError for a negative extent."""
    found = [int(extent) for extent in extents.ravel()]
    if min(found, default=0) < 0:
        raise ValueError(f"a shape is {found}")
    return prod(found)


def slices_of(call: OnnxCall, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return (starts, ends, axes from 0, steps) of a Slice, from attributes or from inputs."""
    starts, ends, axes, steps = (call.wholes(name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1))
    if starts is None or ends is None:
        raise ValueError("a slice's starts or ends are not constants")
    axes = tuple(range(len(starts))) if axes is None else axes
    return starts, ends, tuple(axis % rank for axis in axes), steps or (1,) * len(starts)


# -- tensors, and the shapes of results


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
        if call.name == "Reshape" and found and found[0] is not None:
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
                (call.name, min(call.opset, newest), call.domain),
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
        first = "int32" if (call.name, position) in _WHOLE_RESULTS else next(floats, "float32")
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
    found = _SHAPES.get((call.name, position))
    try:
        return None if found is None else found([None if x is None else x.shape for x in call.inputs], call.arguments)
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
