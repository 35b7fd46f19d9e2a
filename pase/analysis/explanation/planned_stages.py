"""The stages of a plan as search problems whose choices are configurations, states of weights and recomputing.

A plan of one stage is one problem, whose costs are those of the step. Of several stages each is a problem in which the
other stages stay as they are. The time of the step is then a convex function of what a micro-batch takes of the stage
and of what it does once a step. The stage's tables are linear in both and touch that function at the plan, so that no
strategy changes the time of the step by less than they say; what it does change is worked out of the strategy's sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from pase.analysis.explanation.constrained_search import (
    PATIENT_TIME_S,
    ConstrainedSearch,
    Improvement,
    improvement,
    planned_choice,
    present_optimum,
)
from pase.costs import Problem, cost_model
from pase.costs.choice_tables import ChoiceTables, KnownChoices, choice_tables
from pase.costs.choices import criteria_weights
from pase.costs.memory import keeping
from pase.costs.states import EVERY_MODE, ModeSpace
from pase.graph import Graph
from pase.planning.constraints import allowed, mode_space, with_ties
from pase.planning.memory_limit import MemoryLimit, limit_of
from pase.planning.one_stage import step_cost
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.planning.problems import configurations_beside, problem_of_plan
from pase.planning.spans import Batch
from pase.planning.stage_problem import StageProblem, StageSums
from pase.planning.stages import check_stages
from pase.planning.steps import LayerChoice, TrainingStep, chosen_layer
from pase.sharding.shards import IndexArray
from pase.solver import Solution

SMALL_RISE = 1e-6
"""Share of a step's time by which what a stage takes is raised to see how the step's time rises with it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStage:
    """A stage of a plan as a search problem in which all other stages stay as they are.

    Attributes:
        plan: Whose stage it is.
        number: Of the stage.
        first: Position of its first layer in the plan.
        space: Modes that layers choose from.
        problem: Of its layers' choices.
        choice: [V] of the plan.
        search: How other strategies are searched for.
        memory: What strategies need on a device, of this stage alone.
        other_bytes: Beside that, what other stages have at most in the memory of the same devices.
        step: The plan's step, where it has several stages; None for one.
    """

    plan: Plan
    number: int = 0
    first: int = 0
    space: ModeSpace
    problem: Problem
    choice: tuple[int, ...]
    search: ConstrainedSearch
    memory: MemoryLimit
    other_bytes: int = 0
    step: TrainingStep | None = None

    def optimum(self, on_progress: Progress | None = None) -> Solution:
        """Return the cheapest strategy that fits by the tables, nearest to the plan's."""
        return present_optimum(self.plan, self.problem.tables, self.choice, self.search, on_progress)

    def improvement(self, best: Sequence[int]) -> Improvement | None:
        """Return what to change first to come nearer to a better strategy; None where that is not cheaper."""
        return improvement(self.problem, self.choice, best, self.search.fits, cost_of=self.cost, stage=self.number)

    def cost(self, choice: Sequence[int]) -> float:
        """Return what a step costs in which this stage has another strategy."""
        if self.step is None:
            return step_cost(self.problem, choice)
        sums = list(self.step.sums)
        sums[self.number] = self._stage_problem.sums(choice)
        return self.step.cost_of(sums)

    def bound(self, table_cost: float) -> float:
        """Return what a step costs at least of which the tables say a cost."""
        return self._offset + table_cost

    @cached_property
    def _offset(self) -> float:
        """What a step costs at the plan beyond what the tables count of this stage."""
        if self.step is None:
            return 0.0
        often, once = _rises(self.step, self.number)
        own = self.step.sums[self.number]
        return self.step.cost - often * own.micro_batch - once * own.step

    @cached_property
    def _stage_problem(self) -> StageProblem:
        return StageProblem(tables=self.problem.choices, weight=1.0, in_flight=1, limit_bytes=inf)

    def bytes_needed(self, choice: Sequence[int]) -> int:
        """Return the most that a device of the stage has in memory at once."""
        return self.memory.peak(choice).bytes + self.other_bytes

    def layer(self, vertex: int, choice: int) -> LayerChoice:
        """Return what a layer has under one of its choices."""
        return chosen_layer(self.problem.choices, vertex, choice, self.number)

    def modes(self, vertex: int, choice: int) -> IndexArray:
        """Return the choices of a layer with the same configuration as one of them."""
        rows = self.problem.choices.layers[vertex].rows
        return np.flatnonzero(rows == rows[choice]).astype(np.int32)

    def num_configurations(self, vertex: int) -> int:
        """Return how many configurations a layer can have."""
        return len(np.unique(self.problem.choices.layers[vertex].rows))


