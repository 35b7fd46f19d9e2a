"""Points that go from one device to another: of movements between layouts, and of sums."""

from collections.abc import Iterable, Sequence

from pase.targets.mesh_tensorflow.runtime.boxes import num_points
from pase.targets.mesh_tensorflow.runtime.layouts import DeviceMesh
from pase.targets.mesh_tensorflow.runtime.moves import pieces
from pase.targets.mesh_tensorflow.runtime.refine import Hop
from pase.targets.mesh_tensorflow.runtime.traffic import SMALL_POINTS

Pairs = dict[tuple[int, int], int]
"""Points, or bytes, that go from one device to another."""

Stage = Iterable[tuple[tuple[int, int], int]]
"""Points that go from one device to another, all at once."""


def hop_pairs(hop: Hop) -> Pairs:
    """Return the points that a movement takes from one device to another."""
    pairs: Pairs = {}
    for device, taken in zip(hop.target.devices, pieces(hop), strict=True):
        for piece in taken:
            sender = hop.source.devices[piece.source]
            if sender != device:
                pairs[sender, device] = pairs.get((sender, device), 0) + num_points(piece.box)
    return pairs


def all_reduce_pairs(mesh: DeviceMesh, over: Iterable[str], shard_points: int) -> Pairs:
    """Return the points that an all-reduce of shards along some axes takes from one device to another."""
    pairs: Pairs = {}
    for group in sum_groups(mesh, over):
        for stage in all_reduce_stages(group, shard_points):
            add_pairs(pairs, stage)
    return pairs


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


def sum_groups(mesh: DeviceMesh, over: Iterable[str]) -> list[list[int]]:
    """Return the groups of several devices that differ along some axes alone."""
    axes = frozenset(over)
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device, point in zip(mesh.devices, mesh.coordinates, strict=True):
        key = tuple((axis, at) for axis, at in point.items() if axis not in axes)
        groups.setdefault(key, []).append(device)
    return [group for group in groups.values() if len(group) > 1]


def moved_pairs(steps: Iterable[Hop], known: dict[Hop, Pairs]) -> Pairs:
    """Return the points that movements take between devices, all together; known: those that were looked at before."""
    total: Pairs = {}
    for hop in steps:
        # Repeated layers move alike: each distinct movement is looked at once.
        if hop not in known:
            known[hop] = hop_pairs(hop)
        add_pairs(total, known[hop].items())
    return total


def add_pairs(pairs: Pairs, more: Iterable[tuple[tuple[int, int], int]]) -> None:
    """Add points to others."""
    for ends, points in more:
        pairs[ends] = pairs.get(ends, 0) + points
