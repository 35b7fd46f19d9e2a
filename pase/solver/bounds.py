"""Lower bounds and good strategies by moving cost between edges and vertices (sequential soft arc consistency).

One pass visits the vertices in sequence. A visited vertex first collects what earlier passes and vertices sent to it;
then it shares the part of its costs above their minimum among the edges that lead on, and each of these sends on, over
its other end's classes, the least that any choice of this vertex must pay (min over rows of the residual). Every
residual stays non-negative, so Σ over vertices of min θ_v is a lower bound on every strategy's cost at any time,
and a pass never lowers it. On a tree in which every vertex has one edge that leads on, the pass is dynamic
programming and the bound is the optimum.

Proof of the pruning rule: fix x_v = c in any strategy. Its cost is Σ_u θ_u(x_u) + Σ residuals, which is at least
θ_v(c) + Σ_{u≠v} min θ_u. If that exceeds the cost of a strategy that is known, no cheapest strategy has x_v = c, and
c is dropped.
"""

import numpy as np

from pase.solver.elimination import Check
from pase.solver.pairwise import PairwiseModel, class_minima
from pase.solver.solution import RELATIVE_TOLERANCE, Outcome, SearchBudget
from pase.tables.cost_tables import CostTables, FloatArray, IndexArray, verify_tables

WORTH_DROPPING = 0.7
"""A vertex is restricted when no more than this part of its configurations is left: that takes time, too."""
MAX_SWEEPS = 60
MAX_SWEEPS_NEAR_OPTIMUM = 12
LOOSE = 32
"""How many times the cost of the best strategy the ceiling may be."""
LITTLE_LEFT = 4
"""Configurations for each live vertex: then elimination is as good as free."""


def sweep(model: PairwiseModel, limit: float, forward: bool, check: Check) -> float:
    """Make one pass in ascending (or descending) order of vertices; return the lower bound after it.

    limit: configurations whose bound exceeds it are dropped from the model on the way; +inf keeps all.
    """
    order = model.live if forward else model.live[::-1]
    least = model.least or {v: _least(model.reparametrised(v)) for v in order}
    bound = model.offset + sum(least.values())
    incident, minimum = model.incident, np.minimum.reduce
    for v in order:
        check()
        total, ahead = model.costs[v], []
        size = total.size
        for entry in incident[v]:
            edge, side = entry
            message = edge.messages[side]
            total = total + (message if message.size == size else message.take(edge.of[side]))
            if (edge.ends[1 - side] > v) is forward:
                ahead.append(entry)
        low = _least(total)
        bound += low - least[v]
        least[v] = low  # it stays below what is left of θ_v when this vertex has sent its surplus on
        if limit < np.inf:
            keep = total <= limit - (bound - low)
            num_kept = np.count_nonzero(keep)
            if num_kept <= WORTH_DROPPING * len(total):
                if not num_kept:
                    return np.inf
                model.restrict(v, keep)
                total = total[keep]
        if not ahead:
            continue
        # NumPy is quicker with arrays of no axes than with numbers.
        surplus = total - np.array(low)
        if len(ahead) > 1:
            surplus *= np.array(1.0 / len(ahead))
        for edge, side in ahead:
            values, messages = edge.values, edge.messages
            size = values.shape[side]
            sent = surplus if size == surplus.size else class_minima(surplus, edge.of[side], size)
            own = messages[side] = messages[side] - sent
            messages[1 - side] = minimum(values - own[:, None]) if side == 0 else minimum(values - own, 1)
    model.least = least
    return bound


def _least(values: FloatArray) -> float:
    """Return the least of a short vector, in a fraction of the time that a reduction takes."""
    return values.item(values.argmin())


