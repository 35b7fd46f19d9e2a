"""All layers at a glance: what each pays, its runner-up, and why, in the time of one search.

Repeated layers in equal surroundings have one reason: it is given for the first of them, to which the others refer.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from time import monotonic

from pase.analysis.explanation.explain import Work
from pase.analysis.explanation.findings import LayerExplanation, RunnerUp
from pase.analysis.explanation.flips import NO_FLIPS
from pase.analysis.explanation.nearest import TIE
from pase.analysis.explanation.optimum import claimed_optimum, planned_choice, present_optimum
from pase.analysis.explanation.parts import Part
from pase.analysis.explanation.searching import Searching, searching
from pase.costs import Problem
from pase.planning.plan import Plan
from pase.planning.planner import Progress, problem_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefRunnerUp:
    """The cheapest strategy in which a layer has another configuration, which it would be.

    difference: its cost less that of the cheapest strategy with the layer's own, in the unit of the plan's total.
    num_changes: other layers that change with it; None where that was not looked at.
    """

    splits: Mapping[str, int]
    difference: float
    is_tie: bool
    is_exact: bool
    num_changes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOverview:
    """parts: of the layer's own cost, the dearest first. reason: one sentence, None where there was no time for it.

    like: the layer, alike in all of this, whose sentence it is; the layer's own name where it is its own.
    runner_up: None where there is none, or where there was no time for it.
    """

    name: str
    parts: tuple[Part, ...]
    num_configurations: int
    runner_up: BriefRunnerUp | None
    reason: str | None
    like: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """is_optimal: whether no strategy was found that is cheaper; optimum_cost: of the cheapest one."""

    layers: tuple[LayerOverview, ...]
    is_optimal: bool
    optimum_cost: float


def overview(plan: Plan, *, time_limit_s: float | None = None, on_progress: Progress | None = None) -> Overview:
    """Return what every layer pays, its runner-up and why it is as it is.

    time_limit_s: after which the sentences of the rest are left out; None: no limit. Raises PlanError for a layer
    whose configuration no search would look at.
    """
    deadline_s = None if time_limit_s is None else monotonic() + time_limit_s
    problem = problem_of(plan.graph, plan.num_devices, plan.machine, plan.cost_model, on_progress)
    choice = planned_choice(plan, problem)
    search = searching(plan, problem)
    work = _work(plan, problem, choice, search, on_progress)
    optimum = work.optimum
    groups: dict[Hashable, LayerExplanation] = {}
    layers = []
    for vertex, layer in enumerate(plan.layers):
        if on_progress:
            on_progress("looking for runner-ups", vertex / len(plan.layers))
        brief = _brief(work, vertex)
        surroundings = tuple(
            (problem.tables.edge_table[number], problem.tables.edges[number][0] == vertex, *_ends(work, number))
            for number in problem.tables.incident[vertex]
        )
        other = None if brief is None else tuple(brief.splits.values())
        key = problem.tables.vertex_table[vertex], choice[vertex], surroundings, other
        if key not in groups and (deadline_s is None or monotonic() < deadline_s):
            groups[key] = work.layer(vertex, NO_FLIPS, NO_FLIPS)
        first = groups.get(key)
        is_own = first is not None and (brief is None or first.name == layer.name)
        layers.append(
            LayerOverview(
                name=layer.name,
                parts=work.parts.own(vertex, choice[vertex]),
                num_configurations=problem.tables.domain_sizes[vertex],
                runner_up=_in_brief(first.runner_up) if first and is_own else brief,
                reason=first.reason if first else None,
                like=first.name if first else layer.name,
            )
        )
    return Overview(
        layers=tuple(layers),
        is_optimal=work.plan_cost <= optimum.cost * (1 + TIE),
        optimum_cost=optimum.cost,
    )


def _work(
    plan: Plan, problem: Problem, choice: tuple[int, ...], search: Searching, on_progress: Progress | None
) -> Work:
    """Return what is known of a plan beside the cheapest strategy: itself where its proof holds, or another."""
    if plan.exact and search.limited is None:
        # What the file says is looked at again, by the min-marginals that are needed anyway.
        work = Work(plan, problem, choice, claimed_optimum(plan, problem.tables, choice), search)
        if work.free.confirms_optimum():
            return work
    return Work(plan, problem, choice, present_optimum(plan, problem.tables, choice, search, on_progress), search)


def _ends(work: Work, number: int) -> tuple[int, int]:
    u, v = work.problem.tables.edges[number]
    return work.choice[u], work.choice[v]


def _brief(work: Work, vertex: int) -> BriefRunnerUp | None:
    """Return a layer's runner-up where min-marginals know it: without a limit on memory, for an optimal choice."""
    if work.search.limited is not None or work.choice[vertex] != work.optimum.choice[vertex]:
        return None
    least = work.free.least_without(vertex, work.choice[vertex])
    if least is None:
        return None
    difference = least.total_cost - work.optimum.cost
    return BriefRunnerUp(
        splits=work.problem.splits(vertex, least.configuration),
        difference=difference,
        is_tie=abs(difference) <= TIE * work.optimum.cost,
        is_exact=least.is_exact,
        num_changes=None,
    )


def _in_brief(runner_up: RunnerUp | None) -> BriefRunnerUp | None:
    if runner_up is None:
        return None
    return BriefRunnerUp(
        splits=runner_up.splits,
        difference=runner_up.difference,
        is_tie=runner_up.is_tie,
        is_exact=runner_up.is_exact,
        num_changes=len(runner_up.changes),
    )
