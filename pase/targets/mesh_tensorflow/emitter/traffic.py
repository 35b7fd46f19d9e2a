"""Bytes that an edge moves under a plan, from the boxes that its ends hold and need."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pase.costs import SharedWeight
from pase.graph import Access, Edge, Operator, Part, Window
from pase.graph.access import access_dims
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.kinds import KINDS
from pase.targets.mesh_tensorflow.runtime.initial import shared_order
from pase.targets.mesh_tensorflow.runtime.joint_sums import SumEnd, joint_hops
from pase.targets.mesh_tensorflow.runtime.layouts import DeviceMesh, Layout, PlainDim, device_mesh, layout_of, shifted
from pase.targets.mesh_tensorflow.runtime.moves import moved_points
from pase.targets.mesh_tensorflow.runtime.refine import Hop, hops
from pase.targets.mesh_tensorflow.runtime.tensor_dims import tensor_dims

INDEX_BYTES = 4


def layer_mesh(plan: Plan, name: str) -> DeviceMesh:
    """Return the mesh of a layer; RuntimeFailure where its splits and devices are none."""
    layer = plan[name]
    return device_mesh(name, layer.splits.items(), plan.num_devices, layer.devices)


def edge_hops(plan: Plan, edge: Edge) -> tuple[Hop, ...]:
    """Return the movements that take an edge's tensor from its producer to its consumer; a piece is taken out first."""
    producer = plan.graph[edge.producer]
    write = producer.writes[edge.output]
    mesh = layer_mesh(plan, edge.producer)
    parts = [(i, axis) for i, axis in enumerate(write.axes) if isinstance(axis, Part) and axis.extent > 1]
    if not parts:
        return _steps(plan, edge, layout_of(mesh, tensor_dims(producer, write), layer=edge.producer))
    ((position, part),) = parts
    # As the whole tensor, but that the dim of the piece is not split.
    full = replace(
        write,
        shape=(*write.shape[:position], producer.extents[part.dim], *write.shape[position + 1 :]),
        axes=(*write.axes[:position], part.dim, *write.axes[position + 1 :]),
    )
    own = list(tensor_dims(producer, full))
    whole = layout_of(mesh, own, layer=edge.producer)
    place = next(i for i, dim in enumerate(own) if isinstance(dim, PlainDim) and dim.name == part.dim)
    own[place] = PlainDim(f"{part.dim}[{part.offset}]", part.extent)
    piece = layout_of(mesh, own, layer=edge.producer)
    return (Hop(whole, shifted(piece, whole.shape, place, part.offset)), *_steps(plan, edge, piece))


def edge_bytes(plan: Plan, edge: Edge) -> tuple[int, int]:
    """Return the bytes that an edge moves between devices in a step, forward and backward."""
    consumer = plan.graph[edge.consumer]
    read = consumer.reads[edge.input]
    steps = edge_hops(plan, edge)
    word_bytes = plan.graph.word_bytes if read.is_differentiable else INDEX_BYTES
    forward = sum(moved_points(hop) for hop in steps)
    has_gradient = plan.graph.has_gradient(consumer, edge.input)
    backward = sum(map(moved_points, return_hops(plan, edge, steps))) if has_gradient else 0
    return forward * word_bytes, backward * word_bytes


def return_hops(plan: Plan, edge: Edge, steps: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the movements that take an edge's gradient back; steps: those that take its tensor."""
    joint = joint_sum(plan, edge)
    return tuple(hop.adjoint for hop in reversed(steps)) if joint is None else joint


def joint_sum(plan: Plan, edge: Edge) -> tuple[Hop, ...] | None:
    """Return the movements of a gradient that a fan-out sums for its reader; None where the reader sums its own."""
    producer, consumer = plan.graph[edge.producer], plan.graph[edge.consumer]
    if not producer.is_fan_out or _is_laid(consumer) or not plan.graph.has_gradient(consumer, edge.input):
        return None
    handed, read = producer.reads[0], consumer.reads[edge.input]
    giver = SumEnd(layer_mesh(plan, edge.producer), tensor_dims(producer, handed), summed_dims(producer, handed))
    dims = tensor_dims(consumer, read)
    return _joint_hops(giver, SumEnd(layer_mesh(plan, edge.consumer), dims, summed_dims(consumer, read)))


def weight_ends(plan: Plan, weight: SharedWeight) -> tuple[SumEnd, SumEnd]:
    """Return the owner of a shared weight and another user of it, the weight's dims in the owner's order."""
    owner, user = plan.graph[weight.owner], plan.graph[weight.user]
    owned, used = owner.reads[weight.owner_read], user.reads[weight.user_read]
    dims = tensor_dims(user, used)
    order = shared_order(plan.graph, user, used)
    if len(dims) == len(order):
        dims = tuple(dims[order.index(i)] for i in range(len(order)))
    mesh, own = layer_mesh(plan, owner.name), tensor_dims(owner, owned)
    # As a program takes it: parts of whatever the weight lacks.
    lacking = frozenset(owner.extents) - access_dims(owned)
    return SumEnd(mesh, own, lacking), SumEnd(layer_mesh(plan, user.name), dims, summed_dims(user, used))


def joint_sum_of_weight(plan: Plan, weight: SharedWeight) -> tuple[Hop, ...] | None:
    """Return the movements of a gradient that a weight's owner sums for a user; None where that sums its own."""
    return _joint_hops(*weight_ends(plan, weight))


# Repeated layers lie alike, and several pieces of a program ask the same.
_joint_hops = lru_cache(maxsize=4096)(joint_hops)


def summed_dims(operator: Operator, read: Access) -> frozenset[str]:
    """Return the dims whose split leaves parts of the gradient of what a layer reads, to be summed.

    Parts of a kernel read different windows: on their way back these are added where they overlap. All parts hold what
    the first alone reads of a dim: theirs are sums to which the others add nothing.
    """
    kernels = {axis.kernel for axis in read.axes if isinstance(axis, Window)}
    return frozenset({*operator.partial_dims(read), *single_points(read)} - kernels)


def single_points(access: Access) -> tuple[str, ...]:
    """Return the dims of which one point is read or written, such as a stack's first layer or its last."""
    return tuple(axis.dim for axis in access.axes if isinstance(axis, Part) and axis.extent == 1)


_LAID = frozenset({"padded"})
"""Kinds whose inputs are laid into what they write, besides those that join."""


def _is_laid(consumer: Operator) -> bool:
    return consumer.kind in _LAID or (consumer.kind in KINDS and KINDS[consumer.kind].joins)


def _steps(plan: Plan, edge: Edge, source: Layout) -> tuple[Hop, ...]:
    consumer = plan.graph[edge.consumer]
    read = consumer.reads[edge.input]
    mesh = layer_mesh(plan, edge.consumer)
    if not _is_laid(consumer):
        return hops(source, layout_of(mesh, tensor_dims(consumer, read), layer=edge.consumer))
    # Joined along one dim, or padded: the source is a piece of what the consumer writes.
    parts = [(i, axis) for i, axis in enumerate(read.axes) if isinstance(axis, Part)]
    dims = tensor_dims(consumer, consumer.writes[0])
    target = layout_of(mesh, dims, layer=edge.consumer)
    before: tuple[Hop, ...] = ()
    if source.shape != read.shape:
        own = list(dims)
        for position, axis in parts:
            own[position] = PlainDim(f"{axis.dim}_{edge.input}", axis.extent)
        brought = layout_of(mesh, own, layer=edge.consumer)
        before, source = hops(source, brought), brought
    for position, axis in parts:
        source = shifted(source, target.shape, position, axis.offset)
    return (*before, Hop(source, target))
