"""Boxes: the parts of a tensor, as half-open ranges of each of its dims."""

from collections.abc import Sequence
from math import prod

Range = tuple[int, int]
Box = tuple[Range, ...]
"""[rank] half-open ranges; a box may stick out of its tensor, where a window reads padding."""


def extents(box: Box) -> tuple[int, ...]:
    """Return [rank] the number of points along each dim."""
    return tuple(high - low for low, high in box)


def num_points(box: Box) -> int:
    """Return how many points a box holds."""
    return prod(high - low for low, high in box)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, extent) for extent in shape)


def intersection(first: Box, second: Box) -> Box | None:
    """Return what two boxes share, None where they share nothing."""
    shared = []
    for (low, high), (other_low, other_high) in zip(first, second, strict=True):
        lowest, highest = max(low, other_low), min(high, other_high)
        if lowest >= highest:
            return None
        shared.append((lowest, highest))
    return tuple(shared)


def offsets(box: Box, origin: Box) -> tuple[int, ...]:
    """Return [rank] where a box begins, counted from the beginning of another."""
    return tuple(low - first for (low, _), (first, _) in zip(box, origin, strict=True))
