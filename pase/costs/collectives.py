"""Closed forms of collectives in the α–β model: seconds for n bytes over k devices, the best algorithm by size.

A message of n bytes takes α + n β. Forms follow Chan et al. 2007 and Thakur et al. 2005 (references of Gholami 2018);
the additions of a reduction are not timed. Sizes and groups are arrays of one shape, or numbers; a group of one, or
nothing to send, takes no time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import isclose, prod

import numpy as np
from numpy.typing import ArrayLike

from pase.sharding.shards import FloatArray, distinct_rows, divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """latency_s: α, of a message. s_per_byte: β."""

    latency_s: float
    s_per_byte: float

    def shared(self, num_devices: int) -> "Link":
        """Return what each of some devices has of the link while all of them send."""
        return Link(latency_s=self.latency_s, s_per_byte=self.s_per_byte * num_devices)

    def is_close_to(self, other: "Link") -> bool:
        """Return whether two links are the same but for rounding."""
        pairs = (self.latency_s, other.latency_s), (self.s_per_byte, other.s_per_byte)
        return all(isclose(a, b, rel_tol=1e-9, abs_tol=0.0) for a, b in pairs)


Way = tuple[float, float]
"""How a collective goes: so many messages after one another, of so many vectors together; times α and n β, its time.

