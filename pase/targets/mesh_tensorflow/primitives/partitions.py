"""Partitions: which worker holds which box of a tensor, and the buffers that hold halos beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from pase.costs.layouts import even_bounds
from pase.errors import PrimitiveError
from pase.targets.mesh_tensorflow.primitives.halo import Kernel, Region, regions
from pase.targets.mesh_tensorflow.runtime.boxes import Box, extents, intersection, num_points, whole
from pase.targets.mesh_tensorflow.runtime.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The boxes of a tensor that workers hold, in the order of the workers; boxes may overlap, be equal or empty.

    shape: of the whole tensor. boxes: [workers].
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """[workers] the shape of what each one holds."""
        return tuple(extents(box) for box in self.boxes)

    @property
    def is_disjoint(self) -> bool:
        """Whether no element is held twice."""
        boxes = self.boxes
        return all(intersection(boxes[i], boxes[j]) is None for i in range(len(boxes)) for j in range(i))

    @property
    def is_cover(self) -> bool:
        """Whether every element is held once and only once."""
        return sum(map(num_points, self.boxes)) == prod(self.shape) and self.is_disjoint


def partition(shape: Sequence[int], boxes: Sequence[Box]) -> Partition:
    """Return the partition of these boxes; PrimitiveError where one is not in the tensor or the tensor is a scalar."""
    if not shape or min(shape) < 1:
        raise PrimitiveError(f"a tensor of shape {list(shape)} cannot be parted; give a scalar the shape [1]")
    if not boxes:
        raise PrimitiveError("a partition needs at least one worker")
    for i, box in enumerate(boxes):
        inside = all(0 <= low <= high <= n for (low, high), n in zip(box, shape, strict=False))
        if len(box) != len(shape) or not inside:
            raise PrimitiveError(
                f"worker {i} holds {list(box)}, which is no part of a tensor of shape {list(shape)}; "
                "give one half-open range for each dim, within its extent"
            )
    return Partition(shape=tuple(shape), boxes=tuple(boxes))


def blocks(shape: Sequence[int], counts: Sequence[int]) -> Partition:
    """Return the balanced partition with that many parts along each dim; workers are row-major over the parts."""
    _check_counts(shape, counts)
    cuts = [list(pairwise(even_bounds(n, k).tolist())) for n, k in zip(shape, counts, strict=True)]
    return partition(shape, list(product(*cuts)))


def copies(shape: Sequence[int], num_workers: int) -> Partition:
    """Return that many workers, each with the whole tensor."""
    return partition(shape, [whole(shape)] * num_workers)


def expect_cover(parts: Partition, shape: Sequence[int], name: str) -> None:
    """Raise PrimitiveError, on behalf of a primitive, unless every element of a tensor is held once and only once."""
    if parts.shape != tuple(shape):
        raise PrimitiveError(f"{name}: the partition is of a tensor of shape {list(parts.shape)}, not {list(shape)}")
    if not parts.is_cover:
        raise PrimitiveError(f"{name}: the boxes {list(parts.boxes)} must hold every element of {list(shape)} once")


def layout(parts: Partition, devices: Sequence[int]) -> Layout:
    """Return the layout of a partition on devices in which every worker's part is its own: equal ones are added."""
    assert len(devices) == len(parts.boxes)
    return Layout(
        shape=parts.shape, devices=tuple(devices), parts=tuple(range(len(parts.boxes))), boxes=tuple(parts.boxes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What workers in a grid hold for a sliding kernel: [left halo | bulk | right halo] along every dim.

    shape: of the whole tensor. regions: [rank][parts along that dim]. Workers are row-major over the parts.
    """

    shape: tuple[int, ...]
    regions: tuple[tuple[Region, ...], ...]

    @property
    def workers(self) -> tuple[tuple[Region, ...], ...]:
        """[workers][rank] each worker's regions."""
        return tuple(product(*self.regions))

    @property
    def bulk(self) -> Partition:
        """What the workers own."""
        return partition(self.shape, [tuple(r.owned for r in worker) for worker in self.workers])

    @property
    def windows(self) -> Partition:
        """What the workers' kernels are applied to; boxes stick out of the tensor where they read padding."""
        return Partition(shape=self.shape, boxes=tuple(tuple(r.window for r in worker) for worker in self.workers))

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """[workers] the shape of each buffer."""
        return tuple(tuple(r.buffer_extent for r in worker) for worker in self.workers)

    @property
    def segments(self) -> tuple[tuple[tuple[Box, Box], ...], ...]:
        """[workers] the boxes that a buffer is made of: (in the tensor, in the buffer)."""
        return tuple(
            tuple(
                (tuple(inside for inside, _ in pairs), tuple(at for _, at in pairs))
                for pairs in product(*(_placed(r) for r in worker))
            )
            for worker in self.workers
        )

    @property
    def bulk_boxes(self) -> tuple[Box, ...]:
        """[workers] where the bulk lies in the buffer."""
        return tuple(
            tuple((r.halo_left, r.halo_left + r.owned[1] - r.owned[0]) for r in worker) for worker in self.workers
        )

    @property
    def window_boxes(self) -> tuple[Box, ...]:
        """[workers] the window in the buffer's coordinates: what is unused cut off, padding added."""
        return tuple(
            tuple((r.unused_left - r.padding_left, r.buffer_extent - r.unused_right + r.padding_right) for r in worker)
            for worker in self.workers
        )


def halo_buffers(shape: Sequence[int], kernels: Sequence[Kernel], counts: Sequence[int]) -> Buffers:
    """Return the buffers of a tensor under one kernel for each dim, with that many parts along each dim.

    A dim over which nothing slides has ``Kernel(extent=1)``. Raises PrimitiveError where a kernel does not fit.
    """
    _check_counts(shape, counts)
    if len(kernels) != len(shape):
        raise PrimitiveError(f"{len(kernels)} kernels for a tensor of shape {list(shape)}; give one for each dim")
    return Buffers(
        shape=tuple(shape),
        regions=tuple(regions(n, kernel, k) for n, kernel, k in zip(shape, kernels, counts, strict=True)),
    )


def _placed(region: Region) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return a region's segments, each with its range in the buffer."""
    result = []
    at = 0
    for low, high in region.segments:
        result.append(((low, high), (at, at + high - low)))
        at += high - low
    return result


def _check_counts(shape: Sequence[int], counts: Sequence[int]) -> None:
    if len(counts) != len(shape) or any(k < 1 for k in counts):
        raise PrimitiveError(
            f"parts {list(counts)} for a tensor of shape {list(shape)}; give each dim a number of 1 or more"
        )
