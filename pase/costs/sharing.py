"""Weights that several layers use: one trained tensor, so that its users' layouts have a price between them.

The first user owns the weight. Forward, every other user fetches what it needs of it; backward, it sends its gradient
the same way. That gradient is all-reduced on its own only where the user's layout is not the owner's: where the two
agree, partial sums are added on each device, and the owner's all-reduce sums both (data parallelism reduces a tied
weight once).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pase.costs.layouts import (
    Component,
    FloatArray,
    IndexArray,
    IntArray,
    components,
    distinct_rows,
    shard_size,
    split_columns,
    splits_of,
)
from pase.costs.movement import Fetch, fetches
from pase.costs.overlap import volumes
from pase.graph import Access, Graph, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight that `user` shares with its `owner`; the numbers are positions in their reads."""

    owner: str
    owner_read: int
    user: str
    user_read: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTraffic:
    """What sharing moves, for each pair of layouts.

    row_class, col_class: [K_u], [K_v] layout of each configuration. forward, backward: [L_u, L_v] what moves.
    reduced_bytes, group, members: [L_v], [L_v], [L_v, levels] the user's own all-reduce. is_reduced: [L_u, L_v] whether
    it takes place.
    """

    row_class: NDArray[np.intp]
    col_class: NDArray[np.intp]
    forward: Fetch
    backward: Fetch
    reduced_bytes: FloatArray
    group: IntArray
    members: IntArray
    is_reduced: NDArray[np.bool_]


def shared_weights(graph: Graph) -> tuple[SharedWeight, ...]:
    """Return every use of a shared weight but its first, in the order of the graph."""
    owners: dict[str, tuple[str, int]] = {}
    found = []
    for operator in graph.operators:
        for position, access in enumerate(operator.reads):
            if not access.shared:
                continue
            owner, read = owners.setdefault(access.shared, (operator.name, position))
            if owner != operator.name:
                found.append(SharedWeight(owner=owner, owner_read=read, user=operator.name, user_read=position))
    return tuple(found)


def shared_traffic(
    graph: Graph, weight: SharedWeight, us: IndexArray, vs: IndexArray, members: IntArray
) -> SharedTraffic:
    """Return what a shared weight moves between configurations [K_u, D_u] of its owner and [K_v, D_v] of a user.

    members: [K_v, levels] how the devices that sum the user's gradient lie over the machine (`CostModel.sum_members`).
    """
    owner, user = graph[weight.owner], graph[weight.user]
    owned, used = owner.reads[weight.owner_read], user.reads[weight.user_read]
    order = matching_order(owned, used)
    u, v = _components(owner, owned), _components(user, used, order)
    u_group, v_group = _sum_group(owner, owned, us), _sum_group(user, used, vs)
    u_layouts, row_class = distinct_rows(np.column_stack([split_columns(u, splits_of(owner, us)), u_group]))
    v_layouts, col_class = distinct_rows(
        np.column_stack([split_columns(v, splits_of(user, vs)), v_group, members.astype(np.int32)])
    )
    common = volumes(u, u_layouts[:, : len(u)], v, v_layouts[:, : len(v)])
    forward, backward = fetches(common, graph.word_bytes)
    group = v_layouts[:, len(v)].astype(np.int64)
    _, first = np.unique(col_class, return_index=True)
    size = shard_size(used.shape, used.axes, splits_of(user, vs[first])) * graph.word_bytes
    stays = (forward.moved_bytes == 0) & (backward.moved_bytes == 0)
    return SharedTraffic(
        row_class=row_class,
        col_class=col_class,
        forward=forward,
        backward=backward,
        reduced_bytes=size * (group > 1),
        group=group,
        members=v_layouts[:, len(v) + 1 :].astype(np.int64),
        is_reduced=~(stays & (u_layouts[:, -1:] == group)),
    )


def _sum_group(operator: Operator, access: Access, values: IndexArray) -> IndexArray:
    """Return over how many devices a weight's gradient is summed, [K]."""
    return splits_of(operator, values).product(operator.partial_dims(access)).astype(np.int32)


def _components(operator: Operator, access: Access, order: Sequence[int] | None = None) -> tuple[Component, ...]:
    positions = range(len(access.shape)) if order is None else order
    shape = tuple(access.shape[i] for i in positions)
    return components(shape, tuple(access.axes[i] for i in positions), operator.extents)


def matching_order(owned: Access, used: Access) -> Sequence[int]:
    """Return the user's tensor dims in the owner's order: a table of [v, d] may be read as a weight of [d, v]."""
    # Two dims that are not indexed cannot be told apart by their axes.
    if set(owned.axes) == set(used.axes) and len(set(owned.axes)) == len(owned.axes):
        return [used.axes.index(axis) for axis in owned.axes]
    return range(len(used.axes))
