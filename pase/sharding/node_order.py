"""Which digits of a device number lie inside a node: neighbours share a node first.

Exchanging two digits of the same place in all layers at once renumbers the devices, so it changes nothing of what moves
in all; but the last digits tell the devices of one node apart and the first ones the nodes. This module counts,
for every way to order the digits, what crosses nodes, and takes the least.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from math import prod

Digits = frozenset[int]
"""Positions of digits."""

MAX_ORDERS = 20_000
"""Orders of the digits that are looked at; 4096 devices in nodes of 64 have 924."""

_WORTH_IT = 0.99
"""What is not counted here (weights that layers share, what recurrent layers hand on) may outweigh a smaller gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """An all-reduce between the devices that differ in some digits. shard_bytes: what each one adds."""

    digits: Digits
    shard_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """A part of a tensor that every device brings together. digits: in which the senders differ from it."""

    digits: Digits
    shard_bytes: float


def choose_order(
    bases: Sequence[int],
    group_sizes: Sequence[int],
    sums: Iterable[Sum],
    fetches: Iterable[Redistribution],
    *,
    by_level: bool = False,
) -> tuple[int, ...]:
    """Return the positions of the digits, the most significant first, with the fewest bytes across groups.

    bases: [digits]. group_sizes: devices of a group of each level, ascending (a node, a rack); those that no digits
    multiply to are left out. What crosses the groups of the outermost level counts first, then the next one's.
    by_level: whether an all-reduce adds within groups before it goes between them; by default every device exchanges
    a share with every other.
    """
    added, fetched = _together(sums), _together(fetches)

    def crossing(inner: Digits) -> float:
        total = 0.0
        for digits, shard_bytes in added.items():
            count = prod(bases[i] for i in digits)
            inside = prod(bases[i] for i in digits & inner)
            # Every device exchanges a share with each of the others, forth and back; added within the group before, a
            # device's share of what goes further is that much smaller.
            total += 2 * shard_bytes / count * (count - inside) / (inside if by_level else 1)
        for digits, shard_bytes in fetched.items():
            total += shard_bytes * (1 - 1 / prod(bases[i] for i in digits - inner))
        return total

    plain = tuple(range(len(bases)))
    known: dict[Digits, float] = {}

    def cost(inside: Sequence[Digits]) -> tuple[float, ...]:
        for inner in inside:
            if inner not in known:
                known[inner] = crossing(inner)
        return tuple(known[inner] for inner in inside)

    ways = list(islice(_ways(bases, frozenset(plain), sorted(group_sizes, reverse=True)), MAX_ORDERS))
    first, inside = ways[0], min(ways, key=cost)
    if all(best > _WORTH_IT * old for best, old in zip(cost(inside), cost(first), strict=True)):
        inside = first
    outside: list[Digits] = [frozenset(plain), *inside, frozenset()]
    return tuple(i for outer, inner in pairwise(outside) for i in sorted(outer - inner))


def _ways(bases: Sequence[int], digits: Digits, sizes: Sequence[int]) -> Iterator[tuple[Digits, ...]]:
    """Yield the digits inside a group of each level, the outermost level first; the last digits come first."""
    if not sizes:
        yield ()
        return
    size, *others = sizes
    found = False
    for count in range(len(digits) + 1):
        for chosen in combinations(sorted(digits, reverse=True), count):
            if prod(bases[i] for i in chosen) == size:
                found = True
                for rest in _ways(bases, frozenset(chosen), others):
                    yield (frozenset(chosen), *rest)
    if not found:
        yield from _ways(bases, digits, others)


def _together(terms: Iterable[Sum | Redistribution]) -> Mapping[Digits, float]:
    total: dict[Digits, float] = {}
    for term in terms:
        if term.digits and term.shard_bytes:
            total[term.digits] = total.get(term.digits, 0.0) + term.shard_bytes
    return total
