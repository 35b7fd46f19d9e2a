"""ONNX models: files, whose weights are not read, and onnx.ModelProto objects; their operators, with shapes."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.front_end import FrontEnd, framework
from pase.importers.ir import Leaf, Node, Origin, Step, Trace, Value, check_trace
from pase.importers.ir.call import Array, Shape, Translation
from pase.importers.ir.trace import Names
from pase.importers.onnx import points, products
from pase.importers.onnx.batch import InputShapes, Rebatching, input_shapes
from pase.importers.onnx.inference import UNFIT, Inference, OnnxCall, Rebatch, Stored, Tensors, Walked, fold
from pase.importers.onnx.model import OnnxModel, dtype_name, graphs_within, open_model, plain_domain, values_of
from pase.importers.onnx.native import Native, native
from pase.importers.onnx.weights import trained

_MAX_CHANGES_TOLD = 4

TRANSLATIONS: dict[str, Translation] = points.TRANSLATIONS | products.TRANSLATIONS
"""Of ONNX's own operators, by name."""

_AS_IN_ONNX = """
    BiasGelu FastGelu FusedMatMul Gelu LayerNormalization QuickGelu RotaryEmbedding SimplifiedLayerNormalization
    SkipLayerNormalization SkipSimplifiedLayerNormalization TransposeMatMul Trilu
"""
RUNTIME: dict[str, Translation] = {name: TRANSLATIONS[name] for name in _AS_IN_ONNX.split()} | {
    "Attention": products.packed_attention,
    "EmbedLayerNormalization": points.embed_and_normalise,
    "MultiHeadAttention": products.multi_head_attention,
}
"""Of the domain com.microsoft: what an optimiser of onnxruntime's puts together."""

_DOMAINS = {"": TRANSLATIONS, "com.microsoft": RUNTIME}


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

    arguments: extents of dims that the file leaves open, by name. Stored floats of more than one element are
    parameters unless they are states (running statistics) or meet only positions; single ones are constants unless an
    operator has nothing but weights there.
    """
    shapes = input_shapes(model, batch=batch, arguments=arguments or {})
    weights = trained(model.graph)
    with native() as process:
        walked = _walked(model, shapes, weights, process)
    notes = [*shapes.notes, *_told(walked.changes)]
    newest = framework("onnx.defs", "onnx").onnx_opset_version()
    if model.opsets.get("", 0) > newest:
        notes.append(
            f"operators are of opset {model.opsets['']}, read as those of {newest}, the newest that is installed"
        )
    return check_trace(_read(model, walked, weights, tuple(notes)))


def _walked(model: OnnxModel, shapes: InputShapes, weights: frozenset[str], process: Native) -> Walked:
    if shapes.reference is None:
        return walk(model, shapes.shapes, weights, process)
    try:
        reference = walk(model, shapes.reference, weights, process)
    except ModelError:
        # With a batch left open, the one that was exported is not known; one example may be too few for the model.
        return walk(model, shapes.shapes, weights, process)
    rebatch = Rebatch(reference=reference, old=shapes.old_batch, new=shapes.batch)
    return walk(model, shapes.shapes, weights, process, rebatch=rebatch)


def _told(changes: tuple[str, ...]) -> list[str]:
    """Return what was changed for the batch, in words."""
    if not changes:
        return []
    more = len(changes) - _MAX_CHANGES_TOLD
    first = "; ".join(changes[:_MAX_CHANGES_TOLD])
    return [f"the exported batch was written into the model: {first}" + (f"; and {more} more" if more > 0 else "")]


def _read(model: OnnxModel, walked: Walked, weights: frozenset[str], notes: tuple[str, ...]) -> Trace:
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


def _leaf(name: str, walked: Walked, fed: list[str], weights: frozenset[str]) -> Leaf:
    is_weight = name in weights
    role: Literal["input", "parameter", "constant"] = (
        "input" if name in fed else "parameter" if is_weight else "constant"
    )
    array = walked.constants.get(name) if role == "constant" else None
    is_number = array is not None and array.size == 1 and array.dtype.kind in "fiub"
    number = float(array.ravel()[0]) if is_number and array is not None else None
    return Leaf(value=walked.values[name], role=role, storage=name, number=number)


def _translated(call: OnnxCall) -> list[Step]:
    """Return the nodes of an operator; one that nothing is known of passes the leading dim through, if any.

    Raises ModelError where the operator's inputs or attributes do not fit.
    """
    try:
        _DOMAINS.get(call.domain, {}).get(call.name, OnnxCall.opaque)(call)
    except UNFIT as error:
        raise ModelError(
            f"operator {call.name} {call.node!r} is not well formed: {error}; check the file with onnx.checker"
        ) from error
    return call.steps


def _scope(name: str, operator: str) -> str:
    """Return the layer that a node's name tells: of "/layer1/conv1/Conv_2", the path without the operator."""
    parts = [part for part in name.split("/") if part]
    if len(parts) > 1 and parts[-1].partition("_")[0] == operator:
        parts = parts[:-1]
    return "/".join(parts) or name


