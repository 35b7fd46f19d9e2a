"""ONNX models: files, whose weights are not read, and onnx.ModelProto objects; their operators, with shapes.

`Walk` visits every operator of a model with the shapes of its tensors. These come from ONNX's own inference, from
declarations in the file, or from rules for onnxruntime's operators here. Values that depend only on shapes are computed
by ONNX's reference evaluator.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.front_end import FrontEnd, framework
from pase.importers.ir.call import Array, Shape
from pase.importers.ir.trace import Leaf, Names, Node, Origin, Step, Trace, Value, check_trace
from pase.importers.isolated import Native, NativeError, native
from pase.importers.onnx.batch import RESHAPES, TARGETS, InputShapes, Rebatch, input_shapes
from pase.importers.onnx.model import (
    OnnxModel,
    declared,
    dtype_name,
    dtype_number,
    graphs_within,
    open_model,
    plain_domain,
    trained,
    values_of,
)
from pase.importers.onnx.operators import DOMAINS, OnnxCall

UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RuntimeError)
"""Errors for attributes, inputs and shapes that do not fit together, or exceed the memory."""

_FOLDED = """
    Abs Add And Cast Ceil Concat Constant ConstantOfShape Cos CumSum Div Equal Exp Expand Floor Gather Greater
    GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log Max Min Mod Mul Neg NonZero Not Or Pow Range Reciprocal
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape Round Sign Sin Slice Split Sqrt Squeeze Sub Sum Tanh
    Tile Transpose Trilu Unsqueeze Where Xor
