"""Plans as JSON files: written as a whole, read with every field checked and every cost computed again."""

import hashlib
import json
from dataclasses import fields, replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from pase.common.codecs import (
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    Codec,
    array,
    choice,
    defined,
    descriptions,
    json_schema,
    number,
    record,
    table,
    text,
    version,
    wholes,
)
from pase.common.documents import Field, StrPath, read_text, write_atomically
from pase.costs import DEFAULT_OPTIMISER, OPTIMISER_STATE, REPLICATED, STATES, DeviceMemory, cost_model
from pase.costs.modes import ModeSpace, can_be_in_parts
from pase.errors import ConfigurationError, CostError, MachineError, PlanError
from pase.graph import ITEMSIZES, Graph, Precision, graph_document
from pase.graph.document import DIMS, GRAPH, SCALARS
from pase.graph.operators import with_fan_outs
from pase.graph.precision import INDEX, PRECISIONS
from pase.machine.files import MACHINE, machine_descriptions
from pase.planning.constraints import CONSTRAINTS, allowed, constraints_descriptions, mode_space
from pase.planning.pipelines import data_parallel_step
from pase.planning.plan import SCHEDULES, SCHEMA_VERSION, LayerPlan, Plan, SearchRecord, Transfer, hidden_cost
from pase.planning.stages import INTERLEAVED
from pase.planning.steps import Step, plan_layers, total_cost
from pase.sharding.shards import data_parallel_splits, splits_of

_RELATIVE_TOLERANCE = 1e-9
"""Costs are sums of doubles: another order of summation may change their last bits, an edit changes more."""


_LIMIT = "memory_limit_bytes_per_device"

WITHOUT_PEAKS = 2
"""The version of files whose memory is an estimate of another kind than the peak; it is worked out anew."""

_MEMORY_BYTES = (*(field.name for field in fields(DeviceMemory)), "total_bytes")

_TRANSFER = record(Transfer, producer=TEXT, input=WHOLE, cost=NUMBER, forward_bytes=NUMBER, backward_bytes=NUMBER)
_LAYER = record(
    LayerPlan,
    name=TEXT,
    kind=TEXT,
    dims=DIMS,
    splits=table(POSITIVE, minProperties=1),
    devices=wholes(minItems=1, uniqueItems=True),
    layer_cost=NUMBER,
    compute_cost=NUMBER,
    communication_cost=NUMBER,
    memory_bytes=NUMBER,
    transfers=array(defined("transfer", "Transfer", _TRANSFER)),
    hideable_cost=NUMBER.optional(None),
    cover_cost=NUMBER.optional(None),
    state=choice(STATES).optional(REPLICATED),
    is_recomputed=FLAG.optional(False),
    stage=WHOLE.optional(0),
)
_NUMBERS = choice([dtype for dtype in ITEMSIZES if dtype != INDEX])
_PRECISION = record(
    Precision,
    name=TEXT,
    **dict.fromkeys(("parameters", "products", "results", "gradients", "collectives"), _NUMBERS),
    masters=_NUMBERS.optional(""),
    moments=_NUMBERS,
)
_MEMORY: Codec[dict[str, Any]] = record(
    dict, optimiser=choice(OPTIMISER_STATE), **{key: WHOLE.of(f"memory.{key}") for key in _MEMORY_BYTES}
)
_PLAN = record(
    Plan,
    schema_version=version(
        SCHEMA_VERSION,
        before=(WITHOUT_PEAKS,),
        minimum=1,
        hint=lambda found: ": update PaSE" if found > SCHEMA_VERSION else ": search again",
    ),
    tool_version=TEXT,
    model=record(
        dict,
        name=TEXT.of("graph.name"),
        arguments=SCALARS.of("graph.arguments"),
        hash=text(pattern="^[0-9a-f]{64}$").derived(lambda plan: graph_hash(plan.graph)),
    ).derived(lambda plan: plan),
    num_devices=POSITIVE,
    cost_model=TEXT,
    cost_unit=choice(("FLOP", "s")),
    precision=_PRECISION.derived("precision").optional(None),
    total_cost=NUMBER,
    hidden_cost=NUMBER.derived("hidden_cost").optional(0.0),
    lower_bound=NUMBER,
    gap=number(maximum=1).derived("gap"),
    exact=FLAG,
    baselines=table(NUMBER, required=["data_parallel"], properties={"data_parallel": NUMBER.schema}),
    search=record(SearchRecord, ordering=TEXT, largest_dependent_set=WHOLE, time_s=NUMBER, peak_memory_bytes=WHOLE),
    memory=_MEMORY.derived(lambda plan: plan).optional(None),
    **{_LIMIT: POSITIVE.of("device_memory_bytes").optional(None)},
    constraints=CONSTRAINTS.optional(()),
    micro_batches=POSITIVE.optional(1),
    schedule=choice(SCHEDULES).optional(""),
    num_groups=POSITIVE.optional(1),
    layers=array(defined("layer", "Layer", _LAYER), minItems=1),
    machine=defined("machine", "Machine", MACHINE),
    graph=defined("graph", "Computation graph", GRAPH),
)


