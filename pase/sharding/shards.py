"""Configurations of an operator (PaSE section II), and their shards in closed form, as arrays over configurations.

A `splits` argument has shape [K, D], a result has shape [K].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pase.errors import ConfigurationError
from pase.graph import Graph, Operator, SliceOf, Window
from pase.graph.operator import Indexed, split_dim
from pase.sharding.boxes import even_bounds

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int32]
IntArray = NDArray[np.int64]

SingleAxis = str | Window | SliceOf | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Configurations of one operator, by dim.

    Attributes:
        values: [K, D] split factors.
        extents: Extent of each iteration dim, in the same order.
    """

    values: IndexArray
    extents: Mapping[str, int]

    def of(self, dim: str) -> IndexArray:
        """Return the [K] split factors of one dim."""
        return self.values[:, tuple(self.extents).index(dim)]

    def product(self, dims: tuple[str, ...]) -> IntArray:
        """Return the [K] number of parts into which splits of these dims divide together."""
        result = np.ones(len(self.values), dtype=np.int64)
        for dim in dims:
            result *= self.of(dim)
        return result


def splits_of(operator: Operator, values: IndexArray) -> Splits:
    """Return configurations of an operator, [K, D], with the extents of its iteration dims."""
    return Splits(values=values, extents=operator.extents)


def shard_size(tensor: Indexed, splits: Splits) -> FloatArray:
    """Return the [K] number of elements in the largest shard of a tensor, without halos."""
    size = np.ones(len(splits.values))
    for component in components(tensor, splits.extents):
        size *= largest_parts(component, splits)
    return size


class Component(NamedTuple):
    """A factor of a tensor dim that one iteration dim indexes.

    Attributes:
        length: Its extent.
        dim_extent: Extent of the iteration dim.
    """

    length: int
    axis: SingleAxis
    dim_extent: int
    kernel_extent: int = 1


def components(tensor: Indexed, extents: Mapping[str, int]) -> tuple[Component, ...]:
    """Return a tensor's dims, row-major, with products of iteration dims decomposed into their factors.

    Args:
        tensor: The tensor.
        extents: Extents of the iteration dims.
    """
    result: list[Component] = []
    for length, axis in zip(tensor.shape, tensor.index_map, strict=True):
        match axis:
            case tuple():
                result.extend(Component(length=extents[d], axis=d, dim_extent=extents[d]) for d in axis)
            case Window():
                result.append(
                    Component(
                        length=length, axis=axis, dim_extent=extents[axis.out], kernel_extent=extents[axis.kernel]
                    )
                )
            case SliceOf():
                result.append(Component(length=length, axis=axis, dim_extent=extents[axis.dim]))
            case _:
                result.append(Component(length=length, axis=axis, dim_extent=length))
    return tuple(result)


def split_columns(parts: tuple[Component, ...], splits: Splits) -> IndexArray:
    """Return [K, number of components]: the split factor of each component under each configuration."""
    if not parts:
        return np.ones((len(splits.values), 0), dtype=np.int32)
    return np.column_stack([split_of(part.axis, splits) for part in parts])


_PADDING = 64
"""Tolerance of `shard_dims`: shards along an outer dim, which are contiguous, may be 1/64 larger."""