n is the whole vector: before a reduction, after a gathering.
"""

Algorithm = Callable[[int], Way]
"""From the number of devices, 2 or more."""


def point_to_point(size_bytes: ArrayLike, link: Link) -> FloatArray:
    """Return the time of one message."""
    size = np.asarray(size_bytes, dtype=np.float64)
    return np.where(size > 0, link.latency_s + size * link.s_per_byte, 0.0)


def hierarchical_all_reduce(size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]) -> FloatArray:
    """Return the time of an all-reduce among devices that lie over several levels of a machine.

    members: for each level, the innermost first, how many groups of the level before take part in each group of it;
    their product is the size of the whole group. links: for each level, what one device has of it. The best way of
    these: at each level, from the inside out, some stages reduce-scatter what the stages before have left of the
    vector; the rest add up what is left then, whole; what was scattered is gathered back. A level goes in stages where
    it has factors, so that devices on links of one speed take as long however many levels they are said to lie on; and
    levels may be taken together, on the slowest of their links.
    """
    return _fastest(_all_reduce_ways, size_bytes, members, links)


def hierarchical_reduce_scatter(
    size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]
) -> FloatArray:
    """Return the time of a reduce-scatter level by level, from the innermost; size_bytes: before it."""
    ways_of = partial(_shared_out_ways, tuple(REDUCE_SCATTER.values()))
    return _fastest(ways_of, size_bytes, members, links)


def hierarchical_all_gather(size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]) -> FloatArray:
    """Return the time of a gathering from the outermost level inwards; size_bytes: what every device holds after it."""
    return _fastest(partial(_shared_out_ways, tuple(ALL_GATHER.values())), size_bytes, members, links)


def _ring(count: int) -> Way:
    """Parts of n / k go round the ring, to add or to gather them."""
    return count - 1, (count - 1) * (1 / count)


def _halving(count: int) -> Way:
    """Partners at distance 1, 2, 4 … exchange ever smaller halves.

    Devices beyond a power of two hand all they have to a partner first, and get their part from it at the end.
    """
    steps = count.bit_length() - 1
    power = 2.0**steps
    messages, vectors = (2, 1 + 1 / count) if power < count else (0, 0.0)
    return steps + messages, (power - 1) / power + vectors


def _recursive_doubling(count: int) -> Way:
    """Partners at distance 1, 2, 4 … exchange the whole vector; devices beyond a power of two as in `_halving`."""
    steps = count.bit_length() - 1
    steps += 2 if 2**steps < count else 0
    return steps, steps


def _tree(count: int) -> Way:
    """A binomial tree sums the whole vector up, and hands it down."""
    steps = 2 * (count - 1).bit_length()
    return steps, steps


def _bruck(count: int) -> Way:
    """Blocks gathered at distances 1, 2, 4 …, for any number of devices."""
    return (count - 1).bit_length(), (count - 1) / count


REDUCE_SCATTER: Mapping[str, Algorithm] = {"ring": _ring, "recursive halving": _halving}
ALL_GATHER: Mapping[str, Algorithm] = {"ring": _ring, "recursive doubling": _bruck}
ALL_REDUCE_WHOLE: Mapping[str, Algorithm] = {"recursive doubling": _recursive_doubling, "tree": _tree}
"""All-reduces that do not share the vector out; of others, each is a reduce-scatter and an all-gather."""


Level = tuple[int, Link]
"""How many groups of the level before take part at a level, and the link between them."""


def _fastest(
    ways_of: Callable[[tuple[Level, ...]], tuple[Way, ...]],
    size_bytes: ArrayLike,
    members: Sequence[ArrayLike],
    links: Sequence[Link],
) -> FloatArray:
    """Return the time of the best way for each size and group, all of one shape or numbers."""
    size, *counts = np.broadcast_arrays(
        np.asarray(size_bytes, dtype=np.float64), *(np.asarray(count, dtype=np.int32) for count in members)
    )
    rows, group_of = distinct_rows(np.stack([count.reshape(-1) for count in counts], axis=-1))
    sizes, times = size.reshape(-1), np.zeros(size.size)
    for number, row in enumerate(rows.tolist()):
        levels = tuple((count, link) for count, link in zip(row, links, strict=True) if count > 1)
        if levels:
            chosen = np.flatnonzero(group_of == number)
            found = np.array(ways_of(levels))
            times[chosen] = (found[:, :1] + found[:, 1:] * sizes[chosen]).min(axis=0)
    return np.where(size > 0, times.reshape(size.shape), 0.0)


@cache
def _shared_out_ways(algorithms: tuple[Algorithm, ...], levels: tuple[Level, ...]) -> tuple[Way, ...]:
    """Return the ways of a reduce-scatter from the innermost level on, or of a gathering, its reverse."""
    found: list[Way] = []
    for runs in _runs(levels):
        ways: list[Way] = [(0.0, 0.0)]
        left = 1.0
        for count, link in runs:
            stages = _staged(count, algorithms)
            ways = [_then(way, stage, link, left) for way in ways for stage in stages]
            left /= count
        found += ways
    return _best_ways(found)


@cache
def _all_reduce_ways(levels: tuple[Level, ...]) -> tuple[Way, ...]:
    scatter, gather, whole = (tuple(of.values()) for of in (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE_WHOLE))
    found: list[Way] = []
    for runs in _runs(levels):
        # For each level, how many devices share the vector out and how many add up what is left of it, whole.
        for shares in product(*(divisors(count) for count, _ in runs)):
            ways: list[Way] = [(0.0, 0.0)]
            left = 1.0
            for (_, link), share in zip(runs, shares, strict=True):
                for algorithms in (scatter, gather):
                    ways = [_then(way, stage, link, left) for way in ways for stage in _staged(share, algorithms)]
                left /= share
            for (count, link), share in zip(runs, shares, strict=True):
                stages = _staged(count // share, whole, is_whole=True)
                ways = [_then(way, stage, link, left) for way in ways for stage in stages]
            found += ways
    return _best_ways(found)


def _runs(levels: tuple[Level, ...]) -> Iterator[tuple[Level, ...]]:
    """Yield the levels with neighbouring ones taken together, in every way: on the slowest link of them."""
    if not levels:
        yield ()
        return
    for end in range(1, len(levels) + 1):
        links = [link for _, link in levels[:end]]
        slowest = Link(
            latency_s=max(link.latency_s for link in links), s_per_byte=max(link.s_per_byte for link in links)
        )
        for rest in _runs(levels[end:]):
            yield ((prod(count for count, _ in levels[:end]), slowest), *rest)


@cache
def _staged(count: int, algorithms: tuple[Algorithm, ...], *, is_whole: bool = False) -> tuple[Way, ...]:
    """Return the ways of so many devices, in one stage or in several.

    Of several, each but the first works on the part of the vector that the one before it has left, or on the whole.
    """
    if count == 1:
        return ((0.0, 0.0),)
    ways = [algorithm(count) for algorithm in algorithms]
    for first in divisors(count)[1:-1]:
        left = 1.0 if is_whole else 1.0 / first
        ways += [
            (messages + more, vectors + left * others)
            for messages, vectors in (algorithm(first) for algorithm in algorithms)
            for more, others in _staged(count // first, algorithms, is_whole=is_whole)
        ]
    return _best_ways(ways)


def _then(way: Way, stage: Way, link: Link, left: float) -> Way:
    return way[0] + stage[0] * link.latency_s, way[1] + stage[1] * left * link.s_per_byte


def _best_ways(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Return the ways that no other one is as good as in both respects."""
    found: list[Way] = []
    for way in sorted(set(ways)):
        if not found or way[1] < found[-1][1]:
            found.append(way)
    return tuple(found)
