"""`explain`: why a plan is as it is, layer by layer; `overview`: all layers at a glance, in the time of one search."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from pase.analysis.explanation.alternatives import Alternative, Alternatives, FeasibleAlternatives
from pase.analysis.explanation.constrained_search import (
    TIE,
    ConstrainedSearch,
    claimed_optimum,
    constrained_search,
    improvement,
    nearest,
    planned_choice,
    present_optimum,
)
from pase.analysis.explanation.sensitivity import FARTHEST, NO_FLIPS, Side, breakpoints, scaled_tables
from pase.analysis.explanation.why_not import (
    CostParts,
    Explanation,
    Flip,
    LayerExplanation,
    MemoryBinding,
    Part,
    Reasons,
    RunnerUp,
    hidden_more,
    memory_reason,
)
from pase.costs import Problem, cost_model
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.planning.problems import problem_of_plan
from pase.solver import Solution
from pase.tables.cost_tables import CostTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """time_limit_s: of one search for an alternative; None: none. max_solutions: for flips, each way; 0: no flips."""

    time_limit_s: float | None = None
    max_solutions: int = 200


def explain(
    plan: Plan,
    layers: Iterable[str] | None = None,
    *,
    options: ExplainOptions | None = None,
    on_progress: Progress | None = None,
) -> Explanation:
    """Return why a plan's layers have their configurations; layers: by name, all by default.

    Raises PlanError for a layer that the plan does not have, or one whose configuration no search would look at; and
    for a plan with micro-batches, stages or modes of layers, which `explain_step` takes.
    """
    if plan.has_parts:
        raise PlanError(
            "the plan has micro-batches, stages or modes of layers, whose costs are no sum over layers: "
            "pase.analysis.explanation.explain_step, and pase explain, say why it is as it is"
        )
    options = options or ExplainOptions()
    problem = problem_of_plan(plan, on_progress)
    choice = planned_choice(plan, problem)
    search = constrained_search(plan, problem, options.time_limit_s)
    optimum = present_optimum(plan, problem.tables, choice, search, on_progress)
    work = Work(plan, problem, choice, optimum, search)
    below, above = _sides(work, options.max_solutions, on_progress)
    wanted = list(plan.index if layers is None else layers)
    found = []
    for number, name in enumerate(wanted):
        if name not in plan.index:
            raise PlanError(f"the plan has no layer {name!r}")
        found.append(work.layer(plan.index[name], below, above))
        if on_progress:
            on_progress("looking for runner-ups", (number + 1) / len(wanted))
    return Explanation(
        plan_cost=work.plan_cost,
        optimum_cost=optimum.cost,
        is_optimal=work.plan_cost <= optimum.cost * (1 + TIE),
        is_proven=optimum.exact,
        cost_unit=plan.cost_unit,
        flop_per_byte=plan.machine.flop_per_byte(plan.num_devices) if plan.cost_unit == "FLOP" else None,
        searched=(below.searched_to, above.searched_to),
        has_flips=problem.tables.hiding is None and options.max_solutions > 0,
        layers=tuple(found),
        improvement=improvement(problem, choice, optimum.choice, search.fits),
    )


class Work:
    """What is known of a plan while its layers are explained one after the other."""

    def __init__(
        self, plan: Plan, problem: Problem, choice: tuple[int, ...], optimum: Solution, search: ConstrainedSearch
    ) -> None:
        self.plan = plan
        self.problem = problem
        self.choice = choice
        self.optimum = optimum
        self.search = search
        self.plan_cost = problem.tables.evaluate(choice)
        self._free = optimum if search.limit is None else search.unlimited(problem.tables, [optimum.choice])
        self.free = Alternatives(problem.tables, self._free, search)
        self._alternatives = FeasibleAlternatives(tables=problem.tables, optimum=optimum, search=search, free=self.free)
        self.parts = CostParts(problem, cost_model(plan.cost_model, plan.machine, plan.num_devices, plan.precision))
        self._reasons = Reasons(plan, problem, choice, self.parts)

    def layer(self, vertex: int, below: Side, above: Side) -> LayerExplanation:
        own, best = self.choice[vertex], self.optimum.choice[vertex]
        kept = self._alternatives.among(vertex, np.array([own], dtype=np.int32))
        other = self._alternatives.without(vertex, own)
        if kept is None or kept.total_cost > self.plan_cost * (1 + TIE):  # a search cut short found none as good
            kept = Alternative(total_cost=self.plan_cost, choice=self.choice, is_exact=False)
        is_best = kept.total_cost <= self.optimum.cost * (1 + TIE)
        runner_up = None
        if other is not None:
            near = nearest([self.problem.tables], kept.choice, other.choice, moved=(vertex,), costs=[other.total_cost])
            other = replace(other, choice=near) if self.search.fits(near) else other
            runner_up = self._runner_up(vertex, kept, other)
        memory = self._memory(vertex)
        layer = self.plan.layers[vertex]
        return LayerExplanation(
            name=layer.name,
            kind=layer.kind,
            splits=layer.splits,
            num_configurations=self.problem.tables.domain_sizes[vertex],
            parts=self.parts.of(vertex, self.choice),
            is_best=is_best,
            best=layer.splits if is_best else self.problem.splits(vertex, best),
            kept_total_cost=kept.total_cost,
            runner_up=runner_up,
            memory=memory,
            below=self._flip(below, vertex, best),
            above=self._flip(above, vertex, best),
            reason=self._reasons.sentence(vertex, kept, runner_up, other)
            + (memory_reason(self._reasons.text(memory.splits), memory, self.plan_cost) if memory else ""),
        )

    def _runner_up(self, vertex: int, kept: Alternative, other: Alternative) -> RunnerUp:
        difference = other.total_cost - kept.total_cost
        beside = self.problem.tables.costs_beside(vertex, self.choice)
        own = float(beside[self.choice[vertex]])
        beside[self.choice[vertex]] = np.inf
        alone = self.search.cheapest_beside(vertex, self.choice, beside)
        return RunnerUp(
            splits=self.problem.splits(vertex, other.choice[vertex]),
            total_cost=other.total_cost,
            difference=difference,
            is_tie=abs(difference) <= TIE * kept.total_cost,
            is_exact=kept.is_exact and other.is_exact,
            changes=tuple(
                (self.plan.layers[v].name, self.problem.splits(v, c))
                for v, c in enumerate(other.choice)
                if c != self.choice[v] and v != vertex
            ),
            alone=None if alone is None else self.problem.splits(vertex, alone),
            alone_difference=0.0 if alone is None else float(beside[alone]) - own,
            rises=self.parts.rises(kept.choice, other.choice),
            hidden=hidden_more(self.problem.tables, kept.choice, other.choice),
        )

    def _memory(self, vertex: int) -> MemoryBinding | None:
        """Return what the layer would have at a lower cost if it fitted; None where there is no such thing."""
        limit = self.search.limit
        if limit is None:
            return None
        beside = self.problem.tables.costs_beside(vertex, self.choice)
        beside -= beside[self.choice[vertex]]
        for alone in map(int, np.argsort(beside, kind="stable")):
            if beside[alone] >= -TIE * self.plan_cost:
                break
            needed = limit.peak((*self.choice[:vertex], alone, *self.choice[vertex + 1 :])).bytes
            if needed > limit.limit_bytes:
                return MemoryBinding(
                    splits=self.problem.splits(vertex, alone),
                    difference=float(beside[alone]),
                    is_alone=True,
                    needed_bytes=needed,
                    limit_bytes=limit.limit_bytes,
                )
        free = self._free.choice
        if free[vertex] == self.choice[vertex] or self._free.cost >= self.plan_cost * (1 - TIE):
            return None
        return MemoryBinding(
            splits=self.problem.splits(vertex, free[vertex]),
            difference=self._free.cost - self.plan_cost,
            is_alone=False,
            needed_bytes=limit.peak(free).bytes,
            limit_bytes=limit.limit_bytes,
        )

    def _flip(self, side: Side, vertex: int, configuration: int) -> Flip | None:
        found = side.flip(vertex, configuration)
        return found and Flip(scale=found[0], splits=self.problem.splits(vertex, found[1]))


def _sides(work: Work, max_solutions: int, on_progress: Progress | None) -> tuple[Side, Side]:
    """Return the flips with faster and with slower links; none are looked for where costs do not add up."""
    plan, start = work.plan, work.optimum.choice
    if not max_solutions or work.problem.tables.hiding is not None:
        return NO_FLIPS, NO_FLIPS

    def optimise(tables: CostTables, known: Sequence[Sequence[int]]) -> Solution:
        if on_progress:
            on_progress("looking for flips", 0.0)
        return work.search.cheapest(tables, known)

    # Of the same configurations as the plan's own problem: those that its constraints allow.
    problem = scaled_tables(lambda machine: problem_of_plan(plan, on_progress, machine=machine), plan.machine)
    below, above = (
        breakpoints(problem, start, optimise, farthest=farthest, max_solutions=max_solutions, fits=work.search.fits)
        for farthest in (1 / FARTHEST, FARTHEST)
    )
    return below, above


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOverview:
    """parts: of the layer's own cost, the dearest first. reason: one sentence, None where there was no time for it.

    like: the layer, alike in all of this, whose sentence it is; the layer's own name where it is its own.
    runner_up: None where there is none, or where there was no time for it.
    """

    name: str
    parts: tuple[Part, ...]
    num_configurations: int
    runner_up: RunnerUp | None
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
    problem = problem_of_plan(plan, on_progress)
    choice = planned_choice(plan, problem)
    search = constrained_search(plan, problem)
    work = _work(plan, problem, choice, search, on_progress)
    optimum = work.optimum
    groups: dict[Hashable, LayerExplanation] = {}
    layers = []
    for vertex, layer in enumerate(plan.layers):
        if on_progress:
            on_progress("looking for runner-ups", vertex / len(plan.layers))
        brief = _brief(work, vertex)
        surroundings = tuple(
            (
                problem.tables.edge_table[number],
                problem.tables.edges[number][0] == vertex,
                *(choice[end] for end in problem.tables.edges[number]),
            )
            for number in problem.tables.incident[vertex]
        )
        other = None if brief is None else tuple(brief.splits.values())
        key = problem.tables.vertex_table[vertex], choice[vertex], surroundings, other
        if key not in groups and (deadline_s is None or monotonic() < deadline_s):
            groups[key] = work.layer(vertex, NO_FLIPS, NO_FLIPS)
        first = groups.get(key)
        if first and first.runner_up and (brief is None or first.name == layer.name):
            brief = first.runner_up
        layers.append(
            LayerOverview(
                name=layer.name,
                parts=work.parts.own(vertex, choice[vertex]),
                num_configurations=problem.tables.domain_sizes[vertex],
                runner_up=brief,
                reason=first.reason if first else None,
                like=first.name if first else layer.name,
            )
        )
    return Overview(
        layers=tuple(layers), is_optimal=work.plan_cost <= optimum.cost * (1 + TIE), optimum_cost=optimum.cost
    )


def _work(
    plan: Plan, problem: Problem, choice: tuple[int, ...], search: ConstrainedSearch, on_progress: Progress | None
) -> Work:
    """Return what is known of a plan beside the cheapest strategy: itself where its proof holds, or another."""
    if plan.exact and search.limit is None:
        # What the file says is looked at again, by the min-marginals that are needed anyway.
        work = Work(plan, problem, choice, claimed_optimum(plan, problem.tables, choice), search)
        if work.free.confirms_optimum():
            return work
    return Work(plan, problem, choice, present_optimum(plan, problem.tables, choice, search, on_progress), search)


def _brief(work: Work, vertex: int) -> RunnerUp | None:
    """Return a layer's runner-up where min-marginals know it: without a limit on memory, for an optimal choice."""
    if work.search.limit is not None or work.choice[vertex] != work.optimum.choice[vertex]:
        return None
    least = work.free.least_without(vertex, work.choice[vertex])
    if least is None:
        return None
    difference = least.total_cost - work.optimum.cost
    return RunnerUp(
        splits=work.problem.splits(vertex, least.configuration),
        total_cost=least.total_cost,
        difference=difference,
        is_tie=abs(difference) <= TIE * work.optimum.cost,
        is_exact=least.is_exact,
    )
