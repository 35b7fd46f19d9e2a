"""Closed forms of collectives in the α–β model: seconds for n bytes over k devices, the best algorithm by size.

A message of n bytes takes α + n β. Forms follow Chan et al. 2007 and Thakur et al. 2005 (references of Gholami 2018);
the additions of a reduction are not timed. Sizes and groups are arrays of one shape, or numbers; a group of one, or
nothing to send, takes no time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pase.costs.layouts import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """latency_s: α, of a message. s_per_byte: β."""

    latency_s: float
    s_per_byte: float

    def shared(self, num_devices: int) -> "Link":
        """Return what each of some devices has of the link while all of them send."""
        return Link(latency_s=self.latency_s, s_per_byte=self.s_per_byte * num_devices)


Algorithm = Callable[[FloatArray, FloatArray, Link], FloatArray]
"""(bytes n, devices k > 1, link) → seconds. n is the whole vector: before a reduction, after a gathering."""


def point_to_point(size_bytes: ArrayLike, link: Link) -> FloatArray:
    """Return the time of one message."""
    size = np.asarray(size_bytes, dtype=np.float64)
    return np.where(size > 0, link.latency_s + size * link.s_per_byte, 0.0)


def all_reduce(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    """Return the time in which every device gets the sum of all devices' n bytes."""
    return _best(ALL_REDUCE, size_bytes, group, link)


def reduce_scatter(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    """Return the time in which every device gets a k-th of the sum of all devices' n bytes."""
    return _best(REDUCE_SCATTER, size_bytes, group, link)


def all_gather(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    """Return the time in which every device gets all n bytes, of which each holds a k-th."""
    return _best(ALL_GATHER, size_bytes, group, link)


def broadcast(size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    """Return the time in which every device gets the n bytes of one."""
    return _best(BROADCAST, size_bytes, group, link)


def hierarchical_all_reduce(size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]) -> FloatArray:
    """Return the time of an all-reduce among devices that lie over several levels of a machine.

    members: for each level, the innermost first, how many groups of the level before take part in each group of it;
    their product is the size of the whole group. links: for each level, what one device has of it. The better of two
    ways: reduce-scatter level by level inwards to outwards and gather back, so that each level carries a part of what
    the one before it did; or all-reduce the whole vector level by level, which sends fewer messages.
    """
    counts = [np.asarray(count, dtype=np.float64) for count in members]
    # The last level that has several members reduces its part at once; there is nothing to hand further out.
    whole = sum(all_reduce(size_bytes, count, link) for count, link in zip(counts, links, strict=True))
    size = np.asarray(size_bytes, dtype=np.float64)
    scattered = np.zeros(np.broadcast_shapes(size.shape, *(count.shape for count in counts)))
    outer = [np.asarray(1.0)]
    for count in reversed(counts[1:]):
        outer.append(outer[-1] * count)
    for count, beyond, link in zip(counts, reversed(outer), links, strict=True):
        both_ways = reduce_scatter(size, count, link) + all_gather(size, count, link)
        scattered = scattered + np.where(beyond > 1, both_ways, all_reduce(size, count, link))
        size = size / count
    return np.minimum(whole, scattered)


def hierarchical_reduce_scatter(
    size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]
) -> FloatArray:
    """Return the time of a reduce-scatter level by level, from the innermost; size_bytes: before it."""
    size = np.asarray(size_bytes, dtype=np.float64)
    total: FloatArray = np.zeros(size.shape)
    for count, link in zip(members, links, strict=True):
        total = total + reduce_scatter(size, count, link)
        size = size / np.asarray(count, dtype=np.float64)
    return total


def hierarchical_all_gather(size_bytes: ArrayLike, members: Sequence[ArrayLike], links: Sequence[Link]) -> FloatArray:
    """Return the time of a gathering from the outermost level inwards; size_bytes: what every device holds after it."""
    size = np.asarray(size_bytes, dtype=np.float64)
    total: FloatArray = np.zeros(size.shape)
    for count, link in zip(members, links, strict=True):
        total = total + all_gather(size, count, link)
        size = size / np.asarray(count, dtype=np.float64)
    return total


def _ring(passes: int) -> Algorithm:
    """Parts of n / k go round the ring: once to add or gather them, twice for both."""

    def time(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
        return passes * (group - 1) * (link.latency_s + size / group * link.s_per_byte)

    return time


def _halving(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
    """Partners at distance 1, 2, 4 … exchange ever smaller halves.

    Devices beyond a power of two hand all they have to a partner first, and get their part from it at the end.
    """
    steps = np.floor(np.log2(group))
    power = 2.0**steps
    extra = np.where(power < group, 2 * link.latency_s + (size + size / group) * link.s_per_byte, 0.0)
    return steps * link.latency_s + (power - 1) / power * size * link.s_per_byte + extra


def _recursive_doubling(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
    """Partners at distance 1, 2, 4 … exchange the whole vector; devices beyond a power of two as in `_halving`."""
    steps = np.floor(np.log2(group))
    steps = steps + np.where(2.0**steps < group, 2, 0)
    return steps * (link.latency_s + size * link.s_per_byte)


def _tree(passes: int) -> Algorithm:
    """A binomial tree hands the whole vector down, or sums it up, or both."""

    def time(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
        return passes * np.ceil(np.log2(group)) * (link.latency_s + size * link.s_per_byte)

    return time


def _bruck(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
    """Blocks gathered at distances 1, 2, 4 …, for any number of devices."""
    return np.ceil(np.log2(group)) * link.latency_s + (group - 1) / group * size * link.s_per_byte


def _scatter_gather(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
    """Scatter down a tree, then gather (van de Geijn)."""
    return 2 * _bruck(size, group, link)


def _scatter_add_gather(size: FloatArray, group: FloatArray, link: Link) -> FloatArray:
    """Reduce-scatter, then gather, each as it goes best (on a power of two: Rabenseifner's halving and doubling)."""
    return reduce_scatter(size, group, link) + all_gather(size, group, link)


ALL_REDUCE: Mapping[str, Algorithm] = {
    "ring": _ring(2),
    "reduce-scatter and gather": _scatter_add_gather,
    "recursive doubling": _recursive_doubling,
    "tree": _tree(2),
}
REDUCE_SCATTER: Mapping[str, Algorithm] = {"ring": _ring(1), "recursive halving": _halving}
ALL_GATHER: Mapping[str, Algorithm] = {"ring": _ring(1), "recursive doubling": _bruck}
BROADCAST: Mapping[str, Algorithm] = {"tree": _tree(1), "scatter and gather": _scatter_gather}


def _best(algorithms: Mapping[str, Algorithm], size_bytes: ArrayLike, group: ArrayLike, link: Link) -> FloatArray:
    size, count = np.broadcast_arrays(
        np.asarray(size_bytes, dtype=np.float64), np.asarray(group, dtype=np.float64), subok=False
    )
    # A group of one is asked as if of two: the answer is dropped below.
    several = np.maximum(count, 2.0)
    times = [algorithm(size, several, link) for algorithm in algorithms.values()]
    return np.where((count > 1) & (size > 0), np.minimum.reduce(times), 0.0)
