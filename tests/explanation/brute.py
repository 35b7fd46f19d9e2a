"""Everything by looking at all strategies: what explanations are compared with."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from pase.analysis.explanation.sensitivity import ScaledTables
from pase.tables.cost_tables import CostTables
from tests.solver.problems import random_tables, total_cost, tree


def every_strategy(tables: CostTables) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield (strategy, cost), each cost summed entry by entry."""
    for choice in product(*(range(k) for k in tables.domain_sizes)):
        yield choice, total_cost(tables, choice)


def others(tables: CostTables, vertex: int, configuration: int) -> np.ndarray:
    """Return the other configurations of a vertex."""
    return np.delete(np.arange(tables.domain_sizes[vertex], dtype=np.int32), configuration)


def connected(rng: np.random.Generator, num_vertices: int, num_more: int) -> list[tuple[int, int]]:
    """Return the edges of a random connected graph."""
    edges = tree(rng, num_vertices)
    for _ in range(num_more if num_vertices > 1 else 0):
        u, v = rng.choice(num_vertices, 2, replace=False)
        edges.append((int(u), int(v)))
    return edges


def random_problem(seed: int, *, whole: bool = False) -> CostTables:
    """Return a problem of some vertices, few enough to try all strategies."""
    rng = np.random.default_rng(seed)
    num_vertices = int(rng.integers(1, 7))
    edges = connected(rng, num_vertices, int(rng.integers(0, 4)))
    return random_tables(rng, num_vertices, edges, largest_domain=4, whole=whole)


def random_scaled(seed: int) -> ScaledTables:
    """Return two random problems of one structure: what is computed, and what is communicated."""
    rng = np.random.default_rng(seed)
    num_vertices = int(rng.integers(1, 6))
    compute = random_tables(rng, num_vertices, connected(rng, num_vertices, 2), largest_domain=4)

    def other(values: np.ndarray) -> np.ndarray:
        return rng.random(values.shape) * 10 ** rng.uniform(-1, 1)

    communication = CostTables(
        vertex_names=compute.vertex_names,
        vertex_costs=tuple(other(costs) for costs in compute.vertex_costs),
        vertex_table=compute.vertex_table,
        edges=compute.edges,
        edge_tables=tuple(
            type(table)(row_class=table.row_class, col_class=table.col_class, values=other(table.values))
            for table in compute.edge_tables
        ),
        edge_table=compute.edge_table,
    )
    return ScaledTables(compute=compute, communication=communication)
