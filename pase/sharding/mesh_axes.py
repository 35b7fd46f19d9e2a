"""One named mesh for all layers of a placed graph: its axes, and for each layer the axes that split each of its dims.

A layer gives each device a coordinate in each dim that it splits. Written in a mixed-radix system whose bases are the
prime factors of the split, coarsest first, each digit is a function of the device. Layers fit on one mesh, devices
included, exactly if there are digits for all of them that number the devices when combined: every combination of digits
occurs on equally many devices. (A split of 6 has digits 2 · 3 or 3 · 2, so there is a choice to search where the number
of devices is not a prime power.)
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice, pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.sharding.edges import PlacedGraph
from pase.sharding.shards import prime_factors

_MAX_WAYS = 1000
"""Largest number of digit expansions of one layer to try; there is only one if all factors are the same prime."""

_MAX_TRIES = 20_000
"""Limit on the backtracking steps of the search for digits of all layers."""

Coordinates = NDArray[np.int32]
"""[p] a number for each device."""


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a device's coordinate, with values in 0 … size - 1; `packed` is its values, [p] int32."""

    size: int
    packed: bytes

    @property
    def values(self) -> Coordinates:
        """[p] the digit of each device."""
        return np.frombuffer(self.packed, dtype=np.int32)

    @property
    def weight(self) -> int:
        """Number of the first device where the digit is not zero: for a digit of the device number, its place value."""
        return int(np.argmax(self.values != 0))


Way = Mapping[str, tuple[Digit, ...]]
"""For each dim that a layer splits, the digits of its coordinate, coarsest first."""


