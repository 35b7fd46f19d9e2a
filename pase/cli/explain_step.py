"""What `pase explain` says of plans with micro-batches, stages or modes of layers."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from pase.analysis.explanation import SchemeOutcome, StepExplanation, StepLayer, configuration_text
from pase.analysis.explanation.steps import LayerMode
from pase.cli.output import print_facts, print_table, say
from pase.cli.plans import headline, print_layers, step_text
from pase.common.documents import attributes
from pase.common.quantities import percent, quantity
from pase.planning.plan import Plan


def print_step(why: StepExplanation, *, shows_all: bool) -> None:
    """Print what bounds the step, and of each layer the mode that comes next."""
    plan, found = why.plan, why.simulation
    certificate = "proven optimal" if plan.exact else f"gap {plan.gap:.2%}"
    slowest = found.stages[why.slowest]
    has_stages = len(found.stages) > 1
    waits = f"{found.bubble:.1%} of the time; filling and draining take {why.fill:.1%} where all stages take the same"
    held = sum(layer.held is not None for layer in why.layers)
    limit = "time: no layer by itself would cost less in another mode"
    if held:
        limit = f"memory: {held} of {len(why.layers)} layers would each cost less in a mode that does not fit"
    longest = f"stage {slowest.stage}: {quantity(slowest.micro_batch_s, 's')} a micro-batch"
    say(headline(plan))
    print_facts(
        {
            "total cost": f"{quantity(plan.total_cost, plan.cost_unit)}, {certificate}{plan.among}",
            "step": step_text(plan),
            "longest stage": longest if has_stages else None,
            "devices wait": waits if has_stages else None,
            "memory": _memory(why),
            "limited by": limit,
        }
    )
    say()
    print_layers(
        plan.graph,
        ["<layer", "<configuration", "<mode", "<next best", "costs", "<does not fit", "would save"],
        [
            [
                layer.name,
                configuration_text(layer.own.splits, len(plan[layer.name].devices)),
                "  ".join(plan.modes_of(plan[layer.name])) or layer.text(layer.own),
                *_beside(plan, layer, layer.runner_up),
                *_beside(plan, layer, layer.held),
            ]
            for layer in why.layers
        ],
        [layer.kind for layer in why.layers],
        shows_all=shows_all,
    )


def _memory(why: StepExplanation) -> str:
    step = why.simulation.step
    what = "stage" if step.chunks == 1 else "the group of stage"
    where = f"{what} {step.fullest} needs " if why.plan.num_stages > 1 else ""
    limit = "" if why.limit_bytes is None else f" of {quantity(why.limit_bytes, 'B')} that a device may"
    return f"{where}{quantity(step.memory_bytes(step.fullest), 'B')}{limit}"


def _beside(plan: Plan, layer: StepLayer, mode: LayerMode | None) -> tuple[str, str]:
    return ("", "") if mode is None else (layer.text(mode), _share(plan, mode))


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
                quantity(mode.memory_bytes, "B"),
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
                one.micro_batches,
                "none is known to fit" if one.step_s is None else quantity(one.step_s, "s"),
                "the plan's" if one.is_own else "" if one.step_s is None else percent(one.step_s / plan.total_cost - 1),
                "" if one.is_own else quantity(one.bound_s, "s") if isfinite(one.bound_s) else "nothing fits",
            ]
            for one in found
        ],
    )


def step_document(why: StepExplanation) -> dict[str, Any]:
    """Return what is said of the step as a whole."""
    simulated = attributes(why.simulation, "simulated_s=step_time_s waiting_share=bubble")
    return {
        **attributes(why.plan, "total_cost gap micro_batches schedule"),
        **simulated,
        **attributes(why, "fill_share=fill longest_stage=slowest limit_bytes"),
        "stages": [{**asdict(use), "micro_batch_s": use.micro_batch_s} for use in why.simulation.stages],
        "limited_by": "memory" if any(layer.held for layer in why.layers) else "time",
    }


def step_layer_document(layer: StepLayer) -> dict[str, Any]:
    """Return what is said of one layer."""
    return {
        **attributes(layer, "reason stage"),
        "modes": [asdict(mode) for mode in layer.modes],
        "other_configuration": layer.other and asdict(layer.other),
    }


def schemes_document(found: Sequence[SchemeOutcome]) -> list[dict[str, Any]]:
    """Return what other numbers of stages and of micro-batches would take; bounds that nothing fits are null."""
    return [{**asdict(one), "bound_s": one.bound_s if isfinite(one.bound_s) else None} for one in found]
