"""The cheapest strategy under a condition on one layer, for every layer in turn: runner-ups and what a choice costs.

Solving the whole problem once for each layer would do. What the answer needs is less: strategies within a few per
cent of the optimum leave most layers few configurations (`pase.solver.near_optimal`), and between those that have one
the problem falls apart into islands. Min-marginals (`pase.solver.min_marginals`) answer for all configurations of an
island at once; an island that would take too long is solved again for each question. An answer above the limit
proves nothing, and is looked for again under a higher one, at last in the whole problem.

What each configuration of each layer would cost (`every_choice`) takes two passes over the tables. Where the whole
problem is too large for them, that of the strategies up to some per cent above the optimum is not: what is cheaper than
that is found exactly, and of the rest it is known that it is dearer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from math import inf
from time import perf_counter

import numpy as np

from pase.analysis.explanation.constrained_search import (
    LIMITED_TIME_S,
    TIE,
    ConstrainedSearch,
    connected_parts,
    planned_choice,
)
from pase.costs import Allowance, Problem, TimeUpError
from pase.errors import PlanError, SolverError
from pase.planning.memory_limit import cheapest_within
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.planning.problems import problem_of_plan
from pase.solver import Marginals, Solution, min_marginals, near_optimal
from pase.tables.cost_tables import CostTables, IndexArray, among, restricted, restricted_edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Island:
    """A connected part of a problem whose other neighbours have one configuration each.

    vertices: [W] of the whole problem. kept: [W] the configurations that are left of each.
    tables: its own problem, over `kept`; transfers to decided neighbours are part of the layer costs.
    """

    vertices: tuple[int, ...]
    kept: tuple[IndexArray, ...]
    tables: CostTables

    def present(self, choice: Sequence[int]) -> list[int]:
        """Return the island's part of a strategy of the whole problem, all of which is among `kept`."""
        return [int(np.searchsorted(rows, choice[v])) for v, rows in zip(self.vertices, self.kept, strict=True)]

    def numbered(self, choice: Sequence[int]) -> dict[int, int]:
        """Return a strategy of the island by the whole problem's vertices and configurations."""
        return {v: int(rows[c]) for v, rows, c in zip(self.vertices, self.kept, choice, strict=True)}


def islands(tables: CostTables, kept: Sequence[IndexArray]) -> list[Island]:
    """Return the islands of the vertices that have more than one of the `kept` configurations, [V] each ascending."""
    parts = connected_parts(tables, [v for v, rows in enumerate(kept) if len(rows) > 1])
    return [_island(tables, kept, tuple(part)) for part in parts]


def _island(tables: CostTables, kept: Sequence[IndexArray], vertices: tuple[int, ...]) -> Island:
    position = {v: i for i, v in enumerate(vertices)}
    costs = []
    edges: dict[int, tuple[int, int]] = {}
    for vertex in vertices:
        total = tables.layer_costs(vertex)[kept[vertex]]
        for number in tables.incident[vertex]:
            u, v = tables.edges[number]
            if u in position and v in position:
                edges[number] = position[u], position[v]
                continue
            table = tables.edge(number)
            rows, cols = table.row_class[kept[u]], table.col_class[kept[v]]
            total = total + table.values[rows, cols]  # one of the two has one configuration
        costs.append(total)
    return Island(
        vertices=vertices,
        kept=tuple(kept[v] for v in vertices),
        tables=CostTables(
            vertex_names=tuple(tables.vertex_names[v] for v in vertices),
            vertex_costs=tuple(costs),
            vertex_table=tuple(range(len(vertices))),
            edges=tuple(edges.values()),
            edge_tables=tuple(
                restricted_edge(tables.edge(n), kept[tables.edges[n][0]], kept[tables.edges[n][1]]) for n in edges
            ),
            edge_table=tuple(range(len(edges))),
        ),
    )


SLACKS = (3e-5, 3e-4, 0.001, 0.003, 0.007, 0.015, 0.03, 0.06, 0.12, 0.3)
"""Limits that are tried one after the other, above the optimum, as parts of it."""

WORTH_A_STAGE = 2.5
"""A layer's runner-up costs about a layer more: limits within so many average layers are not tried first."""

