"""Plans whose placement is that of one mesh: each split is given to axes of it."""

import random
from collections.abc import Sequence
from math import prod

import numpy as np

from pase.graph import Graph
from pase.planning.plan import Plan
from pase.sharding.shards import prime_factors
from tests.runtime.plans import configurations, make_plan


def mesh_devices(
    splits: dict[str, int], slots: dict[str, Sequence[int]], sizes: Sequence[int], devices: Sequence[int]
) -> tuple[int, ...]:
    """The device of each part, row-major over the split dims and the replicas.

    slots: for each dim, the axes that split it, the coarsest first. devices: row-major over axes of these sizes.
    """
    names = [dim for dim, split in splits.items() if split > 1]
    free = [axis for axis in range(len(sizes)) if all(axis not in slots[dim] for dim in names)]
    order = [axis for dim in names for axis in slots[dim]] + free
    grid = np.array(devices).reshape(sizes)
    return tuple(int(device) for device in grid.transpose(order).ravel())


def mesh_plan(graph: Graph, num_devices: int, seed: int) -> Plan:
    """Random configurations that use most devices, on random axes of one mesh of devices in random order."""
    numbers = random.Random(seed)
    sizes = list(prime_factors(num_devices))
    numbers.shuffle(sizes)
    devices = numbers.sample(range(num_devices), num_devices)
    splits, placed = {}, {}
    for operator in graph.operators:
        choices = configurations(operator, num_devices)
        full = [choice for choice in choices if prod(choice.values()) == num_devices]
        split = numbers.choice(full if full and numbers.random() < 0.7 else choices)
        left = list(range(len(sizes)))
        slots = {}
        for dim, factor in split.items():
            primes = list(prime_factors(factor))
            numbers.shuffle(primes)
            slots[dim] = []
            for prime in primes:
                slots[dim].append(numbers.choice([axis for axis in left if sizes[axis] == prime]))
                left.remove(slots[dim][-1])
        splits[operator.name] = split
        placed[operator.name] = mesh_devices(split, slots, sizes, devices)
    return make_plan(graph, num_devices, splits, placed)
