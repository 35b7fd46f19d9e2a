"""Partial strategies: what is fixed stays, what is not is chosen as well as it can be."""

import itertools
from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import load_machine
from pase.costs import Problem
from pase.errors import ConfigurationError, TablesError
from pase.planning.problems import problem_of
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
    assert solution.exact
    assert solution.cost == pytest.approx(_cheapest(problem, fixed), rel=1e-12)
    # The choice is one of the whole problem, costs what is said, and is as fixed.
    assert problem.tables.evaluate(solution.choice) == pytest.approx(solution.cost, rel=1e-12)
    for vertex, (index, allowed) in enumerate(zip(solution.choice, _matching(problem, fixed), strict=True)):
        assert index in allowed, problem.graph.operators[vertex].name


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