MAX_CELLS = 150_000_000
"""Combinations that min-marginals may look at, about a second's work: an island of more is solved for each question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A cheapest strategy under a condition. is_exact: whether that is proven."""

    total_cost: float
    choice: tuple[int, ...]
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """What a vertex has in a cheapest strategy under a condition, and what that costs."""

    configuration: int
    total_cost: float
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """Configurations, [V] each ascending, of strategies within a limit, and the island of each open vertex."""

    kept: tuple[IndexArray, ...]
    islands: list[Island]
    island: Mapping[int, Island]
    marginals: dict[int, Marginals | None]  # by the island's first vertex


class Alternatives:
    """Finds cheapest strategies under a condition on one vertex; narrowed problems are made when first needed."""

    def __init__(self, tables: CostTables, optimum: Solution, search: ConstrainedSearch | None = None) -> None:
        """Take a problem, its solution, and how to search for others; memory is no matter here."""
        self._tables = tables
        self._optimum = optimum
        self._search = search or ConstrainedSearch()
        self._best = self._answer(optimum.choice, optimum.exact)
        self._stages: dict[int, _Stage] = {}

    def confirms_optimum(self) -> bool:
        """Return whether min-marginals prove that nothing is cheaper than what was taken for the optimum.

        False says nothing: something is cheaper, a problem was too large for them, or costs do not add up.
        """
        if self._tables.hiding is not None:
            return False
        stage, tolerance = self._stage(self._first_stage), TIE * self._optimum.cost
        for island in stage.islands:
            marginals = self._marginals(stage, island)
            if marginals is None:
                return False
            own = marginals.costs[0][island.present(self._optimum.choice)[0]]
            if marginals.costs[0].min() < own - tolerance:
                return False
        return True

    def least_among(self, vertex: int, rows: IndexArray) -> Least | None:
        """Return which of some other choices of a vertex costs least, and how much, where min-marginals know it.

        None: there are none, or the problem is too large for them.
        """
        if not len(rows):
            return None
        for number, limit in self._limits():
            known = self._known(number, vertex, rows)
            if known is None:
                return None
            if known.total_cost <= limit:
                return known
        return None

    def among(self, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has one of some configurations; None if there are none."""
        if not len(rows):
            return None
        if self._optimum.choice[vertex] in rows:
            return self._best
        enough = 0.0  # once a search was in vain, the limit that what it found is sure to be within
        for number, limit in self._limits():
            if limit < enough:
                continue
            found = self._near(number, vertex, rows, limit)
            if found is not None and found.total_cost <= limit:
                return found
            if found is not None:
                enough = min(enough or found.total_cost, found.total_cost)
        start = list(self._optimum.choice)
        start[vertex] = int(self._tables.costs_beside(vertex, start)[rows].argmin())
        solution = self._search.unlimited(restricted(self._tables, {vertex: rows}), [start])
        choice = list(solution.choice)
        choice[vertex] = int(rows[choice[vertex]])
        return self._answer(choice, solution.exact)

    def _limits(self) -> Iterator[tuple[int, float]]:
        """Yield (stage, limit), without the lowest where a higher one takes little more than they.

        None where costs do not add up: every question is then a search.
        """
        if self._tables.hiding is not None:
            return
        for number in range(self._first_stage, len(SLACKS)):
            yield number, self._optimum.cost * (1 + SLACKS[number])

    @cached_property
    def _first_stage(self) -> int:
        first = sum(slack < WORTH_A_STAGE / self._tables.num_vertices for slack in SLACKS[:-1])
        if first:
            stage = self._stage(first)
            if any(self._marginals(stage, island) is None for island in stage.islands):
                return 0
        return first

    def _known(self, number: int, vertex: int, rows: IndexArray) -> Least | None:
        """Return the least of what a stage has left, as min-marginals have it; above every limit if nothing is."""
        stage = self._stage(number)
        left = np.flatnonzero(np.isin(stage.kept[vertex], rows))
        if not len(left) or vertex not in stage.island:
            return Least(configuration=int(rows[0]), total_cost=np.inf, is_exact=False)
        island = stage.island[vertex]
        marginals = self._marginals(stage, island)
        if marginals is None:
            return None
        at = island.vertices.index(vertex)
        costs = marginals.costs[at]
        best = int(left[costs[left].argmin()])
        more = float(costs[best] - costs[np.searchsorted(stage.kept[vertex], self._optimum.choice[vertex])])
        return Least(
            configuration=int(stage.kept[vertex][best]),
            total_cost=self._optimum.cost + more,
            is_exact=self._optimum.exact,
        )

    def _near(self, number: int, vertex: int, rows: IndexArray, limit: float) -> Alternative | None:
        """Return the cheapest of what a stage has left, the answer if it is within the limit; None if nothing is."""
        known = self._known(number, vertex, rows)
        stage = self._stage(number)
        island = stage.island.get(vertex)
        if island is None:
            return None
        at = island.vertices.index(vertex)
        if known is None:
            return self._solved(stage, island, at, np.flatnonzero(np.isin(stage.kept[vertex], rows)).astype(np.int32))
        if known.total_cost > limit:
            return None
        marginals = self._marginals(stage, island)
        assert marginals is not None
        choice = list(self._optimum.choice)
        changes = marginals.changes(at, int(np.searchsorted(stage.kept[vertex], known.configuration)))
        for v, c in changes.items():
            choice[island.vertices[v]] = int(island.kept[v][c])
        return Alternative(total_cost=known.total_cost, choice=tuple(choice), is_exact=known.is_exact)

    def _solved(self, stage: _Stage, island: Island, at: int, left: IndexArray) -> Alternative:
        """Return the cheapest strategy of an island in which a vertex has one of the configurations that are left."""
        present = island.present(self._optimum.choice)
        present[at] = int(island.tables.costs_beside(at, present)[left].argmin())  # a start: the others as they are
        solution = self._search.unlimited(restricted(island.tables, {at: left}), [present])
        choice = list(solution.choice)
        choice[at] = int(left[choice[at]])
        whole = list(self._optimum.choice)
        for v, c in island.numbered(choice).items():
            whole[v] = c
        return self._answer(whole, solution.exact and self._optimum.exact)

    def _stage(self, number: int) -> _Stage:
        if number not in self._stages:
            kept = near_optimal(self._tables, self._optimum.cost * (1 + SLACKS[number]))
            found = islands(self._tables, kept)
            island = {v: one for one in found for v in one.vertices}
            self._stages[number] = _Stage(kept=kept, islands=found, island=island, marginals={})
        return self._stages[number]

    def _marginals(self, stage: _Stage, island: Island) -> Marginals | None:
        key = island.vertices[0]
        if key not in stage.marginals:
            # What is not within any limit may count as twice the highest, so that all costs are finite.
            stage.marginals[key] = min_marginals(
                island.tables,
                island.present(self._optimum.choice),
                max_cells=MAX_CELLS,
                ceiling=2 * (1 + SLACKS[-1]) * self._optimum.cost or 1.0,
            )
        return stage.marginals[key]

    def _answer(self, choice: Sequence[int], is_exact: bool) -> Alternative:
        return Alternative(total_cost=self._tables.evaluate(choice), choice=tuple(choice), is_exact=is_exact)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeasibleAlternatives:
    """Finds cheapest strategies that fit, under a condition on one vertex.

    optimum: the cheapest that fits. free: finds them whether they fit or not, and is all there is without a limit.
    """

    tables: CostTables
    optimum: Solution
    search: ConstrainedSearch
    free: Alternatives

    def among(self, vertex: int, rows: IndexArray) -> Alternative | None:
        """Return the cheapest strategy in which a vertex has one of some configurations; None if none is found."""
        if self.optimum.choice[vertex] in rows:
            return Alternative(total_cost=self.optimum.cost, choice=self.optimum.choice, is_exact=self.optimum.exact)
        found = self.free.among(vertex, rows)
        if found is None or self.search.fits(found.choice):
            return found
        return self._limited(vertex, rows, found)

    def _limited(self, vertex: int, rows: IndexArray, unlimited: Alternative) -> Alternative | None:
        """Return the cheapest strategy that fits; unlimited: the cheapest one, which does not."""
        assert self.search.limit is not None
        costs = np.full(self.tables.domain_sizes[vertex], inf)
        costs[rows] = self.tables.costs_beside(vertex, self.optimum.choice)[rows]
        start = self.search.cheapest_beside(self.tables, vertex, self.optimum.choice, costs)
        known = [self._with({vertex: start})] if start is not None else []
        known += self._exchanged(vertex, rows)
        least = min(known, key=self.tables.evaluate, default=None)
        if least is not None:
            cost = self.tables.evaluate(least)
            bounds = (self.optimum.cost, self.optimum.exact), (unlimited.total_cost, unlimited.is_exact)
            if any(is_exact and cost <= bound * (1 + TIE) for bound, is_exact in bounds):
                return Alternative(total_cost=cost, choice=least, is_exact=True)
        try:
            limited = cheapest_within(
                among(self.tables, vertex, rows),
                self.search.limit,
                time_limit_s=self.search.time_limit_s or LIMITED_TIME_S,
                known=known,
                unlimited=replace(
                    self.optimum,
                    cost=unlimited.total_cost,
                    lower_bound=unlimited.total_cost if unlimited.is_exact else 0.0,
                    exact=unlimited.is_exact,
                    choice=unlimited.choice,
                ),
            )
        except SolverError:  # nothing fits, or nothing that does was found in time
            return None
        solution = limited.solution
        return Alternative(total_cost=solution.cost, choice=solution.choice, is_exact=solution.exact)

    def _exchanged(self, vertex: int, rows: IndexArray) -> list[tuple[int, ...]]:
        """Return the cheapest strategy that fits in which a vertex has the choice of one that is alike, which has its.

        Of repeated layers it is often a matter of which of them has what.
        """
        choice, table = self.optimum.choice, self.tables.vertex_table
        others = [v for v in range(len(choice)) if table[v] == table[vertex] and choice[v] in rows]
        found = [self._with({vertex: choice[other], other: choice[vertex]}) for other in others]
        return list(islice(filter(self.search.fits, sorted(found, key=self.tables.evaluate)), 1))

    def _with(self, changes: Mapping[int, int]) -> tuple[int, ...]:
        """Return the optimum with other choices of some vertices."""
        found = list(self.optimum.choice)
        for vertex, choice in changes.items():
            found[vertex] = choice
        return tuple(found)


LIMITS = (9.0, 1.0, *reversed(SLACKS))
"""How far above the optimum strategies are looked at, as parts of it; the first that is not too much work."""

MOST_CELLS = 400_000_000
"""Combinations that min-marginals may look at, some seconds' work: this is done once, where it is asked for."""

MOST_CHOICES = 40
"""Configurations of a layer, the cheapest, of which is said what they would cost."""

Change = tuple[int, tuple[int, ...]]
"""A layer, by its number, and the splits that it would have instead of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A configuration of a layer: splits, in the order of its dims; difference: of the least total cost with it to the
    plan's; changes: which other layers differ from the plan in a strategy that costs this.
    """

    splits: tuple[int, ...]
    difference: float
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestConfigurations:
    """A layer's cheapest configurations, its own first and then by cost.

    num_configurations: of the layer in all. beyond: by how much more than the plan each of the others costs at least.
    """

    choices: tuple[Choice, ...]
    num_configurations: int
    beyond: float


def every_choice(
    plan: Plan, *, most: int = MOST_CHOICES, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[CheapestConfigurations | None, ...]:
    """Return [layers] what their configurations would cost in the cheapest strategy that has them.

    The plan's constraints hold for all, and layers keep their modes; a limit on memory does not hold. None stands for
    layers that were not reached within the time limit. Raises PlanError where nothing is known: for a plan that is not
    the optimum, or is not without its memory limit, of several stages, or where the problem is too large, or the time
    too short.
    """
    deadline_s = inf if time_limit_s is None else perf_counter() + time_limit_s
    allowance = Allowance(deadline_s=deadline_s)
    try:
        problem = problem_of_plan(plan, on_progress, allowance=allowance)
        if problem.tables.hiding is not None:
            raise PlanError(
                f"what other configurations would cost is not known under cost model {plan.cost_model!r}, whose costs "
                "do not add up; a plan of 'alpha_beta' has it"
            )
        choice = planned_choice(plan, problem)
        cost = problem.tables.evaluate(choice)
        for slack in LIMITS:
            if on_progress:
                on_progress("looking at every configuration", 0.0)
            found = _within(problem.tables, choice, cost, slack, lambda _: allowance.check())
            if found is not None:
                is_limited = plan.device_memory_bytes is not None
                return _choices(problem, choice, cost, found, slack, most, deadline_s, is_limited, on_progress)
    except TimeUpError:
        raise PlanError(
            f"what other configurations would cost is not known: the time limit of {time_limit_s:g} s was reached "
            "before it was worked out of any layer; give more time (--time-limit)"
        ) from None
    raise PlanError("what other configurations would cost is not known: the problem is too large for min-marginals")


def _not_the_cheapest(is_limited: bool) -> PlanError:
    """Return the error of a plan that something is cheaper than; is_limited: whether it is within a memory limit."""
    if is_limited:
        return PlanError(
            "what other configurations would cost is not known of a plan within a memory limit that binds, which it "
            "does for all layers together; search with a higher limit to have it"
        )
    return PlanError(
        "what other configurations would cost is not known of a plan that is not the cheapest: something costs less; "
        "search again, without a time limit, and report that plan"
    )


_Known = Sequence[tuple[Island, Marginals]]


def _within(
    tables: CostTables, choice: Sequence[int], cost: float, slack: float, check: Callable[[int], None]
) -> _Known | None:
    """Return the min-marginals of each island of strategies so near to one; None where that is too much work."""
    kept = near_optimal(tables, cost * (1 + slack), check)
    found = []
    for island in islands(tables, kept):
        # What is not within the limit may count as twice that, so that all costs are finite.
        ceiling = 2 * (1 + slack) * cost or 1.0
        marginals = min_marginals(
            island.tables, island.present(choice), max_cells=MOST_CELLS, ceiling=ceiling, check=check
        )
        if marginals is None:
            return None
        found.append((island, marginals))
    return found


def _choices(
    problem: Problem,
    choice: Sequence[int],
    cost: float,
    known: _Known,
    slack: float,
    most: int,
    deadline_s: float,
    is_limited: bool,
    on_progress: Progress | None,
) -> tuple[CheapestConfigurations | None, ...]:
    tables = problem.tables

    @cache
    def splits(vertex: int, configuration: int) -> tuple[int, ...]:
        return tuple(problem.splits(vertex, configuration).values())

    own = [Choice(splits=splits(v, c), difference=0.0, changes=()) for v, c in enumerate(choice)]
    found: list[CheapestConfigurations | None] = [
        CheapestConfigurations(choices=(own[v],), num_configurations=tables.domain_sizes[v], beyond=slack * cost)
        for v in range(len(choice))
    ]
    for island, marginals in known:
        present = island.present(choice)
        for at, vertex in enumerate(island.vertices):
            if on_progress:
                on_progress("looking at every configuration", vertex / len(choice))
            more = marginals.costs[at] - marginals.costs[at][present[at]]
            if more.min() < -TIE * cost:
                raise _not_the_cheapest(is_limited)
            if perf_counter() > deadline_s:
                found[vertex] = None
                continue
            order = [int(c) for c in np.argsort(more, kind="stable") if c != present[at] and more[c] <= slack * cost]
            listed = [
                Choice(
                    splits=splits(vertex, int(island.kept[at][c])),
                    difference=max(float(more[c]), 0.0),
                    changes=tuple(
                        (island.vertices[u], splits(island.vertices[u], int(island.kept[u][to])))
                        for u, to in sorted(marginals.changes(at, c).items())
                        if u != at
                    ),
                )
                for c in order[: most - 1]
            ]
            found[vertex] = CheapestConfigurations(
                choices=(own[vertex], *listed),
                num_configurations=tables.domain_sizes[vertex],
                beyond=float(more[order[most - 1]]) if len(order) >= most else slack * cost,
            )
    return tuple(found)