def shard_dims(part_extents: Sequence[Any], count: Any) -> Any:
    """Return the dim along which ZeRO shards a device's part of a weight over the devices that all hold that part.

    Each device keeps ``ceil(extent / count)`` points of the dim, the last ones fewer or none (`sharding.boxes.chunk`).
    It is the first dim along which the largest shard is at most 1/64 larger than along any other.

    Each device keeps ``ceil(extent / count)`` points of the dim, the last ones fewer or none (`sharding.boxes.chunk`).
    It is the first dim along which the largest shard is no more than a 64th larger than along any other.

    Args:
        part_extents: Extent of the part along each dim, a number or [K] numbers.
        count: Number of devices that hold the part, a number or [K] numbers.

    Returns:
        The number of the dim, or [K] numbers; -1 for a part of a single element, which cannot be sharded.
    """
    points = np.asarray(prod(np.asarray(extent, dtype=np.int64) for extent in part_extents))
    shards = [-(-extent // count) * (points // np.maximum(extent, 1)) for extent in part_extents]
    least = points
    for shard in shards:
        least = np.minimum(least, shard)
    best = np.full_like(points, -1)
    for dim, shard in reversed(list(enumerate(shards))):
        best = np.where((shard < points) & (shard <= least + least // _PADDING), dim, best)
    return best


def shards_in_order(part_extents: Sequence[Any], count: Any) -> Any:
    """Return whether the shards of a part are contiguous in row-major memory; [K] values for [K] extents."""
    along = shard_dims(part_extents, count)
    before: Any = 1
    found = np.zeros_like(along, dtype=np.bool_)
    for dim, extent in enumerate(part_extents):
        found = found | ((along == dim) & (before == 1))
        before = before * np.asarray(extent)
    return found


def sharded_extents(part_extents: Sequence[Any], count: Any) -> list[Any]:
    """Return the extents of the largest shard of a part (`shard_dims`), each a number or [K] numbers."""
    along = shard_dims(part_extents, count)
    return [np.where(along == dim, -(-extent // count), extent) for dim, extent in enumerate(part_extents)]


def padded_shard_points(part_extents: Sequence[int], dim: int, count: int) -> int:
    """Return the points of the largest of `count` shards along a dim, which is the size of each message."""
    return -(-part_extents[dim] // count) * prod(extent for at, extent in enumerate(part_extents) if at != dim)


_FEW_ROWS = 4
"""Up to this many rows are compared as tuples, which is faster than array functions for so few."""

_FEW_NUMBERS = 1024


def distinct_rows(rows: IndexArray) -> tuple[IndexArray, NDArray[np.intp]]:
    """Return the distinct rows of [N, C] non-negative integers, in order, and [N] the index of each row among them."""
    if len(rows) == 1 or not rows.shape[1]:
        return rows[:1], np.zeros(len(rows), dtype=np.intp)
    if 0 < len(rows) <= _FEW_ROWS:
        given = list(map(tuple, rows.tolist()))
        number_of = {row: number for number, row in enumerate(sorted({*given}))}
        return np.array(list(number_of), rows.dtype), np.array([number_of[row] for row in given], np.intp)
    bases = [most + 1 for most in rows.max(axis=0, initial=0).tolist()]
    size = prod(bases)
    if size >= 1 << 62:
        values, inverse = np.unique(rows, axis=0, return_inverse=True)
        return values, inverse.reshape(-1)
    # Encode each row as one number with its columns as digits: sorting numbers is much faster than sorting rows.
    weights = [1]
    for base in bases[:0:-1]:
        weights.append(weights[-1] * base)
    numbers = rows @ np.array(weights[::-1], dtype=np.int64)
    if size > _FEW_NUMBERS + 4 * len(rows):
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        return rows[first], inverse
    # Few numbers need no sorting: writing in reverse order leaves the first row of each.
    first_of = np.full(size, -1, dtype=np.intp)
    first_of[numbers[::-1]] = np.arange(len(rows) - 1, -1, -1)
    found = np.flatnonzero(first_of >= 0)
    place = np.empty(size, dtype=np.intp)
    place[found] = np.arange(len(found))
    return rows[first_of[found]], place[numbers]


def split_of(axis: SingleAxis, splits: Splits) -> IndexArray:
    """Return the [K] split factors of the iteration dim that indexes a component."""
    return splits.of(split_dim(axis)) if axis is not None else np.ones(len(splits.values), dtype=np.int32)


def largest_parts(component: Component, splits: Splits) -> FloatArray:
    """Return the [K] extents of the largest of the even parts of a component."""
    split = split_of(component.axis, splits)
    if not isinstance(component.axis, SliceOf):
        return np.asarray(-(-component.length // split.astype(np.int64)), dtype=np.float64)
    values, place = distinct_rows(split[:, None])
    largest = [np.bincount(part_labels(component, k)).max() for k in values[:, 0].tolist()]
    return np.array(largest, dtype=np.float64)[place]


def part_labels(component: Component, split: int) -> IntArray:
    """Return, for each position along a component, which part of the iteration dim it belongs to."""
    bounds = even_bounds(component.dim_extent if isinstance(component.axis, SliceOf) else component.length, split)
    positions = np.arange(component.length)
    if isinstance(component.axis, SliceOf):
        positions = positions + component.axis.offset
    return np.searchsorted(bounds, positions, side="right").astype(np.int64) - 1


def held_extents(operator: Operator, tensor: Indexed, part_of: Callable[[str, int], Any]) -> list[tuple[int, Any]]:
    """Return a tensor's dims as a program holds them: each one's extent, and the extent of a device's part.

    A window's part has all points under its windows, halos and padding included; a single point gives no dim.

    Args:
        operator: The operator, whose iteration dims index the tensor.
        tensor: One of its tensors.
        part_of: Returns the size of a part of an iteration dim of the given name and extent: a number or [K] numbers.
    """
    found: list[tuple[int, Any]] = []
    for part in components(tensor, operator.extents):
        match part.axis:
            case str():
                found.append((part.length, part_of(part.axis, part.length)))
            case Window(out=out, kernel=kernel, stride=stride, dilation=dilation):
                outs, kernels = part_of(out, part.dim_extent), part_of(kernel, part.kernel_extent)
                found.append((part.length, (outs - 1) * stride + (kernels - 1) * dilation + 1))
            case SliceOf() if part.length > 1:
                found.append((part.length, part_of(part.axis.dim, part.length)))
            case None if part.length > 1:
                found.append((part.length, part.length))
            case _:
                pass
    return found


MAX_CONFIGURATIONS = 2_000_000
"""Largest number of configurations of one layer: 2 million tuples of 8 factors take 64 MB."""


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

    If `num_devices` is a power of two, these are all products up to `num_devices`. Remaining devices hold replicas.

    Returns:
        [K, D] split factors: row 0 splits nothing, the rest follow in lexicographic order.

    Raises:
        ConfigurationError: There are more than MAX_CONFIGURATIONS.
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


MOST_FACTOR = 64
"""Largest divisor to suggest for the number of devices."""


def check_splittable(graph: Graph, num_devices: int) -> None:
    """Raise ConfigurationError where no layer can be split at all, so that every device would do the same work."""
    if num_devices == 1:
        return
    extents = {d.extent for o in graph.operators for d in o.dims if d.name not in o.unsplittable}
    if all(gcd(extent, num_devices) == 1 for extent in extents):
        factors = {gcd(extent, factor) for extent in extents for factor in range(2, MOST_FACTOR + 1)} - {1}
        advice = f"use a number of devices that {min(factors)} divides" if factors else "pad a dim of the model"
        raise ConfigurationError(
            f"no layer of {graph.name!r} can be split over {num_devices} devices: none of its dims is divisible "
            f"by a divisor of {num_devices} above 1; {advice}"
        )


def check_batch(graph: Graph, batch: int, num_devices: int) -> None:
    """Raise ConfigurationError where a batch of more than one example cannot be split at all."""
    if num_devices > 1 and batch > 1 and gcd(batch, num_devices) == 1:
        nearest = max(1, round(batch / num_devices)) * num_devices
        raise ConfigurationError(
            f"a batch of {batch} cannot be split over {num_devices} devices: no divisor of {num_devices} above 1 "
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
