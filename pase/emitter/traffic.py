"""Bytes that an edge moves under a plan, from the boxes that its ends hold and need."""

from dataclasses import replace

from pase.emitter.kinds import KINDS
from pase.graph import Edge, Part
from pase.plan import Plan
from pase.runtime.layouts import DeviceMesh, Layout, PlainDim, device_mesh, layout_of, shifted
from pase.runtime.moves import moved_points
from pase.runtime.refine import Hop, hops
from pase.runtime.tensor_dims import tensor_dims

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
    backward = sum(moved_points(hop.adjoint) for hop in steps) if plan.graph.has_gradient(consumer, edge.input) else 0
    return forward * word_bytes, backward * word_bytes


_LAID = frozenset({"padded"})
"""Kinds whose inputs are laid into what they write, besides those that join."""


def _steps(plan: Plan, edge: Edge, source: Layout) -> tuple[Hop, ...]:
    consumer = plan.graph[edge.consumer]
    read = consumer.reads[edge.input]
    mesh = layer_mesh(plan, edge.consumer)
    is_laid = consumer.kind in _LAID or (consumer.kind in KINDS and KINDS[consumer.kind].joins)
    if not is_laid:
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