"""
"""Operators that are evaluated where all inputs are constants, such as shapes and positions."""

MAX_ELEMENTS = 1 << 16
"""Maximum number of elements of an evaluated constant; larger ones only have shapes."""


# -- a model's operators, in order

_Dims = tuple[int | None, ...]
_MAX_SIZE = 1 << 62
_MAX_DATA = 4096
"""Elements of a constant that shapes can follow from."""

_REFUSED = {
    "Loop Scan": "repeats a graph of its own; export the model with the loop written out",
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger "
    "QLinearAdd QAttention": "computes with quantised numbers, which are not trained; export the model before it is "
    "quantised",
    "SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceAt SequenceMap SequenceLength "
    "SplitToSequence ConcatFromSequence Optional OptionalGetElement OptionalHasElement": "makes or reads a list of "
    "tensors, whose shapes are not known; export the model with tensors alone",
}
"""Operators that cannot be imported, and why."""

_WHY_REFUSED = {name: reason for names, reason in _REFUSED.items() for name in names.split()}


class Walk:
    """A model's operators with the shapes that follow from those of its inputs.

    Attributes:
        calls: Operators in order, without the evaluated ones.
        values: All tensors by name.
        constants: Tensors with known values.
        outputs: Outputs of the model.
        changes: Changes for another batch, in words.
    """

    def __init__(
        self,
        model: OnnxModel,
        shapes: Mapping[str, Shape],
        trained: frozenset[str],
        native: Native,
        rebatch: Rebatch | None = None,
    ) -> None:
        """Walk a model.

        Args:
            model: The model, as in the file.
            shapes: Shapes of its inputs.
            trained: Names of the weights, which are not constants even if their values are known.
            native: Infers shapes.
            rebatch: The walk with the exported batch, for one with another batch.

        Raises:
            ModelError: The model has control flow, is quantised, or a shape depends on values.
        """
        self._model, self._trained, self._native, self._rebatch = model, trained, native, rebatch
        self._newest = framework("onnx.defs", "onnx").onnx_opset_version()
        self._opsets = {str(entry.domain): int(entry.version) for entry in model.proto.opset_import}
        self._declared = {str(i.name): i for i in (*model.graph.value_info, *model.graph.output)}
        self._read = frozenset(_names_read(model.graph))
        self._extents: dict[str, int] = {}
        self._count = 0
        self.calls, self.changes = list[OnnxCall](), list[str]()
        self.values, self.constants = dict[str, Value](), dict[str, Array]()
        for given in model.inputs:
            self._define(given.name, shapes[given.name], given.dtype)
            named = zip(given.dims, shapes[given.name], strict=True)
            self._extents |= {dim: extent for dim, extent in named if isinstance(dim, str)}
        self._graph(model.graph, {})
        self.outputs = tuple(dict.fromkeys(str(info.name) for info in model.graph.output))
        for name in self.outputs:
            if name not in self.values:
                raise ModelError(f"the model's output {name!r} is made by no operator; the file is damaged")

    # -- tensors

    def _define(self, name: str, shape: Sequence[int], dtype: str, array: Array | None = None) -> Value:
        """Add a tensor, optionally with values; ModelError for a duplicate name or an invalid shape."""
        value = Value(name=name, shape=tuple(shape), dtype=dtype)
        if name in self.values:
            raise ModelError(f"two tensors are named {name!r}; the file is damaged")
        if any(extent < 0 for extent in value.shape) or prod(value.shape) > _MAX_SIZE:
            raise ModelError(f"tensor {name!r} has shape {value.shape}; the file is damaged")
        self.values[name] = value
        if array is not None:
            self.constants[name] = array
        return value

    def _know(self, name: str, array: Array) -> str:
        """Add a tensor whose values are known; return its name."""
        return self._define(name, array.shape, str(array.dtype), array).name

    def _known(self, name: str) -> Array | None:
        """Return the values of a tensor that is a constant."""
        return None if name in self._trained else self.constants.get(name)

    # -- operators

    def _graph(self, graph: Any, scope: Mapping[str, str]) -> None:
        """Walk a graph; scope: maps names in it to names of tensors here."""
        for tensor in graph.initializer:
            name = scope.get(tensor.name, str(tensor.name))
            self._define(name, tensor.dims, dtype_name(tensor.data_type), values_of(tensor))
        for sparse in graph.sparse_initializer:
            own = sparse.values
            self._define(scope.get(own.name, str(own.name)), sparse.dims, dtype_name(own.data_type))
        for node in graph.node:
            self._node(node, scope)

    def _node(self, node: Any, scope: Mapping[str, str]) -> None:
        """Walk an operator: evaluate it, or add it with the shapes of its results."""
        self._count += 1
        operator, domain = str(node.op_type), plain_domain(node.domain)
        name = str(node.name) or next((str(output) for output in node.output if output), f"{operator}_{self._count}")
        if operator in _WHY_REFUSED:
            raise ModelError(f"operator {operator} {name!r} {_WHY_REFUSED[operator]}")
        inputs, outputs = ([scope.get(i, str(i)) for i in names] for names in (node.input, node.output))
        for read in inputs:
            if read and read not in self.values:
                raise ModelError(f"operator {operator} {name!r} reads {read!r}, which nothing before it makes")
        if operator == "If":
            return self._if(node, name, inputs, outputs, scope)
        try:
            with np.errstate(all="ignore"):
                value_of = framework("onnx.helper", "onnx").get_attribute_value
                attributes = {str(attribute.name): _plain(value_of(attribute)) for attribute in node.attribute}
                call = self._call(operator, domain, name, inputs, attributes)
                if domain or not self._is_worked_out(call, node, inputs, outputs):
                    self._add(call, node, inputs, outputs)
        except UNFIT as error:
            raise ModelError(
                f"operator {operator} {name!r} cannot be worked out: {error}; check the file with onnx.checker"
            ) from error
        return None

    def _call(
        self, operator: str, domain: str, name: str, inputs: Sequence[str], attributes: Mapping[str, Any]
    ) -> OnnxCall:
        """Return an operator without its results."""
        return OnnxCall(
            name=operator,
            domain=domain,
            node=name,
            arguments=attributes,
            inputs=tuple(self.values[i] if i else None for i in inputs),
            outputs=(),
            known={i: array for i in inputs if (array := self._known(i)) is not None},
            opset=self._model.opsets.get(domain, 1),
            read=self._read,
        )

    def _add(self, call: OnnxCall, node: Any, inputs: list[str], outputs: list[str]) -> None:
        """Add an operator of the model's, with its results."""
        if self._rebatch is not None and inputs and inputs[0] and outputs and outputs[0]:
            inputs = self._rebatched(call, inputs, outputs[0])
            call = self._call(call.name, call.domain, call.node, inputs, call.arguments)
        found = self._results(call, node, outputs)
        for value in found:
            if value is not None:
                self._define(value.name, value.shape, value.dtype)
                if self._rebatch is not None:
                    self._rebatch.follow(call.name, call.tensors, value)
        self.calls.append(replace(call, outputs=tuple(found)))

    def _is_worked_out(self, call: OnnxCall, node: Any, inputs: list[str], outputs: list[str]) -> bool:
        """Evaluate one of ONNX's own operators if possible; return whether its results are defined."""
        stored = {name: values_of(value) for name, value in call.arguments.items() if _is_tensor(value)}
        value: Any = call.arguments.get("value")
        given = [call.known.get(i) for i in inputs]
        found: Sequence[Array] | None = None
        match call.name:
            case "Constant" if _is_tensor(value) and outputs:
                self._define(outputs[0], value.dims, dtype_name(value.data_type), stored["value"])
                return True
            case "ConstantOfShape" if outputs and outputs[0] in self._trained and given[0] is not None:
                # It represents a weight.
                dtype = dtype_name(value.data_type) if _is_tensor(value) else "float32"
                self._define(outputs[0], [int(extent) for extent in given[0].ravel()], dtype)
                return True
            case "Shape" if inputs and inputs[0]:
                found = [np.asarray(call.x.shape[call.get("start", 0) : call.get("end")], dtype=np.int64)]
            case "Size" if inputs and inputs[0]:
                found = [np.asarray(prod(call.x.shape), dtype=np.int64)]
            case name if name in _FOLDED.split() and all(array is not None for array in stored.values()):
                if all(not i or array is not None for i, array in zip(inputs, given, strict=True)):
                    found = self._folded(call, node, given, outputs)
        for output, array in zip(outputs, found or (), strict=False):
            if output:
                self._know(output, array)
        return found is not None

    def _folded(
        self, call: OnnxCall, node: Any, given: Sequence[Array | None], outputs: Sequence[str]
    ) -> list[Array] | None:
        """Return the results of an operator for constant inputs; None where they are large, or not numbers.

        The size is inferred first; the only unknown dim, of NonZero, is at most that of the input.
        """
        types = self._inferred(call, node, outputs)
        shapes = [dims for output in outputs if (dims := types.get(output, (None, ""))[0]) is not None]
        longest = max((array.size for array in given if array is not None), default=1)
        if call.name == "Range":  # for whose numbers of few bits the inference overflows
            start, limit, delta = (float(array.ravel()[0]) for array in given if array is not None)
            shapes, longest = [(None,)], int(abs((limit - start) / delta))
        # A dim of no elements is one whose others are made all the same.
        sizes = [prod(longest if extent is None else max(1, extent) for extent in dims) for dims in shapes]
        if len(shapes) < len(outputs) or max(sizes, default=0) > MAX_ELEMENTS:
            return None
        divisor = given[1] if call.name in ("Div", "Mod") else None
        if divisor is not None and divisor.dtype.kind in "iu" and not np.all(divisor):
            raise ValueError("a shape is divided by 0")
        if call.get("num_outputs", len(outputs)) > len(outputs):
            raise ValueError(f"num_outputs is {call.get('num_outputs', 0)}; expected {len(outputs)}")
        onnx, reference = framework("onnx", "onnx"), framework("onnx.reference", "onnx")
        names = [f"i{k}" if array is not None else "" for k, array in enumerate(given)]
        results = [f"o{k}" for k in range(len(outputs))]
        own = onnx.NodeProto(op_type=call.name, input=names, output=results, attribute=node.attribute)
        graph = onnx.GraphProto(node=[own], output=[onnx.ValueInfoProto(name=name) for name in results])
        evaluator = reference.ReferenceEvaluator(graph, opsets={"": min(call.opset, self._newest)})
        feeds = {name: array for name, array in zip(names, given, strict=True) if array is not None}
        values = zip(evaluator.run(None, feeds), shapes, strict=True)
        # The evaluator's Squeeze of old opsets keeps dims where no axes are given.
        found = [
            np.asarray(value) if None in dims else np.reshape(value, [extent or 0 for extent in dims])
            for value, dims in values
        ]
        return found if all(array.dtype.kind not in "OSU" and array.size <= MAX_ELEMENTS for array in found) else None

    # -- shapes of results

    def _results(self, call: OnnxCall, node: Any, outputs: Sequence[str]) -> list[Value | None]:
        """Return an operator's results; ModelError where their shapes do not follow from those of its inputs."""
        types = self._inferred(call, node, outputs)
        found: list[Value | None] = []
        for position, output in enumerate(outputs):
            dims, dtype = types.get(output, (None, ""))
            # Results without readers may be unknown: dropout's mask, running statistics in training mode.
            is_left_out = not output or (position > 0 and output not in self._read and dims is None)
            found.append(None if is_left_out else self._result(call, output, position, dims, dtype))
        if call.name in RESHAPES and found and found[0] is not None:
            before, after = call.x.shape, found[0].shape
            if prod(before) != prod(after):
                reason = "the file is damaged"
                if self._rebatch is not None:
                    reason = "the batch is written into the model there: export it with a batch that is left open"
                raise ModelError(f"{call.where} makes {list(after)} of {list(before)}; {reason}")
        return found

    def _inferred(self, call: OnnxCall, node: Any, outputs: Sequence[str]) -> dict[str, tuple[_Dims | None, str]]:
        """Return the dims and type of an operator's results as ONNX's own shape inference has them, by name."""
        onnx, helper = framework("onnx", "onnx"), framework("onnx.helper", "onnx")
        from_array = framework("onnx.numpy_helper", "onnx").from_array
        own = onnx.NodeProto()
        own.CopyFrom(node)
        own.input[:], own.output[:] = ["" if value is None else value.name for value in call.inputs], outputs
        types, data = dict[str, bytes](), dict[str, bytes]()
        for name, value in ((value.name, value) for value in call.tensors):
            made = helper.make_tensor_type_proto(dtype_number(value.dtype), list(value.shape))
            types[name] = made.SerializeToString()
            if name in self.constants and self.constants[name].size <= _MAX_DATA:
                data[name] = from_array(self.constants[name], name).SerializeToString()
        operator = (call.name, min(call.opset, 1 << 30 if call.domain else self._newest), call.domain)
        ir_version = int(self._model.proto.ir_version)
        try:
            found = self._native.ask("infer", operator, own.SerializeToString(), types, data, self._opsets, ir_version)
        except NativeError as error:
            shapes = ", ".join(str(list(value.shape)) for value in call.tensors)
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            hint = "; the batch may be written into the model: export it with one left open" if self._rebatch else ""
            raise ModelError(f"{call.where} cannot take tensors of shapes {shapes}: {text}{hint}") from error
        tensors = {name: onnx.TypeProto.FromString(text).tensor_type for name, text in (found or {}).items()}
        return {name: (_dims(tensor), dtype_name(tensor.elem_type)) for name, tensor in tensors.items()}

    def _result(self, call: OnnxCall, output: str, position: int, dims: _Dims | None, dtype: str) -> Value:
        """Return a result with its shape as inferred, as declared in the file, or by the rules here."""
        info = self._declared.get(output)
        told = self._as_declared(info) if info is not None and info.type.tensor_type.HasField("shape") else None
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
        is_whole = (call.name, position) == ("EmbedLayerNormalization", 1)
        return Value(name=output, shape=shape, dtype=dtype or ("int32" if is_whole else next(floats, "float32")))

    def _as_declared(self, info: Any) -> Value | None:
        """Return a tensor as the file declares it, with the new batch; None where it leaves dims open."""
        found = declared(info)
        dims = [self._extents.get(dim) if isinstance(dim, str) else dim for dim in found.dims]
        shape = tuple(dim for dim in dims if dim is not None)
        if len(shape) < len(dims):
            return None
        if self._rebatch is not None and shape[:1] == (self._rebatch.old,):
            shape = (self._rebatch.new, *shape[1:])
        return Value(name=found.name, shape=shape, dtype=found.dtype)

    # -- another batch

    def _rebatched(self, call: OnnxCall, inputs: list[str], output: str) -> list[str]:
        """Return an operator's inputs where the exported batch is not written into them."""
        rebatch, at = self._rebatch, TARGETS.get(call.name, len(inputs))
        assert rebatch is not None
        if call.name == "Concat":
            return self._repeated(rebatch, call, inputs, output)
        if at >= len(inputs) or inputs[0] not in rebatch.values or output not in rebatch.values:
            return inputs
        now, then = (known.get(inputs[at]) for known in (self.constants, rebatch.constants))
        target = () if now is None else tuple(int(extent) for extent in now.ravel())
        if now is None or then is None or tuple(int(extent) for extent in then.ravel()) != target:
            # The model computes it from the batch already.
            return inputs
        changed = rebatch.target(call.name, call.x, output, target)
        if changed == target:
            return inputs
        self.changes.append(f"{call.name} {call.node!r} to {list(changed)} instead of {list(target)}")
        return [*inputs[:at], self._know(f"{output}:target", np.asarray(changed, np.int64)), *inputs[at + 1 :]]

    def _repeated(self, rebatch: Rebatch, call: OnnxCall, inputs: list[str], output: str) -> list[str]:
        """Return a concatenation's inputs, those of one example repeated to the batch of the others."""
        leading = {
            i: (value.shape[0], then[0])
            for i, value in enumerate(call.inputs)
            if value is not None and value.name in rebatch.values
            if (then := rebatch.values[value.name].shape) and value.shape
        }
        axis, rank = call.arguments.get("axis", 1), len(call.x.shape)
        is_leading = not rank or not isinstance(axis, int) or axis % rank == 0
        if is_leading or not any(now == rebatch.new != then for now, then in leading.values()):
            return inputs
        found = list(inputs)
        for i in (i for i, (now, _) in leading.items() if now == 1 != rebatch.new):
            value = self.values[inputs[i]]
            shape = (rebatch.new, *value.shape[1:])
            wide = self._define(f"{output}:repeated{i}", shape, value.dtype)
            target = self._know(f"{output}:batch{i}", np.asarray(shape, np.int64))
            self.calls.append(replace(self._call("Expand", "", wide.name, [inputs[i], target], {}), outputs=(wide,)))
            self.changes.append(f"{inputs[i]!r} is repeated {rebatch.new} times for Concat {call.node!r}")
            found[i] = wide.name
        return found

    # -- control flow

    def _if(self, node: Any, name: str, inputs: list[str], outputs: list[str], scope: Mapping[str, str]) -> None:
        """Walk the branch of an If whose condition is known; ModelError for another."""
        condition = self._known(inputs[0]) if inputs else None
        if condition is None or condition.size != 1:
            raise ModelError(
                f"operator If {name!r} is control flow that depends on values; export the model with one of its "
                "branches alone"
            )
        wanted = "then_branch" if condition.ravel()[0] else "else_branch"
        branch = next((a.g for a in node.attribute if a.name == wanted and a.HasField("g")), None)
        if branch is None or len(branch.output) != len(outputs):
            raise ModelError(f"operator If {name!r} has no usable {wanted}; the file is damaged")
        made = [str(t.name) for t in branch.initializer] + [str(o) for n in branch.node for o in n.output if o]
        # Two branches may use equal names: those of the second are prefixed with the operator's name.
        inner = {**scope, **{own: f"{name}/{own}" if own in self.values else own for own in made}}
        self._read |= {inner.get(read, read) for read in _names_read(branch)}
        self._graph(branch, inner)
        for info, output in zip(branch.output, outputs, strict=True):
            source = inner.get(info.name, str(info.name))
            if source not in self.values:
                raise ModelError(f"operator If {name!r} returns {info.name!r}, which nothing makes")
            shape, dtype = self.values[source].shape, self.values[source].dtype
            value = self._define(output, shape, dtype, self._known(source))
            call = self._call("Identity", "", f"{name}:{output}", [source], {})
            self.calls.append(replace(call, outputs=(value,)))


