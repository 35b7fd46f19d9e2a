import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import SolverError
from pase.solver.ordering import breadth_first, generate_seq
from pase.tables.cost_tables import CostTables
from scripts.benchmarks.recurrences import dependent_sets, find_best_strategy, naive_dependent_sets, naive_recurrence
from tests.solver.problems import brute_force, complete, random_tables, small_problems, total_cost


@given(small_problems(), st.randoms(use_true_random=False), st.sampled_from([find_best_strategy, naive_recurrence]))
def test_both_recurrences_are_exact_for_any_order(tables, random, recurrence):
    order = list(range(tables.num_vertices))
    random.shuffle(order)
    least = brute_force(tables)
    if not np.isfinite(least):
        with pytest.raises(SolverError, match="every strategy has an infinite cost"):
            recurrence(tables, order)
        return
    solution = recurrence(tables, order)
    assert solution.exact
    assert solution.cost == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert total_cost(tables, solution.choice) == pytest.approx(solution.cost, rel=1e-12)


def star(num_leaves: int) -> CostTables:
    edges = [(0, leaf) for leaf in range(1, num_leaves + 1)]
    return random_tables(np.random.default_rng(0), num_leaves + 1, edges, smallest_domain=4)


def test_recurrence_4_needs_less_than_recurrence_2():
    # A hub and its leaves in breadth-first order: (2) depends on every leaf at once, (4) with GenerateSeq on the hub.
    tables = star(7)
    around, sizes = tables.neighbours, tables.domain_sizes
    naive = naive_recurrence(tables, breadth_first(around, sizes))
    quick = find_best_strategy(tables, generate_seq(around, sizes))
    assert naive.cost == pytest.approx(quick.cost)
    assert naive.largest_dependent_set == max(map(len, naive_dependent_sets(around, breadth_first(around, sizes)))) == 7
    assert quick.largest_dependent_set == dependent_sets(around, generate_seq(around, sizes)).largest == 1
    assert naive.statistics.operations > 100 * quick.statistics.operations
    assert naive.peak_memory_bytes > 100 * quick.peak_memory_bytes


def test_a_table_that_does_not_fit_is_refused_before_it_is_made():
    tables = random_tables(np.random.default_rng(0), 12, complete(12), smallest_domain=60, largest_domain=60)
    with pytest.raises(
        SolverError, match=r"step 1 of 12 .* 12 layers .* the limit is 4294967296: use another ordering"
    ):
        find_best_strategy(tables, range(12))
    with pytest.raises(SolverError, match="the limit is 1000"):
        naive_recurrence(star(5), range(6), solver_memory_bytes=1000)


def test_an_order_has_every_vertex_once():
    with pytest.raises(SolverError, match="each of the 6 vertices once"):
        find_best_strategy(star(5), [0, 1])
