"""`pase explain`: why a plan, or one of its layers, is as it is; its costs, its placement and its transfers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import Any

import click

from pase.analysis.differences import PlacementTraffic, bytes_by_level, compare_placements
from pase.analysis.explanation import (
    FARTHEST,
    TIE,
    ExplainOptions,
    Explanation,
    Flip,
    Improvement,
    LayerExplanation,
    Outcome,
    RunnerUp,
    SchemeOutcome,
    Sensitivity,
    choice_text,
    explain,
    other_schemes,
    sensitivity,
)
from pase.analysis.explanation.why_not import mode_text
from pase.analysis.figures import CostFigures, cost_figures
from pase.analysis.simulation.pipeline import StagedSimulation, simulate_stages
from pase.cli.options import (
    ModelArguments,
    all_layers_option,
    chosen_plan,
    costs_note,
    flag,
    headline,
    json_option,
    model_options,
    overlapped_text,
    plan_argument,
    print_layers,
    time_limit_option,
    times_text,
    total_cost_text,
)
from pase.cli.output import print_facts, print_json, print_table, say
from pase.cli.progress import progress
from pase.common.documents import attributes
from pase.common.options import option
from pase.common.words import listed, number, percent, percentage, quantity, signed
from pase.errors import PlanError, unknown_name
from pase.planning.plan import LayerPlan, Plan, configuration_text
from pase.planning.planner import check_seconds
from pase.planning.steps import LayerChoice
from pase.sharding.layouts import device_mesh
from pase.sharding.traffic import Flow
from pase.views.drawing.plans import extents_text

_SHOWN_DEVICES = 16
"""Maximum number of a part's devices that a table lists."""

_SHOWN_RISES = 8
"""Maximum number of parts of a difference that are listed."""

NOT_LOOKED_FOR = "not looked for: what overlaps with compute depends on all layers together under this cost model"
NOT_PROVEN = "not known: no search with links of another speed was proven in its time; give more (--time-limit)"
"""Shown for links of another speed where only the scale of the machine is known."""


@click.command("explain", epilog="Example: pase explain plan.json fc1")
@plan_argument
@click.argument("layer", required=False)
@model_options()
@option("--why/--no-why", "is_why", default=True, show_default=False, help="Say why, or costs and bytes alone.")
@flag("--sensitivity", "is_sensitivity", help="Search with each machine figure 20% off, too.")
@flag("--schemes", "is_schemes", help="Search other numbers of stages and micro-batches, too.")
@all_layers_option
@time_limit_option("Seconds for one search, of the many that it takes.")
@json_option
def explain_command(
    plan: str,
    layer: str | None,
    model: ModelArguments,
    is_why: bool,
    is_sensitivity: bool,
    is_schemes: bool,
    shows_all: bool,
    time_limit_s: float | None,
    as_json: bool,
) -> None:
    """Say why PLAN's layers have their configurations, or LAYER alone; of a MODEL, those of the best plan on --devices.

    For each layer: what binds, the next best configuration and what it would cost, and the machine's ratio r at which
    the choice would change. Then costs, placement, and the bytes of a step under the plan's placement, under the
    paper's greedy one and with every layer's parts on the devices in order, those that cross nodes apart.

    For a plan with micro-batches, stages or modes, too: what bounds the step, and what each layer would cost and need
    in other modes.
    """
    with progress() as show:
        found = chosen_plan(plan, model, show)
    if layer is not None and layer not in found.index:
        raise PlanError(unknown_name("layer", layer, found.index))
    names = list(found.index) if layer is None else [layer]
    if is_schemes:
        check_seconds(found.cost_model)
    why: Explanation | None = None
    with progress() as show:
        if is_why:
            options = ExplainOptions(time_limit_s=time_limit_s)
            why = explain(found, None if layer is None else names, options=options, on_progress=show)
        schemes = other_schemes(found, on_progress=show) if is_schemes else None
        moves = sensitivity(found, time_limit_s=time_limit_s, on_progress=show) if is_sensitivity else None
        show("following what moves between devices", 0.0)
        placements = [_of(placement, layer) for placement in compare_placements(found)]
    if as_json:
        document = _document(found, names, placements, why)
        document |= {} if moves is None else {"sensitivity": sensitivity_document(moves)}
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
    """Return the transfers in which a layer takes part."""
    flows = placement.flows
    if layer is not None:
        flows = tuple(flow for flow in flows if layer in (flow.movement.producer, flow.movement.consumer))
    return PlacementTraffic(name=placement.name, flows=flows)


