"""Min-marginals: against all strategies, and against solving the whole problem with one configuration kept."""

from dataclasses import replace

import numpy as np
import pytest

from pase.planning.problems import problem_of
from pase.solver import min_marginals, solve
from pase.tables.cost_tables import restricted
from tests.explanation.brute import every_strategy, random_problem
from tests.networks import slow_machine, small_graph
from tests.solver.problems import total_cost

PLENTY = 10**9


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("whole", [False, True])
def test_they_are_the_least_of_all_strategies(seed: int, whole: bool) -> None:
    tables = random_problem(seed, whole=whole)
    optimum = solve(tables)
    found = min_marginals(tables, optimum.choice, max_cells=PLENTY)
    assert found is not None
    everything = list(every_strategy(tables))
    for vertex, size in enumerate(tables.domain_sizes):
        for configuration in range(size):
            least = min(cost for choice, cost in everything if choice[vertex] == configuration)
            assert found.costs[vertex][configuration] == pytest.approx(least, rel=1e-9)
            choice = found.strategy(vertex, configuration)
            assert choice[vertex] == configuration
            assert total_cost(tables, choice) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("name", ["inception_v3", "rnnlm"])
@pytest.mark.parametrize("model", ["paper", "alpha_beta"])
def test_they_are_what_a_search_finds_for_each(name: str, model: str) -> None:
    tables = problem_of(small_graph(name), 8, slow_machine(), model).tables
    optimum = solve(tables)
    found = min_marginals(tables, optimum.choice, max_cells=PLENTY)
    assert found is not None
    draw = np.random.default_rng(0)
    for vertex in draw.choice(tables.num_vertices, min(6, tables.num_vertices), replace=False).tolist():
        configuration = int(draw.integers(tables.domain_sizes[vertex]))
        kept = {vertex: np.array([configuration], dtype=np.int32)}
        least = solve(restricted(tables, kept)).cost
        assert found.costs[vertex][configuration] == pytest.approx(least, rel=1e-9)
        assert total_cost(tables, found.strategy(vertex, configuration)) == pytest.approx(least, rel=1e-9)
        assert found.costs[vertex][optimum.choice[vertex]] == pytest.approx(optimum.cost, rel=1e-9)


def test_a_strategy_changes_what_has_to_change_alone() -> None:
    """Where vertices do not see one another's configurations, one that changes leaves the others as they are."""
    tables = problem_of(small_graph("inception_v3"), 8, slow_machine(), "paper").tables
    optimum = solve(tables)
    found = min_marginals(tables, optimum.choice, max_cells=PLENTY)
    assert found is not None
    assert found.strategy(0, optimum.choice[0]) == optimum.choice
    changed = [
        sum(a != b for a, b in zip(found.strategy(v, c), optimum.choice, strict=True))
        for v in range(tables.num_vertices)
        for c in range(tables.domain_sizes[v])
        if c != optimum.choice[v]
    ]
    assert min(changed) == 1
    assert np.mean(changed) < tables.num_vertices / 2


def test_too_large_a_problem_is_left_to_others() -> None:
    tables = random_problem(0)
    assert min_marginals(tables, solve(tables).choice, max_cells=3) is None


def test_forbidden_combinations_count_as_the_ceiling() -> None:
    tables = random_problem(1)
    (first, *rest) = tables.vertex_costs
    barred = first.copy()
    barred[0] = np.inf
    tables = replace(tables, vertex_costs=(barred, *rest))
    optimum = solve(tables)
    found = min_marginals(tables, optimum.choice, max_cells=PLENTY, ceiling=100 * optimum.cost)
    assert found is not None
    for vertex, table in enumerate(tables.vertex_table):
        if table == 0:
            assert found.costs[vertex][0] >= 100 * optimum.cost
