"""`explain`: why a plan is as it is, layer by layer; `overview`: all layers at a glance, in the time of one search."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic

import numpy as np

from pase.analysis.explanation.alternatives import Alternative, Alternatives, FeasibleAlternatives
from pase.analysis.explanation.constrained_search import (
    LIMITED_TIME_S,
    TIE,
    claimed_optimum,
    nearest,
)
from pase.analysis.explanation.cost_parts import CostParts, Part
from pase.analysis.explanation.planned_stages import PlannedStage, planned_stages
from pase.analysis.explanation.sensitivity import FARTHEST, NO_FLIPS, Side, breakpoints, scaled_tables
from pase.analysis.explanation.why_not import (
    Explanation,
    Flip,
    LayerExplanation,
    MemoryBinding,
    Outcome,
    Reasons,
    RunnerUp,
)
from pase.costs import cost_model
from pase.errors import PlanError, unknown_name
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.planning.problems import problem_of_plan
from pase.solver import Solution
from pase.tables.cost_tables import CostTables, IndexArray

SEARCHES_OF_A_LAYER = 3
"""Searches for alternatives of a layer within a memory limit, about, of which a glance gets a share of its time."""

MOST_CHEAPER = 4
"""Choices of a layer that cost less than its own, of which it is looked whether they fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """How a plan is explained."""

    time_limit_s: float | None = None
    """Of one search for an alternative; None for no limit."""

    max_solutions: int = 200
    """Searches for flips, each way; 0: no flips."""


def explain(
    plan: Plan,
    layers: Iterable[str] | None = None,
    *,
    options: ExplainOptions | None = None,
    on_progress: Progress | None = None,
) -> Explanation:
    """Return why a plan's layers have their configurations and modes.

    Args:
        plan: Any. Layers of a plan with several stages are compared with strategies in which other stages stay as they
            are.
        layers: Which to explain, by name, each mode of theirs searched, too. None for all, without that; where a memory
            limit binds, which makes searches slow, repeated layers then share one search (`LayerExplanation.like`).
        options: See `ExplainOptions`.
        on_progress: Called with what is being done and the fraction that is done.

    Raises:
        PlanError: The plan has no such layer, or one has a configuration that no search considers.
    """
    options = options or ExplainOptions()
    wanted = list(plan.index if layers is None else layers)
    for name in wanted:
        if name not in plan.index:
            raise PlanError(unknown_name("layer", name, plan.index))
    works = {}
    for stage in planned_stages(plan, time_limit_s=options.time_limit_s, on_progress=on_progress):
        if not wanted or any(name in stage.problem.graph.index for name in wanted):
            works[stage.number] = Work(stage, stage.optimum(on_progress))
    below, above = NO_FLIPS, NO_FLIPS
    # Where communication overlaps, costs do not add up.
    adds_up = plan.num_groups == 1 and not any(work.problem.choices.hides for work in works.values())
    has_flips = adds_up and options.max_solutions > 0
    if has_flips:
        below, above = _sides(works[0], options.max_solutions, on_progress)
    found: list[LayerExplanation] = []
    first: dict[Hashable, LayerExplanation] = {}
    for number, name in enumerate(wanted):
        work = works[plan[name].stage if plan.num_groups > 1 else 0]
        vertex = work.stage.problem.graph.index[name]
        like, key = None, (work.stage.number, _alike(work.stage, vertex))
        if layers is None and work.is_limited:
            like = first.get(key)
        found.append(work.layer(vertex, below, above, like=like, searches_modes=layers is not None))
        first.setdefault(key, found[-1])
        if on_progress:
            on_progress("looking for runner-ups", (number + 1) / len(wanted))
    plan_cost = max((work.plan_cost for work in works.values()), default=plan.total_cost)
    optimum_cost = min((work.optimum_cost for work in works.values()), default=plan.total_cost)
    improvements = [work.stage.improvement(work.best) for work in works.values()]
    return Explanation(
        plan_cost=plan_cost,
        optimum_cost=optimum_cost,
        is_optimal=plan_cost <= optimum_cost * (1 + TIE),
        is_proven=all(work.is_proven for work in works.values()),
        cost_unit=plan.cost_unit,
        flop_per_byte=plan.machine.flop_per_byte(plan.num_devices) if plan.cost_unit == "FLOP" else None,
        searched=(below.searched_to, above.searched_to),
        has_flips=has_flips,
        layers=tuple(found),
        improvement=max(filter(None, improvements), key=lambda one: one.saving, default=None),
    )


