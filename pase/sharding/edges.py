"""Transfers along the edges of a placed graph, computed from the boxes at both ends; shared weights are edges, too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from pase.graph import ITEMSIZES, Access, Edge, Graph, Operator, SliceOf, Window
from pase.graph.operator import DimIndex, access_dims
from pase.sharding.layouts import (
    DeviceMesh,
    Layout,
    PlainDim,
    device_mesh,
    layout_of,
    shifted,
    single_points,
    tensor_dims,
)
from pase.sharding.reshard import ReshardStep, SumEnd, joint_steps, reshard_steps

JOINING_KINDS = frozenset({"concat"})
"""Kinds of layers that take their inputs on the inputs' own meshes, and join them into one output."""

LAID_KINDS = JOINING_KINDS | {"padded"}
"""Kinds of layers that place their inputs into a larger output."""

# Repeated layers have equal layouts, and several parts of a program request the same transfers.
_joint_steps = lru_cache(maxsize=4096)(joint_steps)


class LayerMode(Protocol):
    """A layer's entry in a strategy."""

    @property
    def splits(self) -> Mapping[str, int]:
        """The split factor of each iteration dim."""

    @property
    def state(self) -> str:
        """How devices that hold the same part of a weight store its state (`pase.planning.plan.STATES`)."""

    @property
    def is_recomputed(self) -> bool:
        """Whether the forward pass is recomputed before the backward pass."""


class PlacedLayer(LayerMode, Protocol):
    """A layer on devices: a split factor for each dim, and the device of each part, then of the replicas."""

    @property
    def devices(self) -> tuple[int, ...]:
        """[p] row-major over the dims that are split, then the replicas."""

    @property
    def stage(self) -> int:
        """Pipeline stage that the layer belongs to, from 0."""


class PlacedGraph(Protocol):
    """A graph on devices, such as a plan; gives each layer by name."""

    @property
    def graph(self) -> Graph:
        """Its layers and edges."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step; the graph computes one of them."""

    def __getitem__(self, name: str) -> PlacedLayer: ...


def layer_mesh(plan: PlacedGraph, name: str) -> DeviceMesh:
    """Return the mesh of a layer; ProgramError where its splits and devices are inconsistent.

    A layer of a pipeline is placed on the devices of its stage only.
    """
    layer = plan[name]
    if len(layer.devices) == plan.num_devices:
        return device_mesh(name, layer.splits.items(), plan.num_devices, layer.devices)
    own = sorted(layer.devices)
    mesh = device_mesh(name, layer.splits.items(), len(own), [own.index(device) for device in layer.devices])
    return replace(mesh, devices=layer.devices)


def edge_steps(plan: PlacedGraph, edge: Edge) -> tuple[ReshardStep, ...]:
    """Return the transfers that take an edge's tensor, or a slice of it, from its producer to its consumer."""
    if isinstance(edge, SharedWeight):
        ends = sum_ends(plan, edge)
        names = edge.producer, edge.consumer
        return reshard_steps(
            *(layout_of(end.mesh, end.dims, layer=name) for end, name in zip(ends, names, strict=True))
        )
    producer = plan.graph[edge.producer]
    write = producer.writes[edge.output]
    mesh = layer_mesh(plan, edge.producer)
    parts = [(i, axis) for i, axis in enumerate(write.index_map) if isinstance(axis, SliceOf) and axis.extent > 1]
    if not parts:
        return _steps(plan, edge, layout_of(mesh, tensor_dims(producer, write), layer=edge.producer))
    # Like the whole tensor, except that the dims of the slice are not split.
    shape, axes = list(write.shape), list(write.index_map)
    for position, part in parts:
        shape[position], axes[position] = producer.extents[part.dim], part.dim
    own = list(tensor_dims(producer, replace(write, shape=tuple(shape), index_map=tuple(axes))))
    source, cuts = layout_of(mesh, own, layer=edge.producer), list[ReshardStep]()
    for _, part in parts:
        place = next(i for i, dim in enumerate(own) if isinstance(dim, PlainDim) and dim.name == part.dim)
        own[place] = PlainDim(f"{part.dim}[{part.offset}]", part.extent)
        piece = layout_of(mesh, own, layer=edge.producer)
        cuts.append(ReshardStep(source, shifted(piece, source.shape, place, part.offset)))
        source = piece
    return (*cuts, *_steps(plan, edge, source))


def return_steps(plan: PlacedGraph, edge: Edge, steps: Sequence[ReshardStep]) -> tuple[ReshardStep, ...]:
    """Return the transfers that take an edge's gradient back; `steps` are those of its tensor."""
    joint = joint_sum(plan, edge)
    return tuple(step.adjoint for step in reversed(steps)) if joint is None else joint


def joint_sum(plan: PlacedGraph, edge: Edge) -> tuple[ReshardStep, ...] | None:
    """Return the transfers of a gradient that the producer reduces for the consumer; None where the consumer does.

    Fan-outs reduce for their consumers, the owner of a weight for its other users.
    """
    consumer = plan.graph[edge.consumer]
    is_handed = plan.graph[edge.producer].is_fan_out and consumer.kind not in LAID_KINDS
    is_joint = is_handed or isinstance(edge, SharedWeight)
    if not is_joint or not plan.graph.has_gradient(consumer, edge.input):
        return None
    return _joint_steps(*sum_ends(plan, edge))


