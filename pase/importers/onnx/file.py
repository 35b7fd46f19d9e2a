"""ONNX models: files, whose weights are not read, and onnx.ModelProto objects; their operators, with shapes."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Literal

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.front_end import FrontEnd, framework
from pase.importers.ir.trace import Leaf, Names, Node, Origin, Step, Trace, check_trace
from pase.importers.onnx.batch import InputShapes, Rebatch, input_shapes
from pase.importers.onnx.model import OnnxModel, open_model
from pase.importers.onnx.native import Native, native
from pase.importers.onnx.operators import DOMAINS
from pase.importers.onnx.walk import UNFIT, OnnxCall, Walk
from pase.importers.onnx.weights import trained

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


def _walked(model: OnnxModel, shapes: InputShapes, weights: frozenset[str], process: Native) -> Walk:
    rebatch = None
    if shapes.reference is not None:
        # With a batch left open, the one that was exported is not known; one example may be too few for the model.
        with suppress(ModelError):
            then = Walk(model, shapes.reference, weights, process)
            rebatch = Rebatch(values=then.values, constants=then.constants, old=shapes.old_batch, new=shapes.batch)
    return Walk(model, shapes.shapes, weights, process, rebatch)


def _told(changes: list[str]) -> list[str]:
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
    """Return the nodes of an operator; one that nothing is known of passes the leading dim through, if any.

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
    """Return the layer that a node's name tells: of "/layer1/conv1/Conv_2", the path without the operator."""
    parts = [part for part in name.split("/") if part]
    if len(parts) > 1 and parts[-1].partition("_")[0] == operator:
        parts = parts[:-1]
    return "/".join(parts) or name
