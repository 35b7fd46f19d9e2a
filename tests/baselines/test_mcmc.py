"""The random search: its costs against whole evaluations, its visits against Boltzmann's probabilities, its end."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import load_machine
from pase.analysis.baselines.mcmc import STARTS, Sampling, Walk, choose, sample
from pase.analysis.baselines.registry import EXPERTS
from pase.costs import Problem
from pase.errors import ConfigurationError
from pase.planning.problems import data_parallel_choice, problem_of
from pase.solver import solve
from pase.tables.cost_tables import CostTables
from tests.networks import small_graph, tiny_graph
from tests.solver.problems import small_problems, tables_of

MACHINE = load_machine("1080ti")


@cache
def _problem(name: str, num_devices: int = 8) -> Problem:
    return problem_of(small_graph(name), num_devices, MACHINE, "paper")


def _random_choice(tables: CostTables, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return [int(generator.integers(size)) for size in tables.domain_sizes]


# -- the cost of a step


@settings(max_examples=60)
@given(small_problems(finite=True), st.data())
def test_a_change_is_the_difference_of_two_whole_evaluations(tables: CostTables, data: st.DataObject) -> None:
    before = [data.draw(st.integers(0, size - 1)) for size in tables.domain_sizes]
    vertex = data.draw(st.integers(0, tables.num_vertices - 1))
    after = list(before)
    after[vertex] = data.draw(st.integers(0, tables.domain_sizes[vertex] - 1))
    walk = Walk(tables, before)
    expected = tables.evaluate(after) - tables.evaluate(before)
    assert walk.change(vertex, after[vertex]) == pytest.approx(expected, rel=1e-9, abs=1e-9 * walk.cost)
    assert walk.choice == before


@pytest.mark.parametrize("name", ["densenet121", "transformer"])
def test_the_cost_of_a_long_walk_is_that_of_where_it_arrives(name: str) -> None:
    """Transformer's tied weights, DenseNet's concatenations: every kind of edge is passed many times."""
    tables = _problem(name).tables
    walk = Walk(tables, _random_choice(tables, 1))
    taken = sum(itertools.islice(walk.steps(0.0, np.random.default_rng(2)), 20_000))
    assert taken == 20_000  # at β = 0 every proposal is taken
    assert walk.cost == pytest.approx(tables.evaluate(walk.choice), rel=1e-9)
    steps = walk.steps(20 * tables.num_vertices / walk.cost, np.random.default_rng(3))
    assert 0 < sum(itertools.islice(steps, 20_000)) < 20_000
    assert walk.cost == pytest.approx(tables.evaluate(walk.choice), rel=1e-9)


# -- the distribution

CHI_SQUARE_999 = {6: 22.46, 11: 31.26}
"""What a sum of so many squares of normal variables exceeds once in a thousand times."""

SIZES = (2, 3, 2)
STATES = list(itertools.product(*map(range, SIZES)))


def _tiny_tables() -> CostTables:
    rng = np.random.default_rng(11)
    edges = ((0, 1), (1, 2), (0, 2), (0, 1))
    costs = [rng.random(size) for size in SIZES]
    return tables_of(costs, edges, [rng.random((SIZES[u], SIZES[v])) for u, v in edges])


def _visits(tables: CostTables, beta: float, num_samples: int, every: int) -> list[tuple[int, ...]]:
    walk = Walk(tables, [0, 0, 0])
    steps = walk.steps(beta, np.random.default_rng(7))
    return [
        tuple(walk.choice)
        for number, _ in enumerate(itertools.islice(steps, num_samples * every))
        if number % every == 0
    ]


def _boltzmann(tables: CostTables, beta: float) -> list[float]:
    weights = [exp(-beta * tables.evaluate(state)) for state in STATES]
    return [weight / sum(weights) for weight in weights]


def _chi_square(visits: Sequence[tuple[int, ...]], shares: Sequence[float]) -> float:
    counts = Counter(visits)
    expected = [share * len(visits) for share in shares]
    return sum((counts[state] - mean) ** 2 / mean for state, mean in zip(STATES, expected, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_strategies_are_visited_as_boltzmann_says(temperature: float) -> None:
    tables = _tiny_tables()
    costs = [tables.evaluate(state) for state in STATES]
    beta = 1 / (temperature * float(np.std(costs)))
    visits = _visits(tables, beta, 6000, every=30)  # far enough apart to be independent
    assert _chi_square(visits, _boltzmann(tables, beta)) < CHI_SQUARE_999[11]
    # The test can tell: another temperature, a third off, does not fit.
    assert _chi_square(visits, _boltzmann(tables, beta * 1.5)) > 3 * CHI_SQUARE_999[11]


def test_steps_are_in_detailed_balance() -> None:
    """As many steps lead from any strategy to another as lead back."""
    tables = _tiny_tables()
    beta = 1 / float(np.std([tables.evaluate(state) for state in STATES]))
    visits = _visits(tables, beta, 150_000, every=1)
    steps = Counter(itertools.pairwise(visits))
    pairs = [(a, b) for a, b in itertools.combinations(STATES, 2) if steps[a, b] + steps[b, a]]
    assert len(pairs) == sum(a != b for a, b in itertools.combinations(STATES, 2) if sum(map(int.__ne__, a, b)) == 1)
    for a, b in pairs:
        there, back = steps[a, b], steps[b, a]
        assert (there - back) ** 2 < 11 * (there + back) + 1, (a, b)  # 3.3 standard deviations


# -- the search


def test_an_impossible_configuration_is_never_taken() -> None:
    tables = _tiny_tables()
    costs = list(tables.vertex_costs)
    costs[1] = np.array([*costs[1][:2], np.inf])
    walk = Walk(replace(tables, vertex_costs=tuple(costs)), [0, 0, 0])
    steps = itertools.islice(walk.steps(1e-6, np.random.default_rng(5)), 2000)
    assert {walk.choice[1] for _ in steps} == {0, 1}


@pytest.mark.parametrize("name", ["alexnet", "transformer"])
@pytest.mark.parametrize("start", STARTS)
def test_a_search_is_never_better_than_the_optimum_nor_worse_than_its_start(name: str, start: str) -> None:
    problem = _problem(name)
    options = Sampling(steps=20_000, start=start)
    experts = [expert.choose for expert in EXPERTS.values()]
    found = choose(problem, MACHINE, options=options, experts=experts)
    assert found is not None
    cost = problem.tables.evaluate(found)
    assert cost >= solve(problem.tables).cost * (1 - 1e-12)
    first = STARTS[start](problem, MACHINE, experts, options.seed)
    assert cost <= problem.tables.evaluate(first)
    if start == "random":
        assert cost < 0.8 * problem.tables.evaluate(first)


def test_the_same_seed_finds_the_same_strategy_and_another_one_walks_elsewhere() -> None:
    tables = _problem("transformer").tables
    start = _random_choice(tables, 0)
    first, again, other = (sample(tables, start, Sampling(seed=seed, steps=3000)) for seed in (1, 1, 2))
    assert first == again
    assert first.choice != other.choice
    assert first.cost == tables.evaluate(first.choice)


def test_a_small_problem_is_solved() -> None:
    problem = problem_of(tiny_graph(), 4, MACHINE, "paper")
    found = sample(problem.tables, _random_choice(problem.tables, 3), Sampling())
    assert found.cost == pytest.approx(solve(problem.tables).cost, rel=1e-12)


def test_a_search_that_finds_nothing_better_ends_after_a_tenth_of_the_steps() -> None:
    problem = _problem("alexnet")
    best = solve(problem.tables)
    found = sample(problem.tables, best.choice, Sampling(steps=5000))
    assert (found.steps, found.choice) == (500, best.choice)


@pytest.mark.parametrize("seed", range(2))
def test_a_search_ends_when_half_of_it_has_brought_nothing(seed: int) -> None:
    """Its steps are told again from outside: when the best improved, and so when it must end."""
    tables = _problem("alexnet").tables
    start, options = _random_choice(tables, seed), Sampling(seed=seed, steps=6000)
    found = sample(tables, start, options)
    walk = Walk(tables, start)
    beta = options.coldness * tables.num_vertices / walk.cost
    improved, best, end = 0, walk.cost, options.steps
    for number, is_taken in enumerate(walk.steps(beta, np.random.default_rng(seed)), 1):
        cost = tables.evaluate(walk.choice) if is_taken else best
        if cost < best * (1 - 1e-9):
            improved, best = number, cost
        if number >= max(2 * improved, 600) or number == options.steps:
            end = number
            break
    assert found.steps == end
    assert found.cost == pytest.approx(best, rel=1e-9)


def test_no_steps_leave_the_start() -> None:
    problem = _problem("alexnet")
    start = data_parallel_choice(problem)
    found = sample(problem.tables, start, Sampling(steps=0))
    assert (found.choice, found.steps) == (start, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed -1 is not usable; expected a number of 0 or more"),
        ({"steps": -5}, "steps -5 is not usable"),
        ({"coldness": -0.5}, "coldness -0.5 is not usable"),
        ({"coldness": float("nan")}, "coldness nan is not usable"),
        ({"coldness": float("inf")}, "coldness inf is not usable"),
        ({"start": "expert"}, "unknown start 'expert': did you mean 'experts'"),
    ],
)
def test_what_cannot_be_searched_with_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
