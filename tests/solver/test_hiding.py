"""The cheapest strategy where parts of costs hide behind others, against every strategy of small problems."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

import pase.solver.solution
import pase.solver.two_pass
from pase.errors import SolverError, TablesError
from pase.solver import ConstrainedProblem, NothingFitsError, min_marginals, near_optimal, solve, solve_limited
from pase.solver.search import warm_start
from pase.tables.cost_tables import CostTables, Hiding, restricted, verify_tables
from pase.tables.files import export_cfn, write_problem
from tests.solver.problems import complete, cycle, random_tables, tables_of, total_cost, tree

SOME, ALL = 40, 500
"""Random problems: in the suite, and as a whole."""


def with_hiding(tables: CostTables, rng: np.random.Generator, share: float | None = None) -> CostTables:
    """Return the problem with random parts of its costs that hide, and that they hide behind.

    share: of layer costs, the most that can hide; the rest is the most to hide behind. None: another for each table.
    """
    hideable, cover = [], []
    for costs in tables.vertex_costs:
        most = rng.random() if share is None else share
        hideable.append(costs * most * rng.random(costs.shape))
        cover.append((costs - hideable[-1]) * rng.random(costs.shape))
    edges = [
        np.where(np.isfinite(table.values), table.values, 0.0) * rng.random(table.values.shape)
        if rng.random() < 0.5
        else None
        for table in tables.edge_tables
    ]
    return replace(tables, hiding=Hiding(hideable=tuple(hideable), cover=tuple(cover), edges=tuple(edges)))


def step_cost(tables: CostTables, choice: Sequence[int]) -> float:
    """Return what a strategy costs, written from the definition: S - min(A, B)."""
    hiding = tables.hiding
    assert hiding is not None
    a = b = 0.0
    for t, c in zip(tables.vertex_table, choice, strict=True):
        a += float(hiding.hideable[t][c])
        b += float(hiding.cover[t][c])
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        part, table = hiding.edges[t], tables.edge_tables[t]
        if part is not None:
            a += float(part[table.row_class[choice[u]], table.col_class[choice[v]]])
    return total_cost(tables, choice) - min(a, b)


def every_cost(tables: CostTables) -> dict[tuple[int, ...], float]:
    """Return the cost of every strategy of finite cost."""
    every = {choice: step_cost(tables, choice) for choice in product(*(range(k) for k in tables.domain_sizes))}
    return {choice: cost for choice, cost in every.items() if cost < inf}


def random_problem(seed: int) -> tuple[CostTables, np.random.Generator]:
    """Return a problem of up to six vertices: trees to dense graphs, parallel edges, ties, forbidden pairs."""
    rng = np.random.default_rng(seed)
    num_vertices = int(rng.integers(1, 7))
    edges = tree(rng, num_vertices)
    for _ in range(int(rng.integers(0, 6)) if num_vertices > 1 else 0):
        u, v = rng.choice(num_vertices, 2, replace=False)
        edges.append((int(u), int(v)))
    forbidden = 0.3 if rng.random() < 0.2 else 0.0
    tables = random_tables(rng, num_vertices, edges, whole=bool(rng.random() < 0.3), forbidden=forbidden)
    return with_hiding(tables, rng), rng


@pytest.mark.parametrize("problems", [SOME, pytest.param(ALL, marks=pytest.mark.full)])
def test_no_strategy_is_cheaper(problems: int) -> None:
    between = 0
    for seed in range(problems):
        tables, _ = random_problem(seed)
        every = every_cost(tables)
        if not every:
            with pytest.raises(SolverError, match="every strategy has an infinite cost"):
                solve(tables)
            continue
        found = solve(tables)
        assert found.exact, seed
        assert found.cost == found.lower_bound == pytest.approx(min(every.values()), rel=1e-9, abs=1e-12), seed
        assert every[found.choice] == pytest.approx(found.cost, rel=1e-12, abs=1e-12)
        assert tables.evaluate(found.choice) == found.cost
        assert solve(tables).choice == found.choice
        ends = [solve(tables.weighed(share)).cost for share in (0.0, 1.0)]
        between += max(ends) < found.cost * (1 - 1e-9)
    assert between > problems / 20  # neither sum alone decides these


def test_what_a_share_says_is_a_bound_and_its_ends_are_the_two_sums() -> None:
    for seed in range(20):
        tables, rng = random_problem(seed)
        for choice in {tuple(int(rng.integers(k)) for k in tables.domain_sizes) for _ in range(20)}:
            cost = step_cost(tables, choice)
            if cost == inf:
                continue
            low, high = (tables.weighed(share).evaluate(choice) for share in (0.0, 1.0))
            assert max(low, high) == pytest.approx(cost, rel=1e-12)
            share = float(rng.random())
            between = tables.weighed(share).evaluate(choice)
            assert between == pytest.approx((1 - share) * low + share * high, rel=1e-12)
            assert between <= cost * (1 + 1e-12)


def test_costs_beside_a_strategy_differ_as_whole_strategies_do() -> None:
    for seed in range(30):
        tables, rng = random_problem(seed)
        choice = [int(rng.integers(k)) for k in tables.domain_sizes]
        if step_cost(tables, choice) == inf:
            continue
        vertex = int(rng.integers(tables.num_vertices))
        others = [[*choice[:vertex], c, *choice[vertex + 1 :]] for c in range(tables.domain_sizes[vertex])]
        beside = tables.costs_beside(vertex, choice)
        expected = np.array([step_cost(tables, other) - step_cost(tables, choice) for other in others])
        np.testing.assert_allclose(beside - beside[choice[vertex]], expected, atol=1e-9)


@pytest.mark.parametrize("edges", [complete(6), cycle(6)], ids=["complete", "cycle"])
@pytest.mark.parametrize("limits", [("MAX_ENTRIES", 6), ("MAX_CELLS", 6)])
def test_a_problem_that_is_too_large_is_split(
    edges: list[tuple[int, int]], limits: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pase.solver.two_pass, *limits)
    nodes = 0
    for seed in (1, 4, 6, 7):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 6, edges, largest_domain=4, smallest_domain=4, unary=10.0)
        tables = with_hiding(tables, rng, share=0.8)
        found = solve(tables)
        nodes += found.statistics.nodes
        assert found.exact
        assert found.cost == pytest.approx(min(every_cost(tables).values()), rel=1e-9)
    assert nodes > 0


def test_some_of_the_configurations_are_a_problem_of_their_own() -> None:
    for seed in range(30):
        tables, rng = random_problem(seed)
        vertex = int(rng.integers(tables.num_vertices))
        rows = np.unique(rng.integers(0, tables.domain_sizes[vertex], 2)).astype(np.int32)
        left = restricted(tables, {vertex: rows})
        verify_tables(left)
        kept = {choice: cost for choice, cost in every_cost(tables).items() if choice[vertex] in rows}
        if kept:
            found = solve(left, known=[[0] * tables.num_vertices])
            assert found.cost == pytest.approx(min(kept.values()), rel=1e-9, abs=1e-12)


def test_within_a_limit_the_bound_holds_and_the_strategy_fits() -> None:
    proven = 0
    for seed in range(30):
        tables, rng = random_problem(seed)
        every = every_cost(tables)
        if not every:
            continue
        usage = tuple(rng.integers(0, 21, len(c)).astype(float) for c in tables.vertex_costs)
        problem = ConstrainedProblem(
            tables=tables, resource_usage=tuple(usage[t] for t in tables.vertex_table), limit=0.0
        )
        used = {choice: problem.usage(choice) for choice in every}
        low, high = min(used.values()), max(used.values())
        problem = replace(problem, limit=float(int(low + rng.random() * (high - low))))
        found = solve_limited(problem, known=[max(every, key=every.__getitem__)])
        best = min(cost for choice, cost in every.items() if used[choice] <= problem.limit)
        assert used[found.solution.choice] == found.usage <= problem.limit
        assert found.solution.cost == pytest.approx(every[found.solution.choice], rel=1e-12, abs=1e-12)
        assert found.solution.lower_bound <= best * (1 + 1e-9) <= found.solution.cost * (1 + 1e-8)
        assert found.unlimited.cost == pytest.approx(min(every.values()), rel=1e-9, abs=1e-12)
        if found.solution.exact:
            proven += 1
            assert found.solution.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
        if low:
            with pytest.raises(NothingFitsError, match="no strategy of finite cost weighs"):
                solve_limited(replace(problem, limit=low - 1))
    assert proven > 15


def large(seed: int = 1) -> CostTables:
    """Return a problem that takes some rounds: neither sum alone decides it."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, 40, [*tree(rng, 40), *cycle(40)], largest_domain=8, smallest_domain=8)
    return with_hiding(tables, rng, share=0.6)


