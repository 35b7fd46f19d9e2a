"""Reductions that keep a cheapest strategy and take no bound: merging, dominance and contraction.

(a) Configurations that no neighbour can tell apart are merged to the cheapest. Proof: let c and c' be configurations of
v that are in the same layout class on every edge of v, with cost_v(c) ≤ cost_v(c'). Replacing c' by c in any strategy
changes no transfer cost and does not raise the layer cost. So some cheapest strategy does not contain c'. Of equals the
one with the lowest index stays.

(b) Configurations that another one beats whatever the neighbours do are dropped, to a fixed point. c' dominates c at
vertex v when

    cost_v(c') + Σ over edges of v of max over x of [ T(c', x) - T(c, x) ]  ≤  cost_v(c).

Proof: replace c by c' in any strategy. Each edge's cost rises by at most its maximum, so the total does not rise; hence
some cheapest strategy does not contain c. Of configurations that dominate one another the lowest index stays: along
a chain of dominations the left side less the right never sums to less than nothing, so a cycle would consist of
equalities, and an equality only drops the higher index. Equalities are taken exactly, and a strict domination needs a
margin above rounding, so that rounding cannot close a cycle either.

(c) Vertices with at most two neighbours are eliminated while the problem stays pairwise: one step of `elimination`, in
which the vertex and its edges become a number (no neighbour), a vector of layer costs (one) or an edge between its two
neighbours. That edge inherits the messages of those it replaces, so a bound that was proven stays proven: its residual
is at least min θ_v ≥ 0.
"""

from collections.abc import Callable
from math import prod

import numpy as np

from pase.solver.elimination import Check, EliminationStep, Planner
from pase.solver.pairwise import ClassAlgebra, Edge, Mask, PairwiseModel, Partition, by_configuration
from pase.tables.cost_tables import FloatArray

MAX_CELLS = 1 << 25
"""Vertices and tables whose comparison would look at more combinations than this are left as they are."""

ROUNDING = 1e-12


class _Dropping:
    """Drops configurations, and tells what is to be dropped once for vertices with the same costs and edges."""

    def __init__(self, model: PairwiseModel, keep_of: Callable[[int], Mask]) -> None:
        self.model, self.keep_of, self.dropped = model, keep_of, 0
        self.known: dict[tuple[object, ...], tuple[Mask, object]] = {}

    def drop(self, v: int, *edges: tuple[object, ...]) -> bool:
        """Restrict a vertex, whose edges are told apart by these identities; return whether anything was dropped."""
        costs = self.model.costs[v]
        key = (id(costs), *sorted(edges))
        if key not in self.known:
            # The arrays are kept with the result, so that their ids stay theirs.
            held = costs, [(edge.values, edge.of[side]) for edge, side in self.model.incident[v]]
            self.known[key] = self.keep_of(v), held
        keep = self.known[key][0]
        num_dropped = len(keep) - int(np.count_nonzero(keep))
        if num_dropped:
            self.model.restrict(v, keep)
            self.dropped += num_dropped
        return num_dropped > 0


def merge_alike(model: PairwiseModel) -> int:
    """Merge the configurations of every live vertex; return how many were dropped."""
    algebra = ClassAlgebra()
    partitions: dict[int, Partition] = {}

    def cheapest_of_each(v: int) -> Mask:
        costs = model.costs[v]
        of = np.zeros(len(costs), dtype=np.intp)
        if model.incident[v]:
            sides = [(edge.of[side], edge.values.shape[side]) for edge, side in model.incident[v]]
            of = algebra.join([partitions.setdefault(id(own), Partition(own, size)) for own, size in sides])[0].of
        order = np.lexsort((costs, of))  # stable: the lowest index first among equals
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(of[order]) != 0
        keep = np.zeros(len(costs), dtype=bool)
        keep[order[first]] = True
        return keep

    merging = _Dropping(model, cheapest_of_each)
    for v in model.live:
        merging.drop(v, *[(id(edge.of[side]),) for edge, side in model.incident[v]])
    return merging.dropped


def drop_dominated(model: PairwiseModel, check: Check) -> int:
    """Drop dominated configurations until none is left; return how many were dropped. Costs must be finite."""
    worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    dropping = _Dropping(model, lambda v: ~_dominated(model, v, worst))
    waiting = list(model.live)
    while waiting:
        again: set[int] = set()
        for v in waiting:
            check()
            edges = model.incident[v]
            if len(model.costs[v]) > 1 and dropping.drop(
                v, *[(id(edge.values), side, id(edge.of[side])) for edge, side in edges]
            ):
                again.update(edge.ends[1 - side] for edge, side in edges)
        waiting = sorted(again)
    return dropping.dropped


