"""The paper's two recurrences as plain array operations, without any reduction, and the sets that they range over.

They are the yardsticks of the solver: `find_best_strategy` is FindBestStrategy of Fig. 4 (recurrence (4)),
`naive_recurrence` is recurrence (2). Both are exact. They share no code with the search.

The paper's terms (section III-B), for a sequence v_1 … v_n: the connected set X(i) holds the vertices of V≤i that
v_i reaches through V≤i alone; the dependent set D(i) = N(X(i)) ∩ V>i; the connected subsets S(i) are the components
of X(i) - {v_i}, each of which is X(j) for some j < i. Positions i are counted from 0 here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.errors import SolverError
from pase.solver import Solution, Statistics
from pase.solver.ordering import Neighbours, check_order
from pase.tables.cost_tables import CostTables, FloatArray, verify_tables

DEFAULT_LIMIT_BYTES = 4 << 30

_VALUE_BYTES = 8
_CHOICE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DependentSets:
    """The sets of section III-B for one sequence; every tuple has one entry for each position.

    order: the vertex at each position.
    dependent: D(i), the vertices that the table R(i, ·) is indexed by.
    subsets: S(i), as the positions j whose connected sets X(j) are the components of X(i) - {v_i}.
    """

    order: tuple[int, ...]
    dependent: tuple[frozenset[int], ...]
    subsets: tuple[tuple[int, ...], ...]

    @property
    def largest(self) -> int:
        """The size of the largest dependent set, which the paper calls M."""
        return max((len(d) for d in self.dependent), default=0)

    def connected(self, position: int) -> frozenset[int]:
        """Return X(i), as the vertex at a position together with all that its connected subsets hold."""
        found, stack = [], [position]
        while stack:
            i = stack.pop()
            found.append(self.order[i])
            stack.extend(self.subsets[i])
        return frozenset(found)


def dependent_sets(neighbours: Neighbours, order: Sequence[int]) -> DependentSets:
    """Return the dependent sets and connected subsets of a sequence (section III-B).

    X(i) is v_i with every earlier component that touches it, so S(i) are those components and
    D(i) = (N(v_i) ∩ V>i) ∪ (∪ over X(j) in S(i) of D(j)) - {v_i}. Raises SolverError unless the sequence holds
    each vertex once.
    """
    position = _positions(order, len(neighbours))
    parent = list(range(len(order)))  # of each position, towards the position at which its component was last joined
    dependent: list[frozenset[int]] = []
    subsets: list[tuple[int, ...]] = []
    for i, v in enumerate(order):
        later: set[int] = set()
        components: set[int] = set()
        for w in neighbours[v]:
            if position[w] > i:
                later.add(w)
            else:
                components.add(_root(parent, position[w]))
        for j in components:
            parent[j] = i
            later |= dependent[j]
        later.discard(v)
        dependent.append(frozenset(later))
        subsets.append(tuple(sorted(components)))
    return DependentSets(order=tuple(order), dependent=tuple(dependent), subsets=tuple(subsets))


def naive_dependent_sets(neighbours: Neighbours, order: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return recurrence (2)'s dependent sets: the neighbours of V≤i among V>i, for each position i (section III-A).

    Raises SolverError unless the sequence holds each vertex once.
    """
    position = _positions(order, len(neighbours))
    frontier: set[int] = set()
    sets = []
    for i, v in enumerate(order):
        frontier.discard(v)
        frontier.update(w for w in neighbours[v] if position[w] > i)
        sets.append(frozenset(frontier))
    return tuple(sets)


def find_best_strategy(
    tables: CostTables, order: Sequence[int], *, solver_memory_bytes: int = DEFAULT_LIMIT_BYTES
) -> Solution:
    """Return a cheapest strategy by recurrence (4): R(i, φ_D(i)) for every i in order, then back-substitution (Fig. 4).

    order: each vertex once, for instance `generate_seq`'s. Ties go to the lowest configuration index.

    Raises SolverError when the order is not one, or the tables do not fit the memory limit; TablesError for tables
    that are not well formed.
    """
    started_s = time.perf_counter()
    verify_tables(tables)
    sets = dependent_sets(tables.neighbours, order)
    dependent = [tuple(sorted(d)) for d in sets.dependent]
    return _dynamic_programming(tables, sets.order, dependent, sets.subsets, solver_memory_bytes, started_s)


