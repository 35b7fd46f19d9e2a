"""Searches that start from what another one of the same tables left, beside all strategies one by one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.solver import solve, solve_again, warm_start, warm_start_from
from pase.tables.cost_tables import CostTables, EdgeTable, IndexArray, restricted
from tests.solver.problems import cycle, random_tables, repeated_blocks, small_problems, total_cost

Kept = dict[int, IndexArray]


@st.composite
def kept_of(draw: st.DrawFn, tables: CostTables) -> Kept:
    found = {}
    for vertex, size in enumerate(tables.domain_sizes):
        if draw(st.booleans()):
            rows = draw(st.sets(st.integers(0, size - 1), min_size=1))
            found[vertex] = np.array(sorted(rows), dtype=np.int32)
    return found


def _all(tables: CostTables, kept: Kept) -> float:
    rows = [kept.get(v, np.arange(size)) for v, size in enumerate(tables.domain_sizes)]
    return min(total_cost(tables, choice) for choice in product(*(own.tolist() for own in rows)))


@settings(max_examples=50)
@given(data=st.data(), tables=small_problems(finite=True))
def test_finds_the_cheapest_of_those_that_are_left(data: st.DataObject, tables: CostTables) -> None:
    solution = solve(tables)
    start = warm_start(tables, solution)
    kept = data.draw(kept_of(tables))
    if start is None:  # costs that are too far apart
        return
    for _ in range(2):  # what starts searches is not used up
        found = solve_again(tables, start, kept, solution.choice)
        assert found.exact
        assert found.lower_bound == found.cost
        assert found.cost == pytest.approx(_all(tables, kept), rel=1e-12, abs=1e-12)
        assert total_cost(tables, found.choice) == pytest.approx(found.cost, rel=1e-12, abs=1e-12)
        assert all(found.choice[v] in rows for v, rows in kept.items())


@pytest.mark.parametrize("seed", range(4))
def test_larger_problems_cost_what_a_search_of_their_own_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = (
        repeated_blocks(rng, 30, 12)
        if seed % 2
        else random_tables(rng, 40, cycle(40), largest_domain=12, smallest_domain=6)
    )
    solution = solve(tables)
    start = warm_start(tables, solution)
    assert start is not None
    for vertex in rng.choice(tables.num_vertices, 8, replace=False).tolist():
        kept = {vertex: rng.choice(tables.domain_sizes[vertex], 1).astype(np.int32)}
        alone = solve(restricted(tables, kept))
        found = solve_again(tables, start, kept, solution.choice)
        assert (found.exact, found.choice[vertex]) == (True, kept[vertex][0])
        assert found.cost == pytest.approx(alone.cost, rel=1e-12)


def _other_costs(tables: CostTables, rng: np.random.Generator) -> CostTables:
    """Return tables of the same graph whose transfers cost otherwise, some of them told apart by other layouts."""

    def other(table: EdgeTable) -> EdgeTable:
        if rng.random() < 0.2:
            return EdgeTable.from_dense(rng.uniform(0, 5, table.shape))
        return replace(
            table, values=table.values * rng.choice([0.2, 1.0, 6.0]) + rng.integers(0, 4, table.values.shape)
        )

    return replace(tables, edge_tables=tuple(map(other, tables.edge_tables)))


@settings(max_examples=50)
@given(data=st.data(), tables=small_problems(finite=True), seed=st.integers(0, 2**32))
def test_finds_the_cheapest_where_costs_have_changed(data: st.DataObject, tables: CostTables, seed: int) -> None:
    start, rng = warm_start(tables, solve(tables)), np.random.default_rng(seed)
    near = [0] * tables.num_vertices
    for _ in range(3):
        if start is None:
            return
        tables = _other_costs(tables, rng)
        start = warm_start_from(start, tables, near)
        if start is None:
            return
        assert start.bound <= _all(tables, {}) * (1 + 1e-12) + 1e-12
        for kept in ({}, data.draw(kept_of(tables))):
            found = solve_again(tables, start, kept, near)
            assert found.exact
            assert found.cost == pytest.approx(_all(tables, kept), rel=1e-12, abs=1e-12)
            assert total_cost(tables, found.choice) == pytest.approx(found.cost, rel=1e-12, abs=1e-12)


def test_costs_that_are_far_apart_have_no_start() -> None:
    tables = random_tables(np.random.default_rng(5), 6, cycle(6), forbidden=0.3, smallest_domain=3)
    assert np.isinf(max(table.values.max() for table in tables.edge_tables))
    assert warm_start(tables, solve(tables)) is None
    allowed = [replace(t, values=np.where(np.isinf(t.values), 1.0, t.values)) for t in tables.edge_tables]
    finite = replace(tables, edge_tables=tuple(allowed))
    start, known = warm_start(finite, solve(finite)), solve(tables).choice
    assert start is not None
    assert warm_start_from(start, tables, known) is None


def test_vertices_that_are_alike_stay_alike_where_the_same_is_kept() -> None:
    tables = repeated_blocks(np.random.default_rng(0), 20, 6)
    rows = np.array([0, 2], dtype=np.int32)
    left = restricted(tables, dict.fromkeys(range(0, 41, 2), rows))
    assert len(left.vertex_costs) == len(tables.vertex_costs) + 1
    assert len(left.edge_tables) == len(tables.edge_tables) + 3
    assert solve(left).cost == pytest.approx(
        solve(restricted(tables, {v: rows.copy() for v in range(0, 41, 2)})).cost, rel=1e-12
    )
