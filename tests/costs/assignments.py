"""The least that devices fetch when a tensor changes its layout, and in how many messages, over all assignments.

Elements are looked at one by one, and every device's parts are chosen anew: by trying all permutations, or by matching
devices under every pair of bounds on what they fetch forward and backward.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from pase.graph import Access, DimIndex, SliceOf, Window
from pase.graph.operator import axis_dims
from tests.moved import Holdings, holdings, overlaps, sizes

Splits = dict[str, int]


@dataclass(frozen=True)
class Side:
    """One side of an edge: how a tensor lies in an iteration space."""

    access: Access
    extents: dict[str, int]

    def layouts(self, num_devices: int) -> list[Splits]:
        """Every way in which the iteration dims that the tensor has can be split."""
        dims = [dim for axis in self.access.index_map for dim in axis_dims(axis)]
        ways = [[k for k in range(1, num_devices + 1) if self.extents[dim] % k == 0] for dim in dims]
        return [dict(zip(dims, chosen, strict=True)) for chosen in product(*ways) if num_devices % prod(chosen) == 0]

    def holdings(self, num_devices: int) -> list[Holdings]:
        """What each part holds under each of them."""
        return [holdings(self.extents, self.access, own, num_devices) for own in self.layouts(num_devices)]


@dataclass(frozen=True)
class Fetches:
    """[p, p] of a device that has one of the producer's p shares, counting replicas, and one of the consumer's.

    kept: elements of both. sent, sent_back: shares, replicas counted once, that have what the device lacks of the
    consumer's share, and of the producer's. held, needed: [p] elements of each share.
    """

    kept: NDArray[np.int64]
    sent: NDArray[np.int64]
    sent_back: NDArray[np.int64]
    held: NDArray[np.int64]
    needed: NDArray[np.int64]

    @property
    def forward(self) -> NDArray[np.int64]:
        return self.needed[None, :] - self.kept

    @property
    def backward(self) -> NDArray[np.int64]:
        return self.held[:, None] - self.kept


class Least(NamedTuple):
    """Elements and messages that the device fetches which fetches most, either way, under the best assignment."""

    forward: int
    backward: int
    sent: int
    sent_back: int


def fetches(held: Holdings, needed: Holdings) -> Fetches:
    """What each pair of shares would have a device fetch."""
    kept = overlaps(held, needed).T.astype(np.int64)
    is_kept = kept > 0
    return Fetches(
        kept=kept,
        sent=is_kept[_distinct(held)].sum(axis=0)[None, :] - is_kept,
        sent_back=is_kept[:, _distinct(needed)].sum(axis=1)[:, None] - is_kept,
        held=sizes(held).astype(int),
        needed=sizes(needed).astype(int),
    )


def _distinct(side: Holdings) -> NDArray[np.intp]:
    """The first of the shares that hold the same elements."""
    return np.unique(np.concatenate(side.owned, axis=1), axis=0, return_index=True)[1]


@cache
def _orders(count: int) -> NDArray[np.int64]:
    return np.array(list(permutations(range(count))))


def least_by_permutations(found: Fetches, *, has_gradient: bool) -> Least:
    """Of the assignment of the least elements in sum, then forward, then of the fewest messages: all are tried."""
    orders, devices = _orders(len(found.held)), np.arange(len(found.held))

    def most(elements: NDArray[np.int64], messages: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Of each assignment: elements that a device fetches at most, and messages that it gets which does."""
        elements, messages = elements[devices, orders], messages[devices, orders]
        highest = elements.max(axis=1)
        return highest.tolist(), np.where(elements == highest[:, None], messages, 0).max(axis=1).tolist()

    ways = [
        *most(found.forward, found.sent),
        *most(found.backward * has_gradient, found.sent_back * has_gradient),
    ]
    best = min((f + b, f, sent + sent_back, sent) for f, sent, b, sent_back in zip(*ways, strict=True))
    return Least(forward=best[1], backward=best[0] - best[1], sent=best[3], sent_back=best[2] - best[3])