def naive_recurrence(
    tables: CostTables, order: Sequence[int], *, solver_memory_bytes: int = DEFAULT_LIMIT_BYTES
) -> Solution:
    """Return a cheapest strategy by recurrence (2), whose tables range over all neighbours of V≤i in V>i.

    order: each vertex once; the paper's is `breadth_first`'s. Ties go to the lowest configuration index.

    Raises SolverError when the order is not one, or the tables do not fit the memory limit; TablesError for tables
    that are not well formed.
    """
    started_s = time.perf_counter()
    verify_tables(tables)
    dependent = [tuple(sorted(d)) for d in naive_dependent_sets(tables.neighbours, order)]
    previous = [(i - 1,) if i else () for i in range(len(order))]
    return _dynamic_programming(tables, order, dependent, previous, solver_memory_bytes, started_s)


def _dynamic_programming(
    tables: CostTables,
    order: Sequence[int],
    dependent: Sequence[tuple[int, ...]],
    uses: Sequence[Sequence[int]],
    solver_memory_bytes: int,
    started_s: float,
) -> Solution:
    """Fill R(i, ·) = min over C of [H(i, ·) + Σ over j in uses[i] of R(j, ·)] for each position i, and go back.

    dependent: the vertices that each R is indexed by; uses: the earlier positions whose R each one takes up.
    """
    sizes = tables.domain_sizes
    position = {v: i for i, v in enumerate(order)}
    later: list[list[tuple[int, FloatArray]]] = [[] for _ in order]
    dense = [t.dense() for t in tables.edge_tables]
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        if position[u] < position[v]:
            later[position[u]].append((v, dense[t]))
        else:
            later[position[v]].append((u, dense[t].T))
    results: dict[int, FloatArray] = {}
    choices: list[NDArray[np.int32]] = []
    held_bytes = peak_bytes = operations = 0
    for i, v in enumerate(order):
        axes = (v, *dependent[i])
        cells = prod(sizes[x] for x in axes)
        operations += cells
        kept_bytes = cells // sizes[v] * (_VALUE_BYTES + _CHOICE_BYTES)
        peak_bytes = max(peak_bytes, held_bytes + cells * _VALUE_BYTES + kept_bytes)
        if peak_bytes > solver_memory_bytes:
            raise SolverError(
                f"step {i + 1} of {len(order)} of the recurrence ranges over {cells:.3g} combinations of {len(axes)} "
                f"layers and would hold {peak_bytes:.3g} bytes; the limit is {solver_memory_bytes}: "
                "use another ordering, or the solver"
            )
        total = np.empty([sizes[x] for x in axes])
        total[...] = _spread(tables.layer_costs(v), (v,), axes)
        for w, costs in later[i]:
            total += _spread(costs, (v, w), axes)
        for j in uses[i]:
            total += _spread(results.pop(j), dependent[j], axes)
            held_bytes -= prod(sizes[x] for x in dependent[j]) * _VALUE_BYTES
        choice = total.argmin(axis=0).astype(np.int32)
        results[i] = np.take_along_axis(total, choice[None], axis=0)[0]
        choices.append(choice)
        held_bytes += kept_bytes
    strategy: dict[int, int] = {}
    for i in reversed(range(len(order))):
        strategy[order[i]] = int(choices[i][tuple(strategy[x] for x in dependent[i])])
    cost = tables.evaluate([strategy[v] for v in range(tables.num_vertices)])
    if not np.isfinite(cost):
        raise SolverError("every strategy has an infinite cost: the combinations that the tables forbid leave none")
    found = sum(float(r) for r in results.values())
    assert abs(found - cost) <= 1e-9 * cost, (found, cost)
    return Solution(
        cost=cost,
        lower_bound=cost,
        exact=True,
        choice=tuple(strategy[v] for v in range(tables.num_vertices)),
        ordering="given",
        largest_dependent_set=max(map(len, dependent)),
        time_s=time.perf_counter() - started_s,
        peak_memory_bytes=peak_bytes,
        statistics=Statistics(num_configurations=sum(sizes), num_configurations_left=sum(sizes), operations=operations),
    )


def _spread(values: FloatArray, vertices: Sequence[int], axes: Sequence[int]) -> FloatArray:
    """Return values over `vertices` with one axis for each of `axes`, of extent 1 where a vertex is not among them."""
    ordered = sorted(range(len(vertices)), key=lambda k: axes.index(vertices[k]))
    turned = values.transpose(ordered)
    extents = iter(turned.shape)
    present = set(vertices)
    return turned.reshape([next(extents) if x in present else 1 for x in axes])


def _positions(order: Sequence[int], num_vertices: int) -> list[int]:
    check_order(order, num_vertices)
    position = [0] * num_vertices
    for i, v in enumerate(order):
        position[v] = i
    return position


def _root(parent: list[int], i: int) -> int:
    """Return the representative of a position's component, halving the path on the way."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i
