"""The printed form of an explanation: why layers have their configurations, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from pase.analysis.explanation import (
    FARTHEST,
    TIE,
    Explanation,
    Flip,
    LayerExplanation,
    MemoryBinding,
    Part,
    RunnerUp,
    Sensitivity,
    configuration_text,
    percent,
)
from pase.cli.output import print_table, quantity, say
from pase.planning.plan import Plan


def print_why(plan: Plan, explanation: Explanation) -> None:
    """Print why every layer has its configuration: layers that are alike in all of it stand in one row."""
    say(f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
    say(f"  total cost              {_verdict(explanation)}   (cost model {plan.cost_model})")
    say(f"  flips                   {_searched(explanation)}")
    say()
    groups = _alike(plan, explanation)
    names = [_called(group) for group in groups]
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
        [[name, *_row(plan, group[0], explanation)] for name, group in zip(names, groups, strict=True)],
    )
    if len(groups) < len(explanation.layers):
        say()
        say("+n: so many more layers with the same row; 'pase explain PLAN LAYER' has each in full.")
    say()
    say("Why:")
    for group in groups:
        say(f"  {group[0].reason}{f'  (+{len(group) - 1})' if len(group) > 1 else ''}")


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
        found = f"never {_up_to(end, explanation)}"
        if flip is not None:
            found = f"{configuration_text(flip.splits, count)} at {_ratio(flip.scale, explanation, is_long=True)}"
        say(f"  with {what} links       {found}")
    say()
    say("What it pays, with its edges on both sides:")
    say()
    whole = sum(part.cost for part in layer.parts)
    print_table(
        ["<part", "cost", "share", "bytes", "devices"],
        [
            [
                part.name,
                quantity(part.cost, unit),
                f"{part.cost / whole:.1%}",
                quantity(part.size_bytes, "B") if part.size_bytes else "",
                str(part.group or ""),
            ]
            for part in layer.parts
        ],
    )


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
                _moves(plan, one.moves),
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
        changes = [f"{name} {configuration_text(splits, num_devices)}" for name, splits in runner_up.changes]
        say(f"    with it change        {_listed(changes)}")
    alone = "none fits"
    if runner_up.alone is not None:
        difference = percent(explanation.relative(runner_up.alone_difference))
        alone = f"{configuration_text(runner_up.alone, num_devices)}: {difference}"
    say(f"    all others kept       {alone}")


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
    if ratio is None:
        return f"all links so many times as slow, ×1 as they are; looked for from {_factor(low)} to {_factor(high)}"
    return f"r is {_number(ratio)} FLOP per byte; looked for from {_number(low * ratio)} to {_number(high * ratio)}"


def _row(plan: Plan, layer: LayerExplanation, explanation: Explanation) -> list[str]:
    count = plan.num_devices
    return [
        configuration_text(layer.splits, count),
        ("memory, " if layer.memory else "") + (f"{layer.binding.name} {layer.share:.0%}" if layer.binding else "none"),
        configuration_text(layer.runner_up.splits, count) if layer.runner_up else "none",
        _costs(layer.runner_up, explanation) if layer.runner_up else "",
        *(
            _flip(flip, explanation, count, is_complete=end in (FARTHEST, 1 / FARTHEST))
            for flip, end in zip((layer.below, layer.above), explanation.searched, strict=True)
        ),
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


def _called(group: Sequence[LayerExplanation]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} +{len(group) - 1}"


def _costs(runner_up: RunnerUp, explanation: Explanation) -> str:
    return "the same" if runner_up.is_tie else percent(explanation.relative(runner_up.difference))


def _flip(flip: Flip | None, explanation: Explanation, num_devices: int, *, is_complete: bool) -> str:
    if flip is None:
        return "never" if is_complete else "not found"
    return f"{_ratio(flip.scale, explanation)}: {configuration_text(flip.splits, num_devices)}"


def _ratio(scale: float, explanation: Explanation, *, is_long: bool = False) -> str:
    """Return a scale as r where the cost model has one, as a factor otherwise."""
    if explanation.flop_per_byte is None:
        return _factor(scale)
    ratio = _number(scale * explanation.flop_per_byte)
    return f"r = {ratio} ({_factor(scale)})" if is_long else ratio


def _factor(scale: float) -> str:
    return f"×1/{1 / scale:g}" if scale < 1 and (1 / scale).is_integer() else f"×{_number(scale)}"


def _up_to(scale: float, explanation: Explanation) -> str:
    return f"{'down' if scale < 1 else 'up'} to {_ratio(scale, explanation, is_long=True)}"


def _number(value: float) -> str:
    """Return a number with three digits, without an exponent as far as that can be read."""
    return f"{float(f'{value:.3g}'):,g}" if 1e-3 <= value < 1e6 else f"{value:.3g}"


_SHOWN = 8
"""Of layers that change, how many are named."""


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_SHOWN])
    return shown if len(texts) <= _SHOWN else f"{shown} … ({len(texts)} in all)"


def _outcome(one: Sensitivity) -> tuple[str, str]:
    """Return the best time, and what the plan loses, under a changed figure."""
    if one.time_change is None:
        return "nothing fits", "does not fit"
    time = percent(one.time_change) + ("" if one.is_proven else " (not proven)")
    if one.regret is None:
        return time, "does not fit"
    return time, percent(one.regret) if one.regret > TIE else "nothing"


def _moves(plan: Plan, moves: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    return _listed([f"{name} {configuration_text(splits, plan.num_devices)}" for name, splits in moves]) or "none"


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """Return what is said of the whole plan."""
    low, high = explanation.searched
    return {
        "total_cost": explanation.plan_cost,
        "is_optimal": explanation.is_optimal,
        "optimum": {"total_cost": explanation.optimum_cost, "exact": explanation.is_proven},
        "flop_per_byte": explanation.flop_per_byte,
        "flips_searched": {"from_scale": low, "to_scale": high},
    }


def why_document(layer: LayerExplanation, explanation: Explanation) -> dict[str, Any]:
    """Return what is said of one layer."""
    return {
        "reason": layer.reason,
        "is_best": layer.is_best,
        "best": layer.best,
        "kept_total_cost": layer.kept_total_cost,
        "memory": None if layer.memory is None else _memory_document(layer.memory, explanation),
        "num_configurations": layer.num_configurations,
        "binding": None if layer.binding is None else layer.binding.name,
        "binding_share": layer.share,
        "parts": [_part_document(part) for part in layer.parts],
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


def _part_document(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "kind": str(part.kind),
        "layer": part.other or None,
        "cost": part.cost,
        "bytes": part.size_bytes,
        "devices": part.group or None,
    }


def _runner_up_document(runner_up: RunnerUp, explanation: Explanation) -> dict[str, Any]:
    return {
        "splits": runner_up.splits,
        "total_cost": runner_up.total_cost,
        "difference": runner_up.difference,
        "relative_difference": explanation.relative(runner_up.difference),
        "is_tie": runner_up.is_tie,
        "exact": runner_up.is_exact,
        "changes": [{"name": name, "splits": splits} for name, splits in runner_up.changes],
        "others_kept": None
        if runner_up.alone is None
        else {
            "splits": runner_up.alone,
            "difference": runner_up.alone_difference,
            "relative_difference": explanation.relative(runner_up.alone_difference),
        },
    }


def _memory_document(memory: MemoryBinding, explanation: Explanation) -> dict[str, Any]:
    return {
        "splits": memory.splits,
        "difference": memory.difference,
        "relative_difference": explanation.relative(memory.difference),
        "others_kept": memory.is_alone,
        "needed_bytes": memory.needed_bytes,
        "limit_bytes": memory.limit_bytes,
    }


def _flip_document(flip: Flip | None, explanation: Explanation) -> dict[str, Any] | None:
    if flip is None:
        return None
    ratio = None if explanation.flop_per_byte is None else flip.scale * explanation.flop_per_byte
    return {"scale": flip.scale, "flop_per_byte": ratio, "splits": flip.splits}
