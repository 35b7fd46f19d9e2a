"""Reduction (b): configurations that another one beats whatever the neighbours do are dropped, to a fixed point.

c' dominates c at vertex v when

    cost_v(c') + Σ over links of v of max over x of [ T(c', x) - T(c, x) ]  ≤  cost_v(c).

Proof: replace c by c' in any strategy. Each link's cost rises by at most its maximum, so the total does not rise; hence
some cheapest strategy does not contain c. Of configurations that dominate one another the lowest index stays: along
a chain of dominations the left side less the right never sums to less than nothing, so a cycle would consist of
equalities, and an equality only drops the higher index. Equalities are taken exactly, and a strict domination needs a
margin above rounding, so that rounding cannot close a cycle either.
"""

import numpy as np
from numpy.typing import NDArray

from pase.solver.effort import Check
from pase.solver.network import Link, Network
from pase.tables.cost_tables import FloatArray

Mask = NDArray[np.bool_]

MAX_CELLS = 1 << 25
"""Vertices and tables whose comparison would look at more combinations than this are left as they are."""

ROUNDING = 1e-12


def drop_dominated(network: Network, check: Check) -> int:
    """Drop dominated configurations until none is left; return how many were dropped. Costs must be finite.

    Vertices with the same costs and the same tables share the work, and so do links with the same table.
    """
    worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    known: dict[tuple[object, ...], tuple[object, Mask]] = {}
    dropped = 0
    waiting = list(network.live)
    while waiting:
        again: set[int] = set()
        for v in waiting:
            check()
            if len(network.costs[v]) == 1:
                continue
            links = network.incident[v]
            parts = sorted((id(link.values), side, id(link.of[side])) for link, side in links)
            key = (id(network.costs[v]), *parts)
            if key not in known:
                # The arrays are kept with the result: their ids stay theirs.
                held = (network.costs[v], [(link.values, link.of[side]) for link, side in links])
                known[key] = (held, ~dominated(network, v, worst))
            keep = known[key][1]
            if not keep.all():
                dropped += int(len(keep) - keep.sum())
                network.restrict(v, keep)
                again.update(link.ends[1 - side] for link, side in links)
        waiting = sorted(again)
    return dropped


def dominated(network: Network, v: int, worst: dict[tuple[int, int], tuple[FloatArray, FloatArray]]) -> Mask:
    """Return which live configurations of a vertex another one dominates.

    worst: what is known already of links' tables, by identity; it is added to.
    """
    costs = network.costs[v]
    size = len(costs)
    none = np.zeros(size, dtype=bool)
    if size * size > MAX_CELLS:
        return none
    rise = costs[:, None] - costs  # [c', c] how much the total can rise when c becomes c'
    scale = float(costs.max())
    for link, side in network.incident[v]:
        num_classes, num_others = link.values.shape[side], link.values.shape[1 - side]
        if num_classes * num_classes * num_others > MAX_CELLS:
            return none
        of = link.of[side]
        rise += _worst_differences(link, side, worst)[of[:, None], of]
        scale += float(link.values.max())
    lower_index = np.tri(size, k=-1, dtype=bool).T  # [c', c]: c' < c
    np.fill_diagonal(rise, np.inf)
    return np.asarray(((rise < -ROUNDING * scale) | ((rise <= 0) & lower_index)).any(axis=0))


def _worst_differences(
    link: Link, side: int, known: dict[tuple[int, int], tuple[FloatArray, FloatArray]]
) -> FloatArray:
    """Return [L, L] max over the other end's classes x of T(i, x) - T(j, x)."""
    key = (id(link.values), side)
    if key not in known:
        rows = link.values if side == 0 else np.ascontiguousarray(link.values.T)
        worst = np.empty((len(rows), len(rows)))
        for i, row in enumerate(rows):
            np.subtract(row, rows).max(axis=1, out=worst[i])
        known[key] = (link.values, worst)
    return known[key][1]
