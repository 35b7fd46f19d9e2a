"""Flips: breakpoints against a dense scan over all strategies, tables against plain builds at other scales."""

from itertools import pairwise

import numpy as np
import pytest

from pase.analysis.explanation.sensitivity import breakpoints, scaled_links, scaled_tables
from pase.machine import load_machine
from pase.planning.problems import problem_of
from pase.solver import Solution, solve
from pase.tables.cost_tables import CostTables
from tests.explanation.brute import every_strategy, random_scaled
from tests.networks import slow_machine, small_graph


def optimise(tables: CostTables, known: object) -> Solution:
    return solve(tables)


@pytest.mark.parametrize("farthest", [32.0, 1 / 32])
@pytest.mark.parametrize("seed", range(8))
def test_breakpoints_are_those_of_a_dense_scan(seed: int, farthest: float) -> None:
    problem = random_scaled(seed)
    lines = [
        (choice, compute, communication)
        for (choice, compute), (_, communication) in zip(
            every_strategy(problem.compute), every_strategy(problem.communication), strict=True
        )
    ]
    compute, communication = (np.array([line[i] for line in lines]) for i in (1, 2))
    start = solve(problem.at(1.0)).choice
    side = breakpoints(problem, start, optimise, farthest=farthest)
    assert side.searched_to == farthest
    scales = [scale for scale, _ in side.breakpoints]
    assert scales == sorted(scales, reverse=farthest < 1)
    bounds = [1.0, *scales, farthest]
    choices = [start, *(choice for _, choice in side.breakpoints)]
    for choice, (near, far) in zip(choices, pairwise(bounds), strict=True):
        # Between two breakpoints one strategy is cheapest throughout, and no other ties with it.
        number = [line[0] for line in lines].index(choice)
        for scale in np.geomspace(near, far, 52)[1:-1]:
            costs = compute + scale * communication
            assert costs[number] == pytest.approx(costs.min(), rel=1e-9)
            assert np.count_nonzero(costs <= costs.min() * (1 + 1e-12)) == 1
    for before, after in pairwise(choices):
        assert before != after
    # Every layer's first flip is where the scan first finds another configuration.
    for vertex, own in enumerate(start):
        found = side.flip(vertex, own)
        scan = [
            s for s in np.geomspace(1.0, farthest, 400) if lines[_best(compute, communication, s)][0][vertex] != own
        ]
        assert (found is None) == (not scan) or scales[-1] == pytest.approx(farthest, rel=0.01)
        if found and scan:
            assert found[0] == pytest.approx(scan[0], rel=0.01)


def _best(compute: np.ndarray, communication: np.ndarray, scale: float) -> int:
    return int((compute + scale * communication).argmin())


@pytest.mark.parametrize(("name", "model"), [("alexnet", "alpha_beta"), ("rnnlm", "paper")])
def test_tables_at_a_scale_are_those_of_a_machine_with_such_links(name: str, model: str) -> None:
    graph, machine = small_graph(name), slow_machine()
    problem = scaled_tables(lambda other: problem_of(graph, 8, other, model), machine)
    for scale in (1 / 32, 1.0, 5.0):
        built = problem_of(graph, 8, scaled_links(machine, scale), model).tables
        mixed = problem.at(scale)
        for a, b in zip(built.vertex_costs, mixed.vertex_costs, strict=True):
            assert a == pytest.approx(b, rel=1e-12)
        for x, y in zip(built.edge_tables, mixed.edge_tables, strict=True):
            assert np.array_equal(x.row_class, y.row_class)
            assert np.array_equal(x.col_class, y.col_class)
            assert x.values == pytest.approx(y.values, rel=1e-12)


def test_the_ratio_of_a_machine_with_slower_links_is_as_much_larger() -> None:
    machine = load_machine("1080ti")
    assert scaled_links(machine, 4.0).flop_per_byte(16) == 4 * machine.flop_per_byte(16)


def test_a_limit_on_solutions_says_how_far_it_came() -> None:
    problem = next(p for p in map(random_scaled, range(100)) if _num_breakpoints(p) >= 3)
    start = solve(problem.at(1.0)).choice
    whole = breakpoints(problem, start, optimise)
    for limit in range(12):
        cut = breakpoints(problem, start, optimise, max_solutions=limit)
        assert 1.0 <= cut.searched_to <= 32.0
        # What was found up to there is all that there is.
        assert list(cut.breakpoints) == [p for p in whole.breakpoints if p[0] <= cut.searched_to]
    assert cut.searched_to > 1.0


def _num_breakpoints(problem: object) -> int:
    return len(breakpoints(problem, solve(problem.at(1.0)).choice, optimise).breakpoints)  # type: ignore[arg-type, attr-defined]
