"""Partial sums: which devices add them up and what these send, and the sums that several readers leave to one layer.

An all-reduce goes in pieces between all pairs of devices: each of k devices adds a k-th and sends the others the sum.

What a fan-out hands on, or a weight that several layers share, has one sum of its gradient. A reader that holds the
tensor as the other end does, and would sum its gradient over the same groups of devices, leaves its parts as they are:
they are added on each device. What its windows reach beyond its own part goes to the neighbours before that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pase.sharding.layouts import DeviceMesh, PlainDim, TensorDim, WindowDim, layout_of
from pase.sharding.reshard import Pairs, ReshardStep, add_pairs, reshard_steps

SMALL_POINTS = 1024
"""Below this size an all-reduce adds on one device: as many bytes, and far fewer operations."""

Stage = Iterable[tuple[tuple[int, int], int]]
"""Points that go from one device to another, all at once."""


def sum_groups(mesh: DeviceMesh, over: Iterable[str]) -> list[list[int]]:
    """Return the groups of several devices that differ along some axes alone."""
    return [[mesh.devices[i] for i in group] for group in mesh.groups(over) if len(group) > 1]


def all_reduce_stages(group: Sequence[int], shard_points: int) -> tuple[Stage, Stage]:
    """Return what the devices of a group send to have shards added, then to have the sums back."""
    count = len(group)
    if shard_points < max(SMALL_POINTS, count):
        first, *others = group
        return [((other, first), shard_points) for other in others], [
            ((first, other), shard_points) for other in others
        ]
    shares = [shard_points // count + (i < shard_points % count) for i in range(count)]
    # To the one that adds this share, and from it.
    there = [((other, to), share) for to, share in zip(group, shares, strict=True) for other in group if other != to]
    return there, [((adder, other), share) for (other, adder), share in there]


def all_reduce_pairs(mesh: DeviceMesh, over: Iterable[str], shard_points: int) -> Pairs:
    """Return the points that an all-reduce of shards along some axes takes from one device to another."""
    pairs: Pairs = {}
    for group in sum_groups(mesh, over):
        for stage in all_reduce_stages(group, shard_points):
            add_pairs(pairs, stage)
    return pairs


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
        return tuple(axis for axis in self.mesh.split_axes if axis in self.over or axis in kernels)


def joint_steps(giver: SumEnd, reader: SumEnd) -> tuple[ReshardStep, ...] | None:
    """Return the movements that take a reader's parts of a gradient to the devices of the giver's sum, as parts.

    Each is between some of the devices; together they are between all. None where the reader has to sum its gradient
    itself: it has the whole of it, or other devices hold other parts of the tensor, or its groups are others.
    """
    axes = reader.axes
    groups = [[giver.mesh.devices[i] for i in group] for group in giver.mesh.groups(giver.axes)]
    if not axes or any(len(group) != prod(map(reader.mesh.size, axes)) for group in groups):
        return None
    own = tuple(PlainDim(dim.out, dim.extent) if isinstance(dim, WindowDim) else dim for dim in reader.dims)
    if any(dim.extent % reader.mesh.size(dim.name) for dim in own):
        return None  # The giver's parts are of one size.
    held, read = layout_of(giver.mesh, giver.dims), layout_of(reader.mesh, own)
    there = reshard_steps(held, read)
    if len(there) != 1 or there[0].source.by_device != there[0].target.by_device:
        return None
    part_of = {
        device: tuple(point[axis] for axis in axes)
        for device, point in zip(reader.mesh.devices, reader.mesh.coordinates, strict=True)
    }
    if any(len({part_of[device] for device in group}) != len(group) for group in groups):
        return None
    windowed = reshard_steps(held, layout_of(reader.mesh, reader.dims))
    if len(windowed) != 1:
        return None
    back = windowed[0].adjoint
    # Devices that differ along the tensor's own dims alone have the same part of the whole gradient between them.
    place = {device: position for position, device in enumerate(back.target.devices)}
    return tuple(
        ReshardStep(back.source.at(alike), back.target.at([place[back.source.devices[i]] for i in alike]))
        for alike in reader.mesh.groups(dim.name for dim in own)
    )
