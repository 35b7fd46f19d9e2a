"""How an explanation searches: within the plan's own limit on memory, and for the strategy nearest to the plan."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from pase.common.connected import connected
from pase.costs import Problem, memory_tables
from pase.errors import PlanError
from pase.planning.memory_limit import weighted_problem
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.solver import ConstrainedProblem, Solution, solve, solve_limited
from pase.tables.cost_tables import CostTables

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

    limited: a problem with the bytes that its strategies take on each device, and the limit; None: no limit.
    time_limit_s: of one search.
    """

    limited: ConstrainedProblem | None = None
    time_limit_s: float | None = None

    def fits(self, choice: Sequence[int]) -> bool:
        return self.limited is None or self.limited.fits(choice)

    def weighted(self, tables: CostTables) -> ConstrainedProblem | None:
        """Return a problem of the same configurations with their weights; None where there is no limit."""
        return self.limited and replace(self.limited, tables=tables)

    def cheapest(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy that fits; SolverError where none does."""
        weighted = self.weighted(tables)
        if weighted is None:
            return self.unlimited(tables, known, on_progress)
        time_limit_s = self.time_limit_s or PATIENT_TIME_S
        return solve_limited(weighted, known=known, time_limit_s=time_limit_s, on_progress=on_progress).solution

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
    memory = memory_tables(problem, optimiser=plan.optimiser)
    return ConstrainedSearch(limited=weighted_problem(problem.tables, memory, limit), time_limit_s=time_limit_s)


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
    if search.limited is None or not plan.exact:
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
