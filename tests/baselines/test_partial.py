"""Partial strategies: what is fixed stays, what is not is chosen as well as it can be."""

import itertools
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import load_machine
from pase.costs import Problem
from pase.errors import ConfigurationError, TablesError
from pase.planning.planner import problem_of
from pase.solver import solve
from scripts.benchmarks.paper import complete, restrict
from tests.networks import slow_machine, small_graph, tiny_graph


@cache
def _tiny() -> Problem:
    return problem_of(tiny_graph(), 4, slow_machine(), "paper")


@cache
def _lenet() -> Problem:
    return problem_of(small_graph("lenet5"), 2, load_machine("1080ti"), "paper")


def _matching(problem: Problem, fixed: Mapping[str, Mapping[str, int]]) -> list[list[int]]:
    """Return, for each vertex, its configurations that are as fixed, by looking at each of them."""
    found = []
    for vertex, operator in enumerate(problem.graph.operators):
        wanted = {dim: fixed[operator.name].get(dim, 1) for dim in operator.extents} if operator.name in fixed else None
        indices = range(problem.tables.domain_sizes[vertex])
        found.append([i for i in indices if wanted is None or problem.splits(vertex, i) == wanted])
    return found


def _cheapest(problem: Problem, fixed: Mapping[str, Mapping[str, int]]) -> float:
    return min(problem.tables.evaluate(choice) for choice in itertools.product(*_matching(problem, fixed)))


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"fc1": {}},
        {"fc1": {"b": 4}},
        {"fc2": {"n": 2, "c": 2}},
        {"fc1": {"c": 4}, "softmax": {"b": 2}},
        {"fc1": {"b": 4}, "fc2": {"b": 4}, "softmax": {"b": 4}},
        {"fc1": {"b": 1, "n": 1, "c": 1}, "fc2": {"b": 2}},
    ],
)
def test_the_rest_is_chosen_best(fixed: dict[str, dict[str, int]]) -> None:
    problem = _tiny()
    solution = complete(problem, fixed)
    assert solution.exact
    assert solution.cost == pytest.approx(_cheapest(problem, fixed), rel=1e-12)
    # The choice is one of the whole problem, costs what is said, and is as fixed.
    assert problem.tables.evaluate(solution.choice) == pytest.approx(solution.cost, rel=1e-12)
    for vertex, (index, allowed) in enumerate(zip(solution.choice, _matching(problem, fixed), strict=True)):
        assert index in allowed, problem.graph.operators[vertex].name


@settings(max_examples=40)
@given(st.data())
def test_any_part_of_a_strategy_can_be_fixed(data: st.DataObject) -> None:
    problem = _lenet()
    fixed = {}
    for vertex, operator in enumerate(problem.graph.operators):
        if data.draw(st.booleans()) or vertex < 3:  # what is left free must be few enough to try
            index = data.draw(st.integers(0, problem.tables.domain_sizes[vertex] - 1))
            fixed[operator.name] = problem.splits(vertex, index)
    solution = complete(problem, fixed)
    assert solution.cost == pytest.approx(_cheapest(problem, fixed), rel=1e-12)


def test_fixing_what_is_best_anyway_changes_nothing() -> None:
    problem = _lenet()
    best = solve(problem.tables)
    names = list(problem.graph.index)
    for vertex, index in enumerate(best.choice):
        solution = complete(problem, {names[vertex]: problem.splits(vertex, index)})
        assert solution.cost == pytest.approx(best.cost, rel=1e-12)
    everything = {name: problem.splits(v, best.choice[v]) for v, name in enumerate(names)}
    assert complete(problem, everything).choice == best.choice


def test_restricted_tables_are_rows_and_columns_of_the_old_ones() -> None:
    tables = _tiny().tables
    restricted = restrict(tables, {0: 3, 2: 1})
    assert restricted.domain_sizes == (1, tables.domain_sizes[1], 1)
    assert restricted.layer_costs(0).tolist() == [tables.layer_costs(0)[3]]
    for number, (u, v) in enumerate(tables.edges):
        dense = tables.edge(number).dense()
        rows = [3] if u == 0 else slice(None)
        cols = [1] if v == 2 else slice(None)
        np.testing.assert_array_equal(restricted.edge(number).dense(), dense[rows][:, cols])


def test_the_problem_itself_is_left_as_it_is() -> None:
    before = solve(_tiny().tables)
    complete(_tiny(), {"fc1": {"c": 4}})
    assert solve(_tiny().tables).choice == before.choice


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"fc9": {"b": 2}}, "there is no layer 'fc9' in graph 'mlp'"),
        ({"fc1": {"z": 2}}, "layer 'fc1' has no dim z; its dims are b, n, c"),
        ({"fc1": {"b": 3}}, r"\{'b': 3\} is no configuration of layer 'fc1' .* on 4 devices"),
        ({"fc1": {"b": 8}}, r"\{'b': 8\} is no configuration of layer 'fc1' .* on 4 devices"),
        ({"fc1": {"b": 4, "n": 2}}, r"is no configuration of layer 'fc1' .* on 4 devices"),
        ({"fc1": {"b": 0}}, r"\{'b': 0\} is no configuration of layer 'fc1'"),
        ({"softmax": {"n": 4, "b": -1}}, r"is no configuration of layer 'softmax'"),
    ],
)
def test_what_cannot_be_fixed_is_refused(fixed: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        complete(_tiny(), fixed)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({3: 0}, "there is no vertex 3; they are 0 to 2"),
        ({-1: 0}, "there is no vertex -1; they are 0 to 2"),
        ({0: 10}, "vertex 'fc1' has no configuration 10; they are 0 to 9"),
        ({0: -1}, "vertex 'fc1' has no configuration -1; they are 0 to 9"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(choice: dict[int, int], message: str) -> None:
    with pytest.raises(TablesError, match=message):
        restrict(_tiny().tables, choice)
