from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pase.solver.search
from pase.errors import SolverError, TablesError
from pase.solver import solve
from pase.solver.elimination import plan_elimination, run_plan
from pase.solver.ordering import ORDERINGS
from pase.solver.pairwise import PairwiseModel
from pase.tables.cost_tables import CostTables, EdgeTable
from scripts.benchmarks.recurrences import find_best_strategy, naive_recurrence
from tests.solver.problems import (
    brute_force,
    complete,
    cycle,
    frustrated,
    random_tables,
    repeated_blocks,
    small_problems,
    tables_of,
    total_cost,
    tree,
)


@pytest.fixture
def bounded_first(monkeypatch):
    """Make `solve` bound and prune even the smallest problem before it eliminates anything."""
    monkeypatch.setattr(pase.solver.search, "DIRECT_OPERATIONS", 0)


@pytest.fixture
def branching(monkeypatch):
    """Make `solve` split problems of a few layers."""
    for limit, operations in (("DIRECT_OPERATIONS", 0), ("QUICK_OPERATIONS", 30), ("MAX_OPERATIONS", 30)):
        monkeypatch.setattr(pase.solver.search, limit, operations)


def check_optimal(tables: CostTables, **options) -> None:
    least = brute_force(tables)
    if not np.isfinite(least):
        with pytest.raises(SolverError, match="every strategy has an infinite cost"):
            solve(tables, **options)
        return
    solution = solve(tables, **options)
    assert solution.exact
    assert solution.gap == 0
    assert solution.cost == solution.lower_bound
    assert solution.cost == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert total_cost(tables, solution.choice) == pytest.approx(solution.cost, rel=1e-12)
    assert solve(tables, **options).choice == solution.choice


@given(small_problems())
def test_the_optimum_is_that_of_all_strategies(tables):
    check_optimal(tables)


@given(small_problems(), st.sampled_from(sorted(ORDERINGS)))
def test_every_ordering_gives_the_optimum(tables, ordering):
    check_optimal(tables, ordering=ordering)


@pytest.mark.parametrize("how", ["bounded_first", "branching"])
def test_the_optimum_with_bounding_and_with_branching(how, request):
    request.getfixturevalue(how)
    given(small_problems())(lambda tables: check_optimal(tables))()


@pytest.mark.parametrize("few", [2, 16])
def test_the_optimum_where_few_configurations_are_each_a_class(few, monkeypatch):
    monkeypatch.setattr(pase.solver.pairwise, "FEW_CONFIGURATIONS", few)
    given(small_problems())(lambda tables: check_optimal(tables))()
    monkeypatch.setattr(pase.solver.search, "DIRECT_OPERATIONS", 0)
    given(small_problems())(lambda tables: check_optimal(tables))()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", ["tree", "cycle", "dense", "single"])
def test_trees_cycles_and_dense_graphs(shape, seed, bounded_first):
    rng = np.random.default_rng(seed)
    edges = {"tree": tree(rng, 7), "cycle": cycle(7), "dense": complete(5), "single": []}[shape]
    num_vertices = {"dense": 5, "single": 1}.get(shape, 7)
    check_optimal(random_tables(rng, num_vertices, edges, whole=seed % 2 == 0, forbidden=0.1 * (seed % 3)))


def test_frustrated_problems_are_split_and_solved(branching):
    # No layer costs and transfers that cannot all be small: the bound is far off, so splitting has to do the work.
    nodes = 0
    for seed in range(5):
        tables = frustrated(seed, 7, 4)
        least = find_best_strategy(tables, range(7)).cost
        solution = solve(tables)
        assert solution.exact
        assert solution.cost == pytest.approx(least, rel=1e-9)
        nodes += solution.statistics.nodes
    assert nodes > 20


def test_recurrence_2_recurrence_4_and_the_solver_agree(bounded_first):
    for seed in range(15):
        rng = np.random.default_rng(seed)
        num_vertices = int(rng.integers(2, 12))
        extra = [(int(a), int(b)) for a, b in rng.integers(0, num_vertices, (6, 2)) if a != b]
        tables = random_tables(rng, num_vertices, tree(rng, num_vertices) + extra, largest_domain=5, smallest_domain=2)
        around, sizes = tables.neighbours, tables.domain_sizes
        reference = naive_recurrence(tables, ORDERINGS["breadth_first"](around, sizes))
        assert find_best_strategy(tables, ORDERINGS["generate_seq"](around, sizes)).cost == pytest.approx(
            reference.cost
        )
        solution = solve(tables)
        assert solution.exact
        assert solution.cost == pytest.approx(reference.cost, rel=1e-12)


