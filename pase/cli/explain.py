"""`pase explain`: why a plan, or one of its layers, is as it is; what it costs, where it lies and what it moves."""

from collections.abc import Iterable, Sequence
from typing import Any

import click

from pase.analysis.explanation import (
    FARTHEST,
    TIE,
    ExplainOptions,
    Explanation,
    Flip,
    Improvement,
    LayerExplanation,
    RunnerUp,
    Sensitivity,
    StepExplanation,
    configuration_text,
    explain,
    explain_step,
    other_schemes,
    sensitivity,
)
from pase.analysis.placements import PlacementTraffic, bytes_by_level, compare_placements
from pase.cli.explain_step import (
    print_schemes,
    print_step,
    print_step_layer,
    schemes_document,
    step_document,
    step_layer_document,
)
from pase.cli.layer_table import all_layers_option, print_layers, times_text
from pase.cli.options import chosen_plan, json_option, plan_argument, plan_options, time_limit_option
from pase.cli.output import hidden_text, print_json, print_table, quantity, say, total_cost_text
from pase.cli.progress import progress
from pase.common.quantities import number, percent
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
@click.option("--schemes", "is_schemes", is_flag=True, help="Search other numbers of stages and micro-batches, too.")
@all_layers_option
@time_limit_option("Seconds for one search, of the many that it takes.")
@json_option
def explain_command(
    plan: str,
    layer: str | None,
    is_why: bool,
    is_sensitivity: bool,
    is_schemes: bool,
    shows_all: bool,
    time_limit_s: float | None,
    as_json: bool,
    **model: Any,
) -> None:
    """Say why PLAN's layers have their configurations, or LAYER alone; of a MODEL, those of the best plan on --devices.

    For each layer: what binds, the next best configuration and what it would cost, and the machine's ratio r at which
    the choice would change. Then costs, where parts lie, and the bytes of a step under the plan's placement, under the
    paper's greedy one and with every layer's parts on the devices in order, those that cross nodes apart.

    For a plan with micro-batches, stages or modes: what bounds the step, and what each layer would cost and need in
    other modes.
    """
    with progress() as show:
        found = chosen_plan(plan, model, show)
    if layer is not None and layer not in found.index:
        raise PlanError(unknown_name("layer", layer, found.index))
    names = list(found.index) if layer is None else [layer]
    if is_schemes and not found.has_parts:
        raise PlanError("the plan has one stage and one micro-batch, and no modes: --schemes is for plans with these")
    options = ExplainOptions(time_limit_s=time_limit_s)
    why: Explanation | StepExplanation | None = None
    with progress() as show:
        if is_why and found.has_parts:
            why = explain_step(found, None if layer is None else names, on_progress=show)
        elif is_why:
            why = explain(found, names, options=options, on_progress=show)
        schemes = other_schemes(found, on_progress=show) if is_schemes else None
        moves = sensitivity(found, time_limit_s=time_limit_s, on_progress=show) if is_sensitivity else None
        show("following what moves between devices", 0.0)
        placements = [_of(placement, layer) for placement in compare_placements(found)]
    if as_json:
        document = _document(found, names, placements, why, moves)
        print_json(document | ({} if schemes is None else {"schemes": schemes_document(schemes)}))
        return
    if layer is None:
        _print_plan(found, placements, why, shows_all=shows_all)
    else:
        _print_layer(found, found[layer], placements, why)
    if moves is not None:
        say()
        say("With another machine, one figure at a time:")
        say()
        print_sensitivity(found, moves)
    if schemes is not None:
        say()
        print_schemes(found, schemes)


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
    why: Explanation | StepExplanation | None,
    moves: Sequence[Sensitivity] | None,
) -> dict[str, Any]:
    levels = plan.machine.levels_spanned(plan.num_devices)
    of_plan: dict[str, Any] = {}
    of_layers: dict[str, dict[str, Any]] = {}
    match why:
        case Explanation():
            of_plan = {
                "total_cost": why.plan_cost,
                "is_optimal": why.is_optimal,
                "optimum": {"total_cost": why.optimum_cost, "exact": why.is_proven},
                "flop_per_byte": why.flop_per_byte,
                "flips_searched": {"from_scale": why.searched[0], "to_scale": why.searched[1]},
                "improvement": improvement_document(why.improvement, plan),
            }
            of_layers = {name: {"why": why_document(why[name], why)} for name in names}
        case StepExplanation():
            of_plan = {"step": step_document(why)}
            of_layers = {layer.name: {"why": step_layer_document(layer)} for layer in why.layers}
    return {
        "model": plan.graph.name,
        "num_devices": plan.num_devices,
        "cost_model": plan.cost_model,
        "cost_unit": plan.cost_unit,
        "hidden_cost": plan.hidden_cost,
        "levels": [{"name": level.name, "devices": level.num_devices} for level in levels],
        **of_plan,
        "layers": [_layer_document(plan, plan[name], placements) | of_layers.get(name, {}) for name in names],
        **({"sensitivity": sensitivity_document(moves)} if moves is not None else {}),
        "edges": [
            {
                "producer": producer,
                "consumer": consumer,
                "placements": [
                    {"name": placement.name} | _bytes_document(plan, _between(placement.flows, producer, consumer))
                    for placement in placements
                ],
            }
            for producer, consumer in _pairs(plan, names, placements)
        ],
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
        "stage": layer.stage,
        "state": layer.state,
        "is_recomputed": layer.is_recomputed,
        "compute_cost": layer.compute_cost,
        "communication_cost": layer.communication_cost,
        "transfer_cost": layer.transfer_cost,
        "hidden_cost": plan.hidden_of(layer),
        "memory_bytes": layer.memory_bytes,
        "placements": [
            {"name": placement.name} | _bytes_document(plan, _within(placement.flows, layer.name))
            for placement in placements
        ],
    }


