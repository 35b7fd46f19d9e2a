"""How a placement uses the levels of a machine: which levels a layer's groups span, and how far edges fetch.

Everything follows from the lists of devices, regardless of how these were chosen. `fanouts` gives for each level how
many groups of the level below form one of its groups; the devices of a group are numbered consecutively.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import mul

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.graph.operator import split_dim
from pase.sharding.boxes import aligned_dims
from pase.sharding.overlap import Overlap
from pase.sharding.shards import Component, FloatArray, IntArray, part_labels

_DEVICES_AT_ONCE = 256
"""Number of devices whose senders are searched together."""


@dataclass(frozen=True, slots=True)
class PlacedAxes:
    """A layer's mesh on devices.

    Attributes:
        splits: The dims that are split, in the order of the iteration space, and their factors.
        devices: The device of each part, row-major over these dims, then the replicas.
    """

    splits: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]


@lru_cache(maxsize=1 << 8)
def axis_positions(axes: PlacedAxes) -> Mapping[str, IntArray]:
    """Return [p] the part of each split dim that each device holds; "" numbers the replicas."""
    counts = [factor for _, factor in axes.splits]
    index = np.indices((*counts, len(axes.devices) // prod(counts))).reshape(len(counts) + 1, -1)
    positions = np.empty_like(index)
    positions[:, list(axes.devices)] = index
    return FrozenDict(zip([*(dim for dim, _ in axes.splits), ""], positions, strict=True))


def group_members(axes: PlacedAxes, over: Collection[str], fanouts: tuple[int, ...]) -> IntArray:
    """Return [levels] how many groups of the level below communicate at each level, in the fullest of its groups.

    Args:
        axes: Placed axes of a layer.
        over: Dims whose parts communicate; devices that differ in other dims, or as replicas, form separate groups.
        fanouts: Fan-out of each level.
    """
    own = tuple(dim for dim, _ in axes.splits if dim in over)
    return np.array(_group_members(axes, own, fanouts), dtype=np.int64)


@lru_cache(maxsize=1 << 14)
def _group_members(axes: PlacedAxes, over: tuple[str, ...], fanouts: tuple[int, ...]) -> tuple[int, ...]:
    num_devices = len(axes.devices)
    group = np.zeros(num_devices, dtype=np.int64)
    for dim, position in axis_positions(axes).items():
        if dim not in over:
            group = group * (int(position.max()) + 1) + position
    members = []
    inner = np.arange(num_devices)
    for fanout in fanouts:
        # Each pair of a communicating group and a group of the level before counts once.
        distinct = np.unique(group * num_devices + inner)
        outer = distinct // num_devices * num_devices + distinct % num_devices // fanout
        members.append(int(np.unique(outer, return_counts=True)[1].max()))
        inner = inner // fanout
    return tuple(members)


def placed_overlap(
    u: tuple[Component, ...],
    u_axes: PlacedAxes,
    v: tuple[Component, ...],
    v_axes: PlacedAxes,
    fanouts: tuple[int, ...],
) -> Overlap:
    """Return the overlap, [1, 1], of the two sides of an edge on their devices, and how far these fetch.

    Args:
        u: How the producer indexes the tensor.
        u_axes: Placed axes of the producer.
        v: How the consumer indexes the tensor.
        v_axes: Placed axes of the consumer.
        fanouts: Fan-out of each level.
    """
    groups = [
        _group_overlap(u[slice(*of_u)], u_axes, v[slice(*of_v)], v_axes)
        for of_u, of_v in aligned_dims([part.length for part in u], [part.length for part in v])
    ]
    forward = _fetch(groups, fanouts)
    backward = _fetch([(common.T, v_part, u_part) for common, u_part, v_part in groups], fanouts)
    figures = (
        prod(float(common.sum(axis=1).max()) for common, _, _ in groups),
        prod(float(common.sum(axis=0).max()) for common, _, _ in groups),
        *forward[:2],
        *backward[:2],
        forward[2][-1] - 1 if fanouts else 0.0,
        backward[2][-1] - 1 if fanouts else 0.0,
    )
    reached = (np.array(way[2], dtype=np.float64).reshape(1, 1, -1) for way in (forward, backward))
    return Overlap(*(np.full((1, 1), figure) for figure in figures), *reached)


_Group = tuple[FloatArray, IntArray, IntArray]
"""For a group of dims: [parts of u, parts of v] common elements, and [p] the part of u and of v on each device."""


def _group_overlap(
    u: tuple[Component, ...], u_axes: PlacedAxes, v: tuple[Component, ...], v_axes: PlacedAxes
) -> _Group:
    (u_factors, u_part), (v_factors, v_part) = _parts(u, u_axes), _parts(v, v_axes)
    return _common(u, u_factors, v, v_factors), u_part, v_part


def _parts(parts: tuple[Component, ...], axes: PlacedAxes) -> tuple[tuple[int, ...], IntArray]:
    """Return how a group of dims is split, and which part of it each device holds."""
    positions, factor_of = axis_positions(axes), dict(axes.splits)
    dims = [None if part.axis is None else split_dim(part.axis) for part in parts]
    own = np.zeros(len(axes.devices), dtype=np.int64)
    for dim in dims:
        if dim in factor_of:
            own = own * factor_of[dim] + positions[dim]
    return tuple(factor_of.get(dim, 1) if dim else 1 for dim in dims), own


@lru_cache(maxsize=1 << 6)
def _common(
    u: tuple[Component, ...], u_factors: tuple[int, ...], v: tuple[Component, ...], v_factors: tuple[int, ...]
) -> FloatArray:
    """Return [parts of u, parts of v] the number of common elements."""
    num_u, num_v = prod(u_factors), prod(v_factors)
    codes = _labels(u, u_factors) * num_v + _labels(v, v_factors)
    return np.bincount(codes, minlength=num_u * num_v).reshape(num_u, num_v).astype(np.float64)


def _labels(parts: tuple[Component, ...], factors: tuple[int, ...]) -> IntArray:
    """Return, for each element of a group of dims, row-major, the part that holds it."""
    label = np.zeros(1, dtype=np.int64)
    for part, factor in zip(parts, factors, strict=True):
        label = (label[:, None] * factor + part_labels(part, factor)).reshape(-1)
    return label


def _fetch(groups: Sequence[_Group], fanouts: tuple[int, ...]) -> tuple[float, float, list[int]]:
    """Return the worst device's needed elements, those of them that it holds, and [levels] devices that it reaches.

    Each part is fetched from the nearest device that holds it; a device reaches itself. The worst device fetches most.
    Ties go to the one that fetches from most others at the outermost level, then at the next one.
    """
    num_devices = len(groups[0][1]) if groups else prod(fanouts)
    needed, kept = np.ones(num_devices), np.ones(num_devices)
    held = np.zeros(num_devices, dtype=np.int64)
    for common, u_part, v_part in groups:
        needed = needed * common.sum(axis=0)[v_part]
        kept = kept * common[u_part, v_part]
        held = held * len(common) + u_part
    lacks = needed - kept
    worst = np.flatnonzero(lacks == lacks.max())
    if lacks.max() == 0:
        return float(needed[worst[0]]), float(kept[worst[0]]), [1] * len(fanouts)
    sizes = list(accumulate(fanouts, mul))
    has = [_holders(held, size, groups) for size in sizes]
    furthest: tuple[tuple[int, ...], int, tuple[int, ...]] = (), -1, ()
    for first in range(0, len(worst), _DEVICES_AT_ONCE):
        devices = worst[first : first + _DEVICES_AT_ONCE]
        wanted = np.ones((1, len(devices)), dtype=np.bool_)
        for common, _, v_part in groups:
            wanted = (wanted[:, None, :] & (common > 0)[None, :, v_part[devices]]).reshape(-1, len(devices))
        wanted[held[devices], np.arange(len(devices))] = False
        near = [(wanted & table[:, devices // size]).sum(axis=0) for table, size in zip(has, sizes, strict=True)]
        reached = np.stack([np.zeros(len(devices), dtype=np.int64), *near])
        for device, reach in zip(devices.tolist(), reached.T.tolist(), strict=True):
            senders = tuple(outer - inner for inner, outer in pairwise(reach))
            furthest = max(furthest, (senders[::-1], device, tuple(reach[1:])))
    _, device, reach = furthest
    return float(needed[device]), float(kept[device]), [1 + count for count in reach]


def _holders(held: IntArray, size: int, groups: Sequence[_Group]) -> NDArray[np.bool_]:
    """Return [parts, groups of a level] whether some device of the group holds the part."""
    num_parts = prod(len(common) for common, _, _ in groups)
    found = np.zeros((num_parts, len(held) // size), dtype=np.bool_)
    found[held, np.arange(len(held)) // size] = True
    return found
