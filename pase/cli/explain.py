"""`pase explain`: why a plan, or one of its layers, is as it is; what it costs, where it lies and what it moves."""

from collections.abc import Iterable, Sequence
from typing import Any

import click

from pase.analysis.explanation import (
    ExplainOptions,
    Explanation,
    Sensitivity,
    configuration_text,
    explain,
    sensitivity,
)
from pase.analysis.placements import PlacementTraffic, bytes_by_level, compare_placements
from pase.cli.options import chosen_plan, json_option, plan_argument, plan_options, time_limit_option
from pase.cli.output import print_json, print_table, quantity, say, total_cost_text
from pase.cli.progress import progress
from pase.cli.why import (
    explanation_document,
    print_layer_why,
    print_sensitivity,
    print_why,
    sensitivity_document,
    why_document,
)
from pase.errors import PlanError, unknown_name
from pase.planning.plan import LayerPlan, Plan
from pase.sharding.layouts import device_mesh
from pase.sharding.traffic import Flow

_SHOWN_DEVICES = 16
"""Of a part's devices, how many a table names."""


@click.command("explain", epilog="Example: pase explain plan.json fc1")
@plan_argument
@click.argument("layer", required=False)
@plan_options
@click.option("--why/--no-why", "is_why", default=True, help="Say why, or costs and bytes alone.")
@click.option("--sensitivity", "is_sensitivity", is_flag=True, help="Search with each machine figure 20% off, too.")
@time_limit_option("Seconds for one search, of the many that it takes.")
@json_option
def explain_command(
    plan: str,
    layer: str | None,
    is_why: bool,
    is_sensitivity: bool,
    time_limit_s: float | None,
    as_json: bool,
    **model: Any,
) -> None:
    """Say why PLAN's layers have their configurations, or LAYER alone; of a MODEL, those of the best plan on --devices.

    For each layer: what binds, the next best configuration and what it would cost, and the machine's ratio r at which
    the choice would change. Then costs, where parts lie, and the bytes of a step under the plan's placement, under the
    paper's greedy one and with every layer's parts on the devices in order, those that cross nodes apart.
    """
    with progress() as show:
        found = chosen_plan(plan, model, show)
    if layer is not None and layer not in found.index:
        raise PlanError(unknown_name("layer", layer, found.index))
    names = list(found.index) if layer is None else [layer]
    options = ExplainOptions(time_limit_s=time_limit_s)
    with progress() as show:
        why = explain(found, names, options=options, on_progress=show) if is_why else None
        moves = sensitivity(found, time_limit_s=time_limit_s, on_progress=show) if is_sensitivity else None
        show("following what moves between devices", 0.0)
        placements = [_of(placement, layer) for placement in compare_placements(found)]
    if as_json:
        print_json(_document(found, names, placements, why, moves))
        return
    if layer is None:
        _print_plan(found, placements, why)
    else:
        _print_layer(found, found[layer], placements, why)
    if moves is not None:
        say()
        say("With another machine, one figure at a time:")
        say()
        print_sensitivity(found, moves)


def _of(placement: PlacementTraffic, layer: str | None) -> PlacementTraffic:
    """Return what a layer takes part in, of all that moves."""
    flows = placement.flows
    if layer is not None:
        flows = tuple(flow for flow in flows if layer in (flow.movement.producer, flow.movement.consumer))
    return PlacementTraffic(name=placement.name, devices=placement.devices, flows=flows)


# -- for programs


def _document(
    plan: Plan,
    names: Sequence[str],
    placements: Sequence[PlacementTraffic],
    why: Explanation | None,
    moves: Sequence[Sensitivity] | None,
) -> dict[str, Any]:
    levels = plan.machine.levels_spanned(plan.num_devices)
    return {
        "model": plan.graph.name,
        "num_devices": plan.num_devices,
        "cost_model": plan.cost_model,
        "cost_unit": plan.cost_unit,
        "levels": [{"name": level.name, "devices": level.num_devices} for level in levels],
        **(explanation_document(why) if why else {}),
        "layers": [
            _layer_document(plan, plan[name], placements) | ({"why": why_document(why[name], why)} if why else {})
            for name in names
        ],
        **({"sensitivity": sensitivity_document(moves)} if moves is not None else {}),
        "edges": _edge_documents(plan, names, placements),
        "placements": [
            {"name": placement.name}
            | {
                f"{what}_{key}": value
                for what, flows in (("edge", _edges(placement.flows)), ("layer", _inner(placement.flows)))
                for key, value in _bytes_document(plan, flows).items()
            }
            for placement in placements
        ],
    }


