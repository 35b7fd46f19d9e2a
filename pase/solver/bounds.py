"""Lower bounds and good strategies by moving cost between edges and vertices (sequential soft arc consistency).

One pass visits the vertices in sequence. A visited vertex first collects what earlier passes and vertices sent to it;
then it shares the part of its costs above their minimum among the links that lead on, and each of these sends on, over
its other end's classes, the least that any choice of this vertex must pay (min over rows of the residual). Every
residual stays non-negative, so Σ over vertices of min θ_v is a lower bound on every strategy's cost at any time,
and a pass never lowers it. On a tree in which every vertex has one link that leads on, the pass is dynamic
programming and the bound is the optimum.

Proof of the pruning rule: fix x_v = c in any strategy. Its cost is Σ_u θ_u(x_u) + Σ residuals, which is at least
θ_v(c) + Σ_{u≠v} min θ_u. If that exceeds the cost of a strategy that is known, no cheapest strategy has x_v = c, and
c is dropped.
"""

import numpy as np

from pase.solver.classes import by_configuration, class_minima
from pase.solver.effort import Check
from pase.solver.network import Link, Network
from pase.tables.cost_tables import FloatArray

WORTH_DROPPING = 0.7
"""A vertex is narrowed when no more than this part of its configurations is left: narrowing takes time, too."""


def sweep(network: Network, limit: float, forward: bool, check: Check) -> float:
    """Make one pass in ascending (or descending) order of vertices; return the lower bound after it.

    limit: configurations whose bound exceeds it are dropped from the network on the way; +inf keeps all.
    """
    order = network.live if forward else network.live[::-1]
    least = network.least or {v: float(np.minimum.reduce(network.reparametrised(v))) for v in order}
    bound = network.offset + sum(least.values())
    incident, minimum = network.incident, np.minimum.reduce
    for v in order:
        check()
        total = network.reparametrised(v)
        low = float(minimum(total))
        bound += low - least[v]
        least[v] = low  # it stays below what is left of θ_v when this vertex has sent its surplus on
        if limit < np.inf:
            keep = total <= limit - (bound - low)
            num_kept = np.count_nonzero(keep)
            if num_kept <= WORTH_DROPPING * len(total):
                if not num_kept:
                    return np.inf
                network.restrict(v, keep)
                total = total[keep]
        ahead = [entry for entry in incident[v] if (entry[0].ends[1 - entry[1]] > v) == forward]
        if not ahead:
            continue
        surplus = total - low
        if len(ahead) > 1:
            surplus *= 1.0 / len(ahead)
        for link, side in ahead:
            send(link, side, class_minima(surplus, link.of[side], link.values.shape[side]))
    network.least = least
    return bound


def send(link: Link, side: int, surplus: FloatArray) -> None:
    """Move `surplus`, over the classes of one end, into the link, and all that the link can give to its other end."""
    own = link.messages[side] - surplus
    link.messages[side] = own
    if side == 0:
        link.messages[1] = np.minimum.reduce(link.values - own[:, None])
    else:
        link.messages[0] = np.minimum.reduce(link.values - own, 1)


def decode(network: Network, forward: bool) -> tuple[float, dict[int, int]]:
    """Return a cost and a choice for the live vertices: each in turn takes what is best given the ones before it.

    What a vertex does not know yet is estimated by the message from there. Ties go to the lowest number. The
    choice is in the tables' numbers.
    """
    chosen: dict[int, int] = {}
    cost = network.offset
    for v in network.live if forward else network.live[::-1]:
        paid = network.costs[v]
        estimate = None
        for link, side in network.incident[v]:
            other = link.ends[1 - side]
            if other in chosen:
                paid = paid + link.seen_from(1 - side, chosen[other])
            else:
                message = by_configuration(link.messages[side], link.of[side])
                estimate = message if estimate is None else estimate + message
        c = int((paid if estimate is None else paid + estimate).argmin())
        chosen[v] = c
        cost += float(paid[c])
    return cost, {v: int(network.origin[v][c]) for v, c in chosen.items()}