def least_by_matching(found: Fetches, *, has_gradient: bool) -> Least:
    """The same, by bounds: for each bound on the fetches forward the least one backward that leaves a matching."""
    forward, backward = found.forward, found.backward * has_gradient
    backward_bounds = np.unique(backward).tolist()
    best: tuple[int, int, int] | None = None
    for forward_bound in np.unique(forward).tolist():
        # More forward is worth it only for less backward.
        while backward_bounds:
            if not _has_matching((forward <= forward_bound) & (backward <= backward_bounds[-1])):
                break
            bound = backward_bounds.pop()
            if best is None or forward_bound + bound < best[0]:
                best = forward_bound + bound, forward_bound, bound
    assert best is not None
    _, most, most_back = best
    sent, sent_back = found.sent, found.sent_back * has_gradient
    bounds = product(np.unique(sent[forward == most]).tolist(), np.unique(sent_back[backward == most_back]).tolist())
    for count, count_back in sorted(bounds, key=lambda pair: (sum(pair), pair)):
        allowed = (forward < most) | ((forward == most) & (sent <= count))
        if _has_matching(allowed & ((backward < most_back) | ((backward == most_back) & (sent_back <= count_back)))):
            return Least(most, most_back, count, count_back)
    raise AssertionError


def _has_matching(allowed: NDArray[np.bool_]) -> bool:
    """Whether each of the producer's shares can meet one of the consumer's that it may."""
    if not allowed.any(axis=0).all() or not allowed.any(axis=1).all():
        return False
    return bool((maximum_bipartite_matching(csr_matrix(allowed), perm_type="column") >= 0).all())


# -- pairs of sides


def pieces(most: int) -> Iterator[tuple[Side, Side]]:
    """Every pair of pieces of dims of up to so many elements: all pieces that are of one length."""
    for length in range(1, most + 1):
        sides = [
            _side((length,), (SliceOf(dim="c", offset=offset, extent=length),), {"c": extent})
            for extent in range(length, most + 1)
            for offset in range(extent - length + 1)
        ]
        yield from product(sides, sides)


def random_pair(rng: random.Random) -> tuple[Side, Side]:
    """Two sides of one tensor, of different shapes or of the same one, with every kind of axis."""
    size = rng.choice([6, 8, 10, 12, 12, 16, 18, 20, 24, 24, 30, 32, 36, 40, 48, 48, 60, 64, 72, 96])
    shape = _factors(rng, size)
    other = shape if rng.random() < 0.6 else _factors(rng, size)
    return _random_side(rng, shape), _random_side(rng, other)


def _factors(rng: random.Random, size: int) -> tuple[int, ...]:
    found = []
    while size > 1 and len(found) < 3:
        factor = rng.choice([k for k in range(2, size + 1) if size % k == 0])
        found.append(factor)
        size //= factor
    if size > 1:
        found.append(size)
    if rng.random() < 0.1:
        found.insert(rng.randrange(len(found) + 1), 1)
    return tuple(found)


def _random_side(rng: random.Random, shape: tuple[int, ...]) -> Side:
    axes: list[DimIndex] = []
    extents: dict[str, int] = {}
    for length in shape:
        name = f"d{len(extents)}"
        kind = rng.choices(["plain", "piece", "window", "product", "none"], [10, 5, 3, 2, 1])[0]
        if kind == "piece":
            offset = rng.choice([0, 0, 1, length, rng.randrange(9)])
            extents[name] = offset + length + rng.choice([0, 0, 1, 2, length, rng.randrange(9)])
            axes.append(SliceOf(dim=name, offset=offset, extent=length))
        elif kind == "window":
            extents[name] = rng.choice([max(1, length // 2), max(1, length - 1), length, length + 1, 2 * length])
            extents[f"k{name}"] = 3
            axes.append(Window(out=name, kernel=f"k{name}"))
        elif kind == "product":
            parts = _factors(rng, length)
            names = tuple(f"{name}_{number}" for number in range(len(parts)))
            extents |= dict(zip(names, parts, strict=True))
            axes.append(names)
        elif kind == "none":
            axes.append(None)
        else:
            extents[name] = length
            axes.append(name)
    return _side(shape, tuple(axes), extents)


def _side(shape: tuple[int, ...], axes: tuple[DimIndex, ...], extents: dict[str, int]) -> Side:
    return Side(Access(tensor="x", shape=shape, index_map=axes), extents)