class Work:
    """What is known of a stage of a plan while its layers are explained one after the other."""

    def __init__(self, stage: PlannedStage, optimum: Solution) -> None:
        """Take a stage and the cheapest strategy by its tables."""
        self.stage = stage
        self.problem = stage.problem
        self.choice = stage.choice
        self.search = stage.search
        self.optimum = optimum
        self.plan_cost = stage.cost(self.choice)
        optimum_cost = stage.cost(optimum.choice)
        self.optimum_cost, self.best = self.plan_cost, self.choice
        if optimum_cost < self.plan_cost:
            self.optimum_cost, self.best = optimum_cost, optimum.choice
        bound = stage.bound(optimum.cost)
        self.is_proven = optimum.exact and self.optimum_cost <= bound + TIE * self.plan_cost
        tables, plan = stage.problem.tables, stage.plan
        self._free = optimum if self.search.limit is None else self.search.unlimited(tables, [optimum.choice])
        self.free = Alternatives(tables, self._free, self.search)
        self._alternatives = FeasibleAlternatives(tables=tables, optimum=optimum, search=self.search, free=self.free)
        model = cost_model(plan.cost_model, plan.machine, stage.problem.num_devices, plan.precision)
        self.parts = CostParts(stage.problem, model)
        self._reasons = Reasons(stage, self.parts)

    def limit_searches(self, time_limit_s: float) -> None:
        """Give each search for an alternative so much time."""
        self.search = replace(self.search, time_limit_s=time_limit_s)
        self._alternatives = replace(self._alternatives, search=self.search)

    @property
    def is_limited(self) -> bool:
        """Whether a memory limit binds."""
        return not self.search.fits(self._free.choice)

    def layer(
        self,
        vertex: int,
        below: Side,
        above: Side,
        *,
        like: LayerExplanation | None = None,
        searches_modes: bool = False,
    ) -> LayerExplanation:
        """Return why a layer is as it is.

        Args:
            vertex: The layer.
            below: Flips with faster links.
            above: Flips with slower links.
            like: Of a repeated layer, whose alternatives are taken over; None to search for its own.
            searches_modes: Whether each of its modes is searched for.
        """
        own = self.choice[vertex]
        modes = self.stage.modes(vertex, own)
        outcomes: tuple[Outcome, ...] = ()
        if len(modes) > 1:
            outcomes = tuple(self._outcomes(vertex, modes, is_searched=searches_modes))
        if like is not None:
            name = self.problem.graph.operators[vertex].name
            parts = self.parts.of(vertex, self.choice)
            return replace(like, name=name, parts=parts, outcomes=outcomes)
        every = np.arange(self.problem.tables.domain_sizes[vertex], dtype=np.int32)
        kept = self._among(vertex, np.array([own], dtype=np.int32))
        if kept is None or kept.total_cost > self.plan_cost * (1 + TIE):  # a search cut short found none as good
            kept = Alternative(total_cost=self.plan_cost, choice=self.choice, is_exact=False)
        is_best = kept.total_cost <= self.optimum_cost * (1 + TIE)
        others, other_modes = np.setdiff1d(every, modes), modes[modes != own]
        other = self._near(vertex, kept, self._among(vertex, others))
        mode = self._near(vertex, kept, self._among(vertex, other_modes))
        # Peaks of strategies with modes take long to work out.
        has_alone = searches_modes or not (self.is_limited and self.stage.plan.has_parts)
        runner_up = self._runner_up(vertex, kept, other, others if has_alone else others[:0])
        other_mode = self._runner_up(vertex, kept, mode, other_modes if has_alone else other_modes[:0])
        memory = self._memory(vertex)
        operator = self.problem.graph.operators[vertex]
        return LayerExplanation(
            name=operator.name,
            like=operator.name,
            kind=operator.kind,
            choice=self.stage.layer(vertex, own),
            num_configurations=self.stage.num_configurations(vertex),
            parts=self.parts.of(vertex, self.choice),
            is_best=is_best,
            best=self.stage.layer(vertex, own if is_best else self.best[vertex]),
            kept_total_cost=kept.total_cost,
            runner_up=runner_up,
            other_mode=other_mode,
            memory=memory,
            below=self._flip(below, vertex),
            above=self._flip(above, vertex),
            outcomes=outcomes,
            reason=self._reasons.sentence(vertex, kept, other, runner_up, other_mode, memory),
        )

    def _among(self, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest strategy in which a layer has one of some choices, with what a step costs then."""
        found = self._alternatives.among(vertex, rows)
        if found is None:
            return None
        total = self.stage.cost(found.choice)
        if total < self.optimum_cost:
            self.optimum_cost, self.best = total, found.choice
        is_least = total <= self.stage.bound(found.total_cost) + TIE * self.plan_cost
        return replace(found, total_cost=total, is_exact=found.is_exact and is_least)

    def _near(self, vertex: int, kept: Alternative, other: Alternative | None) -> Alternative | None:
        """Return a strategy with the layer's other choice, and of equal ones the nearest to the one that keeps it."""
        if other is None:
            return None
        near = nearest([self.problem.tables], kept.choice, other.choice, moved=(vertex,))
        if not self.search.fits(near) or self.stage.cost(near) > other.total_cost + TIE * self.plan_cost:
            return other
        return replace(other, choice=near)

    def _runner_up(
        self, vertex: int, kept: Alternative, other: Alternative | None, rows: IndexArray
    ) -> RunnerUp | None:
        """Return what is said of a strategy with another choice of a layer; rows: those that could be changed alone."""
        if other is None:
            return None
        difference = other.total_cost - kept.total_cost
        costs = np.full(self.problem.tables.domain_sizes[vertex], np.inf)
        costs[rows] = self.problem.tables.costs_beside(vertex, self.choice)[rows]
        alone = self.search.cheapest_beside(self.problem.tables, vertex, self.choice, costs)
        rises = self.parts.rises(kept.choice, other.choice)
        hidden = sum(rise.cost for rise in rises) - difference
        more_bytes = None
        if self.stage.plan.has_parts:
            more_bytes = self.stage.bytes_needed(other.choice) - self.stage.bytes_needed(self.choice)
        return RunnerUp(
            choice=self.stage.layer(vertex, other.choice[vertex]),
            total_cost=other.total_cost,
            difference=difference,
            is_tie=abs(difference) <= TIE * kept.total_cost,
            is_exact=kept.is_exact and other.is_exact,
            more_bytes=more_bytes,
            changes=tuple(
                (self.problem.graph.operators[v].name, self.stage.layer(v, c))
                for v, c in enumerate(other.choice)
                if c != self.choice[v] and v != vertex
            ),
            alone=None if alone is None else self.stage.layer(vertex, alone),
            alone_difference=0.0 if alone is None else self._alone(vertex, alone),
            rises=rises,
            hidden=hidden if abs(hidden) > TIE * self.plan_cost else 0.0,
        )

    def _with(self, vertex: int, choice: int) -> tuple[int, ...]:
        """Return the plan's strategy with another choice of one layer."""
        return (*self.choice[:vertex], choice, *self.choice[vertex + 1 :])

    def _alone(self, vertex: int, choice: int) -> float:
        """Return what the plan's strategy costs more with another choice of one layer."""
        return self.stage.cost(self._with(vertex, choice)) - self.plan_cost

    def _outcomes(self, vertex: int, modes: IndexArray, *, is_searched: bool) -> list[Outcome]:
        """Return what a step takes with each mode of a layer's configuration, the cheapest alone first."""
        own, found = self.choice[vertex], []
        for mode in map(int, modes):
            least = self._among(vertex, np.array([mode], dtype=np.int32)) if is_searched else None
            found.append(
                Outcome(
                    choice=self.stage.layer(vertex, mode),
                    is_own=mode == own,
                    difference=None if least is None else least.total_cost - self.plan_cost,
                    is_exact=least is not None and least.is_exact,
                    alone_difference=self._alone(vertex, mode),
                    stage=self.stage,
                    strategy=self._with(vertex, mode),
                )
            )
        return sorted(found, key=lambda outcome: (outcome.alone_difference, not outcome.is_own))

    def _memory(self, vertex: int) -> MemoryBinding | None:
        """Return what the layer would have at a lower cost if it fitted; None where there is no such thing."""
        limit_bytes = self.stage.plan.device_memory_bytes
        if self.search.limit is None or limit_bytes is None:
            return None
        beside = self.problem.tables.costs_beside(vertex, self.choice)
        beside -= beside[self.choice[vertex]]
        # Of a plan that is not the cheapest, choices that cost less may fit.
        for alone in map(int, np.argsort(beside, kind="stable")[:MOST_CHEAPER]):
            if beside[alone] >= -TIE * self.plan_cost:
                break
            needed = self.stage.bytes_needed(self._with(vertex, alone))
            difference = self._alone(vertex, alone)
            if needed > limit_bytes and difference < -TIE * self.plan_cost:
                return MemoryBinding(
                    choice=self.stage.layer(vertex, alone),
                    difference=difference,
                    is_alone=True,
                    needed_bytes=needed,
                    limit_bytes=limit_bytes,
                )
        free = self._free_near
        difference = self.stage.cost(free) - self.plan_cost
        if free[vertex] == self.choice[vertex] or difference >= -TIE * self.plan_cost:
            return None
        return MemoryBinding(
            choice=self.stage.layer(vertex, free[vertex]),
            difference=difference,
            is_alone=False,
            needed_bytes=self.stage.bytes_needed(free),
            limit_bytes=limit_bytes,
        )

    @cached_property
    def _free_near(self) -> tuple[int, ...]:
        """The cheapest strategy whether it fits or not, of equal ones the nearest to the plan."""
        return nearest([self.problem.tables], self.choice, self._free.choice)

    def _flip(self, side: Side, vertex: int) -> Flip | None:
        found = side.flip(vertex, self.optimum.choice[vertex])
        return found and Flip(scale=found[0], choice=self.stage.layer(vertex, found[1]))


def _sides(work: Work, max_solutions: int, on_progress: Progress | None) -> tuple[Side, Side]:
    """Return the flips of a plan of one stage with faster and with slower links."""
    plan, start = work.stage.plan, work.optimum.choice

    def optimise(tables: CostTables, known: Sequence[Sequence[int]]) -> Solution:
        if on_progress:
            on_progress("looking for flips", 0.0)
        return work.search.cheapest(tables, known)

    # Of the same choices as the plan's own problem: those that its constraints allow.
    space = work.stage.space
    problem = scaled_tables(lambda other: problem_of_plan(plan, on_progress, machine=other, space=space), plan.machine)
    below, above = (
        breakpoints(problem, start, optimise, farthest=farthest, max_solutions=max_solutions, fits=work.search.fits)
        for farthest in (1 / FARTHEST, FARTHEST)
    )
    return below, above


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOverview:
    """What is said of a layer at a glance.

    Attributes:
        name: Of the layer.
        parts: Of the layer's own cost, the dearest first.
        num_configurations: That it could have.
        runner_up: None where it has no other configuration, or where there was no time for it.
        reason: One sentence; None where there was no time for it.
        like: The layer whose sentence it is, which is alike in all of this; its own name where it is its own.
    """

    name: str
    parts: tuple[Part, ...]
    num_configurations: int
    runner_up: RunnerUp | None
    reason: str | None
    like: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All layers at a glance.

    Attributes:
        layers: In the order of the plan.
        is_optimal: Whether no strategy was found that is cheaper; of several stages, by changing one of them.
        optimum_cost: Of the cheapest one.
    """

    layers: tuple[LayerOverview, ...]
    is_optimal: bool
    optimum_cost: float


def overview(plan: Plan, *, time_limit_s: float | None = None, on_progress: Progress | None = None) -> Overview:
    """Return what every layer pays, its runner-up and why it is as it is.

    Args:
        plan: Any.
        time_limit_s: After which the sentences of the rest are left out; None for no limit.
        on_progress: Called with what is being done and the fraction that is done.

    Raises:
        PlanError: A layer has a configuration that no search considers.
    """
    deadline_s = None if time_limit_s is None else monotonic() + time_limit_s
    layers, works = [], []
    stages = planned_stages(plan, on_progress=on_progress)
    num_groups = sum(len({_alike(stage, vertex) for vertex in range(len(stage.choice))}) for stage in stages)
    for stage in stages:
        work = _work(stage, on_progress)
        if time_limit_s is not None and stage.search.limit is not None:
            work.limit_searches(min(LIMITED_TIME_S, time_limit_s / (SEARCHES_OF_A_LAYER * num_groups)))
        works.append(work)
        groups: dict[Hashable, LayerExplanation] = {}
        for vertex, operator in enumerate(stage.problem.graph.operators):
            if on_progress:
                on_progress("looking for runner-ups", (stage.first + vertex) / len(plan))
            brief = _brief(work, vertex)
            key = _alike(stage, vertex), None if brief is None else tuple(brief.choice.splits.values())
            if key not in groups and (deadline_s is None or monotonic() < deadline_s):
                groups[key] = work.layer(vertex, NO_FLIPS, NO_FLIPS)
            first = groups.get(key)
            if first and first.runner_up and (brief is None or first.name == operator.name):
                brief = first.runner_up
            layers.append(
                LayerOverview(
                    name=operator.name,
                    parts=work.parts.own(vertex, stage.choice[vertex]),
                    num_configurations=stage.num_configurations(vertex),
                    runner_up=brief,
                    reason=first.reason if first else None,
                    like=first.name if first else operator.name,
                )
            )
    optimum_cost = min(work.optimum_cost for work in works)
    return Overview(
        layers=tuple(layers),
        is_optimal=works[0].plan_cost <= optimum_cost * (1 + TIE),
        optimum_cost=optimum_cost,
    )


def _alike(stage: PlannedStage, vertex: int) -> Hashable:
    """Return what layers of a stage have in common of which the same is said: tables, choices and neighbours."""
    tables, choice = stage.problem.tables, stage.choice
    surroundings = tuple(
        (tables.edge_table[number], tables.edges[number][0] == vertex, *(choice[end] for end in tables.edges[number]))
        for number in tables.incident[vertex]
    )
    return tables.vertex_table[vertex], choice[vertex], surroundings


def _work(stage: PlannedStage, on_progress: Progress | None) -> Work:
    """Return what is known of a stage beside the cheapest strategy: itself where its proof holds, or another."""
    plan = stage.plan
    if plan.exact and not plan.has_parts and stage.search.limit is None:
        # What the file says is looked at again, by the min-marginals that are needed anyway.
        work = Work(stage, claimed_optimum(plan, stage.problem.tables, stage.choice))
        if work.free.confirms_optimum():
            return work
    return Work(stage, stage.optimum(on_progress))


def _brief(work: Work, vertex: int) -> RunnerUp | None:
    """Return a layer's runner-up where min-marginals know it: without a limit on memory, for an optimal choice."""
    own = work.choice[vertex]
    if work.search.limit is not None or work.stage.step is not None or own != work.optimum.choice[vertex]:
        return None
    every = np.arange(work.problem.tables.domain_sizes[vertex], dtype=np.int32)
    least = work.free.least_among(vertex, np.setdiff1d(every, work.stage.modes(vertex, own)))
    if least is None:
        return None
    difference = least.total_cost - work.optimum.cost
    return RunnerUp(
        choice=work.stage.layer(vertex, least.configuration),
        total_cost=least.total_cost,
        difference=difference,
        is_tie=abs(difference) <= TIE * work.optimum.cost,
        is_exact=least.is_exact,
    )
