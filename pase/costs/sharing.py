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
    components,
    distinct_rows,
    shard_size,
    split_columns,
    splits_of,
)
from pase.costs.overlap import volumes
from pase.costs.traffic import Message, Pattern
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

    row_class, col_class: [K_u], [K_v] layout of each configuration. forward_bytes, backward_bytes: [L_u, L_v]
    moved. reduction: the user's own all-reduce, [L_v]. is_reduced: [L_u, L_v] whether it takes place.
    """

    row_class: NDArray[np.intp]
    col_class: NDArray[np.intp]
    forward_bytes: FloatArray
    backward_bytes: FloatArray
    reduction: Message
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


def shared_traffic(graph: Graph, weight: SharedWeight, us: IndexArray, vs: IndexArray) -> SharedTraffic:
    """Return what a shared weight moves between configurations [K_u, D_u] of its owner and [K_v, D_v] of a user."""
    owner, user = graph[weight.owner], graph[weight.user]
    owned, used = owner.reads[weight.owner_read], user.reads[weight.user_read]
    order = _matching_order(owned, used)
    u, v = _components(owner, owned), _components(user, used, order)
    u_columns, v_columns = _columns(owner, owned, u, us), _columns(user, used, v, vs)
    u_layouts, row_class = distinct_rows(u_columns)
    v_layouts, col_class = distinct_rows(v_columns)
    common = volumes(u, u_layouts[:, :-1], v, v_layouts[:, :-1])
    forward = np.maximum(common.consumed - common.kept_forward, 0.0) * graph.word_bytes
    backward = np.maximum(common.produced - common.kept_backward, 0.0) * graph.word_bytes
    group = v_layouts[:, -1].astype(np.int64)
    _, first = np.unique(col_class, return_index=True)
    size = shard_size(used.shape, used.axes, splits_of(user, vs[first])) * graph.word_bytes
    agrees = (forward == 0) & (backward == 0) & (u_layouts[:, -1:] == group)
    return SharedTraffic(
        row_class=row_class,
        col_class=col_class,
        forward_bytes=forward,
        backward_bytes=backward,
        reduction=Message(
            tensor=f"gradient of {used.tensor}",
            pattern=Pattern.ALL_REDUCE,
            size_bytes=size * (group > 1),
            group=group,
            times=1,
        ),
        is_reduced=~agrees,
    )


def _columns(operator: Operator, access: Access, parts: tuple[Component, ...], values: IndexArray) -> IndexArray:
    """Return [K, components + 1]: how a weight is split, and over how many devices its gradient is summed."""
    splits = splits_of(operator, values)
    group = splits.product(operator.partial_dims(access)).astype(np.int32)
    return np.column_stack([split_columns(parts, splits), group])


def _components(operator: Operator, access: Access, order: Sequence[int] | None = None) -> tuple[Component, ...]:
    positions = range(len(access.shape)) if order is None else order
    shape = tuple(access.shape[i] for i in positions)
    return components(shape, tuple(access.axes[i] for i in positions), operator.extents)


def _matching_order(owned: Access, used: Access) -> Sequence[int]:
    """Return the user's tensor dims in the owner's order: a table of [v, d] may be read as a weight of [d, v]."""
    if set(owned.axes) == set(used.axes):
        return [used.axes.index(axis) for axis in owned.axes]
    return range(len(used.axes))
