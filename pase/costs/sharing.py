"""Gradients that several layers add to, so that their layouts have a price between them: fan-outs and shared weights.

A fan-out hands a tensor to several readers. The first user of a weight owns it, and every other user fetches what it
needs of it. Either way a reader sends its gradient back, and all-reduces it on its own only where its layout is not
that of the fan-out or the owner, or the devices are others that it sums over: where both agree, partial sums are added
on each device, and the fan-out's or the owner's all-reduce sums them all (data parallelism reduces a tied weight once).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pase.costs.layouts import IntArray
from pase.costs.traffic import LayerTraffic
from pase.graph import Access, Edge, Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight that `user` shares with its `owner`; the numbers are positions in their reads."""

    owner: str
    owner_read: int
    user: str
    user_read: int


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointSum:
    """A gradient that a reader sums on its own unless it can leave that to a fan-out, or to the owner of the weight.

    read: the reader's position of it, among `LayerTraffic.joint_sums`. group: [K_u] over how many devices the other one
    sums.
    """

    read: int
    group: IntArray


def joint_sum(graph: Graph, edge: Edge, u: LayerTraffic, v: LayerTraffic) -> JointSum | None:
    """Return what the two ends of an edge have to sum; None where no gradient comes back to a fan-out on it."""
    producer = graph[edge.producer]
    if not producer.is_fan_out or edge.input not in v.joint_sums:
        return None
    return JointSum(read=edge.input, group=u.splits.product(producer.partial_dims(producer.reads[0])))


def joint_sum_of_weight(graph: Graph, weight: SharedWeight, u: LayerTraffic) -> JointSum:
    """Return what the owner of a weight and another user of it have to sum."""
    owner = graph[weight.owner]
    over = owner.partial_dims(owner.reads[weight.owner_read])
    return JointSum(read=weight.user_read, group=u.splits.product(over))


def matching_order(owned: Access, used: Access) -> Sequence[int]:
    """Return the user's tensor dims in the owner's order: a table of [v, d] may be read as a weight of [d, v]."""
    # Two dims that are not indexed cannot be told apart by their axes.
    if set(owned.axes) == set(used.axes) and len(set(owned.axes)) == len(owned.axes):
        return [used.axes.index(axis) for axis in owned.axes]
    return range(len(used.axes))
