"""Plans as JSON files: written as a whole, read with every field checked and every cost computed again."""

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from msgspec import UNSET, Meta, UnsetType, field, structs

from pase.common.documents import DocumentSource, StrPath, read_text, shown, write_atomically
from pase.common.structs import (
    VERSION,
    Document,
    Number,
    Positive,
    Scalars,
    Whole,
    choice,
    describes,
    difference,
    document_of,
    json_schema,
    read,
)
from pase.costs import DEFAULT_OPTIMISER, OPTIMISER_STATE, REPLICATED, STATES, cost_model
from pase.costs.states import EVERY_MODE, can_be_in_parts
from pase.errors import ConfigurationError, CostError, GraphError, MachineError, PlanError
from pase.graph import Graph, Operator, Precision
from pase.graph.document import Dims, GraphDocument, canonical_text
from pase.graph.operators import with_fan_outs
from pase.graph.precision import PRECISIONS
from pase.machine.files import MachineDocument
from pase.planning.constraints import ConstraintsDocument, allowed, mode_space
from pase.planning.pipelines import data_parallel_step
from pase.planning.plan import SCHEDULES, SCHEMA_VERSION, LayerPlan, Plan, SearchRecord, Transfer, hidden_cost
from pase.planning.stages import INTERLEAVED
from pase.planning.steps import TrainingStep, plan_layers_beside, total_cost
from pase.sharding.shards import data_parallel_splits, splits_of

_RELATIVE_TOLERANCE = 1e-9
"""Costs are sums of doubles: another order of summation may change their last bits, an edit changes more."""

_GAP_TOLERANCE = 1e-12
"""The gap is a difference of two of them."""


WITHOUT_PEAKS = 2
"""The version of files whose memory is an estimate of another kind than the peak; it is worked out anew."""


@describes(Transfer)
class TransferDocument(Document):
    """Predicted traffic of one edge, or of one shared weight, in one training step, of all micro-batches; 0 for edges
    between stages, which layer_cost has."""

    producer: str
    """Name of the layer that the tensor comes from; for a shared weight, of the first layer that uses it."""
    input: Whole
    """Position of the tensor among the reads of this layer's operator, from 0."""
    cost: Number
    """r · t_x of Eq. 1, forward and backward together, in cost_unit; for a shared weight with the all-reduce of its
    gradient, where the layouts differ."""
    forward_bytes: Number
    """Bytes that the device which fetches most fetches in the forward pass."""
    backward_bytes: Number
    """Bytes that the device which fetches most fetches in the backward pass."""


@describes(LayerPlan)
class LayerDocument(Document):
    """One layer's part of the strategy."""

    name: str
    """Name of the operator."""
    kind: str
    """Kind of the operator, such as dense."""
    dims: Dims
    """Iteration space: number of points of each iteration dim, in order."""
    splits: Dims
    """Configuration: split factor of each iteration dim, in the same order; their product divides num_devices. One that
    a search chose divides its dim's extent; one that was pinned need not, and then the first parts are a point
    larger."""
    devices: Annotated[tuple[Whole, ...], Meta(min_length=1, extra_json_schema={"uniqueItems": True})]
    """Device of each part, row-major over the dims that are split and then the replicas, from 0; every device once."""
    layer_cost: Number
    """t_l of Eq. 1, in cost_unit, of all micro-batches, on each device of the layer: compute_cost +
    communication_cost."""
    compute_cost: Number
    """Computation on one device, forward and backward, of all micro-batches, in cost_unit."""
    communication_cost: Number
    """Communication inside the layer, what overlaps with computation included, in cost_unit; in plans with
    micro-batches, stages or modes all of layer_cost that is not compute_cost, so the forward pass of a layer that is
    recomputed, too."""
    memory_bytes: Number
    """What the layer keeps on each device through a step, in bytes; with memory.buffers_bytes, which belong to no
    single layer, all layers make memory.total_bytes."""
    transfers: tuple[TransferDocument, ...]
    """One entry for each incoming edge of the layer, then one for each weight that an earlier layer shares with it."""
    hideable_cost: Number | UnsetType = UNSET
    """Of what the layer and its transfers cost, communication that can overlap with computation, in cost_unit; absent
    where costs add up."""
    cover_cost: Number | UnsetType = UNSET
    """Of compute_cost, what communication can overlap with, in cost_unit; absent where costs add up."""
    state: Annotated[str, choice(STATES)] = REPLICATED
    """How the devices that hold the same part of a weight share it: the optimizer's state (zero1), its gradient (zero2)
    and itself (zero3) sharded; replicated without this: nothing."""
    is_recomputed: bool = False
    """Whether what the backward pass needs of the layer is recomputed instead of saved; false without this."""
    stage: Whole = 0
    """Stage of the pipeline, from 0; 0 without this."""


