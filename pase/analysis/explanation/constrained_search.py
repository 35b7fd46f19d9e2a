"""How an explanation searches: within the plan's own limit on memory, and for the strategy nearest to the plan.

And what a plan that is not the cheapest pays too much for, and what to change in it first.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.common.containers import connected
from pase.costs import Problem
from pase.costs.liveness import Turn
from pase.errors import PlanError
from pase.planning.memory_limit import MemoryLimit, cheapest_within, limit_of
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.planning.steps import LayerChoice, chosen_layer
from pase.solver import ConstrainedProblem, Solution, solve
from pase.tables.cost_tables import CostTables, FloatArray

Choice = tuple[int, ...]

TIE = 1e-9
"""Costs that differ by no more than this part of a strategy's cost count as equal: the solver tells no closer."""


def nearest(
    tables: Sequence[CostTables],
    reference: Sequence[int],
    choice: Sequence[int],
    *,
    moved: Collection[int] = (),
    costs: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return `choice` with every vertex as in `reference` that can be so at the same cost.

    tables: one problem or several over the same vertices, edges and configurations; a change must cost the same in
    each. moved: vertices that stay as they are in `choice`. Changes that belong together (neighbours that both differ)
    are taken back together, then one at a time, until none is left that can be. costs: of `choice` in each problem,
    where they are known.
    """
    incident = tables[0].incident
    slack = [TIE * cost for cost in costs or [table.evaluate(choice) for table in tables]]
    found = list(choice)

    def take_back(group: Collection[int]) -> bool:
        before = dict.fromkeys(group)
        edges = {number for v in group for number in incident[v]}

        def costs_now() -> list[float]:
            return [
                _cost_of(table, found, group, edges) if table.hiding is None else table.evaluate(found)
                for table in tables
            ]

        old = costs_now()
        for v in group:
            before[v], found[v] = found[v], reference[v]
        new = costs_now()
        if all(abs(n - o) <= s for n, o, s in zip(new, old, slack, strict=True)):
            return True
        for v, c in before.items():
            assert c is not None
            found[v] = c
        return False

    changed = {v for v, (c, r) in enumerate(zip(choice, reference, strict=True)) if c != r} - set(moved)
    for group in connected_parts(tables[0], changed):
        if take_back(group):
            changed -= set(group)
    waiting = True
    while waiting:
        back = {v for v in sorted(changed) if take_back((v,))}
        changed -= back
        waiting = bool(back)
    return tuple(found)


def _cost_of(tables: CostTables, choice: Sequence[int], vertices: Collection[int], edges: Collection[int]) -> float:
    layers = sum(float(tables.layer_costs(v)[choice[v]]) for v in vertices)
    return layers + sum(tables.edge(e).cost(choice[tables.edges[e][0]], choice[tables.edges[e][1]]) for e in edges)


def connected_parts(tables: CostTables, vertices: Collection[int]) -> list[list[int]]:
    """Return the connected parts of some vertices, each ascending, the one with the first vertex first."""
    of = set(vertices)
    return connected(sorted(of), ((v, u) for v in of for u in tables.neighbours[v] & of))


LIMITED_TIME_S = 0.5
"""Time of one search under a memory limit, unless another is given: it may take long, and there are many searches."""
PATIENT_TIME_S = 10.0
"""Time of a search whose proof decides how far flips are known; there are few such searches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConstrainedSearch:
    """What every search of an explanation keeps to.

    Attributes:
        limit: On the peaks of strategies; None for no limit.
        time_limit_s: Of one search; None for the usual time.
        patience_s: Of a search for the cheapest strategy within the limit, if no time is given.
    """

    limit: MemoryLimit | None = None
    time_limit_s: float | None = None
    patience_s: float = PATIENT_TIME_S
    _limited_turns: dict[Turn, ConstrainedProblem] = field(init=False, default_factory=dict)

    def fits(self, choice: Sequence[int]) -> bool:
        return self.limit is None or self.limit.fits(choice)

    def cheapest_beside(self, tables: CostTables, vertex: int, choice: Sequence[int], costs: FloatArray) -> int | None:
        """Return the choice of a vertex that costs least of those that fit with the others of a strategy.

        Args:
            tables: Of the problem.
            vertex: Whose choice it is.
            choice: The strategy.
            costs: [K] of the vertex's choices, infinite for those that are not considered.

        Returns:
            Its number; None where none fits.
        """
        turns = set[Turn]()
        may_fit = np.isfinite(costs)
        for candidate in map(int, np.argsort(costs, kind="stable")):
            if not may_fit[candidate]:
                continue
            strategy = (*choice[:vertex], candidate, *choice[vertex + 1 :])
            if self.limit is None or self.limit.fits(strategy):
                return candidate
            # What others need in the same turn, at least, is known at once.
            turn = self.limit.peak(strategy).turn
            if turn not in turns:
                turns.add(turn)
                at_turn = self._at(tables, turn)
                may_fit &= at_turn.usage(choice) + at_turn.changes(vertex, choice) <= at_turn.limit
        return None

    def _at(self, tables: CostTables, turn: Turn) -> ConstrainedProblem:
        """Return the problem in which what strategies need in one turn is limited."""
        assert self.limit is not None
        if turn not in self._limited_turns:
            self._limited_turns[turn] = self.limit.relaxed(tables, {turn: 1})
        return self._limited_turns[turn]

    def cheapest(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy that fits; SolverError where none does."""
        if self.limit is None:
            return self.unlimited(tables, known, on_progress)
        time_limit_s = self.time_limit_s or self.patience_s
        found = cheapest_within(tables, self.limit, known=known, time_limit_s=time_limit_s, on_progress=on_progress)
        return found.solution

    def unlimited(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy whether it fits or not.

        Without a time limit a search ends unproven when it is interrupted, and so does all of the explanation then.
        """
        solution = solve(tables, known=known, time_limit_s=self.time_limit_s, on_progress=on_progress)
        if not solution.exact and self.time_limit_s is None:
            raise KeyboardInterrupt
        return solution


def constrained_search(plan: Plan, problem: Problem, time_limit_s: float | None = None) -> ConstrainedSearch:
    """Return how to search for what is compared with a plan."""
    limit = plan.device_memory_bytes
    if limit is None:
        return ConstrainedSearch(time_limit_s=time_limit_s)
    return ConstrainedSearch(limit=limit_of(problem, limit, plan.optimiser), time_limit_s=time_limit_s)


def planned_choice(plan: Plan, problem: Problem) -> Choice:
    """Return the strategy of a plan, or of a stage of it, by the choices of a problem."""
    choice = list[int]()
    for operator in problem.graph.operators:
        layer = plan[operator.name]
        splits = tuple(layer.splits.values())
        found = problem.choice(len(choice), splits, layer.state, is_recomputed=layer.is_recomputed)
        if found is None:
            raise PlanError(
                f"layer {layer.name!r} has the configuration {dict(layer.splits)}, which a search on "
                f"{problem.num_devices} devices does not consider: there is nothing to compare it with; search again"
            )
        choice.append(found)
    return tuple(choice)


def present_optimum(
    plan: Plan,
    tables: CostTables,
    choice: Sequence[int],
    search: ConstrainedSearch,
    on_progress: Progress | None = None,
) -> Solution:
    """Return the cheapest strategy that fits, nearest to a plan; searched for again unless that takes long.

    Under a memory limit it does: there a plan whose file says that it is proven is taken at its word, unless the tables
    have modes that the search may not have had.
    """
    if search.limit is None or not plan.exact or plan.has_parts:
        return optimum_near(tables, choice, search, on_progress)
    return claimed_optimum(plan, tables, choice)


def claimed_optimum(plan: Plan, tables: CostTables, choice: Sequence[int]) -> Solution:
    """Return the plan as the cheapest strategy that its file says it is."""
    cost = tables.evaluate(choice)
    return Solution(
        cost=cost,
        lower_bound=cost,
        exact=True,
        choice=tuple(choice),
        ordering=plan.search.ordering,
        largest_dependent_set=plan.search.largest_dependent_set,
        time_s=plan.search.time_s,
        peak_memory_bytes=plan.search.peak_memory_bytes,
    )


def optimum_near(
    tables: CostTables, choice: Sequence[int], search: ConstrainedSearch, on_progress: Progress | None = None
) -> Solution:
    """Return the cheapest strategy that fits, of equals the one that differs least from a given one, which fits."""
    solution = search.cheapest(tables, [choice], on_progress)
    own = tables.evaluate(choice)
    if own <= solution.cost * (1 + TIE):
        return replace(solution, choice=tuple(choice), cost=own, lower_bound=min(solution.lower_bound, own))
    near = nearest([tables], choice, solution.choice)
    return replace(solution, choice=near) if search.fits(near) else solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What to change in a plan that is not the cheapest.

    Attributes:
        layer: The one whose own cost, with the transfers to it, is most above what it is in the cheapest strategy.
        excess: By how much.
        changes: What to change first, and what layers have then; all others stay as they are.
        saving: What that takes off the plan's cost.
    """

    layer: str
    excess: float
    changes: tuple[tuple[str, LayerChoice], ...]
    saving: float


def improvement(
    problem: Problem,
    choice: Sequence[int],
    optimum: Sequence[int],
    fits: Callable[[Sequence[int]], bool] = lambda _: True,
    *,
    cost_of: Callable[[Sequence[int]], float] | None = None,
    stage: int = 0,
) -> Improvement | None:
    """Return what to change first in a strategy; None where the optimum is not cheaper.

    First is what saves most for each layer that is changed: one layer alone, with those that are alike and save as much
    by the same, or neighbours that together become what they are in the optimum.

    Args:
        problem: with the costs.
        choice: the strategy, by the problem's choices.
        optimum: a cheaper strategy, the nearest to it.
        fits: whether a strategy is one that may be.
        cost_of: what a step costs with a strategy; by default what the tables say.
        stage: whose problem it is.
    """
    tables = problem.tables
    cost_of = cost_of or tables.evaluate
    cost = cost_of(choice)
    if cost <= cost_of(optimum) * (1 + TIE):
        return None
    excess = _own_costs(tables, choice) - _own_costs(tables, optimum)
    worst = int(excess.argmax())

    def saving(other: Choice) -> float:
        return cost - cost_of(other)

    def saving_by_layer(other: Choice) -> float:
        return saving(other) / sum(old != new for old, new in zip(choice, other, strict=True))

    changed = {v for v, (own, best) in enumerate(zip(choice, optimum, strict=True)) if own != best}
    parts = [_with(choice, optimum, part) for part in connected_parts(tables, changed)]
    alone, alike = _alone(tables, choice)
    # Of parts it may be that none fits but all of them together.
    found = max(filter(fits, [*alone.values(), *parts, tuple(optimum)]), key=saving_by_layer)
    for vertices, other in alike:
        if found in map(alone.get, vertices) and fits(other) and saving(other) > saving(found):
            found = other
    return Improvement(
        layer=tables.vertex_names[worst],
        excess=float(excess[worst]),
        changes=tuple(
            (tables.vertex_names[v], chosen_layer(problem.choices, v, new, stage))
            for v, (old, new) in enumerate(zip(choice, found, strict=True))
            if old != new
        ),
        saving=saving(found),
    )


def _own_costs(tables: CostTables, choice: Sequence[int]) -> FloatArray:
    """Return what each layer costs with the transfers to it, less what is hidden: together the cost of the strategy."""
    costs = np.array([tables.layer_costs(v)[c] for v, c in enumerate(choice)])
    for number, (u, v) in enumerate(tables.edges):
        costs[v] += tables.edge(number).cost(choice[u], choice[v])
    if tables.hiding is not None:
        share = tables.hidden_share(choice)
        for v, c in enumerate(choice):
            costs[v] -= share * tables.hiding.hideable[tables.vertex_table[v]][c]
        for number, (u, v) in enumerate(tables.edges):
            table, hideable = tables.edge(number), tables.hiding.edges[tables.edge_table[number]]
            if hideable is not None:
                costs[v] -= share * hideable[table.row_class[choice[u]], table.col_class[choice[v]]]
    return costs


def _alone(tables: CostTables, choice: Sequence[int]) -> tuple[dict[int, Choice], list[tuple[list[int], Choice]]]:
    """Return, by layer that another configuration alone makes cheaper, the strategy with the best of them.

    And, for layers that are alike in this, these layers and the strategy with all of them changed.
    """
    alone: dict[int, Choice] = {}
    groups: dict[tuple[int, int, int], list[int]] = {}
    for vertex, own in enumerate(choice):
        beside = tables.costs_beside(vertex, choice)
        best = int(beside.argmin())
        if beside[best] < beside[own]:
            groups.setdefault((tables.vertex_table[vertex], own, best), []).append(vertex)
            alone[vertex] = _with(choice, {vertex: best}, [vertex])
    return alone, [(found, _with(choice, dict.fromkeys(found, best), found)) for (_, _, best), found in groups.items()]


def _with(choice: Sequence[int], other: Sequence[int] | Mapping[int, int], vertices: Iterable[int]) -> Choice:
    """Return a strategy with some layers as in another one."""
    found = list(choice)
    for vertex in vertices:
        found[vertex] = other[vertex]
    return tuple(found)
