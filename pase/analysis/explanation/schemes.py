"""`other_schemes`: what other numbers of stages and micro-batches would take."""

from collections.abc import Set
from dataclasses import dataclass, replace
from math import inf

from pase.costs.states import ModeSpace
from pase.errors import ConfigurationError
from pase.graph import Graph
from pase.planning.constraints import mode_space
from pase.planning.pipelines import schemes, solve_scheme
from pase.planning.plan import Plan
from pase.planning.planner import Progress, fitting_limit, whole_graph
from pase.planning.problems import modes_of_layers
from pase.planning.spans import Scheme, Setting
from pase.planning.stages import schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeOutcome:
    """The cheapest step of some numbers of stages and micro-batches.

    Attributes:
        stages: Number of groups of devices.
        micro_batches: Of a step.
        chunks: Stages of each group of devices, as in the plan.
        step_s: None where none is known to fit.
        bound_s: None takes less; of the plan's own numbers, its lower bound.
        is_own: Whether the plan has these numbers.
    """

    stages: int
    micro_batches: int
    chunks: int
    step_s: float | None
    bound_s: float
    is_own: bool


def other_schemes(
    plan: Plan, *, space: ModeSpace | None = None, whole: Graph | None = None, on_progress: Progress | None = None
) -> tuple[SchemeOutcome, ...]:
    """Return what the next smaller and larger numbers of stages and micro-batches would take, each searched.

    Args:
        plan: whose numbers they are compared with.
        space: modes to choose from; None: those that layers of the plan have.
        whole: the graph of the whole batch; needed of models that are no built-in networks.
        on_progress: called with what is being done and the fraction that is done.

    Raises:
        PlanError: the graph of the whole batch is not known.
    """
    whole = whole_graph(plan) if whole is None else whole
    own = Scheme(stages=plan.num_groups, micro_batches=plan.micro_batches, chunks=plan.num_stages // plan.num_groups)
    setting = Setting(
        graph=whole,
        num_devices=plan.num_devices,
        machine=plan.machine,
        cost_model=plan.cost_model,
        space=mode_space(space or modes_of_layers(plan), plan.constraints, plan.graph),
        optimiser=plan.optimiser,
        limit_bytes=float(plan.device_memory_bytes or fitting_limit(plan.machine, plan.cost_model) or inf),
        schedule=schedule_of(own.chunks),
        constraints=plan.constraints,
    )
    every = [each for each in schemes(setting, None, None) if each.chunks == own.chunks]
    stages = _neighbours({each.stages for each in every}, own.stages)
    counts = _neighbours({each.micro_batches for each in every}, own.micro_batches)
    asked = [replace(own, stages=number) for number in stages] + [replace(own, micro_batches=m) for m in counts]
    asked = [each for each in asked if each in every]
    found = [
        SchemeOutcome(
            stages=own.stages,
            micro_batches=own.micro_batches,
            chunks=own.chunks,
            step_s=plan.total_cost,
            bound_s=plan.lower_bound,
            is_own=True,
        )
    ]
    for number, scheme in enumerate(asked):
        if on_progress:
            on_progress("searching other schemes", number / len(asked))
        try:
            best = solve_scheme(setting, scheme)
        except ConfigurationError:  # not every divisor of the batch is one of what each layer has of it
            continue
        found.append(
            SchemeOutcome(
                stages=scheme.stages,
                micro_batches=scheme.micro_batches,
                chunks=scheme.chunks,
                step_s=best.cost if best.parts else None,
                bound_s=best.bound,
                is_own=False,
            )
        )
    return tuple(sorted(found, key=lambda each: (each.stages, each.micro_batches)))


def _neighbours(numbers: Set[int], own: int) -> list[int]:
    """Return the next smaller number and the next larger one, as far as there are any."""
    smaller, larger = (n for n in numbers if n < own), (n for n in numbers if n > own)
    return [n for n in (max(smaller, default=None), min(larger, default=None)) if n is not None]