# -- for programs


def _document(
    plan: Plan, names: Sequence[str], placements: Sequence[PlacementTraffic], why: Explanation | None
) -> dict[str, Any]:
    of_plan: dict[str, Any] = {}
    if why is not None:
        of_plan = {
            **attributes(why, "total_cost=plan_cost is_optimal flop_per_byte"),
            "optimum": {"total_cost": why.optimum_cost, "exact": why.is_proven},
            "flips_searched": {"from_scale": why.searched[0], "to_scale": why.searched[1]},
            "improvement": improvement_document(why.improvement, plan),
        }
        if plan.has_parts:
            of_plan["step"] = step_document(simulate_stages(plan), why)

    def moved(choose: Callable[[Iterable[Flow]], list[Flow]]) -> list[dict[str, Any]]:
        return [{"name": each.name} | _bytes_document(plan, choose(each.flows)) for each in placements]

    named = "name kind dims splits devices replicas=num_replicas stage state is_recomputed compute_cost"
    named += " communication_cost transfer_cost memory_bytes"
    figures = cost_figures(plan)
    levels = plan.machine.levels_spanned(plan.num_devices)
    return {
        **attributes(plan, "model=graph.name num_devices cost_model cost_unit"),
        "hidden_cost": figures.overlapped,
        "levels": [attributes(level, "name devices=num_devices") for level in levels],
        **of_plan,
        "layers": [
            {
                **attributes(plan[name], named),
                **attributes(figures.layers[plan.index[name]], "recompute_cost=recompute hidden_cost=overlapped share"),
                "placements": moved(partial(_within, layer=name)),
                **({} if why is None else {"why": why_document(why[name], why)}),
            }
            for name in names
        ],
        "edges": [
            {
                "producer": producer,
                "consumer": consumer,
                "placements": moved(partial(_between, ends=(producer, consumer))),
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


def _bytes_document(plan: Plan, flows: Sequence[Flow]) -> dict[str, Any]:
    forward = sum(flow.total_bytes for flow in flows if flow.movement.phase == "forward")
    whole = sum(flow.total_bytes for flow in flows)
    return {"bytes": whole, "forward_bytes": forward, "bytes_by_level": _levels(plan, flows)}


# -- for people


def _print_plan(
    plan: Plan, placements: Sequence[PlacementTraffic], why: Explanation | None, *, shows_all: bool
) -> None:
    ours, cost, figures = placements[0].flows, partial(quantity, unit=plan.cost_unit), cost_figures(plan)
    overlaps = figures.overlapped > 0
    recomputes = any(own.recompute for own in figures.layers)
    if why:
        print_why(plan, why, figures, shows_all=shows_all)
        say()
        say("Costs of each layer in a step, and the bytes that its edges and itself move between all devices:")
        say()
    print_layers(
        plan.graph,
        [
            *("<layer", "<configuration", "compute"),
            *["recompute"] * recomputes,
            *("communication", "transfers"),
            *["overlapped"] * overlaps,
            *("memory", "edges in", "within"),
        ],
        [
            [
                layer.name,
                configuration_text(layer.splits, len(layer.devices)),
                cost(own.compute),
                *[cost(own.recompute)] * recomputes,
                *map(cost, (own.communication, own.transfer)),
                *[cost(own.overlapped)] * overlaps,
                quantity(layer.memory_bytes, "B"),
                _moved(flow for flow in _edges(ours) if flow.movement.consumer == layer.name),
                _moved(_within(ours, layer.name)),
            ]
            for layer, own in zip(plan.layers, figures.layers, strict=True)
        ],
        [(layer.kind, tuple(layer.dims.items())) for layer in plan.layers],
        shows_all=shows_all,
    )
    if note := costs_note(plan, figures, has_shares=False):
        say()
        say(note)
    if not why:
        say()
        say(headline(plan))
        print_facts(
            {
                "total cost": f"{total_cost_text(plan)}   (cost model {plan.cost_model})",
                "overlapped": overlapped_text(plan, figures),
                "precision": plan.precision.text,
            }
        )
    say()
    others = " and two others" if len(placements) > 1 else ""
    say(f"Bytes that a step moves between all devices, under this plan's placement{others}:")
    say()
    _print_moved(plan, "placement", [(placement.name, placement.flows) for placement in placements])


def _print_layer(plan: Plan, layer: LayerPlan, placements: Sequence[PlacementTraffic], why: Explanation | None) -> None:
    cost = partial(quantity, unit=plan.cost_unit)
    say(f"{layer.name} ({layer.kind}) of {plan.graph.name} on {plan.num_devices} devices")
    figures = cost_figures(plan).layers[plan.index[layer.name]]
    overlapped = f"{cost(figures.overlapped)} of {cost(figures.overlappable)} that can overlap with compute"
    has_stages = plan.num_groups > 1
    stage = "the devices of its stage" if has_stages else "each device"
    whole = "the time of all devices" if has_stages else "a step"
    print_facts(
        {
            "iteration space": extents_text(layer.dims) + (" of a micro-batch" if plan.micro_batches > 1 else ""),
            "configuration": configuration_text(layer.splits, len(layer.devices)),
            "mode": ", ".join(plan.modes_of(layer)),
            "compute": f"{cost(figures.compute)} in a step on {stage}",
            "recompute": f"{cost(figures.recompute)}, its forward pass once more" if figures.recompute else None,
            "communication inside": cost(figures.communication),
            "transfers on edges in": cost(figures.transfer),
            "overlapped of these": overlapped if figures.overlapped else None,
            "share": f"{percentage(figures.share)} of {whole}",
            "memory": f"{quantity(layer.memory_bytes, 'B')} on each device",
        }
    )
    say()
    if why:
        print_layer_why(plan, why[layer.name], why)
        say()
    print_table(["<part", "<devices"], _parts(plan, layer))
    for placement in placements:
        say()
        say(f"bytes that a step moves between all devices, {_TITLES[placement.name]}:")
        rows = [
            (f"{producer} → {consumer}", _between(placement.flows, (producer, consumer)))
            for producer, consumer in _pairs(plan, [layer.name], placements)
        ]
        _print_moved(plan, "edge", [*rows, ("within the layer", _within(placement.flows, layer.name))])


_TITLES = {
    "plan": "as placed by the plan",
    "greedy": "under the paper's greedy assignment",
    "device order": "with all parts on the devices in order",
}


def _print_moved(plan: Plan, what: str, rows: Sequence[tuple[str, Sequence[Flow]]]) -> None:
    """Print bytes: the total, forward, and those that cross each level of the machine above the first."""
    levels = plan.machine.levels_spanned(plan.num_devices)
    parts = [("edges", _edges), ("layers", _inner)] if what == "placement" else [("", list)]
    columns = ["forward", "in all", *(f"across {level.name}s" for level in levels[:-1])]
    table = []
    for name, flows in rows:
        row = [name]
        for _, choose in parts:
            chosen = choose(flows)
            by_level = _levels(plan, chosen)
            row += [_moved(flow for flow in chosen if flow.movement.phase == "forward"), _moved(chosen)]
            # Traffic that crosses a level uses a link of the next level.
            row += [quantity(sum(by_level[i + 1 :]), "B") for i in range(len(levels) - 1)]
        table.append(row)
    print_table([f"<{what}", *(f"{part} {column}".strip() for part, _ in parts for column in columns)], table)


def _parts(plan: Plan, layer: LayerPlan) -> list[list[str]]:
    """Return rows of each part's coordinates and the devices that hold it."""
    # Devices of a stage are numbered from its first one.
    first, count = min(layer.devices), len(layer.devices)
    mesh = device_mesh(layer.name, layer.splits.items(), count, [device - first for device in layer.devices])
    names = [name for name, size in layer.splits.items() if size > 1]
    holders: dict[str, list[int]] = {}
    for device, point in zip(mesh.devices, mesh.coordinates, strict=True):
        holders.setdefault(extents_text({name: point[name] for name in names}) or "whole", []).append(first + device)
    return [[part, listed([*map(str, sorted(devices))], most=_SHOWN_DEVICES)] for part, devices in holders.items()]


# -- choosing flows


def _edges(flows: Iterable[Flow]) -> list[Flow]:
    return [flow for flow in flows if flow.is_of_edge]


def _inner(flows: Iterable[Flow]) -> list[Flow]:
    return [flow for flow in flows if not flow.is_of_edge]


def _within(flows: Iterable[Flow], layer: str) -> list[Flow]:
    return [flow for flow in _inner(flows) if flow.movement.consumer == layer]


def _between(flows: Iterable[Flow], ends: tuple[str, str]) -> list[Flow]:
    return [flow for flow in flows if (flow.movement.producer, flow.movement.consumer) == ends]


def _pairs(plan: Plan, layers: Iterable[str], placements: Sequence[PlacementTraffic]) -> list[tuple[str, str]]:
    """Return the edges of some layers, including those of shared weights with transfers."""
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


# -- why


def print_why(plan: Plan, explanation: Explanation, figures: CostFigures, *, shows_all: bool = False) -> None:
    """Print why every layer has its configuration; layers with equal rows are merged unless `shows_all`."""
    say(headline(plan))
    print_facts(
        {
            "total cost": f"{_verdict(plan, explanation)}   (cost model {plan.cost_model})",
            **(_step_texts(simulate_stages(plan), explanation) if plan.has_parts else {}),
            "overlapped": overlapped_text(plan, figures),
            **improvement_texts(explanation.improvement, plan),
            "flips": _searched(explanation) if plan.num_groups == 1 else None,
        }
    )
    say()
    groups = [[layer] for layer in explanation.layers] if shows_all else _alike(plan, explanation)
    times = [f" {times_text(len(group))}" if len(group) > 1 else "" for group in groups]
    rows = [_row(plan, group[0], explanation) for group in groups]
    named = [
        {"<layer": f"{group[0].name}{count}", **row} for group, count, row in zip(groups, times, rows, strict=True)
    ]
    # Columns without values are omitted.
    headers = [header for header in named[0] if any(row[header] for row in named)]
    print_table(
        [header.partition("|")[0] for header in headers], [[row[header] for header in headers] for row in named]
    )
    if any(times):
        say()
        say("× n: n layers with the same row, the first of which is named; --all-layers prints each.")
    say()
    say("Why:")
    for group, count in zip(groups, times, strict=True):
        say(f"  {group[0].reason}{f'  ({count.strip()})' if count else ''}")


def _step_texts(simulation: StagedSimulation, explanation: Explanation) -> dict[str, str | None]:
    """Return what bounds a step of a plan with micro-batches, stages or modes, by its title."""
    plan, slowest = simulation.plan, simulation.stages[simulation.slowest]
    fill = f"filling and draining take {simulation.fill:.1%} where all stages take the same"
    has_stages = plan.num_stages > 1
    step, where, of_limit = simulation.step, "", ""
    if has_stages:
        where = f"{'stage' if step.chunks == 1 else 'the group of stage'} {step.fullest} needs "
    if plan.device_memory_bytes is not None:
        of_limit = f" of {quantity(plan.device_memory_bytes, 'B')} that a device may"
    held = _held_by_memory(explanation)
    limited = "time: no layer by itself would cost less with another choice"
    if held:
        count = len(explanation.layers)
        limited = f"memory: {held} of {count} layers would each cost less with a choice that does not fit"
    return {
        "step": plan.step_text,
        "longest stage": f"stage {slowest.stage}: {quantity(slowest.micro_batch_s, 's')} a micro-batch" * has_stages,
        "devices wait": f"{simulation.bubble:.1%} of the time; {fill}" * has_stages,
        "memory": f"{where}{quantity(step.peak.bytes, 'B')}{of_limit}",
        "limited by": limited,
    }


def _held_by_memory(explanation: Explanation) -> int:
    """Return how many layers would each cost less with a choice that does not fit."""
    return sum(layer.memory is not None and layer.memory.is_alone for layer in explanation.layers)


def improvement_texts(found: Improvement | None, plan: Plan) -> dict[str, str]:
    """Return the improvements of a plan that is not the cheapest, by title."""
    if found is None:
        return {}
    cost, share = partial(quantity, unit=plan.cost_unit), percent(-found.saving / plan.total_cost)
    changes = listed([f"{name} to {choice_text(choice, plan.group_size)}" for name, choice in found.changes])
    return {
        "largest excess": f"{found.layer}: {cost(found.excess)} more than in the cheapest strategy",
        "change first": f"{changes}: {share}, {cost(plan.total_cost - found.saving)} in all",
    }


def improvement_document(found: Improvement | None, plan: Plan) -> dict[str, Any] | None:
    """Return the JSON form of a plan's possible improvement."""
    if found is None:
        return None
    changes = {"changes": _changes(found.changes), "total_cost": plan.total_cost - found.saving}
    return attributes(found, "layer excess saving") | changes


def _changes(found: Iterable[tuple[str, LayerChoice]] | None) -> list[dict[str, Any]]:
    return [{"name": name, **_choice_document(choice)} for name, choice in found or ()]


def _choice_document(choice: LayerChoice) -> dict[str, Any]:
    return attributes(choice, "splits state is_recomputed")


def print_layer_why(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> None:
    """Print why one layer has its configuration and mode, in full."""
    cost, runner_up, size = partial(quantity, unit=plan.cost_unit), layer.runner_up, plan.group_size
    say(f"Why: {layer.reason}.")
    own = "it is part of a cheapest strategy" if layer.is_best else "no cheapest strategy has it"
    kept = f"{own}: with it, the least is {cost(layer.kept_total_cost)}"
    flips = []
    for flip, end in zip((layer.below, layer.above), explanation.searched, strict=True):
        found = _unknown(explanation)
        if end != 1:
            found = f"never {'down' if end < 1 else 'up'} to {_ratio(end, explanation, is_long=True)}"
        if flip is not None:
            text = choice_text(flip.choice, size, layer.choice)
            found = f"{text} at {_ratio(flip.scale, explanation, is_long=True)}"
        flips.append(found)
    has_stages = plan.num_groups > 1
    other_mode = {}
    if layer.other_mode is not None:
        other_mode = _runner_up_texts("other mode", layer.other_mode, layer, explanation, size)
    print_facts(
        {
            "the plan": None if explanation.is_optimal else _verdict(plan, explanation),
            "this configuration": None if explanation.is_optimal else kept,
            **_runner_up_texts("runner-up", runner_up, layer, explanation, size),
            **other_mode,
            "with faster links": None if has_stages else flips[0],
            "with slower links": None if has_stages else flips[1],
        }
    )
    say()
    say("What it pays, with its edges on both sides:")
    say()
    whole = sum(part.paid for part in layer.parts)
    has_overlap = any(part.hidden for part in layer.parts)
    print_table(
        ["<part", "cost", *["overlapped"] * has_overlap, "share of these", "bytes of a device", "devices"],
        [
            [
                part.name,
                cost(part.cost),
                *[cost(part.hidden)] * has_overlap,
                percentage(part.paid / whole if whole else None),
                quantity(part.size_bytes, "B") if part.size_bytes else "",
                part.group or None,
            ]
            for part in layer.parts
        ],
    )
    if runner_up is not None and runner_up.rises:
        # The parts of the difference: the largest, the sum of the others, and the overlapped part.
        rows = [(rise.layer, rise.part, rise.cost) for rise in runner_up.rises[:_SHOWN_RISES]]
        if others := runner_up.rises[_SHOWN_RISES:]:
            rows.append((f"{len(others)} more", "", sum(rise.cost for rise in others)))
        if runner_up.hidden:
            rows.append(("", "beside other stages" if has_stages else "overlapped", -runner_up.hidden))
        rows.append(("", "in all", runner_up.difference))
        say()
        say("What the runner-up costs more, part by part:")
        say()
        print_table(["<layer", "<part", "more"], [[*names, signed(more, plan.cost_unit)] for *names, more in rows])
    if layer.outcomes:
        say()
        say("What its modes take, with all other layers free to change, and with all as they are:")
        say()
        _print_outcomes(plan, layer, explanation)


def _print_outcomes(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> None:
    def least(outcome: Outcome) -> str:
        if outcome.difference is None:
            return "none is known to fit"
        return _share(outcome.difference, explanation) + ", not proven to be the least" * (not outcome.is_exact)

    print_table(
        ["<mode", "<the step", "<others kept", f"memory of stage {layer.choice.stage}", "<fits"],
        [
            [
                _full_mode(outcome.choice),
                "the plan's" if outcome.is_own else least(outcome),
                "the plan's" if outcome.is_own else _share(outcome.alone_difference, explanation),
                quantity(outcome.memory_bytes, "B"),
                "yes" if outcome.fits else "no",
            ]
            for outcome in layer.outcomes
        ],
    )


def _full_mode(choice: LayerChoice) -> str:
    return f"{choice.state}, {'recomputed' if choice.is_recomputed else 'kept'}"


def _share(difference: float, explanation: Explanation) -> str:
    relative = explanation.relative(difference)
    return "the same" if abs(relative) <= TIE else percent(relative)


def _runner_up_texts(
    title: str, runner_up: RunnerUp | None, layer: LayerExplanation, explanation: Explanation, num_devices: int
) -> dict[str, str]:
    """Return the facts about a runner-up, by title."""
    if runner_up is None:
        return {title: "none"}
    text = choice_text(runner_up.choice, num_devices, layer.choice)
    proven = "" if runner_up.is_exact else ", not proven to be the least"
    total = quantity(runner_up.total_cost, explanation.cost_unit)
    more = runner_up.more_bytes or 0
    memory = f", {quantity(abs(more), 'B')} {'more' if more > 0 else 'less'} memory" if more else ""
    changes = [f"{name} {choice_text(choice, num_devices)}" for name, choice in runner_up.changes or ()]
    alone = "none fits"
    if runner_up.alone is not None:
        difference = percent(explanation.relative(runner_up.alone_difference))
        alone = f"{choice_text(runner_up.alone, num_devices, layer.choice)}: {difference}"
    return {
        title: f"{text}: {_costs(runner_up, explanation)} ({total} in all{memory}{proven})",
        "  with it change" + " " * (title != "runner-up"): listed(changes),
        "  all others kept" + " " * (title != "runner-up"): alone,
    }


def print_sensitivity(plan: Plan, found: Sequence[Sensitivity]) -> None:
    """Print the effect of each figure of the machine, lower and higher."""
    used = [one for one in found if one.is_used]
    print_table(
        ["<figure", "by", "best time", "this plan loses", "<layers that move"],
        [
            [
                one.figure,
                percent(one.factor - 1),
                *_outcome(one),
                listed([f"{name} {choice_text(to, plan.group_size)}" for name, to in one.moves]) or "none",
            ]
            for one in used
        ],
    )
    unused = list(dict.fromkeys(one.figure for one in found if one.figure not in {each.figure for each in used}))
    if unused:
        say()
        say(f"Costs by {plan.cost_model} do not depend on: {', '.join(unused)}.")


def _verdict(plan: Plan, explanation: Explanation) -> str:
    cost = quantity(explanation.plan_cost, explanation.cost_unit)
    saving = explanation.relative(explanation.optimum_cost - explanation.plan_cost)
    less = f"{quantity(explanation.optimum_cost, explanation.cost_unit)} ({percent(saving)})"
    if plan.has_parts:
        # Its search may have had fewer modes.
        where = "one stage alone, in any mode" if plan.num_groups > 1 else "any mode"
        return f"{cost}, {plan.certificate}" + ("" if explanation.is_optimal else f"; in {where}: {less}")
    if explanation.is_optimal:
        return f"{cost}, {'proven optimal' if explanation.is_proven else 'nothing cheaper found'}{plan.scope}"
    known = "the optimum costs" if explanation.is_proven else "a strategy is known that costs"
    return f"{cost}, not optimal: {known} {less}"


def _unknown(explanation: Explanation) -> str:
    return NOT_PROVEN if explanation.has_flips else NOT_LOOKED_FOR


def _searched(explanation: Explanation) -> str:
    low, high = explanation.searched
    ratio = explanation.flop_per_byte
    if low == high:
        return _unknown(explanation)
    if ratio is None:
        return f"all links so many times as slow, ×1 as they are; looked for from {_factor(low)} to {_factor(high)}"
    return f"r is {number(ratio)} FLOP per byte; looked for from {number(low * ratio)} to {number(high * ratio)}"


def _row(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> dict[str, str]:
    """Return a layer's table row, by column header; a suffix after | distinguishes equal headers."""
    size, own = plan.group_size, layer.choice
    flips = []
    for flip, end in zip((layer.below, layer.above), explanation.searched, strict=True):
        none = "never" if end in (FARTHEST, 1 / FARTHEST) else "not found" if end != 1 else ""
        found = flip and f"{_ratio(flip.scale, explanation)}: {choice_text(flip.choice, size, own)}"
        flips.append(found or none)
    modes = " ".join(plan.modes_of(plan[layer.name]))
    at = "at r" if explanation.flop_per_byte else "at"
    other, memory = layer.other_mode, layer.memory
    held = ""
    if memory is not None:
        is_mode = memory.choice.splits == own.splits
        held = mode_text(memory.choice, own) if is_mode else choice_text(memory.choice, size, own)
        held += "" if memory.is_alone else ", with others"
    return {
        "<configuration": configuration_text(own.splits, size),
        "<mode": modes or "kept" * plan.has_parts,
        "<what binds": f"{layer.binding.name} {layer.share:.0%}" if layer.binding else "none",
        "<runner-up": choice_text(layer.runner_up.choice, size, own) if layer.runner_up else "none",
        "costs": _costs(layer.runner_up, explanation) if layer.runner_up else "",
        "<other mode": mode_text(other.choice, own) if other else "",
        "costs|of the mode": _costs(other, explanation) if other else "",
        "<does not fit": held,
        "would save": percent(explanation.relative(memory.difference)) if memory else "",
        f"<flips below {at}": flips[0],
        f"<flips above {at}": flips[1],
    }


def _alike(plan: Plan, explanation: Explanation) -> list[list[LayerExplanation]]:
    """Group the layers by equal rows, independent of the names of neighbouring layers."""
    groups: dict[tuple[object, ...], list[LayerExplanation]] = {}
    for layer in explanation.layers:
        binding = f"{layer.binding.kind if layer.binding else ''} {layer.share:.0%}"
        row = {**_row(plan, layer, explanation), "<what binds": binding}
        groups.setdefault((layer.kind, tuple(plan[layer.name].dims.items()), *row.values()), []).append(layer)
    return list(groups.values())


def _costs(runner_up: RunnerUp, explanation: Explanation) -> str:
    if runner_up.is_tie:
        return "the same"
    return ("" if runner_up.is_exact else "≤ ") + percent(explanation.relative(runner_up.difference))


def _ratio(scale: float, explanation: Explanation, *, is_long: bool = False) -> str:
    """Return a scale as r where the cost model has one, otherwise as a factor."""
    if explanation.flop_per_byte is None:
        return _factor(scale)
    ratio = number(scale * explanation.flop_per_byte)
    return f"r = {ratio} ({_factor(scale)})" if is_long else ratio


def _factor(scale: float) -> str:
    return f"×1/{1 / scale:g}" if scale < 1 and (1 / scale).is_integer() else f"×{number(scale)}"


def _outcome(one: Sensitivity) -> tuple[str, str]:
    """Return the best time, and the plan's loss, under a changed figure."""
    if one.time_change is None:
        return "nothing fits", "does not fit"
    time = percent(one.time_change) + ("" if one.is_proven else " (not proven)")
    if one.regret is None:
        return time, "does not fit"
    return time, percent(one.regret) if one.regret > TIE else "nothing"


def why_document(layer: LayerExplanation, explanation: Explanation) -> dict[str, Any]:
    """Return the JSON form of one layer's explanation."""
    memory = layer.memory and {
        **_choice_document(layer.memory.choice),
        **attributes(layer.memory, "difference others_kept=is_alone needed_bytes limit_bytes"),
        "relative_difference": explanation.relative(layer.memory.difference),
    }
    names = "reason like is_best best=best.splits kept_total_cost num_configurations binding_share=share"
    document = {
        **attributes(layer, names),
        "memory": memory,
        "binding": layer.binding and layer.binding.name,
        "parts": [
            attributes(part, "name kind cost hidden bytes=size_bytes")
            | {"layer": part.other or None, "devices": part.group or None}
            for part in layer.parts
        ],
        "runner_up": layer.runner_up and _runner_up_document(layer.runner_up, explanation),
        "flips": {"below": _flip_document(layer.below, explanation), "above": _flip_document(layer.above, explanation)},
    }
    if layer.outcomes:
        document["other_mode"] = layer.other_mode and _runner_up_document(layer.other_mode, explanation)
        document["modes"] = [_outcome_document(outcome) for outcome in layer.outcomes]
    return document


def _runner_up_document(runner_up: RunnerUp, explanation: Explanation) -> dict[str, Any]:
    alone: dict[str, Any] | None = None
    if runner_up.alone is not None:
        alone = {
            **_choice_document(runner_up.alone),
            "difference": runner_up.alone_difference,
            "relative_difference": explanation.relative(runner_up.alone_difference),
        }
    return {
        **_choice_document(runner_up.choice),
        **attributes(runner_up, "total_cost difference is_tie exact=is_exact hidden more_bytes"),
        "relative_difference": explanation.relative(runner_up.difference),
        "changes": _changes(runner_up.changes),
        "rises": [attributes(rise, "layer part cost") for rise in runner_up.rises],
        "others_kept": alone,
    }


def _outcome_document(outcome: Outcome) -> dict[str, Any]:
    alone = {"difference": outcome.alone_difference, **attributes(outcome, "memory_bytes fits")}
    return {
        **_choice_document(outcome.choice),
        **attributes(outcome, "is_own difference exact=is_exact"),
        "others_kept": alone,
    }


def _flip_document(flip: Flip | None, explanation: Explanation) -> dict[str, Any] | None:
    if flip is None:
        return None
    ratio = None if explanation.flop_per_byte is None else flip.scale * explanation.flop_per_byte
    return {"scale": flip.scale, "flop_per_byte": ratio, **_choice_document(flip.choice)}


def sensitivity_document(found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """Return the JSON form of the effects of changed machine figures."""
    names = "figure factor is_used relative_time_change=time_change relative_regret=regret exact=is_proven"
    return [attributes(one, names) | {"moves": _changes(one.moves)} for one in found]


# -- other numbers of stages and micro-batches


def print_schemes(plan: Plan, found: Sequence[SchemeOutcome]) -> None:
    """Print the step times with other numbers of stages and of micro-batches."""
    say("With other numbers of stages or micro-batches, each searched with the modes that layers of the plan have:")
    say()
    print_table(
        ["stages", "micro-batches", "the step", "differs", "at least"],
        [
            [
                f"{one.stages}" + f" × {one.chunks}" * (one.chunks > 1),
                one.micro_batches,
                "none is known to fit" if one.step_s is None else quantity(one.step_s, "s"),
                "the plan's" if one.is_own else "" if one.step_s is None else percent(one.step_s / plan.total_cost - 1),
                "" if one.is_own else quantity(one.bound_s, "s") if isfinite(one.bound_s) else "nothing fits",
            ]
            for one in found
        ],
    )


def step_document(simulation: StagedSimulation, explanation: Explanation) -> dict[str, Any]:
    """Return the JSON form of the explanation of the whole step."""
    return {
        **attributes(simulation.plan, "total_cost gap micro_batches schedule limit_bytes=device_memory_bytes"),
        **attributes(simulation, "simulated_s=step_time_s waiting_share=bubble fill_share=fill longest_stage=slowest"),
        "stages": [{**asdict(use), "micro_batch_s": use.micro_batch_s} for use in simulation.stages],
        "limited_by": "memory" if _held_by_memory(explanation) else "time",
    }


def schemes_document(found: Sequence[SchemeOutcome]) -> list[dict[str, Any]]:
    """Return the JSON form of other numbers of stages and micro-batches; bounds that nothing satisfies are null."""
    return [{**asdict(one), "bound_s": one.bound_s if isfinite(one.bound_s) else None} for one in found]
