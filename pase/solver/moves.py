"""Better strategies within a limit on weight, by moves from known ones: no proof, and quick."""

from collections.abc import Sequence

import numpy as np

from pase.solver.weighted import Weighted
from pase.tables import FloatArray

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
            weights = problem.weights[v]
            fits = weight - weights[chosen[v]] + weights <= problem.limit
            cost = np.where(fits, _costs(problem, links, chosen, v), np.inf)
            best = int(cost.argmin())
            if cost[best] < cost[chosen[v]]:
                weight += float(weights[best] - weights[chosen[v]])
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
        if side == 0:
            total = total + table.values[:, table.col_class[c]].take(table.row_class)
        else:
            total = total + table.values[table.row_class[c]].take(table.col_class)
    return total


def _prefix_costs(problem: Weighted, first: Choice, second: Choice) -> FloatArray:
    """Return the [V + 1] costs of the strategies that have their first k configurations from `first`."""
    tables = problem.tables
    total = np.zeros(tables.num_vertices + 2)

    def add(low: int, high: int, cost: float) -> None:
        """Count a cost for every k with low < k ≤ high."""
        total[low + 1] += cost
        total[high + 1] -= cost

    size = tables.num_vertices
    for v in range(size):
        costs = tables.layer_costs(v)
        add(v, size, float(costs[first[v]]))
        add(-1, v, float(costs[second[v]]))
    for e, (u, v) in enumerate(tables.edges):
        table, low, high = tables.edge(e), min(u, v), max(u, v)
        add(-1, low, table.cost(second[u], second[v]))
        add(low, high, table.cost(first[u] if u == low else second[u], first[v] if v == low else second[v]))
        add(high, size, table.cost(first[u], first[v]))
    return np.nan_to_num(np.cumsum(total)[:-1], nan=np.inf)


def _prefix_weights(problem: Weighted, first: Choice, second: Choice) -> FloatArray:
    theirs = np.array([w[c] for w, c in zip(problem.weights, second, strict=True)])
    ours = np.array([w[c] for w, c in zip(problem.weights, first, strict=True)])
    total: FloatArray = theirs.sum() + np.concatenate([[0.0], np.cumsum(ours - theirs)])
    return total
