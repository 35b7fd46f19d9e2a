"""Conditioning: a problem too large to eliminate is split over one vertex's configurations until the parts are not.

A part is a network in which some vertices keep only some of their configurations; the two parts of a split together
hold every strategy of the whole. Each is bounded, narrowed and, where that fits the limits, finished by elimination;
a part whose bound exceeds the best strategy's cost holds no better one. The least bound among the open parts is a
bound on everything that is not settled, so it is the proven lower bound at any time. The part with the least bound
is split first, which raises that bound as fast as can be.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from pase.solver.effort import Effort, Outcome
from pase.solver.narrowing import Ordered, narrow, optimal_strategy
from pase.solver.network import Network
from pase.solver.ordering import dependent_sets

SWEEPS_EACH = 12
MAX_OPEN = 2000
"""With more open parts than this the one split last is taken next, which keeps memory from growing further."""


def branch(network: Network, ordered: Ordered, max_operations: int, effort: Effort, outcome: Outcome) -> None:
    """Search the whole network by splitting; the outcome is exact when this returns.

    max_operations: a part is eliminated when that looks at no more combinations than this.
    """
    number = count()
    open_parts: list[tuple[float, int, Network]] = [(outcome.lower_bound, next(number), network)]
    while open_parts:
        bound, _, part = _take(open_parts)
        if bound <= outcome.incumbent.limit:
            for piece in _split(part, ordered(part)):
                effort.nodes += 1
                effort.check()
                piece_bound = max(bound, narrow(piece, effort, outcome, max_sweeps=SWEEPS_EACH, whole=False))
                if piece_bound > outcome.incumbent.limit:
                    continue
                best = optimal_strategy(piece, ordered, max_operations, effort)
                if best is None:
                    heappush(open_parts, (piece_bound, next(number), piece))
                else:
                    outcome.incumbent.offer(best[1])
        least = min((b for b, _, _ in open_parts), default=np.inf)
        outcome.raise_bound(least)
        effort.progress(f"branching: {len(open_parts)} parts open, gap {outcome.gap:.2%}", 1 - outcome.gap)
    outcome.prove()


def _take(open_parts: list[tuple[float, int, Network]]) -> tuple[float, int, Network]:
    if len(open_parts) <= MAX_OPEN:
        return heappop(open_parts)
    last = max(range(len(open_parts)), key=lambda i: open_parts[i][1])
    taken = open_parts.pop(last)
    heapify(open_parts)
    return taken


def _split(network: Network, order: Sequence[int]) -> list[Network]:
    """Return two networks that share the configurations of the vertex that weighs most in the elimination's tables.

    The half with the smaller reparametrised costs comes first; ties go to the lowest index.
    """
    v = _heaviest(network, order)
    ranked = np.argsort(network.reparametrised(v), kind="stable")
    pieces = []
    for half in (ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]):
        piece = network.copy()
        keep = np.zeros(len(ranked), dtype=bool)
        keep[half] = True
        piece.restrict(v, keep)
        piece.fix_singles()
        pieces.append(piece)
    return pieces


def _heaviest(network: Network, order: Sequence[int]) -> int:
    """Return the vertex with more than one configuration whose tables, in all steps, have the most combinations."""
    around, sizes = network.neighbours()
    position = {v: i for i, v in enumerate(network.live)}
    sets = dependent_sets(around, [position[v] for v in order])
    weight = np.zeros(len(sizes))
    for i, d in zip(sets.order, sets.dependent, strict=True):
        scope = [i, *d]
        cells = float(np.prod([float(sizes[w]) for w in scope]))
        weight[scope] += cells
    weight[np.array(sizes) == 1] = -1
    return network.live[int(weight.argmax())]