def _dominated(model: PairwiseModel, v: int, worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]]) -> Mask:
    """Return which live configurations of a vertex another one dominates.

    worst: what is known already of edges' tables, by identity; it is added to.
    """
    costs = model.costs[v]
    size = len(costs)
    none = np.zeros(size, dtype=bool)
    if size * size > MAX_CELLS:
        return none
    rise = costs[:, None] - costs  # [c', c] how much the total can rise when c becomes c'
    scale = float(costs.max())
    for edge, side in model.incident[v]:
        num_classes, num_others = edge.values.shape[side], edge.values.shape[1 - side]
        if num_classes * num_classes * num_others > MAX_CELLS:
            return none
        of = edge.of[side]
        key = (id(edge.values), side)
        if key not in worst:
            worst[key] = (edge.values, _worst_differences(edge.values if side == 0 else edge.values.T))
        rise += worst[key][1][of[:, None], of]
        scale += float(edge.values.max())
    lower_index = np.tri(size, k=-1, dtype=bool).T  # [c', c]: c' < c
    np.fill_diagonal(rise, np.inf)
    return np.asarray(((rise < -ROUNDING * scale) | ((rise <= 0) & lower_index)).any(axis=0))


def _worst_differences(values: FloatArray) -> FloatArray:
    """Return [L, L] max over the other end's classes x of T(i, x) - T(j, x)."""
    rows = np.ascontiguousarray(values)
    worst = np.empty((len(rows), len(rows)))
    for i, row in enumerate(rows):
        np.subtract(row, rows).max(axis=1, out=worst[i])
    return worst


def contract(model: PairwiseModel, max_operations: int, max_bytes: int, check: Check) -> int:
    """Eliminate vertices of degree 0, 1 and 2, lowest number first, until none is left; return how many there were.

    max_operations: a vertex whose elimination would look at more combinations than this is left alone.
    max_bytes: so is a vertex whose new table would not fit this memory with those before it.
    Vertices with the same costs and tables (repeated layers) share the work.
    """
    planner = Planner()
    gone: set[int] = set()
    held_bytes = 0
    waiting = list(model.live)
    while waiting:
        again: set[int] = set()
        for v in waiting:
            check()
            edges = model.incident[v]
            around = {edge.ends[1 - side] for edge, side in edges}
            if v in gone or len(around) > 2:
                continue
            step = planner.eliminate(v, model.costs[v], [planner.factor(edge) for edge, _ in edges])
            result = step.kernel.result
            if result.values is None:
                num_bytes = 8 * prod(result.shape)
                if step.kernel.operations > max_operations or held_bytes + num_bytes > max_bytes:
                    continue
                held_bytes += num_bytes
                step.kernel.fill(check)
            _replace(model, step)
            gone.add(v)
            again |= around
        waiting = sorted(again)
    model.remove(gone)
    return len(gone)


def _replace(model: PairwiseModel, step: EliminationStep) -> None:
    """Take a vertex out, and put the table that this leaves in its place."""
    v, *dependent = step.scope
    edges, values, partitions = model.incident[v], step.kernel.result.filled(), step.kernel.partitions[1:]
    model.eliminate(v)
    if not dependent:
        model.offset += float(values)
    elif len(dependent) == 1:
        w = dependent[0]
        costs, of = model.costs[w], partitions[0].of
        model.costs[w] = model.made(lambda: costs + by_configuration(values, of), costs, values, of)
    else:
        messages = []
        for w, partition in zip(dependent, partitions, strict=True):
            moved = np.zeros(len(model.costs[w]))
            for edge, side in edges:
                if edge.ends[1 - side] == w:
                    moved = moved + by_configuration(edge.messages[1 - side], edge.of[1 - side])
            message = np.empty(partition.num_classes)
            message[partition.of] = moved
            messages.append(message)
        a, b = dependent
        new = Edge((a, b), [p.of for p in partitions], values, messages)
        model.incident[a] = [*model.incident[a], (new, 0)]
        model.incident[b] = [*model.incident[b], (new, 1)]