@describes(SearchRecord)
class SearchDocument(Document):
    """How the strategy was found."""

    ordering: str
    """Name of the ordering in which the solver eliminated the layers."""
    largest_dependent_set: Whole
    """Number of layers in the ordering's largest dependent set, section III-B of the paper."""
    time_s: Number
    """Wall-clock time of costing and solving, in seconds."""
    peak_memory_bytes: Whole
    """The most that the solver's own tables held at once, in bytes."""
    simplify: Number = 0.0
    """Up to which share the strategy may cost more than the cheapest one known, so that it is more regular; absent
    where it is the cheapest."""
    configurations: Whole = 0
    """Configurations, modes included, that layers at one place of repeated blocks have, over all places; absent where
    the strategy is the cheapest one known."""
    cheapest_configurations: Whole = 0
    """The same, of the cheapest strategy that is known, whose cost baselines has as cheapest."""


class MemoryDocument(Document):
    """What a training step needs on each device, as predicted."""

    optimiser: Annotated[str, choice(OPTIMISER_STATE)]
    """The optimiser whose state is counted."""
    weights_bytes: Whole
    """Parts of weights, in bytes."""
    gradients_bytes: Whole
    """Gradients of those parts, in bytes."""
    optimiser_bytes: Whole
    """What the optimiser keeps for those parts, in bytes."""
    activations_bytes: Whole
    """What else is saved for the backward pass, each tensor once in each layout, in bytes."""
    buffers_bytes: Whole
    """The most that comes and goes at a time, in bytes."""
    total_bytes: Whole
    """All of it, in bytes."""