def decode(model: PairwiseModel, forward: bool) -> tuple[float, dict[int, int]]:
    """Return a cost and a choice for the live vertices: each in turn takes what is best given the ones before it.

    What a vertex does not know yet is estimated by the message from there. Ties go to the lowest number.
    """
    chosen: dict[int, int] = {}
    cost = model.offset
    for v in model.live if forward else model.live[::-1]:
        paid, estimate = model.costs[v], None
        size = paid.size
        for edge, side in model.incident[v]:
            row = chosen.get(edge.ends[1 - side])
            if row is not None:
                row = edge.of[1 - side][row]
                seen = edge.values[row] if side else edge.values[:, row]
                paid = paid + (seen if seen.size == size else seen.take(edge.of[side]))
            else:
                message = edge.messages[side]
                message = message if message.size == size else message.take(edge.of[side])
                estimate = message if estimate is None else estimate + message
        c = int((paid if estimate is None else paid + estimate).argmin())
        chosen[v] = c
        cost += paid.item(c)
    return cost, chosen


def tighten_bounds(
    model: PairwiseModel,
    budget: SearchBudget,
    outcome: Outcome | None = None,
    *,
    limit: float = np.inf,
    max_sweeps: int = MAX_SWEEPS,
    little: int = LITTLE_LEFT,
    whole: bool = True,
) -> float:
    """Bound, decode and drop configurations until little is left or a pass changes little; return the lower bound.

    outcome: its best strategy is the limit, and better ones that are decoded are offered to it; what is rounded away is
    relative to the largest cost, so that a ceiling follows the best strategy down. None: strategies up to `limit` are
    of interest. little: configurations for each live vertex. whole: the model is the whole problem, so that its bound
    holds for every strategy.
    """
    first = max(model.num_configurations(), 1)
    bounds = [-np.inf, -np.inf]
    cost = limit
    for number in range(max_sweeps):
        before = model.num_configurations()
        forward = number % 2 == 0
        if outcome is not None:
            cost, limit = outcome.cost, outcome.limit
            if LOOSE * cost < model.ceiling < np.inf:
                model.lower_ceiling(2 * cost)
                bounds = [-np.inf, -np.inf]
            left = f"{before} configurations of {len(model.live)} layers left"
            budget.progress(f"bounding: {left}", 1 - before / first)
        bound = sweep(model, limit, forward, budget.check)
        scale = min(cost, model.ceiling)
        bound -= RELATIVE_TOLERANCE * scale if scale < np.inf else 0.0
        budget.sweeps += 1
        if outcome is not None and whole:
            outcome.raise_bound(bound)
        if bound > limit:
            return bound
        model.fix_singles()
        after = model.num_configurations()
        gained = bound - bounds[-2]  # by a pass each way
        bounds.append(max(bound, bounds[-1]))
        is_little = after <= little * len(model.live)
        is_slow = number >= 3 and after > 0.95 * before and gained < 0.02 * (cost - bound)
        # Every second pass is decoded, and the last.
        if outcome is not None and (number == 0 or not forward or is_little or is_slow):
            found, chosen = decode(model, not forward)
            if found < cost:  # it is no higher here than in the tables
                outcome.offer(model.complete(chosen))
                cost = outcome.cost
            budget.holds(model.own_bytes())
        if is_little or (is_slow and gained < 0.02 * (cost - bound)):
            break
    return bounds[-1]


def near_optimal(tables: CostTables, limit: float, check: Check = lambda: None) -> tuple[IndexArray, ...]:
    """Return for each vertex the configurations, ascending, that a strategy of a cost of at most `limit` may have.

    None is missing; there may be others. limit: at least the least cost, or every vertex's are empty. check: called now
    and then, to raise where this is to end.
    """
    verify_tables(tables)
    limit += RELATIVE_TOLERANCE * abs(limit)
    # Costs are not negative: whatever is above the limit may count as twice the limit.
    model = PairwiseModel.of_tables(tables, 2 * limit if limit > 0 else 1.0)
    for number in range(MAX_SWEEPS_NEAR_OPTIMUM):
        before = model.num_configurations()
        if sweep(model, limit, number % 2 == 0, check) > limit:
            return tuple(np.empty(0, dtype=np.int32) for _ in model.live)
        if number and model.num_configurations() > 0.98 * before:
            break
    least = model.least or {}
    low = model.offset + sum(least.values())
    return tuple(
        model.origin[v][model.reparametrised(v) <= limit - (low - least[v])].astype(np.int32) for v in model.live
    )