def _dims(tensor: Any) -> _Dims | None:
    """Return the dims of a TypeProto.Tensor, with None for open ones; None where it has no shape."""
    dims = (int(dim.dim_value) if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    return tuple(dims) if tensor.HasField("shape") else None


def _shape_of_result(call: OnnxCall, position: int) -> Shape | None:
    """Return the shape of a result that ONNX cannot infer: of onnxruntime's operators, and of two of its own."""
    try:
        match call.name, position:
            case "Attention", 0:
                # Of queries, keys and values that one product makes; they may have widths of their own.
                sizes = call.wholes("qkv_hidden_sizes")
                return (*call.x.shape[:-1], sizes[2] if sizes else call.value(1).shape[1] // 3)
            case "EmbedLayerNormalization", 0 | 2:
                return (*call.x.shape, call.value(2).shape[1])
            case "EmbedLayerNormalization", 1:
                # Of each example, how many tokens are not masked.
                return call.x.shape[:1]
            case (("FusedMatMul" | "TransposeMatMul"), 0):
                x, y = call.value(0).shape, call.value(1).shape
                x = (*x[:-2], x[-1], x[-2]) if call.arguments.get("transA") else x
                y = (*y[:-2], y[-1], y[-2]) if call.arguments.get("transB") else y
                return (*np.broadcast_shapes(x[:-2], y[:-2]), x[-2], y[-1])
            case (("SkipLayerNormalization" | "SkipSimplifiedLayerNormalization"), 3):
                return call.x.shape
        return call.x.shape if position == 0 and call.name in _LIKE_FIRST.split() else None
    except (ValueError, IndexError, TypeError):
        # An input is omitted or invalid.
        return None


_LIKE_FIRST = """
    BiasGelu FastGelu Gelu QuickGelu RotaryEmbedding MultiHeadAttention LayerNormalization SimplifiedLayerNormalization
    SkipLayerNormalization SkipSimplifiedLayerNormalization GroupQueryAttention GroupNormalization
    MeanVarianceNormalization
"""
"""Operators whose first result has the shape of their first input."""


def _plain(value: Any) -> Any:
    """Return an attribute as numbers, texts, tuples of them, or a stored tensor."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, int | float | str) or _is_tensor(value):
        return value
    return tuple(map(_plain, value)) if hasattr(value, "__iter__") else None


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_type") and hasattr(value, "dims")


def _names_read(graph: Any) -> Iterator[str]:
    """Yield the tensors that are read in a graph and those within it, or returned by it."""
    yield from (str(info.name) for info in graph.output)
    for node in graph.node:
        yield from map(str, node.input)
        for inner in graphs_within(node):
            yield from _names_read(inner)


# -- a model as a trace

_MAX_CHANGES_TOLD = 4


class OnnxFrontEnd(FrontEnd):
    """Takes paths that end in .onnx, and onnx.ModelProto."""

    package = "onnx"
    extra = "onnx"

    def takes(self, source: object) -> bool:
        """Return whether a source is an ONNX file by its name, or a model in memory."""
        if isinstance(source, str):
            return PurePath(source).suffix.lower() == ".onnx"
        onnx = sys.modules.get("onnx")
        return onnx is not None and isinstance(source, onnx.ModelProto)

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a model; ModelError where it is damaged or cannot be traced."""
        framework("onnx", "onnx")
        return trace_onnx(open_model(source), batch=batch, arguments=arguments)


def trace_onnx(model: OnnxModel, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None) -> Trace:
    """Return the trace of a model with the given batch.

    arguments: extents of open dims, by name. Stored floats of more than one element are parameters unless they are
    states (running statistics) or are only combined with positions; scalars are constants unless an operator has only
    weights in that place.
    """
    shapes = input_shapes(model, batch=batch, arguments=arguments or {})
    weights = trained(model.graph)
    with native() as process:
        walked = _walked(model, shapes, weights, process)
    notes = [*shapes.notes, *_change_notes(walked.changes)]
    newest = framework("onnx.defs", "onnx").onnx_opset_version()
    if model.opsets.get("", 0) > newest:
        notes.append(
            f"operators are of opset {model.opsets['']}, read as those of {newest}, the newest that is installed"
        )
    return check_trace(_read(model, walked, weights, tuple(notes)))


def _walked(model: OnnxModel, shapes: InputShapes, weights: frozenset[str], process: Native) -> Walk:
    rebatch = None
    if shapes.reference is not None:
        # With a batch left open, the one that was exported is not known; one example may be too few for the model.
        with suppress(ModelError):
            then = Walk(model, shapes.reference, weights, process)
            rebatch = Rebatch(values=then.values, constants=then.constants, old=shapes.old_batch, new=shapes.batch)
    return Walk(model, shapes.shapes, weights, process, rebatch)


def _change_notes(changes: list[str]) -> list[str]:
    """Return what was changed for the batch, in words."""
    if not changes:
        return []
    more = len(changes) - _MAX_CHANGES_TOLD
    first = "; ".join(changes[:_MAX_CHANGES_TOLD])
    return [f"the exported batch was written into the model: {first}" + (f"; and {more} more" if more > 0 else "")]


def _read(model: OnnxModel, walked: Walk, weights: frozenset[str], notes: tuple[str, ...]) -> Trace:
    """Return nodes of operators, and leaves of the tensors that they read."""
    nodes, names = list[Node](), Names()
    for call in walked.calls:
        origin = Origin(operator=call.name, scope=_scope(call.node, call.name))
        for i, step in enumerate(_translated(call)):
            name = names.new(call.node if i == 0 else f"{call.node}:{i}")
            nodes.append(Node(name=name, op=step.op, inputs=step.inputs, outputs=step.outputs, origin=origin))
    made = {value.name for node in nodes for value in node.outputs}
    fed = [declared.name for declared in model.inputs]
    read = (use.value for node in nodes for use in node.inputs)
    leaves = dict.fromkeys([*fed, *(name for name in read if name not in made)])
    return Trace(
        name=model.name,
        leaves=tuple(_leaf(name, walked, fed, weights) for name in leaves),
        nodes=tuple(nodes),
        outputs=tuple(name for name in walked.outputs if name in made),
        notes=notes,
        num_source_operators=model.num_operators,
    )


def _leaf(name: str, walked: Walk, fed: list[str], weights: frozenset[str]) -> Leaf:
    is_weight = name in weights
    role: Literal["input", "parameter", "constant"] = (
        "input" if name in fed else "parameter" if is_weight else "constant"
    )
    array = walked.constants.get(name) if role == "constant" else None
    is_number = array is not None and array.size == 1 and array.dtype.kind in "fiub"
    number = float(array.ravel()[0]) if is_number and array is not None else None
    return Leaf(value=walked.values[name], role=role, storage=name, number=number)


def _translated(call: OnnxCall) -> list[Step]:
    """Return the nodes of an operator; an unknown one passes the leading dim through, if any.

    Raises ModelError where the operator's inputs or attributes do not fit.
    """
    try:
        DOMAINS.get(call.domain, {}).get(call.name, OnnxCall.opaque)(call)
    except UNFIT as error:
        raise ModelError(
            f"operator {call.name} {call.node!r} is not well formed: {error}; check the file with onnx.checker"
        ) from error
    return call.steps


def _scope(name: str, operator: str) -> str:
    """Return the layer in a node's name: of "/layer1/conv1/Conv_2", the path without the operator."""
    parts = [part for part in name.split("/") if part]
    if len(parts) > 1 and parts[-1].partition("_")[0] == operator:
        parts = parts[:-1]
    return "/".join(parts) or name