class ModelDocument(Document):
    """The model that was searched."""

    name: str
    """Its name; equal to graph.name."""
    arguments: Scalars
    """What its builder was given, such as batch (examples in a training step, or in one of its micro_batches); equal to
    graph.arguments."""
    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of graph as JSON with sorted keys, without white space and with every character beyond ASCII escaped; in
    hexadecimal."""

    @classmethod
    def of(cls, value: Graph, **others: Any) -> Self:
        if "hash" not in others:
            others["hash"] = graph_hash(value)
        return super().of(value, arguments=dict(value.arguments), **others)


_DATA_PARALLEL = {
    "type": "number",
    "minimum": 0,
    "description": "Total cost where every layer's batch is split as far as it goes and nothing else is, in cost_unit.",
}


@describes(Plan)
class PlanDocument(Document, kw_only=True):
    """A parallelization strategy for training a neural network, with the certificate of its search. Fields may be added
    within a schema version; readers pass over those that they do not know. Costs are in the unit that cost_unit
    names."""

    schema_version: Annotated[Literal[2, 3], Meta(extra_json_schema={"type": "integer"})]
    """Version of this format; it changes when a field changes its meaning or disappears."""
    tool_version: str
    """Version of PaSE that wrote the file."""
    model: ModelDocument
    """The model that was searched."""
    num_devices: Positive
    """p, the number of devices."""
    cost_model: str
    """Name of the cost model under which every cost in this file was computed."""
    cost_unit: Literal["FLOP", "s"]
    """Unit of every cost in this file: FLOP of one training step, or seconds."""
    precision: Precision | UnsetType = UNSET
    """The types of numbers that costs and memory are of. Absent in files of earlier versions: all numbers are
    float32."""
    total_cost: Number
    """F(G, φ), Eq. 1 of the paper, in cost_unit: the sum of all layer costs and transfer costs, less hidden_cost."""
    hidden_cost: Number = 0.0
    """What of that sum is not paid because communication overlaps with computation, in cost_unit: the smaller of the
    sums of hideable_cost and of cover_cost. Absent where nothing is hidden."""
    lower_bound: Number
    """No strategy costs less than this, in cost_unit; equal to total_cost where exact is true."""
    gap: Annotated[float, Meta(ge=0, le=1)]
    """(total_cost - lower_bound) / total_cost, a ratio; 0 where exact is true."""
    exact: bool
    """Whether it is proven that no strategy is cheaper."""
    baselines: Annotated[
        dict[str, Number],
        Meta(extra_json_schema={"required": ["data_parallel"], "properties": {"data_parallel": _DATA_PARALLEL}}),
    ]
    """Total costs of other strategies on the same devices, by name, in cost_unit."""
    search: SearchDocument
    """How the strategy was found."""
    memory: MemoryDocument | UnsetType = UNSET
    """What a training step needs on each device, as predicted; absent in files of earlier versions."""
    device_memory_bytes: Positive | UnsetType = field(name="memory_limit_bytes_per_device", default=UNSET)
    """What the strategy was to fit, in bytes on each device: lower_bound and exact then hold among the strategies that
    do. Absent where there was no limit."""
    constraints: ConstraintsDocument | UnsetType = UNSET
    """What the strategy was to keep to, as in files of constraints: lower_bound and exact then hold among the
    strategies that do. Absent where there was nothing."""
    micro_batches: Positive = 1
    """Parts of the batch that a step works through, of which graph computes one; 1 without this."""
    schedule: Annotated[str, choice(SCHEDULES)] | UnsetType = UNSET
    """Order in which the stages of a pipeline work through the micro-batches; absent where there is one stage."""
    num_groups: Positive = 1
    """Groups of devices that have the pipeline's stages in turns: stage s is of group s mod num_groups; 1 without
    this."""
    layers: Annotated[tuple[LayerDocument, ...], Meta(min_length=1)]
    """One entry for each operator of graph, in the same order."""
    machine: MachineDocument
    """The machine that costs were computed for."""
    graph: GraphDocument
    """The computation graph that was searched."""

    @classmethod
    def of(cls, value: Plan, **others: Any) -> Self:
        return super().of(
            value,
            schema_version=SCHEMA_VERSION,
            model=ModelDocument.of(value.graph),
            memory=MemoryDocument.of(value.memory, optimiser=value.optimiser),
            constraints=ConstraintsDocument.of(value.constraints) if value.constraints else UNSET,
            schedule=value.schedule or UNSET,
            **others,
        )


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the JSON form of a plan (`plan_schema`), of which `plan_from_document` makes an equal plan."""
    return PlanDocument.of(plan).builtins()


def plan_schema() -> str:
    """Return the JSON Schema of plan files, as text; docs/export.md says what of it stays as it is."""
    return json_schema(PlanDocument, identifier="urn:pase:plan:2", title="PaSE plan")


def graph_hash(graph: Graph) -> str:
    """Return the SHA-256, in hexadecimal, of a graph's canonical JSON form, wherever it came from."""
    return _document_hash(GraphDocument.of(graph))


def _document_hash(graph: GraphDocument) -> str:
    own = structs.replace(graph, framework="", call="", untrained="")
    return hashlib.sha256(canonical_text(own).encode()).hexdigest()


