"""How the axes of a layer's mesh lie over the levels of a machine: what communicates most lies innermost.

The number of devices that a configuration splits a dim over is taken apart into one factor for each level: how many
groups of the level before lie within one group of it. Dims are served in the order of the bytes in which they take
part, so that the heaviest collectives stay within a node as far as they fit.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from pase.costs.layouts import FloatArray, IndexArray, IntArray
from pase.costs.traffic import LayerTraffic, Message, Pattern


def level_members(values: IndexArray, weight: FloatArray, rooms: Sequence[int]) -> IntArray:
    """Return [levels, K, D]: the factor of each split at each level; their product over the levels is the split.

    values: [K, D] split factors. weight: [K, D] what decides which dims come first, the largest innermost; ties go to
    the later dim, so that the batch stays outside. rooms: for each level, the groups of the level before in one
    of its groups. The outermost level takes what is left.
    """
    num_rows, num_dims = values.shape
    left = values.astype(np.int64)
    members = np.ones((len(rooms), num_rows, num_dims), dtype=np.int64)
    rows = np.arange(num_rows)
    # Sorted from behind: a stable sort then leaves the later of equal dims first.
    order = num_dims - 1 - np.argsort(-weight[:, ::-1], axis=1, kind="stable")
    for level, room in enumerate(rooms[:-1]):
        free = np.full(num_rows, room, dtype=np.int64)
        for rank in range(num_dims):
            dims = order[:, rank]
            taken = np.gcd(left[rows, dims], free)
            members[level, rows, dims] = taken
            left[rows, dims] //= taken
            free //= taken
    members[-1] = left
    return members


def communicated_bytes(traffic: LayerTraffic) -> FloatArray:
    """Return [K, D]: the bytes of a layer's messages in which each dim's split takes part.

    Sums that stand on an edge are among them: whoever makes these, the layer's devices take part.
    """
    dims = list(traffic.splits.extents)
    weight = np.zeros(traffic.splits.values.shape)
    for message in (*traffic.messages, *traffic.joint_sums.values()):
        size = message.times * message.size_bytes * (2.0 if message.pattern is Pattern.ALL_REDUCE else 1.0)
        for dim in message.over:
            weight[:, dims.index(dim)] += size
    return weight


def layer_members(traffic: LayerTraffic, rooms: Sequence[int]) -> IntArray:
    """Return [levels, K, D]: how a layer's axes lie over the levels under each of its configurations."""
    return level_members(traffic.splits.values, communicated_bytes(traffic), rooms)


def group_members(message: Message, traffic: LayerTraffic, members: IntArray) -> IntArray:
    """Return [levels, K]: how the devices that take part in a message lie over the levels."""
    return _over(message.over, tuple(traffic.splits.extents), members)


def _over(over: Iterable[str], dims: Sequence[str], members: IntArray) -> IntArray:
    result: IntArray = np.ones(members.shape[:2], dtype=np.int64)
    for dim in over:
        result = result * members[:, :, dims.index(dim)]
    return result


def level_rooms(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Return, for each level, the groups of the level before in one of its groups; sizes: of all but the last level."""
    bounds = [1, *sizes, num_devices]
    rooms = tuple(outer // inner for inner, outer in pairwise(bounds))
    assert prod(rooms) == num_devices, f"levels of {list(sizes)} devices do not divide {num_devices}"
    return rooms