plan_document = _PLAN.write
"""The JSON form of a plan (`plan_schema`), of which `plan_from_document` makes an equal plan."""


def plan_schema() -> str:
    """Return the JSON Schema of plan files, as text; docs/export.md says what of it stays as it is."""
    described = descriptions("pase.planning", "plan.descriptions.toml") | {
        "machine": machine_descriptions()["document"],
        "constraints": constraints_descriptions(),
    }
    schema = json_schema(_PLAN, identifier="urn:pase:plan:2", title="PaSE plan", described=described)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def graph_hash(graph: Graph) -> str:
    """Return the SHA-256, in hexadecimal, of a graph's canonical JSON form, wherever it came from."""
    own = replace(graph, framework="", call="", untrained="")
    text = json.dumps(graph_document(own), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_plan(plan: Plan, path: StrPath) -> None:
    """Write a plan as a JSON file, replacing an old one atomically; PlanError where the file cannot be written."""
    try:
        write_atomically(Path(path), json.dumps(plan_document(plan), indent=1) + "\n")
    except OSError as error:
        raise PlanError(f"plan file {path} cannot be written: {error.strerror or error}") from None


def read_plan(path: StrPath) -> Plan:
    """Return the plan in a JSON file; PlanError says which field is missing, wrong or not consistent."""
    text = read_text(path, PlanError, f"plan file {path}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.strip() and text.lstrip()[0] not in "{[":
            raise PlanError(
                f"{path} is no plan: it is not JSON; a plan is what 'pase search MODEL --devices N -o plan.json' writes"
            ) from None
        raise PlanError(
            f"plan file {path} is not complete JSON ({error}); it may be truncated: "
            "search again with 'pase search … -o'"
        ) from None
    return plan_from_document(Field(document, "", PlanError, f"plan file {path}"))


load_plan = read_plan
"""The public name of it: `pase.load_plan`."""


def plan_from_document(document: Field) -> Plan:
    """Return the plan of a parsed document, after checking that its costs follow from its strategy."""
    plan = _PLAN.read(document)
    memory = document.get("memory")
    # Plans of earlier versions tell of no memory.
    plan = replace(plan, optimiser=memory["optimiser"].text() if memory else DEFAULT_OPTIMISER)
    _verify_model(document["model"], plan.graph)
    plan = replace(plan, graph=_typed(plan.graph, document))
    in_turns = plan.schedule == INTERLEAVED and plan.num_groups > 1
    is_even = plan.num_stages % plan.num_groups == 0 if in_turns else plan.num_stages == plan.num_groups
    if plan.num_devices % plan.num_groups or not is_even:
        raise document.fail(
            f"has {plan.num_stages} stages on {plan.num_groups} groups of {plan.num_devices} devices; expected "
            f"{'as many stages' if in_turns else 'a stage'} for each group, and groups of one size"
        )
    if with_fan_outs(plan.graph) is not plan.graph:
        raise document["graph"].fail("lacks the fan-outs that sum a gradient for several layers: search again")
    _verify_layers(document["layers"], plan)
    step = Step.of(plan)
    if document["schema_version"].value == WITHOUT_PEAKS:
        layers = (replace(layer, memory_bytes=own) for layer, own in zip(plan.layers, step.kept_by_layer, strict=True))
        plan = replace(plan, layers=tuple(layers))
    else:
        _verify_memory(plan, step, document)
    _verify_constraints(plan, document)
    # A huge number in an edited file may overflow: it is then told apart from the right one, as infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        _verify_costs(plan, step if plan.has_parts else None, document)
    return plan


def _typed(graph: Graph, document: Field) -> Graph:
    """Return the graph in the types that the plan tells of; PlanError where they are none of the graph's."""
    member = document.get("precision")
    if member is None:
        return graph
    found = _PRECISION.read(member)
    if PRECISIONS.get(found.name, found) != found:
        raise member["name"].fail(f"is {found.name!r}, whose types are others: search again")
    if found.itemsize != graph.precision.itemsize:
        raise member["parameters"].fail(
            f"is {found.parameters!r}, of {found.itemsize} bytes; the graph in this file has numbers of "
            f"{graph.precision.itemsize}: search again"
        )
    return graph.in_precision(found)


def _verify_layers(document: Field, plan: Plan) -> None:
    """Raise PlanError unless layers are those of the graph, each on all devices."""
    operators, fields = plan.graph.operators, document.items()
    if len(fields) != len(operators):
        raise document.fail(f"has {len(fields)} layers; the graph has {len(operators)}")
    for field, operator, layer in zip(fields, operators, plan.layers, strict=True):
        for key, expected in (("name", operator.name), ("kind", operator.kind)):
            if field[key].value != expected:
                raise field[key].fail(f"is {field[key].value!r}; the graph has {expected!r} here")
        if list(layer.dims.items()) != list(operator.extents.items()):
            dims = dict(layer.dims)
            raise field["dims"].fail(f"is {dims}; layer {operator.name!r} of the graph has {operator.extents}")
        splits, found = field["splits"], ", ".join(layer.splits) or "none"
        if list(layer.splits) != list(layer.dims):
            raise splits.fail(f"names dims {found}; expected {', '.join(layer.dims)}, in this order")
        for name, factor in layer.splits.items():
            if factor > layer.dims[name]:
                raise splits[name].fail(f"is {factor}, more than the dim's extent {layer.dims[name]}")
        group = plan.num_devices // plan.num_groups
        if group % layer.num_parts:
            raise splits.fail(f"makes {layer.num_parts} parts, which do not divide {group} devices")
        first = layer.stage % plan.num_groups * group
        if len(layer.devices) != group or sorted(layer.devices) != list(range(first, first + group)):
            raise field["devices"].fail(f"must name each device {first} … {first + group - 1} once")
    stages = [layer.stage for layer in plan.layers]
    if stages[0] or any(not 0 <= later - before <= 1 for before, later in pairwise(stages)):
        raise document.fail(f"are of the stages {sorted(set(stages))}; expected stages that count up from 0, in order")


def _verify_model(document: Field, graph: Graph) -> None:
    """Raise PlanError unless what is said of the model is true of the graph in the file."""
    if document["hash"].text() != graph_hash(graph):
        raise document["hash"].fail("is not the hash of the graph in this file; one of them was changed: search again")
    if document["name"].text() != graph.name:
        raise document["name"].fail(f"is {document['name'].value!r}; the graph in this file is {graph.name!r}")
    arguments = {key: field.scalar() for key, field in document["arguments"].members()}
    # As text, because 1, 1.0 and true are equal.
    if repr(arguments) != repr(dict(graph.arguments)):
        raise document["arguments"].fail(f"are {arguments}; the graph in this file has {dict(graph.arguments)}")


def _verify_memory(plan: Plan, step: Step, document: Field) -> None:
    """Raise PlanError unless the memory is that of the strategy, and within the plan's own limit."""
    memory = document.get("memory")
    if memory is not None:
        for key in _MEMORY_BYTES:
            expected = getattr(step.peak.memory, key)
            if memory[key].value != expected:
                raise memory[key].fail(f"is {memory[key].value}, but the strategy needs {expected}: search again")
    for field, layer, own in zip(document["layers"].items(), plan.layers, step.kept_by_layer, strict=True):
        _same(field["memory_bytes"], layer.memory_bytes, own)
    limit = plan.device_memory_bytes
    if limit is not None and (needed := step.peak.bytes) > limit:
        raise document[_LIMIT].fail(f"is {limit}, but the strategy needs {needed}: search again")


def _verify_constraints(plan: Plan, document: Field) -> None:
    """Raise PlanError unless the strategy keeps to the plan's own constraints."""
    member = document.get("constraints")
    if member is None:
        return
    try:
        left = allowed(plan.constraints, plan.graph, plan.num_devices // plan.num_groups)
        modes = mode_space(ModeSpace(states=STATES, recompute=True), plan.constraints, plan.graph)
        for field, operator, layer in zip(document["layers"].items(), plan.graph.operators, plan.layers, strict=True):
            splits = left.configurations(plan.graph, operator)
            if not (splits == np.array([*layer.splits.values()])).all(axis=1).any():
                raise field["splits"].fail("is none that the plan's constraints allow: search again")
            own = modes.of(layer.name)
            has_states = layer.state != REPLICATED or can_be_in_parts(operator, splits_of(operator, splits))
            if has_states and layer.state not in own.states:
                raise field["state"].fail(
                    f"is {layer.state!r}, which the plan's constraints do not allow: search again"
                )
            if layer.is_recomputed and not own.recompute:
                raise field["is_recomputed"].fail("is true, which the plan's constraints do not allow: search again")
    except ConfigurationError as error:
        raise member.fail(f"cannot be kept to: {error}") from None
    for _, group in left.ties:
        if len({tuple(plan[name].splits.values()) for name in group}) > 1:
            raise member.fail(f"tie {', '.join(group)}, whose configurations differ: search again")


def _verify_costs(plan: Plan, step: Step | None, document: Field) -> None:
    """Raise PlanError unless costs are those of the strategy under the plan's own machine and cost model."""
    try:
        model = cost_model(plan.cost_model, plan.machine, plan.num_devices, plan.precision)
    except (CostError, MachineError) as error:
        raise document["cost_model"].fail(f"cannot be used: {error}") from None
    if plan.cost_unit != model.unit:
        raise document["cost_unit"].fail(f"is {plan.cost_unit!r}; cost model {plan.cost_model!r} gives {model.unit!r}")
    # Any permutation of the devices is a placement: what a search costs does not depend on it, so that a person may
    # choose another; `Plan.placed_cost` is of it.
    devices = [layer.devices for layer in plan.layers]
    chosen = [layer.splits for layer in plan.layers]
    expected = step.plans(devices) if step else plan_layers(plan.graph, plan.num_devices, model, chosen, devices)
    for field, layer, right in zip(document["layers"].items(), plan.layers, expected, strict=True):
        for key in ("layer_cost", "compute_cost", "communication_cost"):
            _same(field[key], getattr(layer, key), getattr(right, key))
        for key in ("hideable_cost", "cover_cost"):
            _same_if_told(field, key, getattr(right, key))
        if [(t.producer, t.input) for t in layer.transfers] != [(t.producer, t.input) for t in right.transfers]:
            raise field["transfers"].fail("are not the layer's incoming edges, then its shared weights")
        for entry, transfer, same in zip(field["transfers"].items(), layer.transfers, right.transfers, strict=True):
            for key in ("cost", "forward_bytes", "backward_bytes"):
                _same(entry[key], getattr(transfer, key), getattr(same, key))
    _same_if_told(document, "hidden_cost", hidden_cost(expected) or None)
    _same(document["total_cost"], plan.total_cost, step.cost if step else total_cost(plan.layers))
    if plan.lower_bound > plan.total_cost * (1 + _RELATIVE_TOLERANCE):
        raise document["lower_bound"].fail(f"is {plan.lower_bound:g}, above the total cost {plan.total_cost:g}")
    if plan.exact and not isclose(plan.lower_bound, plan.total_cost, rel_tol=_RELATIVE_TOLERANCE):
        raise document["exact"].fail(f"is true, but the lower bound {plan.lower_bound:g} is below {plan.total_cost:g}")
    if not plan.exact and plan.lower_bound >= plan.total_cost > 0:
        raise document["exact"].fail(f"is false, but the lower bound is the total cost, {plan.total_cost:g}")
    if not isclose(document["gap"].number(), plan.gap, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise document["gap"].fail(f"is {document['gap'].value}; total_cost and lower_bound make it {plan.gap}")
    baseline = document["baselines"]["data_parallel"]
    splits = data_parallel_splits(plan.graph, plan.num_devices)
    if step:
        _same(baseline, baseline.number(), data_parallel_step(step).cost)
        return
    _same(baseline, baseline.number(), total_cost(plan_layers(plan.graph, plan.num_devices, model, splits, devices)))


def _same(field: Field, found: float, expected: float) -> None:
    if not isclose(found, expected, rel_tol=_RELATIVE_TOLERANCE):
        raise field.fail(f"is {found!r}, but the strategy costs {expected!r} there; the file was edited: search again")


def _same_if_told(document: Field, key: str, expected: float | None) -> None:
    """Raise PlanError unless a member that not all plans have is there where it is expected, with that number."""
    member = document.get(key) if expected is None else document[key]
    if member is None:
        return
    if expected is None:
        raise member.fail("is there, but the strategy hides nothing; the file was edited: search again")
    _same(member, member.number(), expected)