def write_plan(plan: Plan, path: StrPath) -> None:
    """Write a plan as a JSON file, replacing an old one atomically; PlanError where the file cannot be written."""
    try:
        write_atomically(Path(path), json.dumps(plan_document(plan), indent=1) + "\n")
    except OSError as error:
        raise PlanError(f"plan file {path} cannot be written: {error.strerror or error}") from None


def read_plan(path: StrPath) -> Plan:
    """Return the plan in a JSON file; PlanError says which field is missing, wrong or not consistent."""
    source = DocumentSource(PlanError, f"plan file {path}")
    text = read_text(path, PlanError, source.name)
    try:
        return plan_from_document(text.encode(), source)
    except (ValueError, RecursionError) as error:
        if text.strip() and text.lstrip()[0] not in "{[":
            raise PlanError(
                f"{path} is no plan: it is not JSON; a plan is what 'pase search MODEL --devices N -o plan.json' writes"
            ) from None
        raise PlanError(
            f"{source.name} is not complete JSON ({error}); it may be truncated: search again with 'pase search … -o'"
        ) from None


load_plan = read_plan
"""The public name of it: `pase.load_plan`."""


def plan_from_document(given: object, source: DocumentSource) -> Plan:
    """Return the plan of a document, after working out again all that follows from its strategy.

    Args:
        given: The document, as JSON in bytes or as its value.
        source: Where it comes from, for messages.

    Raises:
        PlanError: A field is missing, wrong or not consistent with others.
        ValueError, RecursionError: The bytes are not JSON.
    """
    document = read(PlanDocument, given, source, hint=_version_hint)
    plan = _plan(document, source)
    if with_fan_outs(plan.graph) is not plan.graph:
        raise source.fail("graph", "lacks the fan-outs that sum a gradient for several layers: search again")
    _check_stages(plan, source)
    for number, (operator, layer) in enumerate(zip(plan.graph.operators, plan.layers, strict=True)):
        _check_layer(plan, operator, layer, source, f"layers[{number}]")
    step = TrainingStep.of(plan)
    if document.schema_version == WITHOUT_PEAKS:
        layers = (replace(layer, memory_bytes=own) for layer, own in zip(plan.layers, step.kept_by_layer, strict=True))
        plan = replace(plan, layers=tuple(layers))
        document = structs.replace(document, layers=document_of(plan.layers), memory=UNSET)
    _check_constraints(plan, source)
    # A huge number in an edited file may overflow: it is then told apart from the right one, as infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        _check_derived(plan, step, document, source)
    return plan


def _version_hint(path: str, value: object) -> str:
    if path != VERSION or type(value) is not int:
        return ""
    return ": update PaSE" if value > SCHEMA_VERSION else ": search again"


def _same(source: DocumentSource, path: str, given: object, expected: object) -> None:
    """Raise PlanError unless a part of the document is what the rest of it makes of it."""
    found = difference(given, expected, _RELATIVE_TOLERANCE)
    if found is not None:
        steps, value, right = found
        where = f"{path}{steps}"
        if value is UNSET:
            raise source.fail(where, "is missing")
        if isinstance(value, tuple) and isinstance(right, tuple):
            raise source.fail(
                where, f"has {len(value)} entries, but the rest of the file makes it {len(right)}: search again"
            )
        made = "nothing" if right is UNSET else shown(right)
        raise source.fail(where, f"is {shown(value)}, but the rest of the file makes it {made}: search again")


def _plan(document: PlanDocument, source: DocumentSource) -> Plan:
    """Return the plan that a document describes, whose graph and machine are whole."""
    machine = document.machine.checked(source, "machine")
    try:
        graph = document.graph.value()
    except GraphError as error:
        raise source.fail("graph", f"is not a valid graph: {error}") from None
    model = ModelDocument.of(graph, hash=_document_hash(document.graph))
    if document.model.hash != model.hash:
        problem = "is not the hash of the graph in this file; one of them was changed: search again"
        raise source.fail("model.hash", problem)
    _same(source, "model", document.model, model)
    try:
        constraints = document.constraints.constraints(f"{source.name}: constraints.") if document.constraints else ()
    except ConfigurationError as error:
        raise PlanError(str(error)) from None
    plan: Plan = document.value(
        graph=_typed(graph, document.precision, source),
        machine=machine,
        constraints=constraints,
        # Plans of earlier versions tell of no memory.
        optimiser=document.memory.optimiser if document.memory else DEFAULT_OPTIMISER,
    )
    return plan


