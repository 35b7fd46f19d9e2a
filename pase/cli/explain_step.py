"""What `pase explain` says of plans with micro-batches, stages or modes of layers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pase.analysis.explanation import SchemeOutcome, StepExplanation, StepLayer, configuration_text
from pase.analysis.explanation.steps import LayerMode
from pase.cli.layer_table import print_layers
from pase.cli.output import print_table, quantity, say, step_text
from pase.common.quantities import percent, size_text
from pase.planning.plan import Plan


def print_step(why: StepExplanation, *, shows_all: bool) -> None:
    """Print what bounds the step, and of each layer the mode that comes next."""
    plan, found = why.plan, why.simulation
    stages = found.stages
    certificate = "proven optimal" if plan.exact else f"gap {plan.gap:.2%}"
    say(f"{plan.graph.name} on {plan.num_devices} × {plan.machine.device.name} ({plan.machine.name})")
    say(f"  total cost              {quantity(plan.total_cost, plan.cost_unit)}, {certificate}{plan.among}")
    say(f"  step                    {step_text(plan)}")
    if len(stages) > 1:
        slowest = stages[why.slowest]
        say(f"  longest stage           {_stage(slowest.stage, slowest.micro_batch_s, 'a micro-batch')}")
        say(
            f"  devices wait            {found.bubble:.1%} of the time; filling and draining take {why.fill:.1%} where "
            "all stages take the same"
        )
    say(f"  memory                  {_memory(why)}")
    say(f"  limited by              {_limit(why)}")
    say()
    print_layers(
        plan.graph,
        ["<layer", "<configuration", "<mode", "<next best", "costs", "<does not fit", "would save"],
        [_row(plan, layer) for layer in why.layers],
        [layer.kind for layer in why.layers],
        shows_all=shows_all,
    )


def _stage(number: int, value: float, what: str) -> str:
    return f"stage {number}: {quantity(value, 's')} {what}"


def _memory(why: StepExplanation) -> str:
    step = why.simulation.step
    what = "stage" if step.chunks == 1 else "the group of stage"
    where = f"{what} {step.fullest} needs " if why.plan.num_stages > 1 else ""
    limit = "" if why.limit_bytes is None else f" of {size_text(why.limit_bytes)} that a device may"
    return f"{where}{size_text(step.memory_bytes(step.fullest))}{limit}"


def _limit(why: StepExplanation) -> str:
    held = sum(layer.held is not None for layer in why.layers)
    if not held:
        return "time: no layer by itself would cost less in another mode"
    return f"memory: {held} of {len(why.layers)} layers would each cost less in a mode that does not fit"


def _row(plan: Plan, layer: StepLayer) -> list[str]:
    own, held, other = layer.own, layer.held, layer.runner_up
    return [
        layer.name,
        configuration_text(own.splits, len(plan[layer.name].devices)),
        "  ".join(plan.modes_of(plan[layer.name])) or layer.text(own),
        layer.text(other) if other else "",
        _share(plan, other) if other else "",
        layer.text(held) if held else "",
        _share(plan, held) if held else "",
    ]


def _share(plan: Plan, mode: LayerMode) -> str:
    share = mode.difference_s / plan.total_cost
    return "the same" if abs(share) < 1e-9 else percent(share)


def print_step_layer(why: StepExplanation, layer: StepLayer) -> None:
    """Print why one layer is as it is, and what it could do otherwise."""
    plan = why.plan
    say(f"Why: {layer.reason}.")
    say()
    say("What the layer could do, all others as they are:")
    say()
    rows = [(layer.text(mode), mode) for mode in layer.modes]
    if layer.other is not None:
        count = len(plan[layer.name].devices)
        rows.append((f"{configuration_text(layer.other.splits, count)}, {layer.text(layer.other)}", layer.other))
    print_table(
        ["<mode", "the step", "differs", f"memory of stage {layer.stage}", "<fits"],
        [
            [
                text,
                quantity(mode.step_s, "s"),
                "the plan's" if mode.is_own else _share(plan, mode),
                size_text(mode.memory_bytes),
                "yes" if mode.fits else "no",
            ]
            for text, mode in rows
        ],
    )


def print_schemes(plan: Plan, found: Sequence[SchemeOutcome]) -> None:
    """Print what other numbers of stages and of micro-batches would take."""
    say("With other numbers of stages or micro-batches, each searched with the modes that layers of the plan have:")
    say()
    print_table(
        ["stages", "micro-batches", "the step", "differs", "at least"],
        [
            [
                f"{one.stages}" + f" × {one.chunks}" * (one.chunks > 1),
                str(one.micro_batches),
                "none is known to fit" if one.step_s is None else quantity(one.step_s, "s"),
                "the plan's" if one.is_own else "" if one.step_s is None else percent(one.step_s / plan.total_cost - 1),
                "" if one.is_own else quantity(one.bound_s, "s") if one.bound_s < float("inf") else "nothing fits",
            ]
            for one in found
        ],
    )


def step_document(why: StepExplanation) -> dict[str, Any]:
    """Return what is said of the step as a whole."""
    plan, found = why.plan, why.simulation
    return {
        "total_cost": plan.total_cost,
        "gap": plan.gap,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "simulated_s": found.step_time_s,
        "waiting_share": found.bubble,
        "fill_share": why.fill,
        "longest_stage": why.slowest,
        "limit_bytes": why.limit_bytes,
        "stages": [{**asdict(use), "micro_batch_s": use.micro_batch_s} for use in found.stages],
        "limited_by": "memory" if any(layer.held for layer in why.layers) else "time",
    }


def step_layer_document(layer: StepLayer) -> dict[str, Any]:
    """Return what is said of one layer."""
    return {
        "reason": layer.reason,
        "stage": layer.stage,
        "modes": [asdict(mode) for mode in layer.modes],
        "other_configuration": None if layer.other is None else asdict(layer.other),
    }


def schemes_document(found: Sequence[SchemeOutcome]) -> list[dict[str, Any]]:
    """Return what other numbers of stages and of micro-batches would take; bounds that nothing fits are null."""
    return [{**asdict(one), "bound_s": one.bound_s if one.bound_s < float("inf") else None} for one in found]
