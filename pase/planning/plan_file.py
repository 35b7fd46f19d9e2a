"""Plans as JSON files: written as a whole, read with every field checked and every cost computed again."""

import hashlib
import json
from dataclasses import asdict
from importlib import resources
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np

from pase.common.documents import Field, StrPath, write_atomically
from pase.costs import DEFAULT_OPTIMISER, OPTIMISER_STATE, cost_model
from pase.errors import CostError, MachineError, PlanError
from pase.graph import Graph, graph_document, graph_from_document
from pase.graph.operators import with_fan_outs
from pase.machine import machine_document, machine_from_document
from pase.planning.plan import SCHEMA_VERSION, LayerPlan, Plan, SearchRecord, Transfer
from pase.planning.strategy import plan_layers, total_cost
from pase.sharding.configurations import data_parallel_splits

_RELATIVE_TOLERANCE = 1e-9
"""Costs are sums of doubles: another order of summation may change their last bits, an edit changes more."""


_LIMIT = "memory_limit_bytes_per_device"


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the JSON form of a plan (plan.schema.json); `plan_from_document` returns an equal plan."""
    limit = plan.device_memory_bytes
    return {
        "schema_version": plan.schema_version,
        "tool_version": plan.tool_version,
        "model": {
            "name": plan.graph.name,
            "arguments": dict(plan.graph.arguments),
            "hash": graph_hash(plan.graph),
        },
        "num_devices": plan.num_devices,
        "cost_model": plan.cost_model,
        "cost_unit": plan.cost_unit,
        "total_cost": plan.total_cost,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "exact": plan.exact,
        "baselines": dict(plan.baselines),
        "search": {
            "ordering": plan.search.ordering,
            "largest_dependent_set": plan.search.largest_dependent_set,
            "time_s": plan.search.time_s,
            "peak_memory_bytes": plan.search.peak_memory_bytes,
        },
        "memory": {"optimiser": plan.optimiser, **asdict(plan.memory), "total_bytes": plan.memory.total_bytes},
        **({} if limit is None else {_LIMIT: limit}),
        "layers": [_layer_document(layer) for layer in plan.layers],
        "machine": machine_document(plan.machine),
        "graph": graph_document(plan.graph),
    }


def plan_schema() -> str:
    """Return the JSON Schema of plan files, as text; docs/export.md says what of it stays as it is."""
    return (resources.files("pase.planning") / "plan.schema.json").read_text(encoding="utf-8")


def graph_hash(graph: Graph) -> str:
    """Return the SHA-256, in hexadecimal, of a graph's canonical JSON form."""
    text = json.dumps(graph_document(graph), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_plan(plan: Plan, path: StrPath) -> None:
    """Write a plan as a JSON file, replacing an old one atomically; PlanError where the file cannot be written."""
    try:
        write_atomically(Path(path), json.dumps(plan_document(plan), indent=1) + "\n")
    except OSError as error:
        raise PlanError(f"plan file {path} cannot be written: {error.strerror or error}") from None


def read_plan(path: StrPath) -> Plan:
    """Return the plan in a JSON file; PlanError says which field is missing, wrong or not consistent."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(f"plan file {path} cannot be read: {reason}") from None
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
    version = document["schema_version"]
    if version.integer(1) != SCHEMA_VERSION:
        raise version.fail(
            f"is {version.value}; this version of PaSE reads {SCHEMA_VERSION}: "
            f"{'update PaSE' if version.integer(1) > SCHEMA_VERSION else 'search again'}"
        )
    graph = graph_from_document(document["graph"])
    _verify_model(document["model"], graph)
    if with_fan_outs(graph) is not graph:
        raise document["graph"].fail("lacks the fan-outs that sum a gradient for several layers: search again")
    search = document["search"]
    plan = Plan(
        graph=graph,
        machine=machine_from_document(document["machine"]),
        num_devices=document["num_devices"].integer(1),
        cost_model=document["cost_model"].text(),
        cost_unit=document["cost_unit"].text(),
        layers=_layers(document["layers"], graph, document["num_devices"].integer(1)),
        total_cost=document["total_cost"].number(),
        lower_bound=document["lower_bound"].number(),
        exact=document["exact"].boolean(),
        baselines={name: field.number() for name, field in document["baselines"].members()},
        search=SearchRecord(
            ordering=search["ordering"].text(),
            largest_dependent_set=search["largest_dependent_set"].integer(),
            time_s=search["time_s"].number(),
            peak_memory_bytes=search["peak_memory_bytes"].integer(),
        ),
        tool_version=document["tool_version"].text(),
        optimiser=_optimiser(document),
        device_memory_bytes=limit.integer(1) if (limit := document.get(_LIMIT)) else None,
    )
    _verify_memory(plan, document)
    # A huge number in an edited file may overflow: it is then told apart from the right one, as infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        _verify_costs(plan, document)
    return plan


def _layer_document(layer: LayerPlan) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "dims": layer.dims,
        "splits": layer.splits,
        "devices": list(layer.devices),
        "layer_cost": layer.layer_cost,
        "compute_cost": layer.compute_cost,
        "communication_cost": layer.communication_cost,
        "memory_bytes": layer.memory_bytes,
        "transfers": [
            {
                "producer": transfer.producer,
                "input": transfer.input,
                "cost": transfer.cost,
                "forward_bytes": transfer.forward_bytes,
                "backward_bytes": transfer.backward_bytes,
            }
            for transfer in layer.transfers
        ],
    }


def _layers(document: Field, graph: Graph, num_devices: int) -> tuple[LayerPlan, ...]:
    found = document.items()
    if len(found) != len(graph.operators):
        raise document.fail(f"has {len(found)} layers; the graph has {len(graph.operators)}")
    layers = []
    for field, operator in zip(found, graph.operators, strict=True):
        for key, expected in (("name", operator.name), ("kind", operator.kind)):
            if field[key].text() != expected:
                raise field[key].fail(f"is {field[key].value!r}; the graph has {expected!r} here")
        dims = {name: extent.integer(1) for name, extent in field["dims"].members()}
        if list(dims.items()) != list(operator.extents.items()):
            raise field["dims"].fail(f"is {dims}; layer {operator.name!r} of the graph has {operator.extents}")
        layers.append(
            LayerPlan(
                name=operator.name,
                kind=operator.kind,
                dims=dims,
                splits=_splits(field["splits"], dims, num_devices),
                devices=_devices(field["devices"], num_devices),
                layer_cost=field["layer_cost"].number(),
                compute_cost=field["compute_cost"].number(),
                communication_cost=field["communication_cost"].number(),
                memory_bytes=field["memory_bytes"].number(),
                transfers=tuple(
                    Transfer(
                        producer=transfer["producer"].text(),
                        input=transfer["input"].integer(),
                        cost=transfer["cost"].number(),
                        forward_bytes=transfer["forward_bytes"].number(),
                        backward_bytes=transfer["backward_bytes"].number(),
                    )
                    for transfer in field["transfers"].items()
                ),
            )
        )
    return tuple(layers)


def _splits(document: Field, dims: dict[str, int], num_devices: int) -> dict[str, int]:
    splits = {name: factor.integer(1) for name, factor in document.members()}
    if list(splits) != list(dims):
        raise document.fail(f"names dims {', '.join(splits) or 'none'}; expected {', '.join(dims)}, in this order")
    for name, factor in document.members():
        if dims[name] % factor.integer(1):
            raise factor.fail(f"is {factor.value}, which does not divide the dim's extent {dims[name]}")
    if num_devices % prod(splits.values()):
        raise document.fail(f"makes {prod(splits.values())} parts, which do not divide {num_devices} devices")
    return splits


def _devices(document: Field, num_devices: int) -> tuple[int, ...]:
    devices = document.integers()
    if len(devices) != num_devices or sorted(devices) != list(range(num_devices)):
        raise document.fail(f"must name each device 0 … {num_devices - 1} once")
    return devices


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


def _optimiser(document: Field) -> str:
    """Return the optimiser whose state a plan counts; plans of earlier versions, without memory, count none."""
    memory = document.get("memory")
    if memory is None:
        return DEFAULT_OPTIMISER
    name = memory["optimiser"]
    if name.text() not in OPTIMISER_STATE:
        raise name.fail(f"is {name.value!r}; expected one of {', '.join(OPTIMISER_STATE)}")
    return name.text()


def _verify_memory(plan: Plan, document: Field) -> None:
    """Raise PlanError unless the memory is that of the strategy, and within the plan's own limit."""
    memory = document.get("memory")
    if memory is not None:
        for key, expected in {**asdict(plan.memory), "total_bytes": plan.memory.total_bytes}.items():
            if memory[key].integer() != expected:
                raise memory[key].fail(f"is {memory[key].value}, but the strategy needs {expected}: search again")
    limit = plan.device_memory_bytes
    if limit is not None and plan.memory.total_bytes > limit:
        raise document[_LIMIT].fail(f"is {limit}, but the strategy needs {plan.memory.total_bytes}: search again")


def _verify_costs(plan: Plan, document: Field) -> None:
    """Raise PlanError unless costs are those of the strategy under the plan's own machine and cost model."""
    try:
        model = cost_model(plan.cost_model, plan.machine, plan.num_devices)
    except (CostError, MachineError) as error:
        raise document["cost_model"].fail(f"cannot be used: {error}") from None
    if plan.cost_unit != model.unit:
        raise document["cost_unit"].fail(f"is {plan.cost_unit!r}; cost model {plan.cost_model!r} gives {model.unit!r}")
    # Any permutation of the devices is a placement: costs do not depend on it, so that a person may choose another.
    devices = [layer.devices for layer in plan.layers]
    chosen = [layer.splits for layer in plan.layers]
    expected = plan_layers(plan.graph, plan.num_devices, model, chosen, devices, optimiser=plan.optimiser)
    for field, layer, right in zip(document["layers"].items(), plan.layers, expected, strict=True):
        for key in ("layer_cost", "compute_cost", "communication_cost", "memory_bytes"):
            _same(field[key], getattr(layer, key), getattr(right, key))
        if [(t.producer, t.input) for t in layer.transfers] != [(t.producer, t.input) for t in right.transfers]:
            raise field["transfers"].fail("are not the layer's incoming edges, then its shared weights")
        for entry, transfer, same in zip(field["transfers"].items(), layer.transfers, right.transfers, strict=True):
            for key in ("cost", "forward_bytes", "backward_bytes"):
                _same(entry[key], getattr(transfer, key), getattr(same, key))
    _same(document["total_cost"], plan.total_cost, total_cost(plan.layers))
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
    _same(baseline, baseline.number(), total_cost(plan_layers(plan.graph, plan.num_devices, model, splits, devices)))


def _same(field: Field, found: float, expected: float) -> None:
    if not isclose(found, expected, rel_tol=_RELATIVE_TOLERANCE):
        raise field.fail(f"is {found!r}, but the strategy costs {expected!r} there; the file was edited: search again")