def _typed(graph: Graph, precision: Precision | UnsetType, source: DocumentSource) -> Graph:
    """Return the graph in the types that the plan tells of; PlanError where they are none of the graph's."""
    if isinstance(precision, UnsetType):
        return graph
    if PRECISIONS.get(precision.name, precision) != precision:
        raise source.fail("precision.name", f"is {precision.name!r}, whose types are others: search again")
    if precision.itemsize != graph.precision.itemsize:
        raise source.fail(
            "precision.parameters",
            f"is {precision.parameters!r}, of {precision.itemsize} bytes; the graph in this file has numbers of "
            f"{graph.precision.itemsize}: search again",
        )
    return graph.in_precision(precision)


def _check_stages(plan: Plan, source: DocumentSource) -> None:
    """Raise PlanError unless there is a layer for each operator, and stages are of groups of devices in order."""
    if len(plan.layers) != len(plan.graph.operators):
        raise source.fail("layers", f"has {len(plan.layers)} layers; the graph has {len(plan.graph.operators)}")
    in_turns = plan.schedule == INTERLEAVED and plan.num_groups > 1
    is_even = plan.num_stages % plan.num_groups == 0 if in_turns else plan.num_stages == plan.num_groups
    if plan.num_devices % plan.num_groups or not is_even:
        expected = "as many stages" if in_turns else "a stage"
        raise source.fail(
            "",
            f"has {plan.num_stages} stages on {plan.num_groups} groups of {plan.num_devices} devices; expected "
            f"{expected} for each group, and groups of one size",
        )
    stages = [layer.stage for layer in plan.layers]
    if stages[0] or any(not 0 <= later - before <= 1 for before, later in pairwise(stages)):
        problem = f"are of the stages {sorted(set(stages))}; expected stages that count up from 0, in order"
        raise source.fail("layers", problem)


def _check_layer(plan: Plan, operator: Operator, layer: LayerPlan, source: DocumentSource, path: str) -> None:
    """Raise PlanError unless a layer is that of an operator, on all devices of its group."""
    own = layer.name, layer.kind, tuple(layer.dims.items())
    if own != (operator.name, operator.kind, tuple(operator.extents.items())):
        for key, expected in (("name", operator.name), ("kind", operator.kind), ("dims", operator.extents)):
            _same(source, f"{path}.{key}", getattr(layer, key), expected)
    if list(layer.splits) != list(layer.dims):
        names = ", ".join(layer.splits)
        raise source.fail(f"{path}.splits", f"names dims {names}; expected {', '.join(layer.dims)}, in this order")
    for name, factor in layer.splits.items():
        if factor > layer.dims[name]:
            raise source.fail(f"{path}.splits.{name}", f"is {factor}, more than the dim's extent {layer.dims[name]}")
    group = plan.num_devices // plan.num_groups
    if group % layer.num_parts:
        raise source.fail(f"{path}.splits", f"makes {layer.num_parts} parts, which do not divide {group} devices")
    first = layer.stage % plan.num_groups * group
    if len(layer.devices) != group or sorted(layer.devices) != list(range(first, first + group)):
        raise source.fail(f"{path}.devices", f"must name each device {first} … {first + group - 1} once")