def _layer_document(plan: Plan, layer: LayerPlan, placements: Sequence[PlacementTraffic]) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "dims": layer.dims,
        "splits": layer.splits,
        "devices": list(layer.devices),
        "replicas": layer.num_replicas,
        "compute_cost": layer.compute_cost,
        "communication_cost": layer.communication_cost,
        "transfer_cost": _transfer_cost(layer),
        "memory_bytes": layer.memory_bytes,
        "placements": [
            {"name": placement.name} | _bytes_document(plan, _within(placement.flows, layer.name))
            for placement in placements
        ],
    }


def _edge_documents(plan: Plan, layers: Sequence[str], placements: Sequence[PlacementTraffic]) -> list[dict[str, Any]]:
    return [
        {
            "producer": producer,
            "consumer": consumer,
            "placements": [
                {"name": placement.name} | _bytes_document(plan, _between(placement.flows, producer, consumer))
                for placement in placements
            ],
        }
        for producer, consumer in _pairs(plan, layers, placements)
    ]


def _bytes_document(plan: Plan, flows: Sequence[Flow]) -> dict[str, Any]:
    return {
        "bytes": sum(flow.total_bytes for flow in flows),
        "forward_bytes": sum(flow.total_bytes for flow in flows if flow.movement.phase == "forward"),
        "bytes_by_level": _levels(plan, flows),
    }


# -- for people


