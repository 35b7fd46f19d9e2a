"""A step of micro-batches and stages, as the page has it: what each stage does, and when."""

from dataclasses import asdict
from typing import Any

from pase.analysis.simulation.pipeline import StagedSimulation, Work, simulate_stages
from pase.errors import PlanError
from pase.planning.plan import Plan

MOST_PASSES = 6_000
"""That the page draws: of longer steps the first ones."""


def simulated(plan: Plan) -> tuple[StagedSimulation | None, str]:
    """Return a step of a plan with parts, and what stands in the way; None: nothing is said of it."""
    try:
        return simulate_stages(plan) if plan.has_parts else None, ""
    except PlanError as error:  # of several stages in one group of devices
        return None, str(error)


def recomputed_costs(found: StagedSimulation) -> list[float]:
    """Return what of each layer's cost is its forward pass once more."""
    costs = []
    for problem, choice in found.step.problems:
        for layer, c in zip(problem.tables.layers, choice, strict=True):
            assert layer.passes is not None
            costs.append(found.plan.micro_batches * float(layer.passes.remade[c]))
    return costs


def stages_document(found: StagedSimulation) -> dict[str, Any]:
    """Return how the stages of a plan spend a step.

    works: what a stage does, by name. stages: of each `layers`, its first and last layer, `devices`, first and last,
    `times_s` of the works, of one micro-batch. passes: [stage, work, micro-batch or null, begin, end] in seconds, by
    their begin; `num_passes`: how many there are in all.
    """
    works = [*Work]
    passes = sorted(found.passes, key=lambda each: (each.begin_s, each.stage))
    return {
        "step_time_s": found.step_time_s,
        "closed_form_s": found.closed_form_s,
        "waiting_share": found.bubble,
        "works": [str(work) for work in works],
        "stages": [
            {
                **asdict(use),
                "layers": [found.plan.index[name] for name in use.layers],
                "devices": [use.devices[0], use.devices[1] - 1],
                "times_s": [use.times_s[work] for work in works],
                "micro_batch_s": use.micro_batch_s,
            }
            for use in found.stages
        ],
        "num_passes": len(passes),
        "passes": [
            [each.stage, works.index(each.work), each.micro_batch, each.begin_s, each.end_s]
            for each in passes[:MOST_PASSES]
        ],
    }