def _check_constraints(plan: Plan, source: DocumentSource) -> None:
    """Raise PlanError unless the strategy keeps to the plan's own constraints."""
    if not plan.constraints:
        return
    broken = "which the plan's constraints do not allow: search again"
    try:
        left = allowed(plan.constraints, plan.graph, plan.num_devices // plan.num_groups)
        modes = mode_space(EVERY_MODE, plan.constraints, plan.graph)
        for number, (operator, layer) in enumerate(zip(plan.graph.operators, plan.layers, strict=True)):
            path, splits = f"layers[{number}]", left.configurations(plan.graph, operator)
            if not (splits == np.array([*layer.splits.values()])).all(axis=1).any():
                raise source.fail(f"{path}.splits", "is none that the plan's constraints allow: search again")
            own = modes.of(layer.name)
            has_states = layer.state != REPLICATED or can_be_in_parts(operator, splits_of(operator, splits))
            if has_states and layer.state not in own.states:
                raise source.fail(f"{path}.state", f"is {layer.state!r}, {broken}")
            if layer.is_recomputed and not own.recompute:
                raise source.fail(f"{path}.is_recomputed", f"is true, {broken}")
    except ConfigurationError as error:
        raise source.fail("constraints", f"cannot be kept to: {error}") from None
    for _, group in left.ties:
        if len({tuple(plan[name].splits.values()) for name in group}) > 1:
            raise source.fail("constraints", f"tie {', '.join(group)}, whose configurations differ: search again")


def _check_derived(plan: Plan, step: TrainingStep, document: PlanDocument, source: DocumentSource) -> None:
    """Raise PlanError unless all that follows from the strategy is what the document says.

    These are memory and costs, under the plan's own machine and cost model, and what is said of its proof.
    """
    if document.memory is not UNSET:
        _same(source, "memory", document.memory, MemoryDocument.of(step.peak.memory, optimiser=plan.optimiser))
    if plan.device_memory_bytes is not None and step.peak.bytes > plan.device_memory_bytes:
        problem = f"is {plan.device_memory_bytes}, but the strategy needs {step.peak.bytes}: search again"
        raise source.fail("memory_limit_bytes_per_device", problem)
    try:
        model = cost_model(plan.cost_model, plan.machine, plan.num_devices, plan.precision)
    except (CostError, MachineError) as error:
        raise source.fail("cost_model", f"cannot be used: {error}") from None
    _same(source, "cost_unit", plan.cost_unit, model.unit)
    # Any permutation of the devices is a placement: what a search costs does not depend on it, so that a person may
    # choose another; `Plan.placed_cost` is of it.
    devices = [layer.devices for layer in plan.layers]
    if plan.has_parts:
        layers, baseline = step.plans(devices), data_parallel_step(step).cost
        total = step.cost
    else:
        splits = [layer.splits for layer in plan.layers]
        by_batch = data_parallel_splits(plan.graph, plan.num_devices)
        layers, baseline = plan_layers_beside(
            plan.graph, plan.num_devices, model, splits, devices, by_batch, kept_bytes=step.kept_by_layer
        )
        total = total_cost(plan.layers)
    if layers != plan.layers:
        _same(source, "layers", document.layers, document_of(layers))
    _same(source, "hidden_cost", document.hidden_cost, hidden_cost(layers))
    _same(source, "total_cost", plan.total_cost, total)
    if plan.lower_bound > plan.total_cost * (1 + _RELATIVE_TOLERANCE):
        raise source.fail("lower_bound", f"is {plan.lower_bound:g}, above the total cost {plan.total_cost:g}")
    if plan.exact and not isclose(plan.lower_bound, plan.total_cost, rel_tol=_RELATIVE_TOLERANCE):
        raise source.fail("exact", f"is true, but the lower bound {plan.lower_bound:g} is below {plan.total_cost:g}")
    if not plan.exact and plan.lower_bound >= plan.total_cost > 0:
        raise source.fail("exact", f"is false, but the lower bound is the total cost, {plan.total_cost:g}")
    if abs(document.gap - plan.gap) > _GAP_TOLERANCE:
        _same(source, "gap", document.gap, plan.gap)
    _same(source, "baselines.data_parallel", plan.baselines.get("data_parallel", UNSET), baseline)
