"""The cheapest strategy within a limit on weight, against every strategy of small problems."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pase.solver.constrained
import pase.solver.solution
import pase.solver.two_pass
from pase.errors import SolverError
from pase.solver import ConstrainedProblem, NothingFitsError, solve, solve_limited
from pase.solver.two_pass import front
from pase.tables.cost_tables import CostTables, EdgeTable
from tests.solver.problems import complete, cycle, random_tables, repeated_blocks, small_problems, total_cost, tree


def weigh(tables: CostTables, rng: np.random.Generator, *, largest: int = 20) -> tuple[np.ndarray, ...]:
    """Return random weights; vertices that share a table of costs share their weights."""
    distinct = [rng.integers(0, largest + 1, len(costs)).astype(float) for costs in tables.vertex_costs]
    return tuple(distinct[t] for t in tables.vertex_table)


def within(tables: CostTables, weights: tuple[np.ndarray, ...], limit: float) -> ConstrainedProblem:
    return ConstrainedProblem(tables=tables, resource_usage=weights, limit=float(np.floor(limit)))


def weigh_more(problem: ConstrainedProblem, rng: np.random.Generator, *, largest: int = 20) -> ConstrainedProblem:
    """Return the problem with random weights of some edges, and with groups of peaks; each may be missing."""
    tables = problem.tables
    edges: list[EdgeTable | None] = []
    for e in range(len(tables.edges)):
        rows, cols = tables.edge(e).shape
        # Layouts of their own, or those of the costs.
        row_class, col_class = (rng.integers(0, 3, size).astype(np.int32) for size in (rows, cols))
        if rng.random() < 0.3:
            row_class, col_class = tables.edge(e).row_class, tables.edge(e).col_class
        shape = int(row_class.max()) + 1, int(col_class.max()) + 1
        values = rng.integers(0, largest + 1, shape).astype(float)
        found = EdgeTable(row_class=row_class, col_class=col_class, values=values)
        edges.append(found if rng.random() < 0.7 else None)
    peaks = []
    for _ in range(rng.integers(0, 4)):
        of_table = [rng.integers(0, 2 * largest + 1, len(costs)).astype(float) for costs in tables.vertex_costs]
        peaks.append(tuple(of_table[t] for t in tables.vertex_table))
    return replace(problem, edge_usage=tuple(edges) if rng.random() < 0.8 else (), peaks=tuple(peaks))


def weight_of(problem: ConstrainedProblem, choice: Sequence[int]) -> float:
    """Return what a strategy weighs, written from the definition."""
    total = sum(float(w[c]) for w, c in zip(problem.resource_usage, choice, strict=True))
    for (u, v), table in zip(problem.tables.edges, problem.edge_usage, strict=False):
        if table is not None:
            total += float(table.values[table.row_class[choice[u]], table.col_class[choice[v]]])
    return total + sum(max(float(p[c]) for p, c in zip(group, choice, strict=True)) for group in problem.peaks)


def every_strategy(tables: CostTables, weights: tuple[np.ndarray, ...]) -> list[tuple[float, float]]:
    """Return (weight, cost) of every strategy of finite cost."""
    found = []
    for choice in product(*(range(k) for k in tables.domain_sizes)):
        cost = total_cost(tables, choice)
        if cost < inf:
            found.append((sum(float(w[c]) for w, c in zip(weights, choice, strict=True)), cost))
    return found


def check(tables: CostTables, weights: tuple[np.ndarray, ...], limit: float, everything=None) -> int:
    """Compare the answer for one limit with the best of all strategies; return into how many parts it was split."""
    strategies = every_strategy(tables, weights) if everything is None else everything
    least = min((cost for weight, cost in strategies if weight <= limit), default=inf)
    problem = within(tables, weights, limit)
    if least == inf:
        with pytest.raises(SolverError, match=r"no strategy of finite cost weighs|every strategy has an infinite cost"):
            solve_limited(problem)
        return 0
    found = solve_limited(problem)
    solution = found.solution
    assert solution.exact
    assert solution.gap == 0
    assert solution.cost == solution.lower_bound
    assert solution.cost == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert total_cost(tables, solution.choice) == pytest.approx(solution.cost, rel=1e-12)
    assert found.usage == sum(w[c] for w, c in zip(weights, solution.choice, strict=True)) <= limit == found.limit
    assert found.unlimited.cost <= solution.cost
    assert solve_limited(problem).solution.choice == solution.choice
    return solution.statistics.nodes


@st.composite
def limited_problems(draw: st.DrawFn) -> tuple[CostTables, tuple[np.ndarray, ...], float]:
    tables = draw(small_problems())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = weigh(tables, rng, largest=draw(st.sampled_from([2, 20, 10**9])))
    low, high = sum(float(w.min()) for w in weights), sum(float(w.max()) for w in weights)
    return tables, weights, float(np.floor(low + draw(st.floats(-0.1, 1)) * (high - low))) if low else low


@settings(max_examples=40)
@given(limited_problems())
def test_no_strategy_that_fits_is_cheaper(problem):
    tables, weights, limit = problem
    if limit >= 0:
        check(tables, weights, limit)


@settings(max_examples=8)
@given(small_problems(max_vertices=5), st.integers(0, 2**32 - 1))
def test_every_limit_from_nothing_to_enough(tables, seed):
    """At each weight that a strategy has, and just below it; the cost never rises with the limit."""
    weights = weigh(tables, np.random.default_rng(seed), largest=6)
    everything = every_strategy(tables, weights)
    if not everything:
        return
    limits = sorted({weight for weight, _ in everything})
    for limit in limits[:3] + limits[-3:] + limits[len(limits) // 2 :][:3]:
        check(tables, weights, limit, everything)
        if limit >= 1:
            check(tables, weights, limit - 1, everything)


@settings(max_examples=25)
@given(limited_problems(), st.integers(0, 2**32 - 1))
def test_weights_of_edges_and_the_greatest_peak_count(limited, seed):
    tables, weights, limit = limited
    if limit < 0:
        return
    rng = np.random.default_rng(seed)
    largest = int(max(w.max() for w in weights)) or 1
    problem = weigh_more(within(tables, weights, limit), rng, largest=largest)
    every = {
        choice: weight_of(problem, choice)
        for choice in product(*(range(k) for k in tables.domain_sizes))
        if total_cost(tables, choice) < inf
    }
    if not every:
        return
    for share in (0.0, float(rng.random()), 1.0):
        low, high = min(every.values()), max(every.values())
        problem = replace(problem, limit=float(np.floor(low + share * (high - low))))
        found = solve_limited(problem)
        assert found.solution.exact
        assert found.usage == weight_of(problem, found.solution.choice) <= problem.limit
        best = min(total_cost(tables, choice) for choice, weight in every.items() if weight <= problem.limit)
        assert found.solution.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
        assert total_cost(tables, found.solution.choice) == pytest.approx(found.solution.cost, rel=1e-12)
    if low:
        with pytest.raises(NothingFitsError, match="no strategy of finite cost weighs"):
            solve_limited(replace(problem, limit=low - 1))


def test_weights_of_edges_alone_tell_strategies_apart(monkeypatch):
    """No configuration weighs anything, and there are too many choices for tables: branching decides."""
    monkeypatch.setattr(pase.solver.two_pass, "MAX_CELLS", 6)
    num_nodes = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 5, complete(5), largest_domain=3, smallest_domain=3)
        edges = tuple(
            EdgeTable.from_dense(rng.integers(0, 50, tables.edge(e).shape).astype(float))
            for e in range(len(tables.edges))
        )
        nothing = tuple(np.zeros(k) for k in tables.domain_sizes)
        problem = ConstrainedProblem(tables=tables, resource_usage=nothing, edge_usage=edges, limit=0.0)
        every = {c: weight_of(problem, c) for c in product(*(range(k) for k in tables.domain_sizes))}
        low, high = min(every.values()), weight_of(problem, solve(tables).choice)
        for share in (0.1, 0.5):
            problem = replace(problem, limit=float(int(low + share * (high - low))))
            found = solve_limited(problem)
            num_nodes += found.solution.statistics.nodes
            assert found.solution.exact
            best = min(total_cost(tables, c) for c, weight in every.items() if weight <= problem.limit)
            assert found.solution.cost == pytest.approx(best, rel=1e-9)
    assert num_nodes > 0


@pytest.mark.parametrize("edges", [complete(6), cycle(6)], ids=["complete", "cycle"])
@pytest.mark.parametrize("limits", [("MAX_ENTRIES", 6), ("MAX_CELLS", 6)])
def test_a_problem_that_is_too_large_is_split(edges, limits, monkeypatch):
    name, value = limits
    monkeypatch.setattr(pase.solver.two_pass, name, value)
    num_nodes = 0
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 6, edges, largest_domain=4, smallest_domain=4)
        weights = weigh(tables, rng, largest=1000)
        low = sum(float(w.min()) for w in weights)
        optimum = solve(tables).choice
        high = sum(float(w[c]) for w, c in zip(weights, optimum, strict=True))
        everything = every_strategy(tables, weights)
        for share in (0.1, 0.5, 0.9):
            limit = float(int(low + share * (high - low)))
            num_nodes += check(tables, weights, limit, everything)
    assert num_nodes > 0


def test_a_part_is_not_searched_where_it_has_an_optimum_of_the_whole(monkeypatch):
    searched = []

    def is_known(tables: CostTables) -> bool:
        """Return whether a problem that was searched had no higher costs, and has its optimum in this one."""
        return any(
            found.cost == pytest.approx(total_cost(tables, found.choice), rel=1e-12)
            and all((tables.layer_costs(v) >= whole.layer_costs(v)).all() for v in range(tables.num_vertices))
            for whole, found in searched
            if all((tables.edge(e).dense() == whole.edge(e).dense()).all() for e in range(len(tables.edges)))
        )

    def search(tables: CostTables, **options):
        assert not is_known(tables)
        searched.append((tables, solve(tables, **options)))
        return searched[-1][1]

    monkeypatch.setattr(pase.solver.two_pass, "MAX_CELLS", 6)
    monkeypatch.setattr(pase.solver.constrained, "solve", search)
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 6, complete(6), largest_domain=4, smallest_domain=4)
        weights = weigh(tables, rng, largest=1000)
        low, high = (sum(float(end(w)) for w in weights) for end in (np.min, np.max))
        found = solve_limited(within(tables, weights, float(int(low + 0.3 * (high - low)))))
        assert found.solution.exact
        searched.clear()


def dearer_in_steps(num_vertices: int) -> tuple[CostTables, tuple[np.ndarray, ...]]:
    """Return a chain on which hardly two strategies weigh the same."""
    rng = np.random.default_rng(7)
    tables = random_tables(rng, num_vertices, tree(rng, num_vertices), largest_domain=6, smallest_domain=6)
    weights = weigh(tables, rng, largest=10**6)
    return tables, weights


def test_without_a_time_limit_the_number_of_parts_is_limited(monkeypatch):
    monkeypatch.setattr(pase.solver.two_pass, "MAX_ENTRIES", 10)
    tables, weights = dearer_in_steps(30)
    problem = within(tables, weights, sum(w.min() for w in weights) * 1.5)
    found = solve_limited(problem, max_parts=4)
    monkeypatch.undo()
    best = solve_limited(problem)
    assert best.solution.exact
    assert not found.solution.exact
    assert 0 < found.solution.gap < 0.2
    assert found.solution.lower_bound <= best.solution.cost <= found.solution.cost
    assert found.usage <= problem.limit


def test_a_search_that_is_cut_short_returns_what_fits():
    tables, weights = dearer_in_steps(40)
    limit = float(sum(w.min() for w in weights) + 1)
    known = [int(w.argmin()) for w in weights]
    heavy = [int(w.argmax()) for w in weights]
    found = solve_limited(within(tables, weights, limit), time_limit_s=1e-9, known=[heavy, known])
    assert not found.solution.exact
    assert found.usage <= limit
    assert found.solution.lower_bound <= solve_limited(within(tables, weights, limit)).solution.cost
    assert found.solution.cost <= tables.evaluate(known)


@pytest.mark.parametrize("after", [1, 3, 6, 9])
def test_a_search_that_is_interrupted_returns_what_fits(after, monkeypatch):
    monkeypatch.setattr(pase.solver.solution, "PROGRESS_INTERVAL_S", 0)
    tables, weights = dearer_in_steps(40)
    problem = within(tables, weights, sum(w.min() for w in weights) * 1.5)
    told = []

    def interrupt(what: str, fraction: float) -> None:
        assert 0 <= fraction <= 1
        told.append(what)
        if len(told) == after:
            raise KeyboardInterrupt

    found = solve_limited(problem, on_progress=interrupt)
    best = solve_limited(problem)
    assert not found.solution.exact
    assert found.usage <= problem.limit
    assert found.solution.lower_bound <= best.solution.cost <= found.solution.cost


@pytest.mark.parametrize("solver_memory_bytes", [1, 2000])
def test_little_memory_for_tables_leads_to_the_same_optimum(solver_memory_bytes):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 8, [*cycle(8), (0, 4)], largest_domain=4, smallest_domain=4)
        weights = weigh(tables, rng, largest=100)
        problem = within(tables, weights, sum(w.min() for w in weights) * 1.5 + 50)
        small, large = solve_limited(problem, solver_memory_bytes=solver_memory_bytes), solve_limited(problem)
        assert small.solution.exact
        assert small.solution.cost == pytest.approx(large.solution.cost, rel=1e-9)


def test_a_search_that_is_cut_short_before_anything_fits_says_so():
    """The lightest configurations forbid one another: what fits takes a search, and there is no time for one."""
    rng = np.random.default_rng(3)
    for seed in range(50):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 6, cycle(6), smallest_domain=3, forbidden=0.4)
        weights = weigh(tables, rng)
        everything = every_strategy(tables, weights)
        lightest = [int(w.argmin()) for w in weights]
        if everything and total_cost(tables, lightest) == inf:
            break
    limit = min(weight for weight, _ in everything)
    problem = within(tables, weights, limit)
    check(tables, weights, limit, everything)
    cheapest = min(everything, key=lambda found: found[1])
    assert cheapest[0] > limit
    with pytest.raises(SolverError, match="cut short before it found any strategy that fits the limit; give it more"):
        solve_limited(problem, time_limit_s=1e-9)


def by_integer_programming(problem: ConstrainedProblem) -> float:
    """Return the least cost within the limit, by HiGHS: a variable for each configuration, and each pair on an edge."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    tables = problem.tables
    start = np.concatenate([[0], np.cumsum(tables.domain_sizes)])
    costs = [tables.layer_costs(v) for v in range(tables.num_vertices)]
    weights = [*problem.resource_usage]
    rows = [(v, start[v] + c, 1.0) for v, size in enumerate(tables.domain_sizes) for c in range(size)]
    sums, num_rows, column = [1.0] * tables.num_vertices, tables.num_vertices, int(start[-1])
    for e, (u, v) in enumerate(tables.edges):
        values = tables.edge(e).dense()
        costs.append(values.reshape(-1))
        weights.append(np.zeros(values.size))
        numbers = column + np.arange(values.size).reshape(values.shape)
        column += values.size
        # The pairs with a configuration are as many as that configuration itself: one, or none.
        for end, pairs in ((u, numbers), (v, numbers.T)):
            for c, row in enumerate(pairs):
                rows += [(num_rows, int(k), 1.0) for k in row] + [(num_rows, int(start[end]) + c, -1.0)]
                sums.append(0.0)
                num_rows += 1
    i, j, entries = zip(*rows, strict=True)
    matrix = coo_array((entries, (i, j)), shape=(num_rows, column)).tocsr()
    found = milp(
        np.concatenate(costs),
        integrality=np.ones(column),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(matrix, sums, sums),
            LinearConstraint(np.concatenate(weights)[None], -np.inf, problem.limit),
        ],
        options={"mip_rel_gap": 0},
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize("seed", range(3))
def test_an_integer_program_has_the_same_optimum(seed):
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, 12, [*tree(rng, 12), (0, 11), (3, 8)], largest_domain=5, smallest_domain=5)
    weights = weigh(tables, rng, largest=1000)
    free = solve_limited(within(tables, weights, 1e6))
    low = sum(float(w.min()) for w in weights)
    for share in (0.2, 0.6):
        problem = within(tables, weights, low + share * (free.usage - low))
        found = solve_limited(problem)
        assert found.solution.exact
        assert found.solution.cost == pytest.approx(by_integer_programming(problem), rel=1e-7)
        assert found.solution.cost > free.solution.cost