def test_repeated_blocks_are_eliminated_once():
    rng = np.random.default_rng(0)
    tables = repeated_blocks(rng, 100, 6)
    order = [*range(1, 200, 2), *range(0, 201, 2)]  # the inside of every block first
    model = PairwiseModel.of_tables(tables)
    plan = plan_elimination(model.costs, model.edges(), order)
    # Combinations times the factors over different vertices: the blocks' insides are alike, the prefixes are not.
    inside, first, later, last = 6**3 * 2, 6**2, 6**2 * 2, 6
    assert plan.operations == inside + first + 99 * later + last
    optimum, choice = run_plan(plan, lambda _: None)
    assert optimum == pytest.approx(find_best_strategy(tables, order).cost, rel=1e-12)
    assert total_cost(tables, [choice[v] for v in range(201)]) == pytest.approx(optimum, rel=1e-12)


def test_repeated_blocks_that_bounds_do_not_narrow_are_contracted_once(monkeypatch, bounded_first):
    monkeypatch.setattr(pase.solver.search, "QUICK_OPERATIONS", 300)
    monkeypatch.setattr(pase.solver.search, "MAX_OPERATIONS", 50_000)
    monkeypatch.setattr(pase.solver.search, "tighten_bounds", lambda *_, **__: -np.inf)
    tables = repeated_blocks(np.random.default_rng(3), 64, 6)
    solution = solve(tables)
    assert solution.exact
    assert (solution.statistics.num_vertices_left, solution.statistics.nodes) == (0, 0)
    assert solution.cost == pytest.approx(find_best_strategy(tables, range(tables.num_vertices)).cost, rel=1e-12)
    assert total_cost(tables, solution.choice) == pytest.approx(solution.cost, rel=1e-12)


def test_thousands_of_layers(bounded_first):
    tables = repeated_blocks(np.random.default_rng(1), 1500, 6)
    solution = solve(tables)
    reference = find_best_strategy(tables, range(tables.num_vertices))
    assert solution.exact
    assert solution.cost == pytest.approx(reference.cost, rel=1e-12)


def test_a_deep_chain_needs_no_recursion():
    rng = np.random.default_rng(2)
    tables = random_tables(rng, 2000, [(v, v + 1) for v in range(1999)])
    solution = solve(tables)
    assert solution.exact
    assert solution.largest_dependent_set == 1
    assert solution.cost == pytest.approx(find_best_strategy(tables, range(2000)).cost, rel=1e-12)


def test_ties_go_to_the_lowest_index():
    costs, alike = [np.array([2.0, 1.0, 1.0])], (0, 0, 0)
    tables = tables_of(costs, cycle(3), [np.zeros((3, 3))], vertex_table=alike, edge_table=alike)
    assert solve(tables).choice == (1, 1, 1)


def test_ties_go_to_the_lowest_index_when_bounding_first(bounded_first):
    test_ties_go_to_the_lowest_index()


def test_parallel_edges_add_up():
    transfers = np.array([[0.0, 1], [2, 3]]), np.array([[9.0, 1], [1, 1]])
    tables = tables_of([np.zeros(2)] * 2, ((0, 1), (1, 0)), transfers)
    solution = solve(tables)
    assert (solution.cost, solution.choice) == (2.0, (0, 1))


def test_costs_of_very_different_sizes(bounded_first):
    # One forbidding entry of 1e300 must not swallow the digits of the others.
    rng = np.random.default_rng(4)
    tables = random_tables(rng, 6, cycle(6), smallest_domain=3)
    huge = [replace(t, values=np.where(t.values > 8, 1e300, t.values)) for t in tables.edge_tables]
    tables = replace(tables, edge_tables=tuple(huge))
    assert solve(tables).cost == pytest.approx(brute_force(tables), rel=1e-12)


def test_all_costs_zero(bounded_first):
    tables = random_tables(np.random.default_rng(0), 5, cycle(5), unary=0.0)
    tables = replace(tables, edge_tables=tuple(replace(t, values=t.values * 0) for t in tables.edge_tables))
    solution = solve(tables)
    assert (solution.cost, solution.gap, solution.exact, solution.choice) == (0.0, 0.0, True, (0,) * 5)


def test_a_small_memory_limit_is_kept_by_splitting(bounded_first):
    tables = frustrated(7, 7, 5)
    reference = find_best_strategy(tables, range(7))
    free = solve(tables)
    assert free.statistics.nodes == 0
    tight = solve(tables, solver_memory_bytes=4000)
    assert tight.statistics.nodes > 0
    assert tight.exact
    assert tight.cost == pytest.approx(reference.cost, rel=1e-9) == free.cost
    # What the splitting holds besides is narrowed copies of the given tables, which are smaller than these.
    assert tight.peak_memory_bytes <= 2 * tables.num_bytes + 4000 < free.peak_memory_bytes


def test_out_of_time_gives_a_strategy_a_bound_and_a_gap(branching):
    tables = frustrated(8, 20, 8)
    solution = solve(tables, time_limit_s=0.3)
    assert not solution.exact
    assert solution.time_s < 2
    assert 0 < solution.lower_bound < solution.cost == pytest.approx(total_cost(tables, solution.choice))
    assert solution.gap == pytest.approx(1 - solution.lower_bound / solution.cost)
    hopeless = solve(tables, time_limit_s=1e-9)
    assert not hopeless.exact
    assert 0 <= hopeless.lower_bound <= solution.cost
    assert hopeless.cost == pytest.approx(total_cost(tables, hopeless.choice))