def sum_ends(plan: PlacedGraph, edge: Edge) -> tuple[SumEnd, SumEnd]:
    """Return a fan-out and its consumer, or the owner of a weight and another user, as the two ends of a reduction."""
    producer, consumer = plan.graph[edge.producer], plan.graph[edge.consumer]
    if isinstance(edge, SharedWeight):
        handed, read = weight_accesses(plan.graph, edge)
        # As a program reads it: dims that the weight lacks leave partial gradients.
        over = frozenset(producer.extents) - access_dims(handed)
    else:
        handed, read = producer.reads[0], consumer.reads[edge.input]
        over = summed_dims(producer, handed)
    return (
        SumEnd(layer_mesh(plan, edge.producer), tensor_dims(producer, handed), over),
        SumEnd(layer_mesh(plan, edge.consumer), tensor_dims(consumer, read), summed_dims(consumer, read)),
    )


def summed_dims(operator: Operator, read: Access) -> frozenset[str]:
    """Return the dims whose split leaves partial gradients of what a layer reads, which must be reduced.

    The parts of a convolution's kernel read different windows: their gradients are added where they overlap when they
    are sent back. A slice that only the first part reads is held by all parts; the others contribute zeros to its sum.
    Inputs that are placed into a larger output read their gradient from their place in it, for one point as for
    several.
    """
    singles = () if operator.kind in LAID_KINDS else single_points(read)
    kernels = {axis.kernel for axis in read.index_map if isinstance(axis, Window)}
    return frozenset({*operator.partial_dims(read), *singles} - kernels)


def _steps(plan: PlacedGraph, edge: Edge, source: Layout) -> tuple[ReshardStep, ...]:
    consumer = plan.graph[edge.consumer]
    read = consumer.reads[edge.input]
    mesh = layer_mesh(plan, edge.consumer)
    if consumer.kind not in LAID_KINDS:
        return reshard_steps(source, layout_of(mesh, tensor_dims(consumer, read), layer=edge.consumer))
    # Concatenated along one dim, or padded: the source is a slice of the consumer's output, with dims in any order.
    # Layouts have a dim for each iteration dim.
    read, write = _taken_apart(consumer, read), _taken_apart(consumer, consumer.writes[0])
    order = [write.index_map.index(axis.dim if isinstance(axis, SliceOf) else axis) for axis in read.index_map]
    dims = tensor_dims(consumer, write)
    target = layout_of(mesh, dims, layer=edge.consumer)
    own = list(dims)
    for place, axis in zip(order, read.index_map, strict=True):
        if isinstance(axis, SliceOf):
            own[place] = PlainDim(f"{axis.dim}_{edge.input}", axis.extent)
    before: tuple[ReshardStep, ...] = ()
    if source.shape != read.shape or order != sorted(order):
        brought = layout_of(mesh, [own[place] for place in order], layer=edge.consumer)
        before, source = reshard_steps(source, brought), layout_of(mesh, own, layer=edge.consumer)
    for place, axis in zip(order, read.index_map, strict=True):
        if isinstance(axis, SliceOf):
            source = shifted(source, target.shape, place, axis.offset)
    return (*before, ReshardStep(source, target))


def _taken_apart(operator: Operator, access: Access) -> Access:
    """Return an access that has a separate tensor dim for each iteration dim, also where several index one dim."""
    axes: list[DimIndex] = []
    shape: list[int] = []
    for axis, extent in zip(access.index_map, access.shape, strict=True):
        if isinstance(axis, tuple):
            axes += axis
            shape += [operator.extents[name] for name in axis]
        else:
            axes.append(axis)
            shape.append(extent)
    return replace(access, index_map=tuple(axes), shape=tuple(shape))


# -- shared weights


class SharedWeight(Edge):
    """A weight that the consumer shares with its owner, the producer; `output` is its position in the owner's reads."""

    __slots__ = ()


def table_edges(graph: Graph) -> tuple[Edge, ...]:
    """Return the pairs of layers with transfer costs: the edges of a graph, then the weights that layers share."""
    return (*graph.edges, *shared_weights(graph))


def edge_sides(graph: Graph, edge: Edge) -> tuple[tuple[Operator, Access], tuple[Operator, Access]]:
    """Return (producer, its tensor) and (consumer, its read of it); a shared weight's dims are in its owner's order."""
    producer, consumer = graph[edge.producer], graph[edge.consumer]
    if isinstance(edge, SharedWeight):
        owned, used = weight_accesses(graph, edge)
        return (producer, owned), (consumer, used)
    return (producer, producer.writes[edge.output]), (consumer, consumer.reads[edge.input])


def edge_itemsizes(graph: Graph, edge: Edge) -> tuple[int, int]:
    """Return the bytes per number that an edge transfers forward, and of its gradient backward."""
    if isinstance(edge, SharedWeight):
        return ITEMSIZES[graph.precision.parameters], ITEMSIZES[graph.precision.gradients]
    size = graph.types[edge.consumer].read_bytes(edge.input)
    return size, size


def shared_weights(graph: Graph) -> tuple[SharedWeight, ...]:
    """Return every use of a shared weight but its first, in the order of the graph."""
    if not graph.sharing:
        return ()
    return tuple(
        SharedWeight(producer=owner, output=read, consumer=operator.name, input=position)
        for operator in graph.operators
        for position, access in enumerate(operator.reads)
        if access.shared
        for owner, read in graph.sharing[access.shared][:1]
        if owner != operator.name
    )


def weight_accesses(graph: Graph, weight: SharedWeight) -> tuple[Access, Access]:
    """Return how the owner of a shared weight and another user of it read it, the user's dims in the owner's order.

    A table of [v, d] may be read as a weight of [d, v].
    """
    owned, used = graph[weight.producer].reads[weight.output], graph[weight.consumer].reads[weight.input]
    # The axes do not distinguish two dims that are not indexed.
    if set(owned.index_map) != set(used.index_map) or len(set(owned.index_map)) < len(owned.index_map):
        return owned, used
    order = [used.index_map.index(axis) for axis in owned.index_map]
    return owned, replace(used, shape=tuple(used.shape[i] for i in order), index_map=owned.index_map)
