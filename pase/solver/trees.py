"""Elimination of trees: each vertex, leaves first, sends its only later neighbour one vector.

This is `elimination` where no dependent set has two vertices, with nothing to plan: the vector over the neighbour's
layout classes is min over c of [ cost_v(c) + transfer(c, x) ], and the neighbour adds it to its layer costs.
"""

from collections.abc import Sequence

from pase.solver.classes import by_configuration, class_minima
from pase.solver.effort import Check
from pase.solver.network import Link, Network


def eliminate_tree(network: Network, order: Sequence[int], check: Check) -> tuple[float, dict[int, int]] | None:
    """Return the least cost and a strategy that has it, as numbers in the tables; None if the network is not a tree.

    order: the live vertices, each with at most one neighbour after it. Ties go to the lowest index. The network's
    layer costs are used up.
    """
    waiting = set(order)
    towards: dict[int, tuple[Link, int]] = {}
    cost = network.offset
    for v in order:
        check()
        waiting.remove(v)
        costs = network.costs[v]
        ahead = [(link, side) for link, side in network.incident[v] if link.ends[1 - side] in waiting]
        if not ahead:
            cost += float(costs.min())
            continue
        if len(ahead) > 1:
            return None
        link, side = towards[v] = ahead[0]
        least = class_minima(costs, link.of[side], link.values.shape[side])
        sent = (link.values + (least[:, None] if side == 0 else least)).min(axis=side)
        w = link.ends[1 - side]
        network.costs[w] = network.costs[w] + by_configuration(sent, link.of[1 - side])
    chosen: dict[int, int] = {}
    for v in reversed(order):
        total = network.costs[v]
        if v in towards:
            link, side = towards[v]
            total = total + link.seen_from(1 - side, chosen[link.ends[1 - side]])
        chosen[v] = int(total.argmin())
    return cost, network.complete({v: int(network.origin[v][c]) for v, c in chosen.items()})
