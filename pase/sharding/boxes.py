"""Boxes: regions of a tensor, as half-open ranges of each dim; and partitions of a tensor into boxes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.errors import PrimitiveError

Range = tuple[int, int]
Box = tuple[Range, ...]
"""[rank] half-open ranges; a box may extend past its tensor, where a window reads padding."""


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
    """Return the intersection of two boxes, None where it is empty."""
    shared = []
    for (low, high), (other_low, other_high) in zip(first, second, strict=True):
        lowest, highest = max(low, other_low), min(high, other_high)
        if lowest >= highest:
            return None
        shared.append((lowest, highest))
    return tuple(shared)


def difference(box: Box, other: Box) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the points of the first box that are not in the second."""
    shared = intersection(box, other)
    if shared is None:
        return (box,)
    left = []
    for i, ((low, high), (first, last)) in enumerate(zip(box, shared, strict=True)):
        left += [(*shared[:i], part, *box[i + 1 :]) for part in ((low, first), (last, high)) if part[0] < part[1]]
    return tuple(left)


def offsets(box: Box, origin: Box) -> tuple[int, ...]:
    """Return [rank] the start of a box relative to the start of another."""
    return tuple(low - first for (low, _), (first, _) in zip(box, origin, strict=True))


def even_part(extent: int, parts: int, number: int) -> Range:
    """Return one part of a balanced partition: the first (extent mod parts) parts have one point more."""
    small, extra = divmod(extent, parts)
    low = number * small + min(number, extra)
    return low, low + small + (number < extra)


def chunk(extent: int, parts: int, number: int) -> Range:
    """Return one of the parts that `torch.chunk` and DTensor make: all of equal size, except the last ones.

    The last parts may be shorter or empty.
    """
    size = -(-extent // parts)
    return min(number * size, extent), min((number + 1) * size, extent)


def even_bounds(extent: int, parts: int) -> NDArray[np.int64]:
    """Return the [parts + 1] bounds of a balanced partition: the first extent mod parts get one more."""
    small, extra = divmod(extent, parts)
    return np.array([i * small + min(i, extra) for i in range(parts + 1)], dtype=np.int64)


def common_dims(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """Return the coarsest common factorisation of two shapes of one size; None if there is none.

    Each dim of either shape is a product of consecutive dims of the result. Dims of extent 1 are omitted.
    """
    strides = sorted({prod(a[i:]) for i in range(len(a))} | {prod(b[i:]) for i in range(len(b))} | {1})
    if any(larger % smaller for smaller, larger in pairwise(strides)):
        return None
    return tuple(larger // smaller for smaller, larger in pairwise(strides))[::-1]


def aligned_dims(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[Range, Range]]:
    """Yield the smallest runs of dims of two shapes of one size with the same points; extents of 1 are separate."""
    i = j = 0
    while i < len(a) or j < len(b):
        first_i, first_j = i, j
        a_is_one, b_is_one = i < len(a) and a[i] == 1, j < len(b) and b[j] == 1
        left = right = 1
        if i < len(a) and (a_is_one or not b_is_one):
            left, i = a[i], i + 1
        if j < len(b) and (b_is_one or not a_is_one):
            right, j = b[j], j + 1
        while left != right:
            if left < right:
                left, i = left * a[i], i + 1
            else:
                right, j = right * b[j], j + 1
        yield (first_i, i), (first_j, j)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The boxes of a tensor that workers hold, in the order of the workers; boxes may overlap, be equal or empty.

    Attributes:
        shape: Shape of the whole tensor.
        boxes: [workers] box of each worker.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """[workers] the shape of each worker's box."""
        return tuple(extents(box) for box in self.boxes)

    @property
    def is_disjoint(self) -> bool:
        """Whether the boxes are pairwise disjoint."""
        boxes = self.boxes
        return all(intersection(boxes[i], boxes[j]) is None for i in range(len(boxes)) for j in range(i))

    @property
    def is_cover(self) -> bool:
        """Whether every element is in exactly one box."""
        return sum(map(num_points, self.boxes)) == prod(self.shape) and self.is_disjoint


def partition(shape: Sequence[int], boxes: Sequence[Box]) -> Partition:
    """Return the partition of these boxes; PrimitiveError for a box outside the tensor, and for a scalar."""
    if not shape or min(shape) < 1:
        raise PrimitiveError(f"a tensor of shape {list(shape)} cannot be partitioned; give a scalar the shape [1]")
    if not boxes:
        raise PrimitiveError("a partition needs at least one worker")
    for i, box in enumerate(boxes):
        inside = all(0 <= low <= high <= n for (low, high), n in zip(box, shape, strict=False))
        if len(box) != len(shape) or not inside:
            raise PrimitiveError(
                f"worker {i} holds {list(box)}, which is not within a tensor of shape {list(shape)}; "
                "give one half-open range for each dim, within its extent"
            )
    return Partition(shape=tuple(shape), boxes=tuple(boxes))


def blocks(shape: Sequence[int], counts: Sequence[int]) -> Partition:
    """Return the balanced partition with `counts` parts along each dim; workers are row-major over the parts."""
    check_counts(shape, counts)
    cuts = [list(pairwise(even_bounds(n, k).tolist())) for n, k in zip(shape, counts, strict=True)]
    return partition(shape, list(product(*cuts)))


def copies(shape: Sequence[int], num_workers: int) -> Partition:
    """Return the partition in which each of `num_workers` workers holds the whole tensor."""
    return partition(shape, [whole(shape)] * num_workers)


def expect_cover(parts: Partition, shape: Sequence[int], name: str) -> None:
    """Raise PrimitiveError, on behalf of a primitive, unless every element of a tensor is in exactly one box."""
    expect_shape(parts, shape, name)
    if not parts.is_cover:
        raise PrimitiveError(f"{name}: the boxes {list(parts.boxes)} must hold every element of {list(shape)} once")


def expect_shape(parts: Partition, shape: Sequence[int], name: str) -> None:
    """Raise PrimitiveError, on behalf of a primitive, unless a partition's tensor has this shape."""
    if parts.shape != tuple(shape):
        raise PrimitiveError(f"{name}: the partition is of a tensor of shape {list(parts.shape)}, not {list(shape)}")


def check_counts(shape: Sequence[int], counts: Sequence[int]) -> None:
    """Raise PrimitiveError unless there is a number of parts, 1 or more, for each dim of a tensor."""
    if len(counts) != len(shape) or any(k < 1 for k in counts):
        raise PrimitiveError(
            f"parts {list(counts)} for a tensor of shape {list(shape)}; give each dim a number of 1 or more"
        )
