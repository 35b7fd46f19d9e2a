"""Digits of devices: functions that give each device a number below a prime, of which the splits of layers are made.

A layer gives each device a coordinate in each dim that it splits. Written in digits whose bases are the prime factors
of the split, the coarsest first, each digit is a function of the device. Layers can be said on one mesh, devices
included, exactly where digits can be found for all of them that number the devices when taken together: every
combination of digits is that of equally many devices. (A split of 6 is written in digits 2 · 3 or 3 · 2, so that
there is something to search where the number of devices is no power of a prime.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.placement import prime_factors

_MAX_WAYS = 1000
"""Ways to write one layer's coordinates that are looked at; there is one where all factors are the same prime."""

_MAX_TRIES = 20_000
"""How often the search for digits of all layers adds a layer's before it gives up."""

Coordinates = NDArray[np.int32]
"""[p] a number for each device."""


@dataclass(frozen=True, slots=True)
class Digit:
    """A function of the device; size: below what its values are. packed: its values, [p] int32."""

    size: int
    packed: bytes

    @property
    def values(self) -> Coordinates:
        """[p] the digit of each device."""
        return np.frombuffer(self.packed, dtype=np.int32)

    @property
    def weight(self) -> int:
        """The first device where it is not zero: for a digit of the device's number, what the digit is worth."""
        return int(np.argmax(self.values != 0))


Way = Mapping[str, tuple[Digit, ...]]
"""For each dim that a layer splits, its coordinate written in digits, the coarsest first."""


@dataclass(frozen=True)
class Demand:
    """What a layer asks of a mesh: the dims that it splits, with their factors, and the device of each part.

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
        """The ways to write its coordinates in digits."""
        of_dims = [
            [_written(self.coordinates[dim], order) for order in _orders(prime_factors(split))]
            for dim, split in self.splits
        ]
        return tuple(dict(zip(self.coordinates, way, strict=True)) for way in islice(product(*of_dims), _MAX_WAYS))

    def way_on(self, digits: Iterable[Digit]) -> Way | None:
        """Return a way that uses these digits alone, if there is one."""
        known = set(digits)
        return next((way for way in self.ways if known.issuperset(_digits_of(way))), None)


def common_digits(demands: Sequence[Demand], num_devices: int) -> tuple[Digit, ...]:
    """Return digits that number the devices, in which all layers are written or, if that cannot be, many of them.

    demands: in the order in which layers are preferred where not all can be. Digits that no layer asks for are
    those of the number of a device among those that the others do not tell apart.
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
    # What is written already binds nothing. Every step adds a digit, so that steps are few.
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
    """Yield the digits with those that a layer needs besides, those ways first that need the fewest."""
    ways = [[digit for digit in _digits_of(way) if digit not in digits] for way in demand.ways]
    for new in sorted(ways, key=len):
        extended = (*digits, *new)
        if _are_independent(extended, num_devices):
            yield extended


def _are_independent(digits: Sequence[Digit], num_devices: int) -> bool:
    size = prod(digit.size for digit in digits)
    if num_devices % size:
        return False
    return bool((np.bincount(combined(digits, num_devices), minlength=size) == num_devices // size).all())


def combined(digits: Sequence[Digit], num_devices: int) -> Coordinates:
    """Return the number that several digits make of each device, [p]; the first digit counts most."""
    total = np.zeros(num_devices, dtype=np.int32)
    for digit in digits:
        total = total * np.int32(digit.size) + digit.values
    return total


def _remaining(digits: Sequence[Digit], num_devices: int) -> tuple[Digit, ...]:
    left = num_devices // prod(digit.size for digit in digits)
    rank = np.empty(num_devices, dtype=np.int32)
    rank[np.argsort(combined(digits, num_devices), kind="stable")] = np.arange(num_devices, dtype=np.int32) % left
    # A single device makes a mesh, too: of one axis, of one point.
    return _written(rank, prime_factors(left) if digits or left > 1 else (1,))


def _written(coordinate: Coordinates, bases: Sequence[int]) -> tuple[Digit, ...]:
    """Return a coordinate in digits of these bases, the first of which counts most."""
    worth = prod(bases)
    digits = []
    for base in bases:
        worth //= base
        digits.append(Digit(base, (coordinate // worth % base).astype(np.int32).tobytes()))
    return tuple(digits)


def _orders(factors: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield each order of the factors once."""
    if not factors:
        yield ()
    for first in dict.fromkeys(factors):
        place = factors.index(first)
        for rest in _orders(factors[:place] + factors[place + 1 :]):
            yield (first, *rest)


def _digits_of(way: Way) -> Iterator[Digit]:
    return (digit for of_dim in way.values() for digit in of_dim)