def _bytes_document(plan: Plan, flows: Sequence[Flow]) -> dict[str, Any]:
    return {
        "bytes": sum(flow.total_bytes for flow in flows),
        "forward_bytes": sum(flow.total_bytes for flow in flows if flow.movement.phase == "forward"),
        "bytes_by_level": _levels(plan, flows),
    }


# -- for people


def _print_plan(
    plan: Plan, placements: Sequence[PlacementTraffic], why: Explanation | StepExplanation | None, *, shows_all: bool
) -> None:
    ours, unit = placements[0].flows, plan.cost_unit
    hides = plan.hidden_cost > 0
    if why:
        if isinstance(why, StepExplanation):
            print_step(why, shows_all=shows_all)
        else:
            print_why(plan, why, shows_all=shows_all)
        say()
        say("Costs of each layer, and the bytes that its edges and itself move:")
        say()
    print_layers(
        plan.graph,
        [
            *("<layer", "<configuration", "compute", "communication", "transfers"),
            *["hidden"] * hides,
            *("memory", "edges in", "within"),
        ],
        [
            [
                layer.name,
                configuration_text(layer.splits, len(layer.devices)),
                *(quantity(cost, unit) for cost in (layer.compute_cost, layer.communication_cost, layer.transfer_cost)),
                *[quantity(plan.hidden_of(layer), unit)] * hides,
                quantity(layer.memory_bytes, "B"),
                _moved([flow for flow in _edges(ours) if flow.movement.consumer == layer.name]),
                _moved(_within(ours, layer.name)),
            ]
            for layer in plan.layers
        ],
        [(layer.kind, tuple(layer.dims.items())) for layer in plan.layers],
        shows_all=shows_all,
    )
    if not why:
        say()
        say(f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
        say(f"  total cost              {total_cost_text(plan)}   (cost model {plan.cost_model})")
        if hides:
            say(f"  hidden                  {hidden_text(plan)}")
        if plan.precision.text:
            say(f"  precision               {plan.precision.text}")
    say()
    others = " and two others" if len(placements) > 1 else ""
    say(f"Bytes that a step moves between all devices, under this plan's placement{others}:")
    say()
    rows = [(placement.name, placement.flows) for placement in placements]
    _print_moved(plan, "placement", rows)


def _print_layer(
    plan: Plan,
    layer: LayerPlan,
    placements: Sequence[PlacementTraffic],
    why: Explanation | StepExplanation | None,
) -> None:
    unit = plan.cost_unit
    space = " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items())
    say(f"{layer.name} ({layer.kind}) of {plan.graph.name} on {plan.num_devices} devices")
    say(f"  iteration space         {space}")
    say(f"  configuration           {configuration_text(layer.splits, len(layer.devices))}")
    if plan.modes_of(layer):
        say(f"  mode                    {', '.join(plan.modes_of(layer))}")
    say(f"  compute                 {quantity(layer.compute_cost, unit)}")
    again = " (with its forward pass, once more)" if layer.is_recomputed else ""
    say(f"  communication inside    {quantity(layer.communication_cost, unit)}{again}")
    say(f"  transfers on edges in   {quantity(layer.transfer_cost, unit)}")
    if plan.hidden_cost:
        hidden = quantity(plan.hidden_of(layer), unit)
        say(f"  hidden of these         {hidden} of {quantity(layer.hideable_cost or 0.0, unit)} that can hide")
    say(f"  memory                  {quantity(layer.memory_bytes, 'B')} on each device")
    say()
    if isinstance(why, StepExplanation):
        print_step_layer(why, why[layer.name])
        say()
    elif why:
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
    # Those of a stage are counted from its first one.
    first, count = min(layer.devices), len(layer.devices)
    mesh = device_mesh(layer.name, layer.splits.items(), count, [device - first for device in layer.devices])
    names = [name for name, size in layer.splits.items() if size > 1]
    holders: dict[str, list[int]] = {}
    for device, point in zip(mesh.devices, mesh.coordinates, strict=True):
        part = " ".join(f"{name}={point[name]}" for name in names) or "whole"
        holders.setdefault(part, []).append(first + device)
    return [[part, _listed([*map(str, sorted(devices))], _SHOWN_DEVICES)] for part, devices in holders.items()]


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


def print_why(plan: Plan, explanation: Explanation, *, shows_all: bool = False) -> None:
    """Print why every layer has its configuration; layers that are alike in all of it stand in one row unless it
    shows all.
    """
    say(f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
    say(f"  total cost              {_verdict(explanation)}   (cost model {plan.cost_model})")
    if plan.hidden_cost:
        say(f"  hidden                  {hidden_text(plan)}")
    for title, text in improvement_texts(explanation.improvement, plan):
        say(f"  {title:<23} {text}")
    say(f"  flips                   {_searched(explanation)}")
    say()
    groups = [[layer] for layer in explanation.layers] if shows_all else _alike(plan, explanation)
    times = [f" {times_text(len(group))}" if len(group) > 1 else "" for group in groups]
    at = "at r" if explanation.flop_per_byte else "at"
    print_table(
        [
            "<layer",
            "<configuration",
            "<what binds",
            "<runner-up",
            "costs",
            f"<flips below {at}",
            f"<flips above {at}",
        ],
        [
            [f"{group[0].name}{count}", *_row(plan, group[0], explanation)]
            for group, count in zip(groups, times, strict=True)
        ],
    )
    if any(times):
        say()
        say("× n: n layers with the same row, the first of which is named; --all-layers prints each.")
    say()
    say("Why:")
    for group, count in zip(groups, times, strict=True):
        say(f"  {group[0].reason}{f'  ({count.strip()})' if count else ''}")


def improvement_texts(found: Improvement | None, plan: Plan) -> list[tuple[str, str]]:
    """Return what is said, each with its title, of what a plan that is not the cheapest had better change."""
    if found is None:
        return []
    unit = plan.cost_unit
    share = percent(-found.saving / plan.total_cost)
    changes = [f"{name} to {configuration_text(splits, plan.num_devices)}" for name, splits in found.changes]
    return [
        ("largest excess", f"{found.layer}: {quantity(found.excess, unit)} more than in the cheapest strategy"),
        ("change first", f"{_listed(changes)}: {share}, {quantity(plan.total_cost - found.saving, unit)} in all"),
    ]


def improvement_document(found: Improvement | None, plan: Plan) -> dict[str, Any] | None:
    """Return the JSON form of what a plan had better change."""
    if found is None:
        return None
    return {
        "layer": found.layer,
        "excess": found.excess,
        "changes": [{"name": name, "splits": splits} for name, splits in found.changes],
        "saving": found.saving,
        "total_cost": plan.total_cost - found.saving,
    }


def print_layer_why(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> None:
    """Print why one layer has its configuration, in full."""
    unit, count = explanation.cost_unit, plan.num_devices
    say(f"Why: {layer.reason}.")
    if not explanation.is_optimal:
        say(f"  the plan                {_verdict(explanation)}")
        own = "it is part of a cheapest strategy" if layer.is_best else "no cheapest strategy has it"
        say(f"  this configuration      {own}: with it, the least is {quantity(layer.kept_total_cost, unit)}")
    _print_runner_up(layer.runner_up, explanation, count)
    for what, flip, end in (
        ("faster", layer.below, explanation.searched[0]),
        ("slower", layer.above, explanation.searched[1]),
    ):
        found = NOT_LOOKED_FOR
        if end != 1:
            found = f"never {'down' if end < 1 else 'up'} to {_ratio(end, explanation, is_long=True)}"
        if flip is not None:
            found = f"{configuration_text(flip.splits, count)} at {_ratio(flip.scale, explanation, is_long=True)}"
        say(f"  with {what} links       {found}")
    say()
    say("What it pays, with its edges on both sides:")
    say()
    whole = sum(part.paid for part in layer.parts)
    hides = plan.hidden_cost > 0
    print_table(
        ["<part", "cost", *["hidden"] * hides, "share", "bytes", "devices"],
        [
            [
                part.name,
                quantity(part.cost, unit),
                *[quantity(part.hidden, unit)] * hides,
                f"{part.paid / whole:.1%}" if whole else "",
                quantity(part.size_bytes, "B") if part.size_bytes else "",
                str(part.group or ""),
            ]
            for part in layer.parts
        ],
    )
    if layer.runner_up is not None and layer.runner_up.rises:
        _print_rises(layer.runner_up, unit)


def _print_rises(runner_up: RunnerUp, unit: str) -> None:
    """Print what a runner-up's difference is made of: its largest parts, the others together, and what hides."""
    shown, others = runner_up.rises[:_SHOWN], runner_up.rises[_SHOWN:]
    rows = [(rise.layer, rise.part, rise.cost) for rise in shown]
    if others:
        rows.append((f"{len(others)} more", "", sum(rise.cost for rise in others)))
    if runner_up.hidden:
        rows.append(("", "hidden", -runner_up.hidden))
    rows.append(("", "in all", runner_up.difference))
    say()
    say("What the runner-up costs more, part by part:")
    say()
    print_table(["<layer", "<part", "more"], [[layer, part, _signed(cost, unit)] for layer, part, cost in rows])


def _signed(cost: float, unit: str) -> str:
    return f"{'-' if cost < 0 else '+'}{quantity(abs(cost), unit)}"


def print_sensitivity(plan: Plan, found: Sequence[Sensitivity]) -> None:
    """Print what each figure of the machine, lower and higher, would change."""
    used = [one for one in found if one.is_used]
    print_table(
        ["<figure", "by", "best time", "this plan loses", "<layers that move"],
        [
            [
                one.figure,
                percent(one.factor - 1),
                *_outcome(one),
                _listed([f"{name} {configuration_text(to, plan.num_devices)}" for name, to in one.moves]) or "none",
            ]
            for one in used
        ],
    )
    idle = dict.fromkeys(one.figure for one in found) | {one.figure: None for one in used}
    unused = [figure for figure in idle if figure not in {one.figure for one in used}]
    if unused:
        say()
        say(f"Costs by {plan.cost_model} do not depend on: {', '.join(unused)}.")


def _print_runner_up(runner_up: RunnerUp | None, explanation: Explanation, num_devices: int) -> None:
    if runner_up is None:
        say("  runner-up               none")
        return
    costs = _costs(runner_up, explanation)
    text = configuration_text(runner_up.splits, num_devices)
    proven = "" if runner_up.is_exact else ", not proven to be the least"
    total = quantity(runner_up.total_cost, explanation.cost_unit)
    say(f"  runner-up               {text}: {costs} ({total} in all{proven})")
    if runner_up.changes:
        changes = [f"{name} {configuration_text(splits, num_devices)}" for name, splits in runner_up.changes or ()]
        say(f"    with it change        {_listed(changes)}")
    alone = "none fits"
    if runner_up.alone is not None:
        difference = percent(explanation.relative(runner_up.alone_difference))
        alone = f"{configuration_text(runner_up.alone, num_devices)}: {difference}"
    say(f"    all others kept       {alone}")


NOT_LOOKED_FOR = "not looked for: costs do not add up under this cost model"
"""What is said of links of another speed where no scale but that of the machine was looked at."""


def _verdict(explanation: Explanation) -> str:
    cost = quantity(explanation.plan_cost, explanation.cost_unit)
    if explanation.is_optimal:
        return f"{cost}, {'proven optimal' if explanation.is_proven else 'nothing cheaper found'}"
    best = quantity(explanation.optimum_cost, explanation.cost_unit)
    known = "the optimum costs" if explanation.is_proven else "a strategy is known that costs"
    return f"{cost}, not optimal: {known} {best} ({percent(explanation.optimum_cost / explanation.plan_cost - 1)})"


def _searched(explanation: Explanation) -> str:
    low, high = explanation.searched
    ratio = explanation.flop_per_byte
    if low == high:
        return NOT_LOOKED_FOR
    if ratio is None:
        return f"all links so many times as slow, ×1 as they are; looked for from {_factor(low)} to {_factor(high)}"
    return f"r is {number(ratio)} FLOP per byte; looked for from {number(low * ratio)} to {number(high * ratio)}"


def _row(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> list[str]:
    count = plan.num_devices
    flips = []
    for flip, end in zip((layer.below, layer.above), explanation.searched, strict=True):
        none = "never" if end in (FARTHEST, 1 / FARTHEST) else "not found" if end != 1 else ""
        found = flip and f"{_ratio(flip.scale, explanation)}: {configuration_text(flip.splits, count)}"
        flips.append(found or none)
    return [
        configuration_text(layer.splits, count),
        ("memory, " if layer.memory else "") + (f"{layer.binding.name} {layer.share:.0%}" if layer.binding else "none"),
        configuration_text(layer.runner_up.splits, count) if layer.runner_up else "none",
        _costs(layer.runner_up, explanation) if layer.runner_up else "",
        *flips,
    ]


def _alike(plan: Plan, explanation: Explanation) -> list[list[LayerExplanation]]:
    """Return the layers in groups of the same row, whatever the layers at the other ends of their edges are called."""
    groups: dict[tuple[object, ...], list[LayerExplanation]] = {}
    for layer in explanation.layers:
        row = _row(plan, layer, explanation)
        kind = layer.binding.kind if layer.binding else ""
        row[1] = f"{kind} {layer.share:.0%} {layer.memory is None}"
        dims = tuple(plan[layer.name].dims.items())
        groups.setdefault((layer.kind, dims, *row), []).append(layer)
    return list(groups.values())


def _costs(runner_up: RunnerUp, explanation: Explanation) -> str:
    return "the same" if runner_up.is_tie else percent(explanation.relative(runner_up.difference))


def _ratio(scale: float, explanation: Explanation, *, is_long: bool = False) -> str:
    """Return a scale as r where the cost model has one, as a factor otherwise."""
    if explanation.flop_per_byte is None:
        return _factor(scale)
    ratio = number(scale * explanation.flop_per_byte)
    return f"r = {ratio} ({_factor(scale)})" if is_long else ratio


def _factor(scale: float) -> str:
    return f"×1/{1 / scale:g}" if scale < 1 and (1 / scale).is_integer() else f"×{number(scale)}"


_SHOWN = 8
"""Of layers that change, how many are named."""


def _listed(texts: Sequence[str], most: int = _SHOWN) -> str:
    shown = ", ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown} … ({len(texts)} in all)"


def _outcome(one: Sensitivity) -> tuple[str, str]:
    """Return the best time, and what the plan loses, under a changed figure."""
    if one.time_change is None:
        return "nothing fits", "does not fit"
    time = percent(one.time_change) + ("" if one.is_proven else " (not proven)")
    if one.regret is None:
        return time, "does not fit"
    return time, percent(one.regret) if one.regret > TIE else "nothing"


def why_document(layer: LayerExplanation, explanation: Explanation) -> dict[str, Any]:
    """Return what is said of one layer."""
    return {
        "reason": layer.reason,
        "is_best": layer.is_best,
        "best": layer.best,
        "kept_total_cost": layer.kept_total_cost,
        "memory": None
        if layer.memory is None
        else {
            "splits": layer.memory.splits,
            "difference": layer.memory.difference,
            "relative_difference": explanation.relative(layer.memory.difference),
            "others_kept": layer.memory.is_alone,
            "needed_bytes": layer.memory.needed_bytes,
            "limit_bytes": layer.memory.limit_bytes,
        },
        "num_configurations": layer.num_configurations,
        "binding": None if layer.binding is None else layer.binding.name,
        "binding_share": layer.share,
        "parts": [
            {
                "name": part.name,
                "kind": str(part.kind),
                "layer": part.other or None,
                "cost": part.cost,
                "hidden": part.hidden,
                "bytes": part.size_bytes,
                "devices": part.group or None,
            }
            for part in layer.parts
        ],
        "runner_up": None if layer.runner_up is None else _runner_up_document(layer.runner_up, explanation),
        "flips": {
            "below": _flip_document(layer.below, explanation),
            "above": _flip_document(layer.above, explanation),
        },
    }


def sensitivity_document(found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """Return what each changed figure of the machine does."""
    return [
        {
            "figure": one.figure,
            "factor": one.factor,
            "is_used": one.is_used,
            "relative_time_change": one.time_change,
            "relative_regret": one.regret,
            "moves": [{"name": name, "splits": splits} for name, splits in one.moves],
            "exact": one.is_proven,
        }
        for one in found
    ]


def _runner_up_document(runner_up: RunnerUp, explanation: Explanation) -> dict[str, Any]:
    return {
        "splits": runner_up.splits,
        "total_cost": runner_up.total_cost,
        "difference": runner_up.difference,
        "relative_difference": explanation.relative(runner_up.difference),
        "is_tie": runner_up.is_tie,
        "exact": runner_up.is_exact,
        "changes": [{"name": name, "splits": splits} for name, splits in runner_up.changes or ()],
        "rises": [{"layer": rise.layer, "part": rise.part, "cost": rise.cost} for rise in runner_up.rises],
        "hidden": runner_up.hidden,
        "others_kept": None
        if runner_up.alone is None
        else {
            "splits": runner_up.alone,
            "difference": runner_up.alone_difference,
            "relative_difference": explanation.relative(runner_up.alone_difference),
        },
    }


def _flip_document(flip: Flip | None, explanation: Explanation) -> dict[str, Any] | None:
    if flip is None:
        return None
    ratio = None if explanation.flop_per_byte is None else flip.scale * explanation.flop_per_byte
    return {"scale": flip.scale, "flop_per_byte": ratio, "splits": flip.splits}
