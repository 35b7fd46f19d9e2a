"""Better strategies within a limit on weight, by moves from known ones: no proof, and quick."""

from collections.abc import Callable, Sequence

import numpy as np

from pase.solver.weighted import Weighted
from pase.tables.cost_tables import CostTables, FloatArray

MAX_ROUNDS = 20

Choice = tuple[int, ...]


def improved(problem: Weighted, choice: Choice) -> Choice:
    """Return what is left when no change of one vertex within the limit makes a strategy cheaper; it must fit."""
    tables, chosen = problem.tables, list(choice)
    links = _links(problem)
    weight = problem.weight(choice)
    for _ in range(MAX_ROUNDS):
        is_changed = False
        for v in range(tables.num_vertices):
            weights = weight + problem.changes(v, chosen)
            fits = weights <= problem.limit
            cost = np.where(fits, _costs(problem, links, chosen, v), np.inf)
            best = int(cost.argmin())
            if cost[best] < cost[chosen[v]]:
                weight = float(weights[best])
                chosen[v] = best
                is_changed = True
        if not is_changed:
            break
    return tuple(chosen)


def crossings(problem: Weighted, light: Choice, cheap: Choice) -> list[Choice]:
    """Return the cheapest strategies that fit and follow one of two up to a vertex and the other from there on.

    light: one that fits. At most two, one for each way round.
    """
    found = []
    for first, second in ((light, cheap), (cheap, light)):
        # Infinite costs come and go as differences: what is no number is of no interest.
        with np.errstate(invalid="ignore"):
            cost, weight = _prefix_costs(problem, first, second), _prefix_weights(problem, first, second)
        cost[weight > problem.limit] = np.inf
        k = int(cost.argmin())
        if np.isfinite(cost[k]):
            found.append((*first[:k], *second[k:]))
    return found


def _links(problem: Weighted) -> list[list[tuple[int, int, int]]]:
    """Return for each vertex its edges: (edge, side, other end)."""
    links: list[list[tuple[int, int, int]]] = [[] for _ in problem.tables.vertex_names]
    for e, (u, v) in enumerate(problem.tables.edges):
        links[u].append((e, 0, v))
        links[v].append((e, 1, u))
    return links


def _costs(
    problem: Weighted, links: Sequence[Sequence[tuple[int, int, int]]], chosen: Sequence[int], v: int
) -> FloatArray:
    """Return the [K] costs of a vertex's configurations with the neighbours as they are."""
    total = problem.tables.layer_costs(v)
    for e, side, other in links[v]:
        table, c = problem.tables.edge(e), chosen[other]
        total = total + (table.column(c) if side == 0 else table.row(c))
    return total


def _prefix_costs(problem: Weighted, first: Choice, second: Choice) -> FloatArray:
    """Return the [V + 1] costs of the strategies that have their first k configurations from `first`."""
    tables = problem.tables
    layers = [(float(costs[a]), float(costs[b])) for costs, a, b in zip(_layers(tables), first, second, strict=True)]
    return _prefix_sums(
        problem, first, second, layers, range(len(tables.edges)), lambda e, a, b: tables.edge(e).cost(a, b)
    )


def _prefix_weights(problem: Weighted, first: Choice, second: Choice) -> FloatArray:
    """Return the same of weights; there are no peaks."""
    layers = [(float(w[a]), float(w[b])) for w, a, b in zip(problem.weights, first, second, strict=True)]

    def of_edge(e: int, a: int, b: int) -> float:
        weights = problem.edge_weights[e]
        return 0.0 if weights is None else weights.cost(a, b)

    return _prefix_sums(problem, first, second, layers, problem.weighing_edges, of_edge)


def _layers(tables: CostTables) -> list[FloatArray]:
    return [tables.layer_costs(v) for v in range(tables.num_vertices)]


def _prefix_sums(
    problem: Weighted,
    first: Choice,
    second: Choice,
    layers: Sequence[tuple[float, float]],
    edges: Sequence[int],
    of_edge: Callable[[int, int, int], float],
) -> FloatArray:
    """Return the [V + 1] sums over vertices and edges of the strategies that are `first` up to a vertex.

    layers: [V] what a vertex adds in either. of_edge: what an edge does with a configuration at either end.
    """
    size = problem.tables.num_vertices
    total = np.zeros(size + 2)

    def add(low: int, high: int, amount: float) -> None:
        """Count an amount for every k with low < k ≤ high."""
        total[low + 1] += amount
        total[high + 1] -= amount

    for v, (ours, theirs) in enumerate(layers):
        add(v, size, ours)
        add(-1, v, theirs)
    for e in edges:
        u, v = problem.tables.edges[e]
        low, high = min(u, v), max(u, v)
        add(-1, low, of_edge(e, second[u], second[v]))
        add(low, high, of_edge(e, first[u] if u == low else second[u], first[v] if v == low else second[v]))
        add(high, size, of_edge(e, first[u], first[v]))
    return np.nan_to_num(np.cumsum(total)[:-1], nan=np.inf)
