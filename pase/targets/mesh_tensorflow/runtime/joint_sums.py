"""Sums of gradients that several readers of a tensor leave to one: where a reader's parts lie as the sum takes them.

What a fan-out hands on, or a weight that several layers share, has one sum of its gradient. A reader that holds the
tensor as the other end does, and would sum its gradient over the same groups of devices, leaves its parts as they are:
they are added on each device. What its windows reach beyond its own part goes to the neighbours before that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pase.targets.mesh_tensorflow.runtime.layouts import DeviceMesh, Layout, PlainDim, TensorDim, WindowDim, layout_of
from pase.targets.mesh_tensorflow.runtime.refine import Hop, hops


@dataclass(frozen=True, slots=True)
class SumEnd:
    """A layer at one end of a tensor. dims: of the tensor there. over: dims whose parts leave parts of its gradient."""

    mesh: DeviceMesh
    dims: tuple[TensorDim, ...]
    over: frozenset[str]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the gradient is summed over, those of kernels included."""
        kernels = {dim.kernel for dim in self.dims if isinstance(dim, WindowDim)}
        return tuple(axis for axis in _split_axes(self.mesh) if axis in self.over or axis in kernels)


def joint_hops(giver: SumEnd, reader: SumEnd) -> tuple[Hop, ...] | None:
    """Return the movements that take a reader's parts of a gradient to the devices of the giver's sum, as parts.

    Each is between some of the devices; together they are between all. None where the reader has to sum its gradient
    itself: it has the whole of it, or other devices hold other parts of the tensor, or its groups are others.
    """
    axes = reader.axes
    groups = _groups(giver)
    if not axes or any(len(group) != _count(reader.mesh, axes) for group in groups):
        return None
    own = tuple(PlainDim(dim.out, dim.extent) if isinstance(dim, WindowDim) else dim for dim in reader.dims)
    if any(dim.extent % reader.mesh.size(dim.name) for dim in own):
        return None  # The giver's parts are of one size.
    held, read = layout_of(giver.mesh, giver.dims), layout_of(reader.mesh, own)
    there = hops(held, read)
    if len(there) != 1 or _boxes(there[0].source) != _boxes(there[0].target):
        return None
    part_of = {
        device: tuple(point[axis] for axis in axes)
        for device, point in zip(reader.mesh.devices, reader.mesh.coordinates, strict=True)
    }
    if any(len({part_of[device] for device in group}) != len(group) for group in groups):
        return None
    windowed = hops(held, layout_of(reader.mesh, reader.dims))
    if len(windowed) != 1:
        return None
    back = windowed[0].adjoint
    # Devices that differ along the tensor's own dims alone have the same part of the whole gradient between them.
    dims = {dim.name for dim in own}
    alike: dict[tuple[int, ...], list[int]] = {}
    for position, point in enumerate(reader.mesh.coordinates):
        alike.setdefault(tuple(at for axis, at in point.items() if axis not in dims), []).append(position)
    place = {device: position for position, device in enumerate(back.target.devices)}
    return tuple(
        Hop(_among(back.source, positions), _among(back.target, [place[back.source.devices[i]] for i in positions]))
        for positions in alike.values()
    )


def _groups(end: SumEnd) -> Iterable[list[int]]:
    """Return the devices of each sum."""
    axes = set(end.axes)
    found: dict[tuple[int, ...], list[int]] = {}
    for device, point in zip(end.mesh.devices, end.mesh.coordinates, strict=True):
        found.setdefault(tuple(at for axis, at in point.items() if axis not in axes), []).append(device)
    return found.values()


def _split_axes(mesh: DeviceMesh) -> Sequence[str]:
    """Return the axes of dims, without that of the replicas."""
    return [axis for axis, _ in mesh.axes][: len(mesh.axes) - mesh.has_replicas]


def _count(mesh: DeviceMesh, axes: Iterable[str]) -> int:
    count = 1
    for axis in axes:
        count *= mesh.size(axis)
    return count


def _boxes(layout: Layout) -> dict[int, object]:
    return dict(zip(layout.devices, layout.boxes, strict=True))


def _among(layout: Layout, positions: Sequence[int]) -> Layout:
    """Return the layout on some of the devices."""
    return replace(
        layout,
        devices=tuple(layout.devices[i] for i in positions),
        parts=tuple(layout.parts[i] for i in positions),
        boxes=tuple(layout.boxes[i] for i in positions),
    )
