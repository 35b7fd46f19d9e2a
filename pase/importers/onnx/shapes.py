"""`walk`: every operator of a model with the shapes of its tensors; what depends on shapes alone is worked out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.front_end import framework
from pase.importers.ir import Value
from pase.importers.ir.steps import Shape
from pase.importers.onnx.batch import Rebatching
from pase.importers.onnx.folding import Folding, fold
from pase.importers.onnx.inference import Inference, Rebatch, Stored, Tensors, Walked
from pase.importers.onnx.model import OnnxModel, dtype_name, graphs_within, plain_domain, values_of
from pase.importers.onnx.native import Native
from pase.importers.onnx.operators import UNFIT, Array, OnnxCall

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
            or self._is_worked_out(operator, inputs, outputs, attributes)
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
            operator=operator,
            domain=domain,
            name=name,
            attributes=attributes,
            inputs=tuple(self._tensors.values[i] if i else None for i in inputs),
            outputs=(),
            constants=tuple(self._tensors.known(i) for i in inputs),
            opset=self._model.opsets.get(domain, 1),
            read=self._read,
        )

    # -- what is worked out: none of the model's operators then

    def _is_worked_out(
        self, operator: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any]
    ) -> bool:
        """Define an operator's results where they are known now; return whether they are."""
        given = [self._tensors.known(i) if i else None for i in inputs]
        found: tuple[Array, ...] | None = None
        if operator in ("Shape", "Size") and inputs and inputs[0]:
            shape = self._tensors.values[inputs[0]].shape
            whole = shape[attributes.get("start", 0) : attributes.get("end", None)] if operator == "Shape" else shape
            found = (np.asarray(whole if operator == "Shape" else prod(whole), dtype=np.int64),)
        elif all(not i or array is not None for i, array in zip(inputs, given, strict=True)):
            folding = Folding(
                operator=operator,
                inputs=tuple(given),
                attributes={k: v.array if isinstance(v, Stored) else v for k, v in attributes.items()},
                num_outputs=len(outputs),
                opset=self._model.opsets.get("", 1),
            )
            found = fold(folding)
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