@pytest.mark.parametrize("calls", [1, 3, 10, 40])
def test_an_interrupt_returns_the_best_so_far(calls, branching, monkeypatch):
    tables = frustrated(9, 12, 6)
    left = [calls]

    def interrupt(message: str, fraction: float) -> None:
        assert message
        assert 0 <= fraction <= 1
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr("pase.solver.solution.PROGRESS_INTERVAL_S", 0.0)
    solution = solve(tables, on_progress=interrupt)
    assert not solution.exact
    assert solution.lower_bound < solution.cost == pytest.approx(total_cost(tables, solution.choice))


def test_limits_that_make_no_sense():
    tables = random_tables(np.random.default_rng(0), 2, [(0, 1)])
    with pytest.raises(SolverError, match="memory limit is 0 bytes"):
        solve(tables, solver_memory_bytes=0)
    with pytest.raises(SolverError, match="time limit is -1 s"):
        solve(tables, time_limit_s=-1)
    with pytest.raises(SolverError, match="time limit is nan s"):
        solve(tables, time_limit_s=float("nan"))
    with pytest.raises(SolverError, match="unknown ordering 'best'"):
        solve(tables, ordering="best")


def test_disconnected_and_empty_problems_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(TablesError, match="not connected"):
        solve(random_tables(rng, 4, [(0, 1), (2, 3)]))
    with pytest.raises(TablesError, match="no vertices"):
        solve(random_tables(rng, 0, []))


@example(seed=0)
@given(st.integers(0, 2**16))
@settings(max_examples=15)
def test_peak_memory_counts_what_the_elimination_holds(seed):
    tables = random_tables(np.random.default_rng(seed), 5, cycle(5), smallest_domain=2)
    solution = solve(tables)
    assert tables.num_bytes < solution.peak_memory_bytes < tables.num_bytes + 10_000


def test_millions_of_configurations_of_one_layer():
    size = 3_000_000
    layouts = (np.arange(size) % 50).astype(np.int32)
    costs = np.arange(size, dtype=float)[::-1].copy()
    own = EdgeTable(row_class=layouts, col_class=np.arange(50, dtype=np.int32), values=1e3 * (1 - np.eye(50)))
    edges = ((0, 1), (1, 2), (0, 2))
    tables = tables_of([costs, *[np.zeros(50)] * 2], edges, [own, np.ones((50, 50))], edge_table=(0, 1, 0))
    solution = solve(tables)
    assert (solution.cost, solution.choice) == (1.0, (size - 1, (size - 1) % 50, (size - 1) % 50))
    assert solution.peak_memory_bytes < tables.num_bytes + 1_000_000


def test_the_answer_is_never_worse_than_a_known_strategy() -> None:
    tables = frustrated(7, 30, 8)
    good = solve(tables, time_limit_s=1.0).choice
    known = solve(tables, time_limit_s=1e-9, known=[[0] * 30, good])
    assert known.cost <= tables.evaluate(good)
    assert 0 <= known.lower_bound <= known.cost
    with pytest.raises(TablesError, match="one configuration for each of 30 vertices; found 2"):
        solve(tables, known=[[0, 0]])


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_never_exceeds_the_optimum(seed, branching):
    tables = frustrated(seed, 7, 4)
    optimum = find_best_strategy(tables, range(7)).cost
    for limit_s in (0.001, 0.003, 0.01):
        solution = solve(tables, time_limit_s=limit_s)
        assert solution.lower_bound <= optimum * (1 + 1e-12) <= solution.cost * (1 + 2e-12)
        assert not solution.exact or solution.cost == pytest.approx(optimum, rel=1e-9)


def test_a_problem_that_weights_make_small_is_eliminated_as_it_is() -> None:
    """On a cycle, GenerateSeq takes vertices by number; here those with few configurations come first by number."""
    rng = np.random.default_rng(3)
    small, large = 20, 80
    ring = [v for pair in zip(range(small), range(small, 2 * small), strict=True) for v in pair]
    edges = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    sizes = [2] * small + [large] * small
    tables = tables_of([rng.random(k) for k in sizes], edges, [rng.random((sizes[u], sizes[v])) for u, v in edges])
    solution = solve(tables)
    # Walking the ring is dynamic programming over the pairs of a vertex and the first one.
    reached = np.where(np.eye(2, dtype=bool), tables.layer_costs(ring[0]), np.inf)
    for number, (u, v) in enumerate(edges):
        costs = tables.edge(number).dense()
        reached = (reached[:, :, None] + costs).min(axis=1)
        if v != ring[0]:
            reached = reached + tables.layer_costs(v)
        assert u == ring[number]
    assert solution.exact
    assert solution.cost == pytest.approx(float(np.diag(reached).min()), rel=1e-12)
    assert (solution.ordering, solution.statistics.sweeps) == ("min_weight", 0)
