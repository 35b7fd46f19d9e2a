"""Reduction (a): configurations that no neighbour can tell apart are merged to the cheapest.

Proof: let c and c' be configurations of v that are in the same layout class on every link of v, with
cost_v(c) ≤ cost_v(c'). Replacing c' by c in any strategy changes no transfer cost and does not raise the layer cost. So
some cheapest strategy does not contain c'. Of equals the one with the lowest index stays.
"""

import numpy as np
from numpy.typing import NDArray

from pase.solver.classes import ClassAlgebra, Partition
from pase.solver.network import Network

Mask = NDArray[np.bool_]


def merge_alike(network: Network) -> int:
    """Merge the configurations of every live vertex; return how many were dropped.

    Vertices with the same costs and the same layout classes share the work.
    """
    algebra = ClassAlgebra()
    partitions: dict[int, Partition] = {}
    known: dict[tuple[int, ...], tuple[Mask, object]] = {}
    dropped = 0
    for v in network.live:
        links = network.incident[v]
        key = (id(network.costs[v]), *sorted(id(link.of[side]) for link, side in links))
        if key not in known:
            for link, side in links:
                of = link.of[side]
                partitions.setdefault(id(of), Partition(of, link.values.shape[side]))
            # The arrays are kept with the result, so that their ids stay theirs.
            known[key] = (_cheapest_of_each(network, v, algebra, partitions), network.costs[v])
        keep = known[key][0]
        if not keep.all():
            dropped += int(len(keep) - keep.sum())
            network.restrict(v, keep)
    return dropped


def _cheapest_of_each(network: Network, v: int, algebra: ClassAlgebra, partitions: dict[int, Partition]) -> Mask:
    costs = network.costs[v]
    links = network.incident[v]
    of = np.zeros(len(costs), dtype=np.intp)
    if links:
        of = algebra.join([partitions[id(link.of[side])] for link, side in links])[0].of
    order = np.lexsort((costs, of))  # stable: the lowest index first among equals
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.diff(of[order]) != 0
    keep = np.zeros(len(costs), dtype=bool)
    keep[order[first]] = True
    return keep
