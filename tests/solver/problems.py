"""Small random problems, and the cheapest strategy of one by looking at all of them."""

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st

from pase.tables.cost_tables import CostTables, EdgeTable, Hiding

Edges = Sequence[tuple[int, int]]


def tree(rng: np.random.Generator, num_vertices: int) -> list[tuple[int, int]]:
    return [(int(rng.integers(0, v)), v) for v in range(1, num_vertices)]


def cycle(num_vertices: int) -> list[tuple[int, int]]:
    return [(v, (v + 1) % num_vertices) for v in range(num_vertices)]


def complete(num_vertices: int) -> list[tuple[int, int]]:
    return [(u, v) for v in range(num_vertices) for u in range(v)]


def tables_of(
    vertex_costs: Iterable[np.ndarray],
    edges: Edges,
    transfers: Iterable[EdgeTable | np.ndarray],
    *,
    vertex_table: Sequence[int] | None = None,
    edge_table: Sequence[int] | None = None,
    hiding: Hiding | None = None,
) -> CostTables:
    """Return the problem of these costs: a table for each vertex and each edge where nothing says which are whose."""
    costs = tuple(vertex_costs)
    tables = tuple(t if isinstance(t, EdgeTable) else EdgeTable.from_dense(t) for t in transfers)
    of_vertex = tuple(range(len(costs)) if vertex_table is None else vertex_table)
    return CostTables(
        vertex_names=tuple(f"layer{v}" for v in range(len(of_vertex))),
        vertex_costs=costs,
        vertex_table=of_vertex,
        edges=tuple(edges),
        edge_tables=tables,
        edge_table=tuple(range(len(tables)) if edge_table is None else edge_table),
        hiding=hiding,
    )


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
    return tables_of([values(int(k)) * unary for k in sizes], edges, tables)


def frustrated(seed: int, num_vertices: int, num_configurations: int) -> CostTables:
    """Return a problem that no bound and no reduction makes easy: every pair joined, nothing but transfer costs."""
    rng = np.random.default_rng(seed)
    edges = complete(num_vertices)
    k = num_configurations
    return tables_of([np.zeros(k)], edges, [rng.random((k, k)) for _ in edges], vertex_table=(0,) * num_vertices)


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
    k = num_configurations
    return tables_of(
        [rng.random(k), rng.random(k)],
        [edge for x in range(0, 2 * num_blocks, 2) for edge in ((x, x + 1), (x + 1, x + 2), (x, x + 2))],
        [rng.random((k, k)) for _ in range(3)],
        vertex_table=[v % 2 for v in range(2 * num_blocks + 1)],
        edge_table=[0, 1, 2] * num_blocks,
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