# -- every operator of a model with the shapes of its tensors; what depends on shapes alone is worked out


_LOOPS = "Loop Scan"
_QUANTISED = """
    QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger QLinearAdd
    QAttention
"""
_LISTS = """
    SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceAt SequenceMap SequenceLength SplitToSequence
    ConcatFromSequence Optional OptionalGetElement OptionalHasElement
"""
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_LOOPS.split(), "repeats a graph of its own; export the model with the loop written out"),
        **dict.fromkeys(
            _QUANTISED.split(),
            "computes with quantised numbers, which are not trained; export the model before it is quantised",
        ),
        **dict.fromkeys(
            _LISTS.split(),
            "makes or reads a list of tensors, whose shapes are not known; export the model with tensors alone",
        ),
    }
)
"""Operators that cannot be imported, and why."""


def walk(
    model: OnnxModel,
    shapes: Mapping[str, Shape],
    trained: frozenset[str],
    native: Native,
    *,
    rebatch: Rebatch | None = None,
) -> Walked:
    """Return a model's operators with the shapes that follow from those of its inputs; native: infers them.

    Raises ModelError for control flow, for quantised models and where a shape depends on values.
    """
    tensors = Tensors(trained=trained)
    for given in model.inputs:
        tensors.feed(given, shapes[given.name])
    walker = _Walker(model, tensors, native, rebatch)
    walker.graph(model.graph, {})
    outputs = tuple(dict.fromkeys(str(info.name) for info in model.graph.output))
    for name in outputs:
        if name not in tensors.values:
            raise ModelError(f"the model's output {name!r} is made by no operator; the file is damaged")
    return Walked(
        calls=tuple(walker.calls),
        values=tensors.values,
        constants=tensors.constants,
        outputs=outputs,
        changes=tuple(walker.rebatching.changes) if walker.rebatching is not None else (),
    )