def test_repeated_blocks_are_searched_as_one():
    tables = repeated_blocks(np.random.default_rng(0), 30, 8)
    weights = weigh(tables, np.random.default_rng(1), largest=100)
    problem = within(tables, weights, 1e9)
    assert len(problem.priced(2.0).vertex_costs) == 2
    free = solve_limited(problem)
    low, high = problem.least_usage, free.usage
    costs = []
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        found = solve_limited(within(tables, weights, low + share * (high - low)))
        assert found.solution.exact
        costs.append(found.solution.cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == free.solution.cost == free.unlimited.cost


@pytest.mark.parametrize(
    ("weights", "limit", "message"),
    [
        ((np.ones(2),), 1.0, "weights must be one for each configuration of each vertex"),
        ((np.ones(2), np.ones(3)), 1.0, "weights must be one for each configuration of each vertex"),
        ((np.ones(2), np.array([1.0, 0.5])), 3.0, "a weight is not a whole number of 0 or more"),
        ((np.ones(2), np.array([1.0, -1.0])), 3.0, "a weight is not a whole number of 0 or more"),
        ((np.ones(2), np.array([1.0, inf])), 3.0, "a weight is not a whole number of 0 or more"),
        ((np.ones(2), np.array([1.0, 2.0**60])), 3.0, "the weights add up to more than 9007199254740992; scale them"),
        ((np.ones(2), np.ones(2)), -1.0, "the limit on weight is -1.0; give a number of 0 or more"),
        ((np.ones(2), np.ones(2)), float("nan"), "the limit on weight is nan; give a number of 0 or more"),
        ((np.ones(2), np.ones(2)), 1.0, "weighs 1 or less: the lightest configurations of all vertices weigh 2 togeth"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, limit, message):
    tables = random_tables(np.random.default_rng(0), 2, [(0, 1)], smallest_domain=2, largest_domain=2)
    with pytest.raises(SolverError, match=message):
        solve_limited(within(tables, weights, limit))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=40), st.integers(0, 4))
def test_each_entry_has_one_near_it_in_its_front(entries, slack):
    group, cost, weight = np.array(entries, dtype=float).reshape(-1, 3).T
    kept = front(group.astype(np.intp), cost, weight, float(slack))
    for g, c, w in entries:
        near = [k for k in kept if group[k] == g and weight[k] <= w and cost[k] <= c + slack]
        assert near
        if not slack:
            assert not [
                k for k in kept if group[k] == g and (weight[k], cost[k]) != (w, c) and weight[k] >= w and cost[k] >= c
            ]
    assert len(set(kept.tolist())) == len(kept)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), gap=st.sampled_from([0.01, 0.1, 0.5]), is_weighed_more=st.booleans())
@example(seed=4086, gap=0.5, is_weighed_more=True)
def test_within_a_gap_the_answer_is_as_good_and_its_bound_holds(seed: int, gap: float, is_weighed_more: bool) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, 5, cycle(5))
    weights = weigh(tables, rng)
    problem = within(tables, weights, float(rng.uniform(0.2, 1.0) * sum(own.max() for own in weights)))
    if is_weighed_more:
        problem = weigh_more(problem, rng)
    costs = [
        total_cost(tables, choice)
        for choice in product(*(range(k) for k in tables.domain_sizes))
        if weight_of(problem, choice) <= problem.limit
    ]
    if not min(costs, default=inf) < inf:
        with pytest.raises(NothingFitsError, match="no strategy of finite cost weighs"):
            solve_limited(problem, gap=gap)
        return
    found = solve_limited(problem, gap=gap).solution
    assert weight_of(problem, found.choice) <= problem.limit
    assert found.cost == pytest.approx(total_cost(tables, found.choice))
    assert found.lower_bound <= min(costs) * (1 + 1e-9)
    assert found.lower_bound >= found.cost * (1 - gap) * (1 - 1e-8)
    assert not found.exact or found.cost == pytest.approx(min(costs))
