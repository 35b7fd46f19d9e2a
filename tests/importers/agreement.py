"""Whether two graphs are the same search problem, whatever their vertices are called and in which order they stand."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from pase import load_machine, search
from pase.graph import Graph, Operator, verify
from pase.planning.problems import problem_of

DIGITS = 10
DEVICES = 8


def check_same(one: Graph, other: Graph) -> None:
    """Assert that two graphs are the same search problem, with the same optimum."""
    assert fingerprint(one) == fingerprint(other)
    found = [search(graph, devices=DEVICES) for graph in (one, other)]
    assert all(plan.exact for plan in found)
    assert found[0].total_cost == pytest.approx(found[1].total_cost, rel=1e-12)


def fingerprint(graph: Graph, devices: int = DEVICES) -> tuple[Counter[bytes], Counter[bytes]]:
    """What is left of a graph's cost tables without names and orders.

    For each vertex its layer costs, sorted; for each edge the triples of layer cost, layer cost and transfer cost of
    every pair of configurations, sorted.
    """
    tables = problem_of(graph, devices, load_machine("1080ti"), "paper").tables
    costs = [_rounded(tables.layer_costs(i)) for i in range(tables.num_vertices)]
    vertices = Counter(np.sort(cost).tobytes() for cost in costs)
    edges: Counter[bytes] = Counter()
    known: dict[tuple[bytes, bytes, int], bytes] = {}
    for (u, v), number in zip(tables.edges, tables.edge_table, strict=True):
        key = costs[u].tobytes(), costs[v].tobytes(), number
        if key not in known:
            moved = _rounded(tables.edge_tables[number].dense())
            rows = np.stack(np.broadcast_arrays(costs[u][:, None], costs[v][None, :], moved)).reshape(3, -1)
            known[key] = rows[:, np.lexsort(rows)].tobytes()
        edges[known[key]] += 1
    return vertices, edges


def check_apart(operators: Iterable[Operator], *extents: int, along_all: bool = True) -> None:
    """Assert that each is known, and can be split by examples alone and by steps alone, of which there are so many.

    A number of the whole batch has no dims left. along_all: and by all its other dims.
    """
    found = list(operators)
    assert found
    for operator in found:
        assert operator.kind != "opaque", operator.name
        free = [dim.extent for dim in operator.dims if dim.name not in operator.unsplittable and dim.extent > 1]
        assert not free or all(free.count(extent) == 1 for extent in extents), f"{operator.name}: {operator.dims}"
        assert not (along_all and free and operator.unsplittable), operator.name


def without(graph: Graph, *names: str) -> Graph:
    """A graph without some of its vertices."""
    return verify(
        replace(
            graph,
            operators=tuple(operator for operator in graph.operators if operator.name not in names),
            edges=tuple(edge for edge in graph.edges if not {edge.producer, edge.consumer} & {*names}),
        )
    )


def _rounded(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Costs to ten digits: sums of the same numbers in another order differ in the last ones."""
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.maximum(np.abs(array), 1.0))))
    return np.where(array == 0, 0.0, np.round(array * scale) / scale)
