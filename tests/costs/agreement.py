"""Costs by tables, which searches add up, against those of whole plans."""

import numpy as np
import pytest

from pase.costs import CostModel, build_problem
from pase.graph import Graph
from pase.planning.strategy import plan_layers, total_cost


def check_tables(graph: Graph, p: int, model: CostModel, *, seed: int) -> None:
    """Compare the costs of random strategies."""
    problem, rng = build_problem(graph, p, model), np.random.default_rng(seed)
    for _ in range(3):
        choice = tuple(int(rng.integers(n)) for n in problem.tables.domain_sizes)
        splits = [problem.splits(vertex, c) for vertex, c in enumerate(choice)]
        layers = plan_layers(problem.graph, p, model, splits, [tuple(range(p))] * len(choice))
        assert total_cost(layers) == pytest.approx(problem.tables.evaluate(choice), rel=1e-12)
