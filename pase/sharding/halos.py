"""Halos of sliding kernels: the inputs that each worker owns, those that it needs, and the widths of its halos.

Outputs and inputs are both balanced over the workers. Kernels whose padding, stride and extent are not "nice" therefore
give halos of different widths, or points that a worker owns and does not use (Hewett and Grady 2020, Appendix B.1).
Ranges are half-open, start at 0, and are clipped to the tensor; padding outside it is counted separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np

from pase.errors import PrimitiveError
from pase.graph import Access, Window
from pase.sharding.boxes import Box, Partition, Range, check_counts, even_bounds, partition, whole
from pase.sharding.layouts import apart, partition_layout
from pase.sharding.reshard import ReshardStep
from pase.sharding.shards import (
    Component,
    FloatArray,
    IntArray,
    Splits,
    components,
    distinct_rows,
    largest_parts,
    split_columns,
)

MAX_WORKERS = 1 << 20
MAX_EXTENT = 10**12
"""Larger extents are taken for typing errors, and would overflow where bounds are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that slides along a dim: output o reads ``o·stride + k·dilation - padding[0]`` for k below `extent`.

    Attributes:
        padding: Number of points added before the tensor's first and after its last.
    """

    extent: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)

    @property
    def reach(self) -> int:
        """Number of points from the first to the last that one output reads, both included."""
        return (self.extent - 1) * self.dilation + 1

    def num_outputs(self, extent: int) -> int:
        """Return the number of outputs for a tensor of that extent, at most 0 where the kernel does not fit."""
        return (extent + sum(self.padding) - self.reach) // self.stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One worker's part of a dim: the outputs that it computes, the inputs that it owns and those that it needs.

    Attributes:
        needed: From the first to the last point under its windows, clipped to the tensor; empty where its windows are
            within the padding, or would start there if it had an output.
        padding_left, padding_right: Number of points clipped off.
    """

    output: Range
    owned: Range
    needed: Range
    padding_left: int
    padding_right: int

    @property
    def halo_left(self) -> int:
        """Number of needed points before its own."""
        return max(0, min(self.needed[1], self.owned[0]) - self.needed[0])

    @property
    def halo_right(self) -> int:
        """Number of needed points after its own."""
        return max(0, self.needed[1] - max(self.needed[0], self.owned[1]))

    @property
    def unused_left(self) -> int:
        """Number of its own points before the needed ones."""
        return max(0, min(self.needed[0], self.owned[1]) - self.owned[0])

    @property
    def unused_right(self) -> int:
        """Number of its own points after the needed ones."""
        return max(0, self.owned[1] - max(self.needed[1], self.owned[0]))

    @property
    def buffer_extent(self) -> int:
        """Number of points in its buffer, [left halo | bulk | right halo]."""
        return self.halo_left + self.owned[1] - self.owned[0] + self.halo_right

    @property
    def window(self) -> Range:
        """Input range of its kernel: the needed range and its padding, which extends past the tensor."""
        return self.needed[0] - self.padding_left, self.needed[1] + self.padding_right

    @property
    def segments(self) -> tuple[Range, ...]:
        """Ranges that its buffer holds, in order; more than one only if a halo starts past the adjacent neighbour."""
        ranges = (
            (self.owned[0] - self.halo_left, self.owned[0]),
            self.owned,
            (self.owned[1], self.owned[1] + self.halo_right),
        )
        if self.needed[1] < self.owned[0]:
            ranges = (self.needed, *ranges[1:])
        if self.needed[0] > self.owned[1]:
            ranges = (*ranges[:2], self.needed)
        joined: list[Range] = []
        for low, high in ranges:
            if low == high:
                continue
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        return tuple(joined)


def regions(extent: int, kernel: Kernel, num_workers: int) -> tuple[Region, ...]:
    """Return [num_workers] the parts of a dim of that extent under a sliding kernel (Appendix B.1).

    Of n points on P workers the first n mod P own one more; surplus workers have empty ranges.

    Raises:
        PrimitiveError: The numbers do not describe a kernel, or it does not fit the padded input.
    """
    _check(extent, kernel, num_workers)
    bounds = (even_bounds(n, num_workers).tolist() for n in (kernel.num_outputs(extent), extent))
    return tuple(
        _region(extent, kernel, output, owned) for output, owned in zip(*(pairwise(b) for b in bounds), strict=True)
    )