def planned_stages(
    plan: Plan, *, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[PlannedStage, ...]:
    """Return the stages of a plan.

    Layers of a plan without micro-batches, stages and modes have no other modes to choose from; of others they have
    all that the plan's constraints allow.

    Args:
        plan: Any.
        time_limit_s: Of one search.
        on_progress: Called with what is being done and the fraction that is done.

    Raises:
        PlanError: A layer has a configuration that no search considers, or a group of devices has several stages that
            it cannot have in turns.
    """
    if plan.num_stages != plan.num_groups:
        check_stages(plan)
    space = mode_space(EVERY_MODE, plan.constraints, plan.graph) if plan.has_parts else ModeSpace()
    if plan.num_groups > 1:
        return tuple(_stages(plan, space, time_limit_s))
    problem = problem_of_plan(plan, on_progress, space=space)
    memory = limit_of(problem, plan.device_memory_bytes or 0, plan.optimiser)
    stage = PlannedStage(
        plan=plan,
        space=space,
        problem=problem,
        choice=planned_choice(plan, problem),
        search=_search(plan, memory, time_limit_s),
        memory=memory,
    )
    return (stage,)


def _search(plan: Plan, memory: MemoryLimit, time_limit_s: float | None) -> ConstrainedSearch:
    limit = memory if plan.device_memory_bytes else None
    return ConstrainedSearch(limit=limit, time_limit_s=time_limit_s, patience_s=PATIENT_TIME_S / plan.num_stages)


def _stages(plan: Plan, space: ModeSpace, time_limit_s: float | None) -> Iterator[PlannedStage]:
    """Yield each of several stages."""
    step, known, keeps = TrainingStep.of(plan), KnownChoices(), keeping(plan.graph)
    model = cost_model(plan.cost_model, plan.machine, step.group, plan.precision)
    left = allowed(plan.constraints, plan.graph, step.group, configurations_beside(plan))
    fixed = Batch(graph=plan.graph, has_cuts=True).fixed - {layer.name for layer in plan if layer.is_recomputed}
    for number, (graph, (first, _)) in enumerate(zip(step.stages, step.bounds, strict=True)):
        configurations = {operator.name: left.configurations(plan.graph, operator) for operator in graph.operators}
        ties = [names for _, names in left.ties]
        for name in _tied_elsewhere(graph, ties):
            configurations[name] = np.array([list(plan[name].splits.values())], dtype=np.int32)
        tables = choice_tables(
            graph,
            step.group,
            model,
            space,
            known=known,
            keeps=keeps,
            fixed=fixed,
            only=configurations,
            links=step.links[number],
            micro_batches=plan.micro_batches,
            is_whole=True,
        )
        problem = _linear_problem(tables, *_rises(step, number), plan.micro_batches)
        inside = ([name for name in names if name in graph.index] for names in ties)
        problem = with_ties(problem, inside)
        other_bytes = step.peaks[number].bytes - step.memory_of_stage(number).peak().bytes
        memory = limit_of(
            problem,
            (plan.device_memory_bytes or 0) - other_bytes,
            plan.optimiser,
            keeps=keeps,
            in_flight=step.in_flight(number),
        )
        yield PlannedStage(
            plan=plan,
            number=number,
            first=first,
            space=space,
            problem=problem,
            choice=planned_choice(plan, problem),
            search=_search(plan, memory, time_limit_s),
            memory=memory,
            other_bytes=other_bytes,
            step=step,
        )


def _tied_elsewhere(graph: Graph, ties: Sequence[Sequence[str]]) -> list[str]:
    """Return the layers of a stage that are tied to layers of others."""
    crossing = [names for names in ties if not all(name in graph.index for name in names)]
    return [name for names in crossing for name in names if name in graph.index]


def _rises(step: TrainingStep, number: int) -> tuple[int, int]:
    """Return how much a step takes longer for each second that a stage takes longer: of a micro-batch, and once."""
    small_s = SMALL_RISE * step.cost
    own = step.sums[number]

    def rise(raised: StageSums) -> int:
        sums = [*step.sums[:number], raised, *step.sums[number + 1 :]]
        return round((step.cost_of(sums) - step.cost) / small_s)

    return rise(own._replace(repeated=own.repeated + small_s)), rise(own._replace(once=own.once + small_s))


def _linear_problem(tables: ChoiceTables, often: int, once: int, micro_batches: int) -> Problem:
    """Return the problem of a stage of which a micro-batch counts `often`, and what it does once a step `once`."""
    if once and often:
        costs = tables.of_one_stage(often)
    else:
        # What can overlap counts as if it did.
        costs = tables.weighed(criteria_weights(repeated=often, once=once))
    return Problem(choices=tables, tables=costs, micro_batches=micro_batches)