def _print_plan(plan: Plan, placements: Sequence[PlacementTraffic], why: Explanation | None) -> None:
    ours = placements[0].flows
    if why:
        print_why(plan, why)
        say()
        say("Costs of each layer, and the bytes that its edges and itself move:")
        say()
    print_table(
        ["<layer", "<configuration", "compute", "communication", "transfers", "memory", "edges in", "within"],
        [
            [
                layer.name,
                configuration_text(layer.splits, plan.num_devices),
                *(
                    quantity(cost, plan.cost_unit)
                    for cost in (layer.compute_cost, layer.communication_cost, _transfer_cost(layer))
                ),
                quantity(layer.memory_bytes, "B"),
                _moved([flow for flow in _edges(ours) if flow.movement.consumer == layer.name]),
                _moved(_within(ours, layer.name)),
            ]
            for layer in plan.layers
        ],
    )
    if not why:
        say()
        say(f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
        say(f"  total cost              {total_cost_text(plan)}   (cost model {plan.cost_model})")
    say()
    say("Bytes that a step moves between all devices, under this plan's placement and two others:")
    say()
    rows = [(placement.name, placement.flows) for placement in placements]
    _print_moved(plan, "placement", rows)


def _print_layer(plan: Plan, layer: LayerPlan, placements: Sequence[PlacementTraffic], why: Explanation | None) -> None:
    unit = plan.cost_unit
    space = " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items())
    say(f"{layer.name} ({layer.kind}) of {plan.graph.name} on {plan.num_devices} devices")
    say(f"  iteration space         {space}")
    say(f"  configuration           {configuration_text(layer.splits, plan.num_devices)}")
    say(f"  compute                 {quantity(layer.compute_cost, unit)}")
    say(f"  communication inside    {quantity(layer.communication_cost, unit)}")
    say(f"  transfers on edges in   {quantity(_transfer_cost(layer), unit)}")
    say(f"  memory                  {quantity(layer.memory_bytes, 'B')} on each device")
    say()
    if why:
        print_layer_why(plan, why[layer.name], why)
        say()
    print_table(["<part", "<devices"], _parts(plan, layer))
    for placement in placements:
        say()
        say(f"bytes that a step moves, {_TITLES[placement.name]}:")
        rows = [
            (f"{producer} → {consumer}", _between(placement.flows, producer, consumer))
            for producer, consumer in _pairs(plan, [layer.name], placements)
        ]
        _print_moved(plan, "edge", [*rows, ("within the layer", _within(placement.flows, layer.name))])


_TITLES = {
    "plan": "as placed by the plan",
    "greedy": "under the paper's greedy assignment",
    "device order": "with all parts on the devices in order",
}


def _print_moved(plan: Plan, what: str, rows: Sequence[tuple[str, Sequence[Flow]]]) -> None:
    """Print bytes: all, forward, and those of each level of the machine beyond the first."""
    levels = plan.machine.levels_spanned(plan.num_devices)
    is_split = what == "placement"
    parts = [("edges", _edges), ("layers", _inner)] if is_split else [("", list)]
    headers = [f"<{what}"]
    for name, _ in parts:
        headers += [f"{name} {column}".strip() for column in ("forward", "in all")]
        headers += [f"{name} across {level.name}s".strip() for level in levels[:-1]]
    table = []
    for name, flows in rows:
        row = [name]
        for _, choose in parts:
            chosen = choose(flows)
            row.append(_moved([flow for flow in chosen if flow.movement.phase == "forward"]))
            row.append(_moved(chosen))
            by_level = _levels(plan, chosen)
            # What crosses a level is what takes a link of the next ones.
            row += [quantity(sum(by_level[i + 1 :]), "B") for i in range(len(levels) - 1)]
        table.append(row)
    print_table(headers, table)


def _parts(plan: Plan, layer: LayerPlan) -> list[list[str]]:
    """Return rows of a part's coordinates and the devices that hold it."""
    mesh = device_mesh(layer.name, layer.splits.items(), plan.num_devices, layer.devices)
    names = [name for name, size in layer.splits.items() if size > 1]
    holders: dict[str, list[int]] = {}
    for device, point in zip(mesh.devices, mesh.coordinates, strict=True):
        part = " ".join(f"{name}={point[name]}" for name in names) or "whole"
        holders.setdefault(part, []).append(device)
    return [[part, _listed(sorted(devices))] for part, devices in holders.items()]


def _listed(devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:_SHOWN_DEVICES]))
    return shown if len(devices) <= _SHOWN_DEVICES else f"{shown} … ({len(devices)} in all)"


# -- choosing flows


def _edges(flows: Iterable[Flow]) -> list[Flow]:
    return [flow for flow in flows if flow.is_of_edge]


def _inner(flows: Iterable[Flow]) -> list[Flow]:
    return [flow for flow in flows if not flow.is_of_edge]


def _within(flows: Iterable[Flow], layer: str) -> list[Flow]:
    return [flow for flow in _inner(flows) if flow.movement.consumer == layer]


def _between(flows: Iterable[Flow], producer: str, consumer: str) -> list[Flow]:
    return [flow for flow in flows if (flow.movement.producer, flow.movement.consumer) == (producer, consumer)]


def _pairs(plan: Plan, layers: Iterable[str], placements: Sequence[PlacementTraffic]) -> list[tuple[str, str]]:
    """Return the edges of some layers, those of shared weights that move something included."""
    wanted = set(layers)
    shared = (flow.movement for placement in placements for flow in _edges(placement.flows))
    every = [(edge.producer, edge.consumer) for edge in plan.graph.edges]
    every += [(movement.producer, movement.consumer) for movement in shared]
    return list(dict.fromkeys(pair for pair in every if not wanted.isdisjoint(pair)))


def _levels(plan: Plan, flows: Iterable[Flow]) -> list[int]:
    levels = plan.machine.levels_spanned(plan.num_devices)
    rows = [bytes_by_level(flow.bytes_by_pair, levels) for flow in flows]
    return [sum(column) for column in zip(*rows, strict=True)] or [0] * len(levels)


def _moved(flows: Iterable[Flow]) -> str:
    return quantity(sum(flow.total_bytes for flow in flows), "B")


def _transfer_cost(layer: LayerPlan) -> float:
    return sum(transfer.cost for transfer in layer.transfers)