def _region(extent: int, kernel: Kernel, output: Range, owned: Range) -> Region:
    first = output[0] * kernel.stride - kernel.padding[0]
    num_own = output[1] - output[0]
    last = first + (num_own - 1) * kernel.stride + kernel.reach if num_own else first
    return Region(
        output=output,
        owned=owned,
        needed=(_clipped(first, extent), _clipped(last, extent)),
        padding_left=min(last, 0) - min(first, 0),
        padding_right=max(last, extent) - max(first, extent),
    )


def _clipped(position: int, extent: int) -> int:
    return min(max(position, 0), extent)


def _check(extent: int, kernel: Kernel, num_workers: int) -> None:
    least = {
        "extent": (extent, 1),
        "kernel": (kernel.extent, 1),
        "stride": (kernel.stride, 1),
        "dilation": (kernel.dilation, 1),
        "padding": (min(kernel.padding), 0),
    }
    for name, (value, lowest) in least.items():
        if value < lowest:
            article = "an" if name == "extent" else "a"
            raise PrimitiveError(f"{article} {name} of {value} is not possible; expected {lowest} or more")
    largest = max(extent, kernel.extent, kernel.stride, kernel.dilation, *kernel.padding)
    if largest > MAX_EXTENT:
        raise PrimitiveError(f"{largest} points are too many; expected at most {MAX_EXTENT}")
    if not 1 <= num_workers <= MAX_WORKERS:
        raise PrimitiveError(f"{num_workers} workers were asked for; expected 1 to {MAX_WORKERS}")
    padded = extent + sum(kernel.padding)
    if kernel.reach > padded:
        raise PrimitiveError(
            f"a kernel that reaches over {kernel.reach} points (kernel {kernel.extent}, dilation {kernel.dilation}) "
            f"does not fit an extent of {extent} with padding, {padded} points; use a smaller one or more padding"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Buffers of workers under a sliding kernel: [left halo | bulk | right halo] along every dim.

    Attributes:
        shape: Shape of the whole tensor.
        workers: [workers][rank] each worker's regions.
    """

    shape: tuple[int, ...]
    workers: tuple[tuple[Region, ...], ...]

    @property
    def bulk(self) -> Partition:
        """The partition of the inputs that the workers own."""
        return partition(self.shape, [tuple(r.owned for r in worker) for worker in self.workers])

    @property
    def outputs(self) -> tuple[Box, ...]:
        """[workers] the outputs that each worker computes."""
        return tuple(tuple(r.output for r in worker) for worker in self.workers)

    @property
    def windows(self) -> Partition:
        """Inputs of the workers' kernels; boxes extend past the tensor where they read padding."""
        return Partition(shape=self.shape, boxes=tuple(tuple(r.window for r in worker) for worker in self.workers))

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """[workers] the shape of each buffer."""
        return tuple(tuple(r.buffer_extent for r in worker) for worker in self.workers)

    @property
    def segments(self) -> tuple[tuple[tuple[Box, Box], ...], ...]:
        """[workers] the boxes that make up a buffer: (in the tensor, in the buffer)."""
        return tuple(
            tuple(
                (tuple(inside for inside, _ in pairs), tuple(at for _, at in pairs))
                for pairs in product(*(_placed(r) for r in worker))
            )
            for worker in self.workers
        )

    @property
    def bulk_boxes(self) -> tuple[Box, ...]:
        """[workers] the box of the bulk in the buffer."""
        return tuple(
            tuple((r.halo_left, r.halo_left + r.owned[1] - r.owned[0]) for r in worker) for worker in self.workers
        )

    @property
    def window_boxes(self) -> tuple[Box, ...]:
        """[workers] the window in the buffer's coordinates: unused points cut off, padding added."""
        return tuple(
            tuple((r.unused_left - r.padding_left, r.buffer_extent - r.unused_right + r.padding_right) for r in worker)
            for worker in self.workers
        )


def halo_buffers(shape: Sequence[int], kernels: Sequence[Kernel], counts: Sequence[int]) -> Buffers:
    """Return the buffers of a tensor under one kernel for each dim, in `counts` balanced parts along each dim.

    Workers are row-major over the parts. A dim without a sliding kernel has ``Kernel(extent=1)``. Raises PrimitiveError
    where a kernel does not fit.
    """
    check_counts(shape, counts)
    _check_kernels(shape, kernels)
    along = [regions(n, kernel, k) for n, kernel, k in zip(shape, kernels, counts, strict=True)]
    return Buffers(shape=tuple(shape), workers=tuple(product(*along)))


def buffers_of(owned: Partition, kernels: Sequence[Kernel], outputs: Sequence[Box] | None = None) -> Buffers:
    """Return the buffers of workers that own any boxes of a tensor and compute any outputs, balanced or not.

    Args:
        owned: Boxes that the workers own.
        kernels: Kernel of each dim; ``Kernel(extent=1)`` for dims without one.
        outputs: [workers] the box of outputs that each worker computes. Default: in dims without a kernel, the box that
            it owns. In other dims, where the owned ranges must be equal or consecutive, the balanced part of its row.

    Raises:
        PrimitiveError: A kernel does not fit, outputs are outside the output tensor, or ranges partially overlap.
    """
    shape = owned.shape
    _check_kernels(shape, kernels)
    for extent, kernel in zip(shape, kernels, strict=True):
        _check(extent, kernel, len(owned.boxes))
    extents = [kernel.num_outputs(n) for n, kernel in zip(shape, kernels, strict=True)]
    computed = _balanced(owned, kernels, extents) if outputs is None else partition(extents, outputs).boxes
    if len(computed) != len(owned.boxes):
        raise PrimitiveError(f"outputs of {len(computed)} workers, of which {len(owned.boxes)} own the tensor")
    return Buffers(
        shape=shape,
        workers=tuple(
            tuple(_region(*each) for each in zip(shape, kernels, outs, own, strict=True))
            for outs, own in zip(computed, owned.boxes, strict=True)
        ),
    )


def exchange_steps(buffers: Buffers, devices: Sequence[int]) -> tuple[ReshardStep, ...]:
    """Return the transfers that fill the halos of every buffer from the workers that own the points, in place (Eq. 11).

    The bulks are taken out of the buffers and sent directly to the workers that need them, including corners and
    workers that are not adjacent; the received boxes fill the buffers. The adjoint steps add every halo to the bulk
    that it copies, and clear the halos (Eq. 12).
    """
    bulks = apart(enumerate(buffers.bulk_boxes), devices)
    segments = [(i, *placed) for i, of_worker in enumerate(buffers.segments) for placed in of_worker]
    wholes = apart(enumerate(map(whole, buffers.extents)), devices)
    inside = apart([(i, at) for i, _, at in segments], [devices[i] for i, _, _ in segments])
    needed = replace(inside, shape=buffers.shape, boxes=tuple(box for _, box, _ in segments))
    return (
        ReshardStep(wholes, bulks),
        ReshardStep(partition_layout(buffers.bulk, devices), needed),
        ReshardStep(inside, wholes),
    )


def _check_kernels(shape: Sequence[int], kernels: Sequence[Kernel]) -> None:
    if len(kernels) != len(shape):
        raise PrimitiveError(f"{len(kernels)} kernels for a tensor of shape {list(shape)}; give one for each dim")


def _balanced(owned: Partition, kernels: Sequence[Kernel], extents: Sequence[int]) -> tuple[Box, ...]:
    """Return [workers] the balanced parts of outputs of those extents, assigned by the owned ranges of each dim."""
    computed: list[dict[Range, Range]] = []
    for i, (length, kernel, extent) in enumerate(zip(owned.shape, kernels, extents, strict=True)):
        ranges = sorted({box[i] for box in owned.boxes})
        if kernel == Kernel(extent=1):
            computed.append(dict(zip(ranges, ranges, strict=True)))
            continue
        if any(a[1] != b[0] for a, b in pairwise([(0, 0), *ranges, (length, length)])):
            raise PrimitiveError(
                f"workers own the ranges {ranges} of dim {i}, which are not one after the other; "
                "give the outputs that each of them computes"
            )
        computed.append(dict(zip(ranges, pairwise(even_bounds(extent, len(ranges)).tolist()), strict=True)))
    return tuple(tuple(of[limits] for of, limits in zip(computed, box, strict=True)) for box in owned.boxes)


def _placed(region: Region) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return a region's segments, each with its range in the buffer."""
    result = []
    at = 0
    for low, high in region.segments:
        result.append(((low, high), (at, at + high - low)))
        at += high - low
    return result


# -- the closed form


def halo_fetch(access: Access, splits: Splits) -> tuple[FloatArray, IntArray]:
    """Return the [K] elements that the worst-placed device fetches for its windows, and from how many devices.

    Outputs, inputs and kernels are split evenly. A device needs the inputs that its outputs read through its part of
    the kernel, and owns its even part of all inputs. Padding, and points skipped by strides and dilations, are not
    needed. Ties between devices go to the one that fetches from most others.
    """
    parts = components(access, splits.extents)
    windows = tuple(part for part in parts if isinstance(part.axis, Window))
    others = np.ones(len(splits.values))
    for part in parts:
        if part not in windows:
            others *= largest_parts(part, splits)
    kernels = [splits.of(part.axis.kernel) for part in windows if isinstance(part.axis, Window)]
    rows, inverse = distinct_rows(np.column_stack([split_columns(windows, splits), *kernels]))
    positions, owners = np.array([_window_fetch(windows, row) for row in rows.tolist()], dtype=np.int64).T
    return others * positions[inverse], owners[inverse]


def _window_fetch(windows: tuple[Component, ...], split: list[int]) -> tuple[int, int]:
    """Return the most positions of all windows that any device needs but lacks, and how many devices own them.

    Args:
        windows: The windows of the tensor.
        split: Split factors of the outputs of each window, then of the kernel of each.
    """
    needed, owned, owners, is_owner = (np.ones(1, dtype=np.int64) for _ in range(4))
    for window, outs, kernels in zip(windows, split, split[len(windows) :], strict=False):
        along = _window_need(window, outs, kernels)
        needed, owned, owners, is_owner = (
            np.outer(before, own).reshape(-1)
            for before, own in zip((needed, owned, owners, is_owner), along, strict=True)
        )
    return max(zip((needed - owned).tolist(), (owners - is_owner).tolist(), strict=True))


@cache
def _window_need(component: Component, outs: int, kernels: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return what each part of a window's outputs, with each part of its kernel, needs along the window's axis.

    Returns:
        Number of positions needed; number of these that the part owns; number of parts that own any of those needed;
        whether the part itself is one of them.
    """
    window = component.axis
    assert isinstance(window, Window)
    out, own = even_bounds(component.dim_extent, outs), even_bounds(component.length, outs)
    kernel = even_bounds(component.kernel_extent, kernels)
    needed, owned, owners = (np.zeros((outs, kernels), dtype=np.int64) for _ in range(3))
    for i, j in np.ndindex(outs, kernels):
        is_read = np.zeros(component.length, dtype=np.bool_)
        for point in range(int(kernel[j]), int(kernel[j + 1])):
            offset = point * window.dilation - window.pad
            # The first output whose element is not padding, and the element of the last one.
            first = max(int(out[i]), -(offset // window.stride))
            last = (int(out[i + 1]) - 1) * window.stride + offset
            is_read[max(0, first * window.stride + offset) : max(0, last + 1) : window.stride] = True
        positions = np.flatnonzero(is_read)
        owner_of = np.searchsorted(own, positions, side="right") - 1
        needed[i, j] = len(positions)
        owned[i, j] = np.count_nonzero(owner_of == i)
        owners[i, j] = len(np.unique(owner_of))
    is_owner = (owned > 0).astype(np.int64)
    return needed.reshape(-1), owned.reshape(-1), owners.reshape(-1), is_owner.reshape(-1)