class _Walker:
    """Walks operators, in order."""

    def __init__(self, model: OnnxModel, tensors: Tensors, native: Native, rebatch: Rebatch | None) -> None:
        self._model = model
        self._tensors = tensors
        self._inference = Inference(model, tensors, native, rebatch)
        self.rebatching = Rebatching(tensors, rebatch, self._add) if rebatch is not None else None
        self._read = frozenset(_names_read(model.graph))
        self._count = 0
        self.calls: list[OnnxCall] = []

    def graph(self, graph: Any, scope: Mapping[str, str]) -> None:
        """Walk a graph. scope: names of its own tensors, and those that they have here."""
        for tensor in graph.initializer:
            self._tensors.store(scope.get(tensor.name, str(tensor.name)), tensor)
        for sparse in graph.sparse_initializer:
            own = sparse.values
            self._tensors.define(scope.get(own.name, str(own.name)), sparse.dims, dtype_name(own.data_type))
        for node in graph.node:
            self._node(node, scope)

    def _node(self, node: Any, scope: Mapping[str, str]) -> None:
        self._count += 1
        operator, domain = str(node.op_type), plain_domain(node.domain)
        name = str(node.name) or next((str(output) for output in node.output if output), f"{operator}_{self._count}")
        if operator in _REFUSED:
            raise ModelError(f"operator {operator} {name!r} {_REFUSED[operator]}")
        inputs = [scope.get(i, str(i)) for i in node.input]
        outputs = [scope.get(o, str(o)) for o in node.output]
        for read in inputs:
            if read and read not in self._tensors.values:
                raise ModelError(f"operator {operator} {name!r} reads {read!r}, which nothing before it makes")
        if operator == "If":
            self._if(node, name, inputs, outputs, scope)
            return
        try:
            with np.errstate(all="ignore"):
                self._follow(node, operator, domain, name, inputs, outputs)
        except UNFIT as error:
            raise ModelError(
                f"operator {operator} {name!r} cannot be worked out: {error}; check the file with onnx.checker"
            ) from error

    def _follow(self, node: Any, operator: str, domain: str, name: str, inputs: list[str], outputs: list[str]) -> None:
        """Work an operator out, or add it with the shapes of its results."""
        attributes = _attributes(node, name)
        if not domain and (
            self._is_stored(operator, inputs, outputs, attributes)
            or self._is_worked_out(node, operator, inputs, outputs, attributes)
        ):
            return
        if self.rebatching is not None:
            inputs = self.rebatching.inputs(operator, name, inputs, outputs[0] if outputs else "", attributes)
        call = self._called(operator, domain, name, attributes, inputs)
        found = self._inference.results(call, node, outputs)
        for value in found:
            if value is not None:
                self._tensors.define(value.name, value.shape, value.dtype)
        if self.rebatching is not None:
            self.rebatching.follow(operator, inputs, found)
        self.calls.append(replace(call, outputs=tuple(found)))

    def _add(self, operator: str, name: str, inputs: list[str], result: Value) -> None:
        """Add a call of one of ONNX's own operators that the model does not have."""
        self.calls.append(replace(self._called(operator, "", name, {}, inputs), outputs=(result,)))

    def _called(
        self, operator: str, domain: str, name: str, attributes: Mapping[str, Any], inputs: list[str]
    ) -> OnnxCall:
        """Return an operator without its outputs."""
        return OnnxCall(
            name=operator,
            domain=domain,
            node=name,
            arguments=attributes,
            inputs=tuple(self._tensors.values[i] if i else None for i in inputs),
            outputs=(),
            known={i: array for i in inputs if (array := self._tensors.known(i)) is not None},
            opset=self._model.opsets.get(domain, 1),
            read=self._read,
        )

    # -- what is worked out: none of the model's operators then

    def _is_worked_out(
        self, node: Any, operator: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any]
    ) -> bool:
        """Define an operator's results where they are known now; return whether they are."""
        given = [self._tensors.known(i) if i else None for i in inputs]
        found: tuple[Array, ...] | None = None
        if operator in ("Shape", "Size") and inputs and inputs[0]:
            shape = self._tensors.values[inputs[0]].shape
            whole = shape[attributes.get("start", 0) : attributes.get("end", None)] if operator == "Shape" else shape
            found = (np.asarray(whole if operator == "Shape" else prod(whole), dtype=np.int64),)
        elif all(not i or array is not None for i, array in zip(inputs, given, strict=True)) and not any(
            isinstance(value, Stored) and value.array is None for value in attributes.values()
        ):
            found = fold(node, given, self._model.opsets.get("", 1))
        for output, array in zip(outputs, found or (), strict=False):
            if output:
                self._tensors.know(output, array)
        return found is not None

    def _is_stored(self, operator: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any]) -> bool:
        """Define the result of a Constant, or of a ConstantOfShape that stands for a weight; return if it is one."""
        value = attributes.get("value")
        if operator == "Constant" and isinstance(value, Stored) and outputs:
            self._tensors.define(outputs[0], value.shape, value.dtype, value.array)
            return True
        if operator != "ConstantOfShape" or not outputs or outputs[0] not in self._tensors.trained:
            return False
        shape = self._tensors.known(inputs[0])
        if shape is None:
            return False
        dtype = value.dtype if isinstance(value, Stored) else "float32"
        self._tensors.define(outputs[0], [int(extent) for extent in shape.ravel()], dtype)
        return True

    # -- control flow

    def _if(self, node: Any, name: str, inputs: list[str], outputs: list[str], scope: Mapping[str, str]) -> None:
        """Walk the branch of an If whose condition is known; ModelError for another."""
        condition = self._tensors.known(inputs[0]) if inputs else None
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
        # Two branches may have used a name each: then those of the second are told apart by the operator's.
        known = self._tensors.values
        inner = {**scope, **{own: f"{name}/{own}" if own in known else own for own in made}}
        self._read |= {inner.get(read, read) for read in _names_read(branch)}
        self.graph(branch, inner)
        for info, output in zip(branch.output, outputs, strict=True):
            source = inner.get(info.name, str(info.name))
            if source not in known:
                raise ModelError(f"operator If {name!r} returns {info.name!r}, which nothing makes")
            shape, dtype = known[source].shape, known[source].dtype
            value = self._tensors.define(output, shape, dtype, self._tensors.known(source))
            self._add("Identity", f"{name}:{output}", [source], value)


def _attributes(node: Any, name: str) -> dict[str, Any]:
    helper = framework("onnx.helper", "onnx")
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        try:
            value = helper.get_attribute_value(attribute)
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"attribute {attribute.name!r} of operator {name!r} is damaged: {error}") from error
        found[str(attribute.name)] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return an attribute as numbers, texts, tuples of them, or a stored tensor."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, int | float | str):
        return value
    if hasattr(value, "data_type") and hasattr(value, "dims"):
        return Stored(shape=tuple(value.dims), dtype=dtype_name(value.data_type), array=values_of(value))
    if hasattr(value, "__iter__"):
        return tuple(_plain(item) for item in value)
    return None


def _names_read(graph: Any) -> Iterator[str]:
    """Yield the tensors that are read in a graph and those within it, or returned by it."""
    yield from (str(info.name) for info in graph.output)
    for node in graph.node:
        yield from map(str, node.input)
        for inner in graphs_within(node):
            yield from _names_read(inner)
