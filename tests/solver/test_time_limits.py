"""A search that is cut short anywhere, on costs of very different sizes: what it says holds in exact arithmetic.

The clock is one that runs out after some number of looks at it, so that every place where a search can end is tried.
The oracle goes over all strategies of a problem in whole numbers of the smallest positive float, which hold every sum.
"""

import re
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import TypeVar

import numpy as np
import pytest

import pase.solver.constrained
import pase.solver.search
import pase.solver.solution
from pase.errors import SolverError
from pase.solver import ConstrainedProblem, Solution, min_marginals, solve, solve_limited
from pase.tables.cost_tables import CostTables
from tests.solver.problems import complete, cycle, tables_of, tree

UNIT_BITS = 1074
"""Every finite float is a whole number of 2^-1074."""
INFINITE = 1 << 2 * UNIT_BITS
"""More than any sum of the costs here."""
ROUNDING_BITS = 38
"""Sums of 8-byte numbers, and their ceilings, do not tell strategies apart whose costs differ by less than 2^-38."""
TOLERANCE_BITS = 29
"""Min-marginals take what is dearer by 1e-9 for equal."""
SEEDS = range(6)
LOOKS = sorted({*range(40), *(int(1.25**k) for k in range(16, 60))})
CUT_SHORT = re.compile(r"no strategy of finite cost was found within the limits|before it found any strategy that fits")

Found = TypeVar("Found")


def grid(rng: np.random.Generator, num_vertices: int) -> list[tuple[int, int]]:
    edges = [(v, v + 1) for v in range(num_vertices - 1) if v % 3 != 2]
    return edges + [(v, v + 3) for v in range(num_vertices - 3)]


SHAPES: dict[str, Callable[[np.random.Generator, int], list[tuple[int, int]]]] = {
    "tree": tree,
    "cycle": lambda _, n: cycle(n) if n > 2 else [(0, 1)],
    "grid": lambda rng, n: grid(rng, 3 * (n // 3)) if n > 3 else [(v, v + 1) for v in range(n - 1)],
    "dense": lambda _, n: complete(n),
}


def wide_tables(seed: int, shape: str, num_vertices: int, largest_domain: int = 4) -> CostTables:
    """Return a problem whose costs go from 1e-9 to 1e12, in one of several mixtures; some are 0, some infinite."""
    rng = np.random.default_rng(seed)
    edges = SHAPES[shape](rng, num_vertices)
    num_vertices = max(map(max, edges), default=0) + 1
    mixture, forbidden, absent = rng.integers(3), rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.3])

    def values(*size: int) -> np.ndarray:
        powers = {
            0: rng.uniform(-9, 12, size),
            1: np.where(rng.random(size) < 0.5, rng.uniform(-9, -6, size), rng.uniform(9, 12, size)),
            2: np.where(rng.random(size) < 0.8, rng.uniform(0, 3, size), rng.uniform(9, 12, size)),
        }[int(mixture)]
        costs = 10.0**powers
        costs[rng.random(size) < absent] = 0.0
        costs[rng.random(size) < forbidden] = np.inf
        costs.flat[0] = 10.0 ** rng.uniform(-9, 12)  # not all of them forbidden
        return costs

    sizes = rng.integers(2, largest_domain + 1, num_vertices)
    return tables_of([values(k) for k in sizes], edges, [values(sizes[u], sizes[v]) for u, v in edges])


def whole(cost: float) -> int:
    """Return a cost as a whole number of the smallest positive float; INFINITE for an infinite one."""
    if cost == inf:
        return INFINITE
    above, below = float(cost).as_integer_ratio()
    return (above << UNIT_BITS) // below


def exact_cost(tables: CostTables, choice: Sequence[int]) -> int:
    total = sum(whole(tables.vertex_costs[tables.vertex_table[v]][c]) for v, c in enumerate(choice))
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        table = tables.edge_tables[t]
        total += whole(table.values[table.row_class[choice[u]], table.col_class[choice[v]]])
    return total


def least_cost(tables: CostTables, fixed: tuple[int, int] | None = None) -> int:
    """Return the least cost of all strategies, or of those in which a vertex has a configuration.

    A table over the vertices with an edge ahead grows by one vertex at a time.
    """
    last = [max([v, *(max(e) for e in tables.edges if v in e)]) for v in range(tables.num_vertices)]
    behind: list[list[tuple[int, list[list[int]]]]] = [[] for _ in last]
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        values = tables.edge_tables[t].dense()
        behind[max(u, v)].append((min(u, v), [[whole(c) for c in row] for row in (values.T if u < v else values)]))
    held: list[int] = []
    table: dict[tuple[int, ...], int] = {(): 0}
    for v, t in enumerate(tables.vertex_table):
        layers = [whole(c) for c in tables.vertex_costs[t]]
        held.append(v)
        kept = [i for i, u in enumerate(held) if last[u] > v]
        ahead: dict[tuple[int, ...], int] = {}
        for state, cost in table.items():
            for c, layer in enumerate(layers):
                if fixed is not None and fixed[0] == v and fixed[1] != c:
                    continue
                total = cost + layer + sum(rows[c][state[held.index(u)]] for u, rows in behind[v])
                key = tuple((*state, c)[i] for i in kept)
                if total < ahead.get(key, INFINITE):
                    ahead[key] = total
        table, held = ahead, [held[i] for i in kept]
    return min(table.values(), default=INFINITE)


