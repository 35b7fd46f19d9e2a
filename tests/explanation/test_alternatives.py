"""Runner-ups: against all strategies, and against solving the whole problem without a configuration."""

import numpy as np
import pytest

from pase.analysis.explanation import alternatives
from pase.analysis.explanation.alternatives import Alternatives, islands
from pase.analysis.explanation.constrained_search import nearest
from pase.planning.problems import problem_of
from pase.solver import near_optimal, solve
from pase.tables.cost_tables import CostTables, restricted
from tests.explanation.brute import every_strategy, others, random_problem
from tests.networks import slow_machine, small_graph
from tests.solver.problems import total_cost


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("whole", [False, True])
def test_runner_ups_are_those_of_all_strategies(seed: int, whole: bool) -> None:
    tables = random_problem(seed, whole=whole)
    found = Alternatives(tables, solve(tables))
    for vertex, size in enumerate(tables.domain_sizes):
        for configuration in range(size):
            other = found.among(vertex, others(tables, vertex, configuration))
            costs = [cost for choice, cost in every_strategy(tables) if choice[vertex] != configuration]
            assert (other is None) == (not costs)
            if other is not None:
                assert other.is_exact
                assert other.choice[vertex] != configuration
                assert other.total_cost == pytest.approx(min(costs), rel=1e-9)
                assert total_cost(tables, other.choice) == pytest.approx(other.total_cost)


@pytest.mark.parametrize("seed", range(10))
def test_a_layer_kept_to_one_configuration(seed: int) -> None:
    tables = random_problem(seed)
    found = Alternatives(tables, solve(tables))
    for vertex, size in enumerate(tables.domain_sizes):
        for configuration in range(size):
            kept = found.among(vertex, np.array([configuration], dtype=np.int32))
            assert kept is not None
            least = min(cost for choice, cost in every_strategy(tables) if choice[vertex] == configuration)
            assert kept.total_cost == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *[("densenet121", "paper"), ("transformer", "alpha_beta")],
        *(pytest.param("inception_v3", model, marks=pytest.mark.full) for model in ("paper", "alpha_beta")),
    ],
)
def test_islands_give_what_the_whole_network_gives(name: str, model: str) -> None:
    tables = problem_of(small_graph(name), 8, slow_machine(), model).tables
    optimum = solve(tables)
    found = Alternatives(tables, optimum)
    vertices = [v for v, size in enumerate(tables.domain_sizes) if size > 1]
    for vertex in vertices[:: max(1, len(vertices) // 12)]:
        rows = np.delete(np.arange(tables.domain_sizes[vertex], dtype=np.int32), optimum.choice[vertex])
        whole = solve(restricted(tables, {vertex: rows}))
        other = found.among(vertex, others(tables, vertex, optimum.choice[vertex]))
        assert other is not None
        assert other.total_cost == pytest.approx(whole.cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_within_the_limit_is_lost(seed: int) -> None:
    tables = random_problem(seed)
    least = solve(tables).cost
    for slack in (0.0, 0.02, 0.3, 2.0):
        kept = near_optimal(tables, least * (1 + slack))
        for choice, cost in every_strategy(tables):
            if cost <= least * (1 + slack):
                assert all(c in rows for c, rows in zip(choice, kept, strict=True))
    assert any(
        len(rows) < size for rows, size in zip(near_optimal(tables, least), tables.domain_sizes, strict=True)
    ) or (max(tables.domain_sizes) == 1)
    assert [len(rows) for rows in near_optimal(tables, least * 0.5)] == [0] * tables.num_vertices


@pytest.mark.parametrize("seed", range(10))
def test_an_island_costs_what_it_adds_to_the_whole(seed: int) -> None:
    tables = random_problem(seed)
    optimum = solve(tables)
    kept = near_optimal(tables, optimum.cost * 1.1)
    for island in islands(tables, kept):
        own = island.tables.evaluate(island.present(optimum.choice))
        for choice, cost in every_strategy(island.tables):
            whole = list(optimum.choice)
            for vertex, configuration in island.numbered(choice).items():
                whole[vertex] = configuration
            assert total_cost(tables, whole) - optimum.cost == pytest.approx(cost - own, abs=1e-9)


def test_costs_beside_others_that_stay() -> None:
    tables = random_problem(3)
    choice = solve(tables).choice
    for vertex in range(tables.num_vertices):
        costs = tables.costs_beside(vertex, choice)
        wholes = [total_cost(tables, (*choice[:vertex], c, *choice[vertex + 1 :])) for c in range(len(costs))]
        assert costs - costs[0] == pytest.approx(np.array(wholes) - wholes[0], abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_of_equals_the_nearest_changes_only_what_it_must(seed: int) -> None:
    tables = random_problem(seed, whole=True)
    every = list(every_strategy(tables))
    least = min(cost for _, cost in every)
    equals = [choice for choice, cost in every if cost == least]
    for choice in equals[:5]:
        assert nearest([tables], equals[0], choice) == equals[0] or _is_stuck(tables, equals[0], choice)
        moved = {v for v, (a, b) in enumerate(zip(choice, equals[0], strict=True)) if a != b}
        assert nearest([tables], equals[0], choice, moved=moved) == choice


def _is_stuck(tables: CostTables, reference: tuple[int, ...], choice: tuple[int, ...]) -> bool:
    """Return whether no single change back keeps the cost, although all of them together do."""
    found = nearest([tables], reference, choice)
    cost = total_cost(tables, found)
    backs = [
        total_cost(tables, (*found[:v], reference[v], *found[v + 1 :]))
        for v in range(len(found))
        if found[v] != reference[v]
    ]
    return all(back > cost for back in backs)


def test_without_stages_the_whole_problem_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = random_problem(5)
    optimum = solve(tables)
    usual = [Alternatives(tables, optimum).among(v, others(tables, v, c)) for v, c in enumerate(optimum.choice)]
    monkeypatch.setattr(alternatives, "SLACKS", ())
    bare = [Alternatives(tables, optimum).among(v, others(tables, v, c)) for v, c in enumerate(optimum.choice)]
    assert [a and a.total_cost for a in usual] == pytest.approx([b and b.total_cost for b in bare])
