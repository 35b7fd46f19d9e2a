"""Small random problems, and the cheapest strategy of one by looking at all of them."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st

from pase.tables.cost_tables import CostTables, EdgeTable

Edges = Sequence[tuple[int, int]]


def tree(rng: np.random.Generator, num_vertices: int) -> list[tuple[int, int]]:
    return [(int(rng.integers(0, v)), v) for v in range(1, num_vertices)]


def cycle(num_vertices: int) -> list[tuple[int, int]]:
    return [(v, (v + 1) % num_vertices) for v in range(num_vertices)]


def complete(num_vertices: int) -> list[tuple[int, int]]:
    return [(u, v) for v in range(num_vertices) for u in range(v)]


def random_tables(
    rng: np.random.Generator,
    num_vertices: int,
    edges: Edges,
    *,
    largest_domain: int = 4,
    smallest_domain: int = 1,
    whole: bool = False,
    forbidden: float = 0.0,
    unary: float = 1.0,
) -> CostTables:
    """Return a random problem; its tables are by layout, and some layouts are shared by several configurations.

    whole: costs are small whole numbers, so that ties are common. forbidden: part of infinite transfer costs.
    """
    sizes = rng.integers(smallest_domain, largest_domain + 1, num_vertices)

    def values(*shape: int) -> np.ndarray:
        return rng.integers(0, 8, shape).astype(float) if whole else rng.random(shape) * 10

    tables = []
    for u, v in edges:
        rows, cols = int(rng.integers(1, sizes[u] + 1)), int(rng.integers(1, sizes[v] + 1))
        costs = values(rows, cols)
        costs[rng.random(costs.shape) < forbidden] = np.inf
        costs.flat[0] = 1.0
        row_class = rng.integers(0, rows, sizes[u]).astype(np.int32)
        col_class = rng.integers(0, cols, sizes[v]).astype(np.int32)
        row_class[0] = col_class[0] = 0  # so that the one cost above is some configurations'
        tables.append(EdgeTable(row_class=row_class, col_class=col_class, values=costs))
    return CostTables(
        vertex_names=tuple(f"layer{v}" for v in range(num_vertices)),
        vertex_costs=tuple(values(int(k)) * unary for k in sizes),
        vertex_table=tuple(range(num_vertices)),
        edges=tuple(edges),
        edge_tables=tuple(tables),
        edge_table=tuple(range(len(tables))),
    )


def frustrated(seed: int, num_vertices: int, num_configurations: int) -> CostTables:
    """Return a problem that no bound and no reduction makes easy: every pair joined, nothing but transfer costs."""
    rng = np.random.default_rng(seed)
    edges = complete(num_vertices)
    k = num_configurations
    return CostTables(
        vertex_names=tuple(f"layer{v}" for v in range(num_vertices)),
        vertex_costs=(np.zeros(k),),
        vertex_table=(0,) * num_vertices,
        edges=tuple(edges),
        edge_tables=tuple(EdgeTable.from_dense(rng.random((k, k))) for _ in edges),
        edge_table=tuple(range(len(edges))),
    )


def brute_force(tables: CostTables) -> float:
    """Return the least cost of all strategies, summed entry by entry, without `CostTables.evaluate`."""
    return min(total_cost(tables, choice) for choice in product(*(range(k) for k in tables.domain_sizes)))


def total_cost(tables: CostTables, choice: Sequence[int]) -> float:
    total = 0.0
    for v, c in enumerate(choice):
        total += tables.vertex_costs[tables.vertex_table[v]][c]
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        table = tables.edge_tables[t]
        total += table.values[table.row_class[choice[u]], table.col_class[choice[v]]]
    return float(total)


def repeated_blocks(rng: np.random.Generator, num_blocks: int, num_configurations: int) -> CostTables:
    """Return a chain of identical residual blocks (x → y → z, x → z): distinct tables do not grow with its length."""
    names, edges, kinds = ["block0_x"], [], []
    for b in range(num_blocks):
        x = 2 * b
        names += [f"block{b}_y", f"block{b + 1}_x"]
        edges += [(x, x + 1), (x + 1, x + 2), (x, x + 2)]
        kinds += [0, 1, 2]
    k = num_configurations
    return CostTables(
        vertex_names=tuple(names),
        vertex_costs=(rng.random(k), rng.random(k)),
        vertex_table=tuple(v % 2 for v in range(len(names))),
        edges=tuple(edges),
        edge_tables=tuple(EdgeTable.from_dense(rng.random((k, k))) for _ in range(3)),
        edge_table=tuple(kinds),
    )


@st.composite
def small_problems(draw: st.DrawFn, *, max_vertices: int = 6, finite: bool = False) -> CostTables:
    """Draw a connected problem of a few vertices: trees to dense graphs, parallel edges, ties, forbidden pairs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_vertices = draw(st.integers(1, max_vertices))
    edges = tree(rng, num_vertices)
    if num_vertices > 1:
        vertex = st.integers(0, num_vertices - 1)
        pair = st.tuples(vertex, vertex).filter(lambda p: p[0] != p[1])
        edges += draw(st.lists(pair, max_size=8))
    return random_tables(
        rng,
        num_vertices,
        edges,
        whole=draw(st.booleans()),
        forbidden=0.0 if finite else draw(st.sampled_from([0.0, 0.0, 0.3])),
        unary=draw(st.sampled_from([1.0, 0.0])),
    )
