"""How an explanation searches: within the plan's own limit on memory, and for the strategy nearest to the plan.

And what a plan that is not the cheapest pays too much for, and what to change in it first.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.common.containers import connected
from pase.costs import Problem
from pase.errors import PlanError
from pase.planning.memory_limit import MemoryLimit, cheapest_within, limit_of
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.solver import Solution, solve
from pase.tables.cost_tables import CostTables, FloatArray

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

    limit: on the peaks of strategies; None: no limit. time_limit_s: of one search.
    """

    limit: MemoryLimit | None = None
    time_limit_s: float | None = None

    def fits(self, choice: Sequence[int]) -> bool:
        return self.limit is None or self.limit.fits(choice)

    def cheapest_beside(self, vertex: int, choice: Sequence[int], costs: FloatArray) -> int | None:
        """Return the cheapest configuration of a vertex that fits beside the others of a choice; None where none does.

        costs: [K] of its configurations, infinite for those that are not looked at.
        """
        for configuration in map(int, np.argsort(costs, kind="stable")):
            if not np.isfinite(costs[configuration]):
                break
            if self.fits((*choice[:vertex], configuration, *choice[vertex + 1 :])):
                return configuration
        return None

    def cheapest(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy that fits; SolverError where none does."""
        if self.limit is None:
            return self.unlimited(tables, known, on_progress)
        time_limit_s = self.time_limit_s or PATIENT_TIME_S
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


def planned_choice(plan: Plan, problem: Problem) -> tuple[int, ...]:
    """Return a plan's strategy by configuration index."""
    choice = []
    for vertex, layer in enumerate(plan.layers):
        found = problem.choice(vertex, tuple(layer.splits.values()))
        if found is None:
            raise PlanError(
                f"layer {layer.name!r} has the configuration {layer.splits}, which a search on {plan.num_devices} "
                "devices does not look at: there is nothing to compare it with; search again"
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

    Under a memory limit it does: there a plan whose file says that it is proven is taken at its word.
    """
    if search.limit is None or not plan.exact:
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


Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What to change in a plan that is not the cheapest.

    layer: the one whose own cost, with the transfers to it, is most above what it is in the cheapest strategy. excess:
    by how much. changes: what to change first, configurations by layer; all other layers stay as they are. saving: what
    that takes off the plan's cost.
    """

    layer: str
    excess: float
    changes: tuple[tuple[str, dict[str, int]], ...]
    saving: float


def improvement(
    problem: Problem,
    choice: Sequence[int],
    optimum: Sequence[int],
    fits: Callable[[Sequence[int]], bool] = lambda _: True,
) -> Improvement | None:
    """Return what to change first in a strategy; None where the optimum is not cheaper.

    First is what saves most for each layer that is changed: one layer alone, with those that are alike and save as much
    by the same, or neighbours that together become what they are in the optimum.

    Args:
        problem: with the costs.
        choice: the strategy, by configuration index.
        optimum: a cheaper strategy, the nearest to it.
        fits: whether a strategy is one that may be.
    """
    tables = problem.tables
    cost, least = tables.evaluate(choice), tables.evaluate(optimum)
    if cost <= least * (1 + TIE):
        return None
    excess = _own_costs(tables, choice) - _own_costs(tables, optimum)
    worst = int(excess.argmax())

    def saving(other: Choice) -> float:
        return cost - tables.evaluate(other)

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
            (tables.vertex_names[v], problem.splits(v, new))
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