@dataclass(frozen=True)
class Demand:
    """A layer's requirements: the dims that it splits, with their factors, and the device of each part.

    Attributes:
        devices: [p] row-major over these dims and then the replicas.
    """

    splits: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    @cached_property
    def coordinates(self) -> Mapping[str, Coordinates]:
        """The coordinate of each device in each dim."""
        shape = [split for _, split in self.splits]
        parts = np.indices((*shape, len(self.devices) // prod(shape)), dtype=np.int32).reshape(len(shape) + 1, -1)
        by_device = np.empty_like(parts)
        by_device[:, np.array(self.devices)] = parts
        return {dim: by_device[i] for i, (dim, _) in enumerate(self.splits)}

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """All digit expansions of its coordinates."""
        of_dims = [
            [_written(self.coordinates[dim], order) for order in orders(prime_factors(split))]
            for dim, split in self.splits
        ]
        return tuple(dict(zip(self.coordinates, way, strict=True)) for way in islice(product(*of_dims), _MAX_WAYS))

    def way_on(self, digits: Iterable[Digit]) -> Way | None:
        """Return an expansion that uses only these digits, if there is one."""
        known = set(digits)
        return next((way for way in self.ways if known.issuperset(_digits_of(way))), None)


def common_digits(demands: Sequence[Demand], num_devices: int) -> tuple[Digit, ...]:
    """Return digits that number the devices and express all layers or, where that is impossible, many of them.

    Args:
        demands: Requirements of the layers, most important first.
        num_devices: Number of devices.

    Returns:
        The digits. Those that no layer needs are digits of a device's number among the devices that the others do not
        distinguish.
    """
    found = _of_all(sorted(demands, key=lambda demand: len(demand.ways)), (), num_devices, iter(range(_MAX_TRIES)))
    if found is None:
        found = ()
        for demand in demands:
            found = next(_extended(found, demand, num_devices), found)
    return (*found, *_remaining(found, num_devices))


def _of_all(
    demands: Sequence[Demand], digits: tuple[Digit, ...], num_devices: int, tries: Iterator[int]
) -> tuple[Digit, ...] | None:
    # Layers that are already expressed impose nothing. Every step adds a digit, so there are few steps.
    left = [demand for demand in demands if demand.way_on(digits) is None]
    if not left:
        return digits
    for extended in _extended(digits, left[0], num_devices):
        if next(tries, None) is None:
            return None
        found = _of_all(left[1:], extended, num_devices, tries)
        if found is not None:
            return found
    return None


def _extended(digits: tuple[Digit, ...], demand: Demand, num_devices: int) -> Iterator[tuple[Digit, ...]]:
    """Yield the digits extended by those that a layer additionally needs, fewest additions first."""
    ways = [[digit for digit in _digits_of(way) if digit not in digits] for way in demand.ways]
    for new in sorted(ways, key=len):
        extended = (*digits, *new)
        size = prod(digit.size for digit in extended)
        # Independent: every combination occurs on equally many devices.
        if num_devices % size == 0:
            counts = np.bincount(combined(extended, num_devices), minlength=size)
            if (counts == num_devices // size).all():
                yield extended


def combined(digits: Sequence[Digit], num_devices: int) -> Coordinates:
    """Return [p] the number that several digits form on each device; the first digit is the most significant."""
    total = np.zeros(num_devices, dtype=np.int32)
    for digit in digits:
        total = total * np.int32(digit.size) + digit.values
    return total


def _remaining(digits: Sequence[Digit], num_devices: int) -> tuple[Digit, ...]:
    left = num_devices // prod(digit.size for digit in digits)
    rank = np.empty(num_devices, dtype=np.int32)
    rank[np.argsort(combined(digits, num_devices), kind="stable")] = np.arange(num_devices, dtype=np.int32) % left
    # A single device also makes a mesh: one axis of size 1.
    return _written(rank, prime_factors(left) if digits or left > 1 else (1,))


def _written(coordinate: Coordinates, bases: Sequence[int]) -> tuple[Digit, ...]:
    """Return a coordinate in digits of these bases, most significant first."""
    worth = prod(bases)
    digits = []
    for base in bases:
        worth //= base
        digits.append(Digit(base, (coordinate // worth % base).astype(np.int32).tobytes()))
    return tuple(digits)


def orders(factors: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield each distinct order of the factors."""
    if not factors:
        yield ()
    for first in dict.fromkeys(factors):
        place = factors.index(first)
        for rest in orders(factors[:place] + factors[place + 1 :]):
            yield (first, *rest)


def _digits_of(way: Way) -> Iterator[Digit]:
    return (digit for of_dim in way.values() for digit in of_dim)


# -- the mesh

_Axis = tuple[Digit, ...]
"""Digits that form one axis of the mesh, coarsest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A layer on the mesh: for each dim that it splits, the names of the axes, coarsest first.

    Attributes:
        keeps_devices: Whether each device holds the part that the plan gives it; otherwise parts are permuted.
    """

    axes: Mapping[str, tuple[str, ...]]
    keeps_devices: bool


def mesh_axes(plan: PlacedGraph) -> tuple[dict[str, int], tuple[int, ...], tuple[Assignment, ...]]:
    """Return one mesh for all layers, with the plan's devices wherever their digits agree (`common_digits`).

    A layer whose digits do not agree with the others' keeps its splits, on permuted devices. An axis is one digit, or
    several that layers only use together. Axes are ordered from coarse to fine as far as the layers agree.

    Returns:
        The sizes of the axes, the devices, [p] row-major over the axes, and the layers in the plan's order.
    """
    demands = [
        Demand(tuple(s for s in layer.splits.items() if s[1] > 1), layer.devices)
        for layer in map(plan.__getitem__, plan.graph.index)
    ]
    counts = Counter(demands)
    digits = sorted(
        common_digits([demand for demand, _ in counts.most_common()], plan.num_devices), key=lambda digit: -digit.weight
    )
    exact = {demand: demand.way_on(digits) for demand in counts}
    ways = {demand: _elsewhere(demand, digits) if way is None else way for demand, way in exact.items()}
    order: Counter[tuple[Digit, Digit]] = Counter()
    for demand, way in ways.items():
        for of_dim in way.values():
            order.update(dict.fromkeys(combinations(of_dim, 2), counts[demand]))
    axes = _ordered(_joined(digits, list(ways.values())), order)
    names = {digit: f"m{number}" for number, axis in enumerate(axes) for digit in axis}
    layers = {
        demand: Assignment(
            axes={dim: tuple(dict.fromkeys(names[digit] for digit in of_dim)) for dim, of_dim in way.items()},
            keeps_devices=exact[demand] is not None,
        )
        for demand, way in ways.items()
    }
    position = combined([digit for axis in axes for digit in axis], plan.num_devices)
    sizes = {names[axis[0]]: prod(digit.size for digit in axis) for axis in axes}
    return sizes, tuple(np.argsort(position).tolist()), tuple(layers[demand] for demand in demands)


def _elsewhere(demand: Demand, digits: Sequence[Digit]) -> Way:
    """Return digits whose sizes form a layer's splits; dims whose own digits are available keep these."""
    # Two dims of a layer never have a digit in common, so the digits that one keeps are not needed by the others.
    chosen: dict[str, tuple[Digit, ...]] = {}
    for dim, _ in demand.splits:
        own = [way[dim] for way in demand.ways if set(way[dim]) <= set(digits)]
        if own:
            chosen[dim] = own[0]
    free = [digit for digit in digits if all(digit not in of_dim for of_dim in chosen.values())]
    for dim, split in demand.splits:
        if dim not in chosen:
            chosen[dim] = tuple(_taken(free, prime) for prime in prime_factors(split))
    return chosen


def _taken(free: list[Digit], size: int) -> Digit:
    # Splits divide the number of devices, so a digit remains for each of their prime factors.
    return free.pop(next(i for i, digit in enumerate(free) if digit.size == size))


def _joined(digits: Sequence[Digit], ways: Sequence[Way]) -> list[_Axis]:
    """Group the digits into runs that each layer uses entirely or not at all; unused digits form one run."""
    tuples = [of_dim for way in ways for of_dim in way.values()]
    uses = Counter(digit for of_dim in tuples for digit in of_dim)
    follows = Counter(pair for of_dim in tuples for pair in pairwise(of_dim))
    unused = pairwise(digit for digit in digits if digit not in uses)
    after = {a: b for (a, b), count in follows.items() if count == uses[a] == uses[b]} | dict(unused)
    runs = []
    for first in digits:
        if first not in after.values():
            run = [first]
            while run[-1] in after:
                run.append(after[run[-1]])
            runs.append(tuple(run))
    return runs


def _ordered(axes: Iterable[_Axis], order: Mapping[tuple[Digit, Digit], int]) -> list[_Axis]:
    """Order the axes so that few layers use them in another order; `order` counts uses of one digit before another."""

    def before(first: _Axis, second: _Axis) -> int:
        return sum(order.get((a, b), 0) for a in first for b in second)

    left, found = sorted(axes, key=lambda axis: -axis[-1].weight), []
    while left:
        best = min(left, key=lambda axis: sum(before(other, axis) for other in left if other is not axis))
        left.remove(best)
        found.append(best)
    return found
