"""Conditioning: a problem too large to eliminate is split over one vertex's configurations until the parts are not.

A part is a model in which some vertices keep only some of their configurations; the two parts of a split together
hold every strategy of the whole. Each is bounded, narrowed and, where that fits the limits, finished by elimination;
a part whose bound exceeds the best strategy's cost holds no better one. The least bound among the open parts is a
bound on everything that is not settled, so it is the proven lower bound at any time. The part with the least bound
is split first, which raises that bound as fast as can be.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from pase.solver.bounds import tighten_bounds
from pase.solver.elimination import Ordered, optimal_strategy
from pase.solver.ordering import dependent_sets
from pase.solver.pairwise import PairwiseModel
from pase.solver.solution import Outcome, SearchBudget

SWEEPS_EACH = 12
MAX_OPEN = 2000
"""With more open parts than this the one split last is taken next, which keeps memory from growing further."""


def branch(model: PairwiseModel, ordered: Ordered, max_operations: int, budget: SearchBudget, outcome: Outcome) -> None:
    """Search the whole model by splitting; the outcome is exact when this returns.

    max_operations: a part is eliminated when that looks at no more combinations than this.
    """
    number = count()
    open_parts: list[tuple[float, int, PairwiseModel]] = [(outcome.lower_bound, next(number), model)]
    while open_parts:
        bound, _, part = _take(open_parts)
        if bound <= outcome.limit:
            for piece in _split(part, ordered(part)):
                budget.nodes += 1
                budget.check()
                piece_bound = max(bound, tighten_bounds(piece, budget, outcome, max_sweeps=SWEEPS_EACH, whole=False))
                if piece_bound > outcome.limit:
                    continue
                best = optimal_strategy(piece, ordered, max_operations, budget)
                if best is None:
                    heappush(open_parts, (piece_bound, next(number), piece))
                else:
                    outcome.offer(best[1])
        least = min((b for b, _, _ in open_parts), default=np.inf)
        outcome.raise_bound(least)
        budget.progress(f"branching: {len(open_parts)} parts open, gap {outcome.gap:.2%}", 1 - outcome.gap)
    outcome.prove()


def _take(open_parts: list[tuple[float, int, PairwiseModel]]) -> tuple[float, int, PairwiseModel]:
    if len(open_parts) <= MAX_OPEN:
        return heappop(open_parts)
    last = max(range(len(open_parts)), key=lambda i: open_parts[i][1])
    taken = open_parts.pop(last)
    heapify(open_parts)
    return taken


def _split(model: PairwiseModel, order: Sequence[int]) -> list[PairwiseModel]:
    """Return two models that share the configurations of the vertex that weighs most in the elimination's tables.

    The half with the smaller reparametrised costs comes first; ties go to the lowest index.
    """
    v = _heaviest(model, order)
    ranked = np.argsort(model.reparametrised(v), kind="stable")
    pieces = []
    for half in (ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]):
        piece = model.copy()
        keep = np.zeros(len(ranked), dtype=bool)
        keep[half] = True
        piece.restrict(v, keep)
        piece.fix_singles()
        pieces.append(piece)
    return pieces


def _heaviest(model: PairwiseModel, order: Sequence[int]) -> int:
    """Return the vertex with more than one configuration whose tables, in all steps, have the most combinations."""
    around, sizes = model.neighbours()
    position = {v: i for i, v in enumerate(model.live)}
    places = [position[v] for v in order]
    weight = np.zeros(len(sizes))
    for i, d in zip(places, dependent_sets(around, places), strict=True):
        scope = [i, *d]
        cells = float(np.prod([float(sizes[w]) for w in scope]))
        weight[scope] += cells
    weight[np.array(sizes) == 1] = -1
    return model.live[int(weight.argmax())]