class Clock:
    """A clock that stands still for a number of looks at it and has then gone far."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def perf_counter(self) -> float:
        self.looks -= 1
        return 0.0 if self.looks >= 0 else 1e9


def check_certificate(tables: CostTables, solution: Solution, optimum: int) -> None:
    """Check cost, bound and proof of what a search returned against the least cost there is."""
    cost = exact_cost(tables, solution.choice)
    assert abs(whole(solution.cost) - cost) <= cost >> 52  # the reported cost is the float nearest to the sum
    assert optimum <= cost
    if solution.exact:
        assert cost - optimum <= optimum >> ROUNDING_BITS
        assert solution.lower_bound == solution.cost
    else:
        assert whole(solution.lower_bound) <= optimum


def cut_everywhere(
    monkeypatch: pytest.MonkeyPatch, search: Callable[[], Found], is_exact: Callable[[Found], bool]
) -> list[Found]:
    """Return what a search finds when its time is up after each number of looks at the clock, until it ends itself."""
    answers = []
    for looks in LOOKS:
        with monkeypatch.context() as patch:
            patch.setattr(pase.solver.solution, "time", Clock(looks))
            patch.setattr(pase.solver.search, "time", Clock(1 << 60))
            patch.setattr(pase.solver.constrained, "perf_counter", lambda: 0.0)
            try:
                answers.append(search())
            except SolverError as error:
                assert CUT_SHORT.search(str(error))  # noqa: PT017
                continue
        if is_exact(answers[-1]):
            break
    return answers


@pytest.mark.parametrize("kind", ["as it is", "bounded first", "split"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_search_cut_short_anywhere(seed: int, shape: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = wide_tables(seed, shape, 5 + seed % (4 if shape == "dense" else 10))
    optimum = least_cost(tables)
    if kind != "as it is":
        monkeypatch.setattr(pase.solver.search, "DIRECT_OPERATIONS", 0)
    if kind == "split":
        monkeypatch.setattr(pase.solver.search, "QUICK_OPERATIONS", 20)
        monkeypatch.setattr(pase.solver.search, "MAX_OPERATIONS", 20)
    if optimum >= INFINITE:
        with pytest.raises(SolverError, match="every strategy has an infinite cost"):
            solve(tables)
        return
    answers = cut_everywhere(monkeypatch, lambda: solve(tables, time_limit_s=1.0), lambda found: found.exact)
    assert answers[-1].exact
    for found in answers:
        check_certificate(tables, found, optimum)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_search_within_a_limit_cut_short_anywhere(seed: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = wide_tables(seed, shape, 4 + seed % 3, largest_domain=3)
    rng = np.random.default_rng(seed)
    largest = int(rng.choice([3, 30, 10**9]))
    weights = tuple(rng.integers(0, largest + 1, k).astype(float) for k in tables.domain_sizes)
    low, high = (sum(float(f(w)) for w in weights) for f in (np.min, np.max))
    limit = float(np.floor(low + rng.random() * (high - low)))
    every = product(*(range(k) for k in tables.domain_sizes))
    fitting = [c for c in every if sum(w[x] for w, x in zip(weights, c, strict=True)) <= limit]
    optimum = min(exact_cost(tables, choice) for choice in fitting)
    problem = ConstrainedProblem(tables=tables, resource_usage=weights, limit=limit)
    if optimum >= INFINITE:
        with pytest.raises(SolverError, match=r"no strategy of finite cost weighs|every strategy has an infinite cost"):
            solve_limited(problem)
        return
    answers = cut_everywhere(
        monkeypatch, lambda: solve_limited(problem, time_limit_s=1.0), lambda found: found.solution.exact
    )
    assert answers[-1].solution.exact
    free = least_cost(tables)
    for found in answers:
        check_certificate(tables, found.solution, optimum)
        check_certificate(tables, found.unlimited, free)
        assert found.usage == sum(w[c] for w, c in zip(weights, found.solution.choice, strict=True)) <= limit


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_min_marginals_of_very_different_costs(seed: int, shape: str) -> None:
    tables = wide_tables(seed, shape, 4 + seed % 3, largest_domain=3)
    optimum = least_cost(tables)
    if optimum >= INFINITE:
        return
    best = solve(tables)
    ceiling = 1e14
    found = min_marginals(tables, best.choice, max_cells=10**6, ceiling=ceiling)
    assert found is not None
    for v, costs in enumerate(found.costs):
        for c, cost in enumerate(costs):
            least = least_cost(tables, (v, c))
            if least > whole(ceiling):
                assert cost >= ceiling
                continue
            assert abs(whole(cost) - least) <= least >> ROUNDING_BITS
            assert exact_cost(tables, found.strategy(v, c)) - least <= least >> TOLERANCE_BITS
