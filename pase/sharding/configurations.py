"""The configurations of an operator: every way to split its iteration space over the devices (PaSE section II)."""

from math import gcd

import numpy as np

from pase.errors import ConfigurationError
from pase.graph import Graph, Operator
from pase.sharding.shards import IndexArray

MAX_CONFIGURATIONS = 2_000_000
"""Configurations of one layer that are enumerated at most: 2 million tuples of 8 factors fill 64 MB."""


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number of 1 or more, ascending, with repetitions."""
    factors, factor = [], 2
    while number > 1:
        if factor * factor > number:
            factor = number
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)


def enumerate_configurations(operator: Operator, num_devices: int) -> IndexArray:
    """Return all tuples of split factors whose product divides `num_devices`, each factor dividing its dim's extent.

    [K, D]: row 0 is the one that splits nothing, the rest follow in lexicographic order. For a power of two that is
    every product of at most `num_devices`. Devices beyond the product hold replicas. Raises
    ConfigurationError where there are more than MAX_CONFIGURATIONS.
    """
    factors_of_p = divisors(num_devices)
    splits = np.ones((1, 0), dtype=np.int32)
    products = np.ones(1, dtype=np.int64)
    for dim in operator.dims:
        factors = [1] if dim.name in operator.unsplittable else [f for f in factors_of_p if dim.extent % f == 0]
        kept = [np.flatnonzero(num_devices % (products * f) == 0) for f in factors]
        if sum(map(len, kept)) > MAX_CONFIGURATIONS:
            raise ConfigurationError(
                f"layer {operator.name!r} has more than {MAX_CONFIGURATIONS} configurations on {num_devices} devices; "
                "use fewer devices"
            )
        splits = np.concatenate(
            [
                np.column_stack([splits[rows], np.full(len(rows), f, dtype=np.int32)])
                for rows, f in zip(kept, factors, strict=True)
            ]
        )
        products = np.concatenate([products[rows] * f for rows, f in zip(kept, factors, strict=True)])
    order = np.lexsort(splits.T[::-1])
    return np.ascontiguousarray(splits[order])


def check_devices(num_devices: int) -> None:
    """Raise ConfigurationError unless there is at least one device."""
    if num_devices < 1:
        raise ConfigurationError(f"{num_devices} devices were asked for; expected a whole number of 1 or more")


def check_splittable(graph: Graph, num_devices: int) -> None:
    """Raise ConfigurationError where no layer can be split at all, so that every device would do the same work."""
    if num_devices == 1:
        return
    extents = (d.extent for o in graph.operators for d in o.dims if d.name not in o.unsplittable)
    if all(gcd(extent, num_devices) == 1 for extent in extents):
        below = 1 << (num_devices.bit_length() - 1)
        raise ConfigurationError(
            f"no layer of {graph.name!r} can be split over {num_devices} devices: none of its dims is divisible "
            f"by a divisor of {num_devices} beyond 1; use a number of devices with small factors, such as {below}"
        )


def check_batch(graph: Graph, batch: int, num_devices: int) -> None:
    """Raise ConfigurationError where a batch of more than one example cannot be split at all."""
    if num_devices > 1 and batch > 1 and gcd(batch, num_devices) == 1:
        nearest = max(1, round(batch / num_devices)) * num_devices
        raise ConfigurationError(
            f"a batch of {batch} cannot be split over {num_devices} devices: no divisor of {num_devices} beyond 1 "
            f"divides it; use a batch such as {nearest}, or let the other dims of {graph.name!r} alone be split "
            "(--keep-batch)"
        )


def data_parallel(graph: Graph, operator: Operator, num_devices: int) -> tuple[int, ...]:
    """Return the split factors of data parallelism: the batch as many ways as it and p allow, nothing else."""
    batch, splits = graph.batch[operator.name], dict.fromkeys(operator.extents, 1)
    devices, examples = num_devices, batch.examples
    for dim, ways in batch.dims.items():
        if dim not in operator.unsplittable:
            splits[dim] = gcd(devices, examples, ways)
            devices, examples = devices // splits[dim], examples // splits[dim]
    return tuple(splits.values())


def data_parallel_splits(graph: Graph, num_devices: int) -> list[dict[str, int]]:
    """Return the splits of `data_parallel` by dim, for each operator of a graph."""
    return [
        dict(zip(operator.extents, data_parallel(graph, operator, num_devices), strict=True))
        for operator in graph.operators
    ]
