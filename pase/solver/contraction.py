"""Reduction (c): vertices with at most two neighbours are eliminated while the problem stays pairwise.

This is one step of variable elimination: the vertex and its links become a number (no neighbour), a vector of layer
costs (one) or a link between its two neighbours, each the minimum over the vertex's configurations for every choice
of the neighbours; the optimum of the rest is unchanged (see `elimination` for the proof). The link inherits the
messages of the links it replaces, so a bound that was proven stays proven: its residual is at least min θ_v ≥ 0.
"""

from math import prod

import numpy as np

from pase.solver.classes import ClassAlgebra, Partition, by_configuration
from pase.solver.effort import Check
from pase.solver.elimination import Factor, Kernel, Planner, Table, fill
from pase.solver.network import Link, Network


def contract(network: Network, max_operations: int, max_bytes: int, check: Check) -> int:
    """Eliminate vertices of degree 0, 1 and 2, lowest number first, until none is left; return how many there were.

    max_operations: a vertex whose elimination would look at more combinations than this is left alone.
    max_bytes: so is a vertex whose new table would not fit this memory with those before it.
    Vertices with the same costs and tables (repeated layers) share the work.
    """
    planner = Planner(ClassAlgebra())
    partitions: dict[int, Partition] = {}
    known: dict[int, Table] = {}
    gone: set[int] = set()
    held_bytes = 0
    waiting = list(network.live)
    while waiting:
        again: set[int] = set()
        for v in waiting:
            check()
            links = network.incident[v]
            around = {link.ends[1 - side] for link, side in links}
            if v in gone or len(around) > 2:
                continue
            factors = []
            for link, _ in links:
                ends = [
                    partitions.setdefault(id(link.of[s]), Partition(link.of[s], link.values.shape[s])) for s in (0, 1)
                ]
                table = known.setdefault(id(link.values), Table(link.values.shape, link.values))
                factors.append(Factor(link.ends, (ends[0], ends[1]), table))
            dependent, kernel = planner.eliminate(v, network.costs[v], factors)
            if kernel.result.values is None:
                num_bytes = 8 * prod(kernel.result.shape)
                if kernel.operations > max_operations or held_bytes + num_bytes > max_bytes:
                    continue
                held_bytes += num_bytes
                fill(kernel, check)
            _replace(network, v, dependent, kernel)
            gone.add(v)
            again |= around
        waiting = sorted(again)
    network.remove(gone)
    return len(gone)


def _replace(network: Network, v: int, dependent: tuple[int, ...], kernel: Kernel) -> None:
    links = network.incident[v]
    network.eliminate(v)
    values = kernel.result.filled()
    if not dependent:
        network.offset += float(values)
    elif len(dependent) == 1:
        w = dependent[0]
        costs, of = network.costs[w], kernel.partitions[0].of
        network.costs[w] = network.made(lambda: costs + by_configuration(values, of), costs, values, of)
    else:
        messages = []
        for w, partition in zip(dependent, kernel.partitions, strict=True):
            moved = np.zeros(len(network.costs[w]))
            for link, side in links:
                if link.ends[1 - side] == w:
                    moved = moved + by_configuration(link.messages[1 - side], link.of[1 - side])
            message = np.empty(partition.num_classes)
            message[partition.of] = moved
            messages.append(message)
        a, b = dependent
        new = Link((a, b), [p.of for p in kernel.partitions], values, messages)
        network.incident[a] = [*network.incident[a], (new, 0)]
        network.incident[b] = [*network.incident[b], (new, 1)]