def test_a_search_that_is_cut_short_has_a_bound_and_is_no_worse_than_what_was_known() -> None:
    tables = large()
    best, known = solve(tables), [0] * 40
    assert best.exact
    found = solve(tables, time_limit_s=1e-9, known=[known])
    assert not found.exact
    assert found.lower_bound <= best.cost <= found.cost <= tables.evaluate(known)


@pytest.mark.parametrize("after", [1, 5, 25])
def test_a_search_that_is_interrupted_has_a_bound(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pase.solver.solution, "PROGRESS_INTERVAL_S", 0)
    tables = large()
    told = []

    def interrupt(what: str, fraction: float) -> None:
        told.append(what)
        if len(told) == after:
            raise KeyboardInterrupt

    found, best = solve(tables, on_progress=interrupt), solve(tables)
    assert len(told) >= after
    assert found.lower_bound <= best.cost * (1 + 1e-9)
    assert best.cost <= found.cost * (1 + 1e-9)


def test_what_needs_sums_refuses_other_costs(tmp_path) -> None:
    tables = large()
    refused = "some of these costs overlap with others, so they are not additive"
    with pytest.raises(SolverError, match=refused):
        near_optimal(tables, 1e9)
    with pytest.raises(SolverError, match=refused):
        min_marginals(tables, [0] * 40, max_cells=10**9)
    assert warm_start(tables, solve(tables)) is None
    for write, name in ((write_problem, "x.npz"), (export_cfn, "x.cfn")):
        with pytest.raises(TablesError, match=refused):
            write(tables, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_parts_are_checked() -> None:
    tables = random_tables(np.random.default_rng(0), 2, [(0, 1)], largest_domain=3, smallest_domain=3)
    tables = with_hiding(tables, np.random.default_rng(0))
    hiding = tables.hiding
    assert hiding is not None
    verify_tables(tables)
    cases = [
        (replace(hiding, hideable=hiding.hideable[:1]), "there are hideable layer costs for 1 tables; expected one"),
        (replace(hiding, cover=(np.zeros(2), np.zeros(3))), r"costs to overlap with of table 0 have the shape \(2,\)"),
        (replace(hiding, cover=(np.full(3, -1.0), np.zeros(3))), "are not between 0 and the cost"),
        (
            replace(hiding, hideable=(2 * tables.vertex_costs[0], np.zeros(3))),
            "hideable layer costs of table 0 are not",
        ),
        (replace(hiding, edges=(2 * tables.edge_tables[0].values + 1,)), "hideable transfer costs of table 0 are not"),
    ]
    for wrong, message in cases:
        with pytest.raises(TablesError, match=message):
            verify_tables(replace(tables, hiding=wrong))


def test_whatever_hides_or_nothing_does() -> None:
    """A choice by hand: the dearer sum wins once the computation beside it is long enough to hide it."""
    costs = np.array([4.0, 6.0])  # 4 that blocks; or 2 of computation, and 4 of a sum
    for cover, expected, choice in ((0.0, 4.0, 0), (1.5, 4.0, 0), (2.0, 4.0, None), (3.0, 3.0, 1), (9.0, 2.0, 1)):
        behind = np.array([cover])
        hiding = Hiding(hideable=(np.array([0.0, 4.0]), np.zeros(1)), cover=(np.zeros(2), behind), edges=(None,))
        found = solve(tables_of([costs, behind], [(0, 1)], [np.zeros((2, 1))], hiding=hiding))
        assert found.exact
        assert found.cost == expected + cover
        assert choice in (None, found.choice[0])
