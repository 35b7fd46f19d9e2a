"""Layouts: which device holds which box of a tensor, derived from a mesh and the tensor's dims.

Dims are identified by name, independent of the framework. The module also has the dims of windows and filters, and
checks that a layer's dims fit its mesh.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Protocol

import numpy as np

from pase.errors import EmitError, ProgramError
from pase.graph import Access, Operator, SliceOf, Window
from pase.graph.operator import Indexed
from pase.sharding.boxes import Box, Partition, Range, chunk, even_part
from pase.sharding.shards import FloatArray, held_extents

REPLICA = "replica"
"""Name of the mesh axis along which devices hold equal parts; `replica_axis` avoids clashes with dims of that name."""

HOST = -1
"""Number of the host, which feeds data and stores the master copy of the weights; its traffic is not counted."""


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of devices: axes name the dims that they split, positions are row-major over the axes.

    Attributes:
        axes: (name, size), the replicas last.
        devices: [positions] the device at each position.
        has_replicas: Whether the last axis consists of replicas instead of splitting a dim.
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    has_replicas: bool = False

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 for a name that is not an axis."""
        return dict(self.axes).get(axis, 1)

    @cached_property
    def coordinates(self) -> tuple[dict[str, int], ...]:
        """[positions] the coordinate along each axis, by name."""
        names = [name for name, _ in self.axes]
        grid = product(*(range(size) for _, size in self.axes))
        return tuple(dict(zip(names, point, strict=True)) for point in grid)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split dims: all except that of the replicas."""
        return tuple(name for name, _ in self.axes[: len(self.axes) - self.has_replicas])

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of positions that differ only along the given axes, each group in order."""
        along = frozenset(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for position, point in enumerate(self.coordinates):
            found.setdefault(tuple(at for axis, at in point.items() if axis not in along), []).append(position)
        return tuple(map(tuple, found.values()))


def device_mesh(
    layer: str, splits: Iterable[tuple[str, int]], num_devices: int, devices: Sequence[int] | None = None
) -> DeviceMesh:
    """Return the mesh of a layer: an axis for each dim that is split, and one of replicas for the remaining devices.

    Args:
        layer: Name of the layer, for messages.
        splits: Name and split factor of each dim.
        num_devices: Number of devices.
        devices: A permutation of range(num_devices); default: in order.

    Raises:
        ProgramError: The splits do not divide the devices, or the list is not a permutation.
    """
    axes = tuple((name, size) for name, size in splits if size != 1)
    names = [name for name, _ in axes]
    if len(set(names)) != len(names) or any(not isinstance(size, int) or size < 1 for _, size in axes):
        raise ProgramError(f"layer {layer!r}: the axes {axes} are not a mesh; name each dim once, with 1 part or more")
    num_parts = prod(size for _, size in axes)
    if num_devices % num_parts:
        written = " · ".join(f"{name}={size}" for name, size in axes)
        raise ProgramError(
            f"layer {layer!r} is split in {written} = {num_parts} parts, which do not divide {num_devices} devices; "
            "change an axis so that the product divides them"
        )
    if num_parts < num_devices:
        axes = (*axes, (replica_axis(names), num_devices // num_parts))
    order = tuple(range(num_devices)) if devices is None else tuple(devices)
    if sorted(order) != list(range(num_devices)):
        raise ProgramError(
            f"layer {layer!r}: devices {list(order)} must name each of 0 to {num_devices - 1} once; "
            "correct the list, or leave it out for the default order"
        )
    return DeviceMesh(axes, order, has_replicas=num_parts < num_devices)


def replica_axis(names: Sequence[str]) -> str:
    """Return the name of the axis of replicas, which differs from all of `names`."""
    name = REPLICA
    while name in names:
        name += "_"
    return name


@dataclass(frozen=True, slots=True)
class PlainDim:
    """A tensor dim that an axis of the same name splits."""

    name: str
    extent: int

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Iteration dims whose splits cut it, with their extents."""
        return ((self.name, self.extent),)

    def range(self, mesh: DeviceMesh, point: Mapping[str, int]) -> Range:
        """Return the part at a point of a mesh."""
        return even_part(self.extent, mesh.size(self.name), point.get(self.name, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDim:
    """A tensor dim read through a sliding window; its boxes overlap and may extend past the tensor.

    Output o and kernel point k read ``o·stride + k·dilation - pad``.

    Attributes:
        out, kernel: Iteration dims, each followed by its extent.
        extent: Extent of the tensor dim itself.
        pad: Number of padding points before the first one.
    """

    out: str
    out_extent: int
    kernel: str
    kernel_extent: int
    extent: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Iteration dims whose splits cut it, with their extents."""
        return (self.out, self.out_extent), (self.kernel, self.kernel_extent)

    def range(self, mesh: DeviceMesh, point: Mapping[str, int]) -> Range:
        """Return the points that the part at a point of a mesh reads."""
        outs, kernels = self.parts(mesh, point)
        low = outs[0] * self.stride + kernels[0] * self.dilation - self.pad
        return low, low + self.reach(mesh, point)

    def parts(self, mesh: DeviceMesh, point: Mapping[str, int]) -> tuple[Range, Range]:
        """Return the ranges of outputs and of kernel points of the part at a point of a mesh."""
        outs, kernels = (even_part(extent, mesh.size(name), point.get(name, 0)) for name, extent in self.axes)
        return outs, kernels

    def reach(self, mesh: DeviceMesh, point: Mapping[str, int]) -> int:
        """Return how many points the part at a point of a mesh reads."""
        (first_out, last_out), (first, last) = self.parts(mesh, point)
        return (last_out - first_out - 1) * self.stride + (last - first - 1) * self.dilation + 1


TensorDim = PlainDim | WindowDim


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor is distributed over devices.

    Attributes:
        shape: Shape of the whole tensor.
        devices, parts, boxes: [positions] the device, the number of the part that it holds (equal for replicas) and
            that part's box.
    """

    shape: tuple[int, ...]
    devices: tuple[int, ...]
    parts: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def by_device(self) -> dict[int, Box]:
        """The box that each device holds."""
        return dict(zip(self.devices, self.boxes, strict=True))

    def at(self, positions: Sequence[int]) -> "Layout":
        """Return the layout on the devices of the given positions only."""
        return replace(
            self,
            devices=tuple(self.devices[i] for i in positions),
            parts=tuple(self.parts[i] for i in positions),
            boxes=tuple(self.boxes[i] for i in positions),
        )


def check_split(layer: str, mesh: DeviceMesh, axes: Iterable[tuple[str, int]]) -> None:
    """Raise ProgramError where a mesh does not divide dims, given by name and extent, into even parts."""
    for name, extent in axes:
        if extent % mesh.size(name):
            raise ProgramError(
                f"layer {layer!r} splits {name} = {extent} in {mesh.size(name)} parts, which do not divide it; "
                "choose a divisor"
            )


def layout_of(mesh: DeviceMesh, dims: Sequence[TensorDim], *, layer: str = "") -> Layout:
    """Return the layout of a tensor with these dims on a mesh; ProgramError where a dim has more parts than points.

    Where a split does not divide its dim, the first parts have one point more.
    """
    used = [axis for dim in dims for axis in dim.axes]
    for name, extent in used:
        if mesh.size(name) > max(extent, 1):
            raise ProgramError(
                f"layer {layer!r} splits {name} = {extent} in {mesh.size(name)} parts; choose at most as many as points"
            )
    numbers: dict[tuple[int, ...], int] = {}
    parts = []
    for point in mesh.coordinates:
        part = tuple(point.get(name, 0) for name, _ in used)
        parts.append(numbers.setdefault(part, len(numbers)))
    boxes = tuple(tuple(dim.range(mesh, point) for dim in dims) for point in mesh.coordinates)
    return Layout(shape=tuple(dim.extent for dim in dims), devices=mesh.devices, parts=tuple(parts), boxes=boxes)


def shifted(layout: Layout, shape: tuple[int, ...], dim: int, offset: int) -> Layout:
    """Return the layout of a tensor that is a slice of another one of that shape, in the other's coordinates."""

    def moved(box: Box) -> Box:
        low, high = box[dim]
        return (*box[:dim], (low + offset, high + offset), *box[dim + 1 :])

    return replace(layout, shape=shape, boxes=tuple(moved(box) for box in layout.boxes))


def sharded_layout(layout: Layout, groups: Iterable[Sequence[int]], dim: int, *, sizes: Sequence[int] = ()) -> Layout:
    """Return the layout in which the devices of each group shard the box that they all hold.

    Args:
        layout: Layout of the boxes.
        groups: Groups of devices that hold the same box; shards follow their order.
        dim: Dim along which the boxes are sharded (`shard_dims`).
        sizes: Sizes of a grid of all devices, in their order. If the devices of a group do not divide the dim, and the
            group spans some axes of the grid, its box is sharded along one axis after the other, as DTensor does; the
            largest shard has the same size either way.
    """
    boxes = layout.by_device
    for group in groups:
        axes = _axes_of(sorted(group), sizes) or (len(group),)
        for number, device in enumerate(sorted(group)):
            low, high = boxes[device][dim]
            count, at = len(group), number
            for size in axes:
                count //= size
                first, last = chunk(high - low, size, at // count)
                low, high, at = low + first, low + last, at % count
            boxes[device] = (*boxes[device][:dim], (low, high), *boxes[device][dim + 1 :])
    held = tuple(boxes[device] for device in layout.devices)
    numbers = {box: number for number, box in enumerate(dict.fromkeys(held))}
    return replace(layout, parts=tuple(numbers[box] for box in held), boxes=held)


def _axes_of(group: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the axes of a grid that a group of its devices spans; () if it is not such a subgrid."""
    if not sizes:
        return ()
    along = [set(column.tolist()) for column in np.unravel_index(np.asarray(group), tuple(sizes))]
    if any(len(found) not in (1, size) for found, size in zip(along, sizes, strict=True)):
        return ()
    spanned = tuple(size for found, size in zip(along, sizes, strict=True) if len(found) > 1)
    return spanned if prod(spanned) == len(group) else ()


def partition_layout(parts: Partition, devices: Sequence[int]) -> Layout:
    """Return the layout of a partition with a part for every worker, so that equal boxes are added."""
    assert len(devices) == len(parts.boxes)
    return Layout(
        shape=parts.shape, devices=tuple(devices), parts=tuple(range(len(parts.boxes))), boxes=tuple(parts.boxes)
    )


Place = tuple[int, Box]
"""A box that a worker holds: (worker, box in the coordinates of its part)."""


def apart(places: Iterable[Place], devices: Iterable[int]) -> Layout:
    """Return the layout of boxes of workers on devices, [positions], with the worker's number as the first dim.

    The boxes of two workers therefore have no points in common.
    """
    boxes = tuple(((worker, worker + 1), *box) for worker, box in places)
    return Layout(
        shape=tuple(max(high for _, high in column) for column in zip(*boxes, strict=True)),
        devices=tuple(devices),
        parts=tuple(range(len(boxes))),
        boxes=boxes,
    )


WHOLE = "whole dim"
"""Name of a tensor dim that no iteration dim indexes; it contains a space, as no name of an iteration dim does."""


def tensor_dims(operator: Operator, access: Indexed) -> tuple[TensorDim, ...]:
    """Return the dims of a tensor as its layer's mesh splits it: a product of iteration dims gives one dim for each.

    A single point of a dim (such as the first layer of a stack, or a broadcast dim) gives no dim: every part holds it.

    Raises:
        EmitError: No layout expresses an axis (a slice of several points of a dim).
    """
    dims: list[TensorDim] = []
    for axis, extent in zip(access.index_map, access.shape, strict=True):
        match axis:
            case str():
                dims.append(PlainDim(axis, operator.extents[axis]))
            case tuple():
                dims.extend(PlainDim(name, operator.extents[name]) for name in axis)
            case Window():
                dims.append(
                    WindowDim(
                        out=axis.out,
                        out_extent=operator.extents[axis.out],
                        kernel=axis.kernel,
                        kernel_extent=operator.extents[axis.kernel],
                        extent=extent,
                        stride=axis.stride,
                        dilation=axis.dilation,
                        pad=axis.pad,
                    )
                )
            case None if extent > 1:
                dims.append(PlainDim(WHOLE, extent))
            case None | SliceOf(extent=1):
                pass
            case _:
                raise EmitError(
                    f"layer {operator.name!r} ({operator.kind}): tensor {access.tensor!r} is indexed by {axis!r}, "
                    "which programs cannot lay out yet"
                )
    return tuple(dims)


def shard_points(operator: Operator, tensor: Indexed, mesh: DeviceMesh) -> int:
    """Return the points of the largest shard as a program holds it: all under its windows, with padding."""

    def largest(dim: str, extent: int) -> int:
        return -(-extent // mesh.size(dim))

    return prod(part for _, part in held_extents(operator, tensor, largest))


def points_by_device(operator: Operator, tensor: Indexed, mesh: DeviceMesh) -> dict[int, int]:
    """Return the number of points of each device's shard, counted as in `shard_points`."""
    if not any(extent % mesh.size(dim) for dim, extent in operator.extents.items()):
        return dict.fromkeys(mesh.devices, shard_points(operator, tensor, mesh))

    def points(at: Mapping[str, int]) -> int:
        def part(dim: str, extent: int) -> int:
            low, high = even_part(extent, mesh.size(dim), at.get(dim, 0))
            return high - low

        return prod(part for _, part in held_extents(operator, tensor, part))

    return {device: points(at) for device, at in zip(mesh.devices, mesh.coordinates, strict=True)}


def single_points(access: Access) -> tuple[str, ...]:
    """Return the dims of which one point is read or written, such as a stack's first layer or its last."""
    return tuple(axis.dim for axis in access.index_map if isinstance(axis, SliceOf) and axis.extent == 1)


class NamedDim(Protocol):
    """A dim of a framework's tensor: its name, and its global extent."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def size(self) -> int:
        """Its extent."""


def window(out: NamedDim, kernel: NamedDim, *, of: int, stride: int = 1, dilation: int = 1, pad: int = 0) -> WindowDim:
    """Return a tensor dim of extent `of` that output dim `out` reads through a window of dim `kernel`.

    Output o reads points ``o·stride + k·dilation - pad``, k = 0 … kernel - 1.
    """
    return WindowDim(
        out=out.name,
        out_extent=out.size,
        kernel=kernel.name,
        kernel_extent=kernel.size,
        extent=of,
        stride=stride,
        dilation=dilation,
        pad=pad,
    )


# -- filters of convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterDims:
    """The roles of a convolution's dims, by name; dims of its windows have no role.

    Attributes:
        groups: Dims of all three tensors.
        inputs: Channels of the input.
        outputs: Channels of the result.
        batch: Dims of the result that the filters lack.
    """

    groups: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: tuple[str, ...]

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
        """Return the extents of groups, inputs, outputs and batch; dims that `sizes` lacks count as 1."""
        groups, inputs, outputs, batch = (
            prod(sizes.get(name, 1) for name in names) for names in (self.groups, self.inputs, self.outputs, self.batch)
        )
        return groups, inputs, outputs, batch


def filter_dims(
    read: Collection[str], filters: Sequence[str], written: Sequence[str], spatial: Collection[str]
) -> FilterDims:
    """Return the roles of the dims; `spatial` are the dims of windows, both positions and points."""
    own = [name for name in filters if name not in spatial]
    return FilterDims(
        groups=tuple(name for name in own if name in read and name in written),
        inputs=tuple(name for name in own if name not in written),
        outputs=tuple(name for name in own if name in written and name not in read),
        batch=tuple(name for name in written if name not in filters and name not in spatial),
    )


def check_filters(
    layer: str,
    read: Collection[str],
    filters: Sequence[NamedDim],
    windows: Sequence[WindowDim],
    written: Sequence[NamedDim],
) -> None:
    """Raise ProgramError where a convolution's result has dims that neither what it reads nor its filters have."""
    # A channel dim of extent 1 may be missing in any of the three.
    given = {*read, *(dim.name for dim in filters), *(window.out for window in windows)}
    wrong = [dim for dim in written if dim.name not in given and dim.size > 1]
    wrong = wrong or [a for a in written for b in filters if a.name == b.name and a.size != b.size]
    if wrong:
        raise ProgramError(
            f"conv{len(windows)}d of layer {layer!r}: filters of {named(filters)} do not produce "
            f"{', '.join(dim.name for dim in wrong)}; give the same dims to both"
        )


def check_transposed(layer: str, mesh: DeviceMesh, windows: Iterable[Iterable[NamedDim]]) -> None:
    """Raise ProgramError where a transposed convolution's windows, positions or points, are split."""
    split = [dim.name for dims in windows for dim in dims if mesh.size(dim.name) != 1]
    if split:
        raise ProgramError(
            f"layer {layer!r} is a transposed convolution, of which {', '.join(split)} cannot be split; split its "
            "batch or its channels"
        )


# -- pooling


def check_pooled(layer: str, mesh: DeviceMesh, windows: Iterable[WindowDim]) -> None:
    """Raise ProgramError where the points of a pooling's windows are split."""
    for dim in windows:
        if mesh.size(dim.kernel) != 1:
            raise ProgramError(
                f"layer {layer!r} pools windows of {dim.kernel}, which cannot be split; take {dim.kernel} out of the "
                "mesh's axes"
            )


def mean_weights(
    windows: Sequence[WindowDim], mesh: DeviceMesh, point: Mapping[str, int], *, count_padding: bool
) -> FloatArray:
    """Return [outputs of the part…] the factors that turn means over all points of a window into the required means.

    Args:
        windows: The windows.
        mesh: The layer's mesh.
        point: A point of the mesh.
        count_padding: Whether padding counts; if not, a mean is one over the points inside the tensor.
    """
    found = np.ones(())
    for dim in windows:
        low, high = dim.parts(mesh, point)[0]
        num_outs = high - low
        first = np.arange(low, high) * dim.stride - dim.pad
        points = first[:, np.newaxis] + np.arange(dim.kernel_extent) * dim.dilation
        inside = np.maximum(((points >= 0) & (points < dim.extent)).sum(axis=1), 1)
        found = np.multiply.outer(found, np.full(num_outs, dim.kernel_extent) if count_padding else inside)
    return prod(dim.kernel_extent for dim in windows) / found


# -- concatenation and slicing


def not_joined(layer: str, lengths: Iterable[int], along: NamedDim) -> ProgramError:
    """Return the error for tensors concatenated along a dim whose extent is not their sum."""
    return ProgramError(
        f"layer {layer!r} joins {' + '.join(map(str, lengths))} points along {along.name} = {along.size}; correct the "
        "dims so that they add up"
    )


def check_cut(layer: str, along: NamedDim, start: int, step: int, last: int) -> None:
    """Raise ProgramError where each `step`-th point of [start, last) is not all in a dim."""
    if start < 0 or step < 1 or last > along.size:
        raise ProgramError(f"layer {layer!r} cuts [{start}, {last}) from {along.name} = {along.size}; correct the cut")


def place_of_piece(layer: str, dims: Sequence[NamedDim], along: str, start: int, size: int) -> int:
    """Return the position of the dim named `along`; ProgramError where it lacks the points [start, start + size)."""
    for position, dim in enumerate(dims):
        if dim.name == along and 0 <= start < start + size <= dim.size:
            return position
    raise ProgramError(f"layer {layer!r}: {named(dims)} has no [{start}, {start + size}) of {along}; correct the piece")


def place_along(layer: str, dims: Sequence[NamedDim], mesh: DeviceMesh, along: NamedDim) -> int:
    """Return the position of the dim along which points move; ProgramError where it is missing or split."""
    if along not in dims or mesh.size(along.name) > 1:
        raise ProgramError(
            f"layer {layer!r}: {along.name} of {named(dims)} is moved along, which needs all of it on every device; "
            "do not split it"
        )
    return dims.index(along)


def check_shared(weight: str, first: str, dims: Sequence[NamedDim], layer: str, others: Sequence[NamedDim]) -> None:
    """Raise ProgramError where two layers share a weight and their dims differ in extent."""
    shape, other = ([dim.size for dim in own] for own in (dims, others))
    if prod(shape) != prod(other):
        raise ProgramError(
            f"layers {first!r} and {layer!r} share weight {weight!r} with shapes {shape} and {other}; "
            "give them one shape"
        )


def named(dims: Iterable[NamedDim]) -> str:
    """Return dims as text for messages."""
    return ", ".join(f"{dim.name}={dim.size}" for dim in dims)
