"""Transfers of a placed graph between devices in a training step, by pair of devices, and each device's weights.

The transfers of an edge follow from the boxes of its two ends; its gradient's are the adjoint. Within a layer, partial
sums are all-reduced: each of k devices reduces 1/k of them and the others gather it; small ones are reduced on the
first device. Weights that several layers share are sent from their first user to the others, their gradients back. ZeRO
sharded weights are all-gathered, and their gradients reduce-scattered.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import chain, takewhile
from math import prod

from pase.graph import ITEMSIZES, Access, AllReduce, AllToAll, Edge, Exchange, Graph, Handoff, Operator, Relayout, Role
from pase.graph.operator import access_dims, split_dim
from pase.sharding.boxes import Box, chunk, extents, num_points, whole
from pase.sharding.edges import (
    JOINING_KINDS,
    PlacedGraph,
    SharedWeight,
    edge_itemsizes,
    edge_steps,
    joint_sum,
    layer_mesh,
    return_steps,
    shared_weights,
    sum_ends,
    summed_dims,
)
from pase.sharding.layouts import DeviceMesh, Layout, layout_of, points_by_device, single_points, tensor_dims
from pase.sharding.reshard import (
    Pairs,
    ReshardStep,
    add_pairs,
    all_reduce_pairs,
    moved_pairs,
    reshard_steps,
    sum_groups,
)
from pase.sharding.shards import padded_shard_points, shard_dims


class Phase(StrEnum):
    """The phase of a step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """Work that the update of the weights needs first: gradient all-reduces; and the all-gather of weights that are
    updated in shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Owner of transferred bytes: an edge, or one layer, which is then both producer and consumer."""

    producer: str
    consumer: str
    phase: Phase

    @classmethod
    def within(cls, layer: str, phase: Phase) -> "Movement":
        """Return the movement within a layer."""
        return cls(producer=layer, consumer=layer, phase=phase)


# -- within a layer


class Purpose(StrEnum):
    """Purpose of a transfer within a layer: its output, gradients of its inputs, exchanges during its computation,
    sharded weights, and their gradients."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    EXCHANGE = "exchange"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class _Within:
    """A transfer within a layer.

    Attributes:
        itemsize: Bytes of a number.
        times: How often it happens in a step.
    """

    tensor: str
    phase: Phase
    purpose: Purpose
    itemsize: int
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed(_Within):
    """An all-reduce of a layer, between the devices that differ along some axes of its mesh.

    Attributes:
        over: The axes.
        points: Points of the shard, by device.
        read: Position of the read whose gradient it is; None for others.
    """

    over: tuple[str, ...]
    points: Mapping[int, int]
    read: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(_Within):
    """Points that a layer sends between its own devices."""

    pairs: Pairs


def layer_movements(plan: PlacedGraph, operator: Operator) -> Iterator[Summed | Sent]:
    """Yield the transfers within a layer in this order: all-reduces of its output, of gradients, and its exchanges.

    Raises as `flows` does.
    """
    graph, mesh = plan.graph, layer_mesh(plan, operator.name)
    passes = forward_passes(plan, operator.name)
    times = passes * plan.micro_batches
    types = graph.types[operator.name]
    if operator.is_loss:
        # A loss writes one number, the mean over all points; programs store nothing else of it.
        over = tuple(dim.name for dim in operator.dims[:-1])
        one = dict.fromkeys(mesh.devices, 1)
        yield Summed("loss", Phase.FORWARD, Purpose.OUTPUT, types.write_bytes(0), times, over=over, points=one)
    for position, write in enumerate(operator.writes if not operator.is_loss else ()):
        points = points_by_device(operator, write, mesh)
        output = write.tensor, Phase.FORWARD, Purpose.OUTPUT, types.write_bytes(position), times
        if position not in operator.wholes:
            yield Summed(*output, over=operator.partial_dims(write), points=points)
        for dim in single_points(write):
            # The part that computes it sends it to the others, which also hold it in a program.
            yield Sent(*output, pairs=_handed(mesh, dim, points))
    for position, read in enumerate(operator.reads):
        phase = gradient_phase(graph, operator, position)
        if phase is not None:
            points = points_by_device(operator, read, mesh)
            size, times = types.gradient_sum_bytes(operator, position), gradient_sum_times(plan, operator, position)
            gradient = f"gradient of {read.tensor}", phase, Purpose.GRADIENT, size, times
            for over in gradient_sums(plan, operator, position):
                along = cut_along(plan, operator, position, over) if phase is Phase.UPDATE else None
                if along is not None:
                    yield from _in_shards(plan, operator, position, along, sum_groups(mesh, over))
                else:
                    yield Summed(*gradient, over=over, points=points, read=position)
    for exchange in operator.exchanges_with(graph.read_gradients(operator), forward_passes=passes):
        times = exchange.times * plan.micro_batches
        yield _exchanged(operator, replace(exchange, times=times), mesh, types.exchange_bytes(exchange))


def cut_along(plan: PlacedGraph, operator: Operator, position: int, over: Iterable[str]) -> int | None:
    """Return the dim along which devices shard a weight's state, by the weight's position among the reads.

    Args:
        plan: The placed graph.
        operator: The layer.
        position: Position of the weight among its reads.
        over: Axes along which its gradient is reduced.

    Returns:
        The dim, or None where the weight is not sharded, as for a weight that other layers read, too.
    """
    mesh, read = layer_mesh(plan, operator.name), operator.reads[position]
    groups = sum_groups(mesh, over)
    if plan[operator.name].state == "replicated" or read.shared or not groups:
        return None
    if _is_needed_back(operator, mesh):
        return None  # The gradient of its input needs the same all-reduces, unsharded.
    layout = layout_of(mesh, tensor_dims(operator, read), layer=operator.name)
    return shard_dim(layout, len(groups[0]))


def shard_dim(layout: Layout, count: int) -> int | None:
    """Return the dim along which groups of `count` devices shard the parts of a weight, None where they cannot.

    It is the same dim for all parts, chosen by the extents of the largest (`shard_dims`).
    """
    dim = int(shard_dims([max(along) for along in zip(*map(extents, layout.boxes), strict=True)], count))
    return None if dim < 0 else dim


def is_needed_backward(graph: Graph, operator: Operator) -> bool:
    """Return whether a layer's backward pass reads its weights, because it computes another tensor's gradient."""
    if operator.kind in ("add_parameter", "embedding"):
        return False
    # Kernels of convolutions and normalisations always take them.
    inputs = [i for i, read in enumerate(operator.reads) if read.role is not Role.PARAMETER]
    is_product = any(work.contraction for work in operator.work) and not operator.kind.startswith("conv")
    return not is_product or any(graph.has_gradient(operator, i) for i in inputs)


def _in_shards(
    plan: PlacedGraph, operator: Operator, position: int, dim: int, groups: Sequence[Sequence[int]]
) -> Iterator[Sent]:
    """Yield the transfers for a weight whose state is sharded along a dim within groups of devices."""
    graph, read, state = plan.graph, operator.reads[position], plan[operator.name].state
    layout = layout_of(layer_mesh(plan, operator.name), tensor_dims(operator, read), layer=operator.name)
    boxes = layout.by_device
    # All-gather and reduce-scatter send equally much: shards are padded to the size of the largest.
    pairs = {
        (device, other): padded_shard_points(extents(boxes[device]), dim, len(group))
        for group in groups
        for device in group
        for other in group
        if other != device
    }
    gathers, count = {Phase.UPDATE: 1}, plan.micro_batches
    if state == "zero3":
        gathers = {Phase.FORWARD: count * forward_passes(plan, operator.name)}
        gathers |= {Phase.BACKWARD: count} if is_needed_backward(graph, operator) else {}
    for phase, times in gathers.items():
        yield Sent(read.tensor, phase, Purpose.WEIGHT, ITEMSIZES[graph.precision.parameters], times, pairs=pairs)
    size = graph.types[operator.name].gradient_sum_bytes(operator, position)
    times = 1 if state == "zero1" else count
    yield Sent(f"gradient of {read.tensor}", Phase.UPDATE, Purpose.WEIGHT, size, times, pairs=pairs)


def _exchanged(operator: Operator, exchange: Exchange, mesh: DeviceMesh, itemsize: int) -> Summed | Sent:
    told = exchange.tensor, Phase.FORWARD, Purpose.EXCHANGE, itemsize, exchange.times
    points = points_by_device(operator, exchange, mesh)
    match exchange:
        case AllReduce():
            return Summed(*told, over=exchange.over, points=points)
        case Relayout(is_ring=True):
            over = [split_dim(written) for written, _ in exchange.changes]
            return Sent(*told, pairs=_in_rings(points, sum_groups(mesh, over)))
        case Relayout():
            written, read_back = (
                layout_of(mesh, tensor_dims(operator, side), layer=operator.name)
                for side in (exchange, replace(exchange, index_map=exchange.read))
            )
            return Sent(*told, pairs=moved_pairs(reshard_steps(written, read_back)))
        case Handoff():
            return Sent(*told, pairs=_handed(mesh, exchange.across, points))
        case AllToAll():
            return Sent(*told, pairs=_routed(exchange, points, sum_groups(mesh, exchange.over)))
    raise AssertionError(exchange)


def forward_passes(plan: PlacedGraph, layer: str) -> int:
    """Return how often a layer's forward pass runs per micro-batch: twice, if it is recomputed and has a backward pass.

    Adjacent recomputed layers are recomputed together, including those without gradients among them.
    """
    if not plan[layer].is_recomputed:
        return 1
    operators, at = plan.graph.operators, plan.graph.index[layer]

    def is_of_run(operator: Operator) -> bool:
        return plan[operator.name].is_recomputed and plan[operator.name].stage == plan[layer].stage

    run = chain(takewhile(is_of_run, operators[at:]), takewhile(is_of_run, reversed(operators[:at])))
    return 1 + any(any(plan.graph.read_gradients(operator)) for operator in run)


def gradient_sums(plan: PlacedGraph, operator: Operator, position: int) -> tuple[tuple[str, ...], ...]:
    """Return the dims of each all-reduce of the gradient of what a layer reads, by the position of the read.

    A layer also reduces for layers to which it sends the tensor on; what these reduce is not listed here.
    """
    read = operator.reads[position]
    own = tuple(dim for dim in operator.extents if dim in summed_dims(operator, read))
    if operator.is_fan_out:
        # Without partial gradients there is nothing to reduce.
        return (own,) if any(joint_sum(plan, edge) for edge in plan.graph.outgoing.get(operator.name, ())) else ()
    edge = plan.graph.incoming.get((operator.name, position))
    if edge is not None and joint_sum(plan, edge):
        return ()
    mesh = layer_mesh(plan, operator.name)
    sums = {tuple(dim for dim in own if mesh.size(dim) > 1)}
    for weight in shared_weights(plan.graph) if read.shared else ():
        if (weight.consumer, weight.input) == (operator.name, position) and joint_sum(plan, weight):
            return ()
        if (weight.producer, weight.output) == (operator.name, position) and joint_sum(plan, weight):
            sums.add(sum_ends(plan, weight)[0].axes)
    return tuple(sorted(sums))


def gradient_sum_times(plan: PlacedGraph, operator: Operator, position: int) -> int:
    """Return how often in a step the gradient of what a layer reads, by position, is reduced.

    That of a weight is reduced once, after the last micro-batch, unless it is first sent to another layer, or is used
    to compute the gradient of a normalisation's input.
    """
    read, mesh = operator.reads[position], layer_mesh(plan, operator.name)
    if read.role is not Role.PARAMETER or _is_needed_back(operator, mesh):
        return plan.micro_batches
    if read.shared and len(plan.graph.sharing[read.shared]) > 1:
        owned = operator.name, position
        uses = [use for use in shared_weights(plan.graph) if (use.producer, use.output) == owned]
        is_joint = (
            uses and all(joint_sum(plan, use) for use in uses) and len(gradient_sums(plan, operator, position)) == 1
        )
        return 1 if is_joint else plan.micro_batches
    return 1


def _is_needed_back(operator: Operator, mesh: DeviceMesh) -> bool:
    """Return whether a layer normalises over split dims: its backward pass then uses its weights' gradients."""

    def long(dims: Iterable[str]) -> set[str]:
        return {dim for dim in dims if operator.extents[dim] > 1}

    steps = operator.body.steps if operator.body else ()
    over = {dim for step in steps if step.function in ("batch_norm", "normalise") for dim in step.dims}
    kept = long(access_dims(operator.reads[0])) - over
    weights = operator.parameters
    return (
        any(mesh.size(dim) > 1 for dim in over)
        and len(weights) == 2
        and all(long(access_dims(weight)) == kept for weight in weights)
    )


def gradient_phase(graph: Graph, operator: Operator, position: int) -> Phase | None:
    """Return the phase in which the gradient of what a layer reads, by position, is reduced; None if it has none."""
    read = operator.reads[position]
    if not graph.has_gradient(operator, position):
        return None
    # A shared weight's gradients are reduced before the update.
    is_own = read.role is Role.PARAMETER and not (read.shared and len(graph.sharing[read.shared]) > 1)
    return Phase.UPDATE if is_own else Phase.BACKWARD


def _handed(mesh: DeviceMesh, across: str, points: Mapping[int, int]) -> Pairs:
    """Return the points that each part along an axis sends to the next."""
    where = {tuple(point.items()): device for point, device in zip(mesh.coordinates, mesh.devices, strict=True)}
    pairs: Pairs = {}
    for point, device in zip(mesh.coordinates, mesh.devices, strict=True):
        following = where.get(tuple({**point, across: point[across] + 1}.items())) if across in point else None
        if following is not None:
            add_pairs(pairs, [((device, following), points[device])])
    return pairs


def _in_rings(points: Mapping[int, int], groups: Iterable[Sequence[int]]) -> Pairs:
    """Return the points sent to the next device of a ring when all parts circulate: all except the receiver's own."""
    return {
        (device, following): sum(points[other] for other in group) - points[following]
        for group in groups
        for device, following in zip(group, (*group[1:], group[0]), strict=True)
    }


def _routed(exchange: AllToAll, points: Mapping[int, int], groups: Sequence[Sequence[int]]) -> Pairs:
    """Return the points that devices send each other if rows are routed evenly; none for rows in place."""
    if exchange.excess is not None:
        return {}
    return {
        (sender, device): points[device] * min(len(group), exchange.copies) // (exchange.copies * len(group))
        for group in groups
        for device in group
        for sender in group
        if sender != device
    }


# -- a whole step


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Transfers of one tensor in one phase, on an edge or within a layer; `bytes_by_pair` is by (sender, receiver)."""

    tensor: str
    movement: Movement
    bytes_by_pair: Mapping[tuple[int, int], int]

    @cached_property
    def total_bytes(self) -> int:
        """Total over all pairs of devices."""
        return sum(self.bytes_by_pair.values())

    @property
    def is_of_edge(self) -> bool:
        """Whether it is the flow of an edge, between two layers."""
        return self.movement.producer != self.movement.consumer

    def between(self, producer: str, consumer: str) -> "Flow":
        """Return this flow between other layers with equal layouts; within a layer, it becomes the consumer's."""
        ends = Movement(
            producer=producer if self.is_of_edge else consumer, consumer=consumer, phase=self.movement.phase
        )
        return Flow(tensor=self.tensor, movement=ends, bytes_by_pair=self.bytes_by_pair)


def flows(plan: PlacedGraph) -> tuple[Flow, ...]:
    """Return all transfers of a placed plan in a step; ProgramError or EmitError where a layer's splits fit no mesh.

    Numbers have the element types of the plan's graph. Exchanges within an operator count as forward, in either pass.
    """
    # Equal layers with equal layouts have one number.
    numbers: dict[Hashable, int] = {}
    layouts = {
        name: numbers.setdefault(
            (operator.unnamed, plan.graph.types[name], layer_mesh(plan, name), plan[name].state), len(numbers)
        )
        for name, operator in zip(plan.graph.index, plan.graph.operators, strict=True)
    }
    known: dict[Hashable, tuple[Flow, ...]] = {}
    found: list[Flow] = []

    def add(key: Hashable, producer: str, consumer: str, flows_of: Callable[[], Iterable[Flow]]) -> None:
        # Repeated layers with equal layouts have equal transfers: compute those of the first only.
        if key not in known:
            known[key] = tuple(flow for flow in flows_of() if flow.bytes_by_pair)
        found.extend(flow.between(producer, consumer) for flow in known[key])

    for edge in plan.graph.edges:
        ends = layouts[edge.producer], edge.output, layouts[edge.consumer], edge.input
        goes_back = plan.graph.has_gradient(plan.graph[edge.consumer], edge.input)
        key: Hashable = "edge", *ends, goes_back, forward_passes(plan, edge.consumer)
        add(key, edge.producer, edge.consumer, partial(edge_flows, plan, edge))
    found += (flow for weight in shared_weights(plan.graph) for flow in edge_flows(plan, weight) if flow.bytes_by_pair)
    for operator in plan.graph.operators:
        sums = tuple(
            (phase, gradient_sums(plan, operator, i), gradient_sum_times(plan, operator, i))
            for i in range(len(operator.reads))
            if (phase := gradient_phase(plan.graph, operator, i))
        )
        name = operator.name
        key = "layer", layouts[name], sums, forward_passes(plan, name)
        add(key, name, name, partial(_layer_flows, plan, operator))
    return tuple(found)


def bytes_by_movement(found: Iterable[Flow]) -> dict[Movement, int]:
    """Return the bytes of each edge and each layer, by phase."""
    total: dict[Movement, int] = {}
    for flow in found:
        total[flow.movement] = total.get(flow.movement, 0) + flow.total_bytes
    return total


def edge_bytes(plan: PlacedGraph, edge: Edge) -> tuple[int, int]:
    """Return the bytes that an edge moves between devices in a step, forward and backward."""
    sizes = dict.fromkeys(Phase, 0)
    for flow in edge_flows(plan, edge):
        sizes[flow.movement.phase] += flow.total_bytes
    return sizes[Phase.FORWARD], sizes[Phase.BACKWARD]


def edge_flows(plan: PlacedGraph, edge: Edge) -> Iterator[Flow]:
    """Yield the transfers of an edge, or between users of a shared weight, in a step: both ways, hop by hop."""
    consumer = plan.graph[edge.consumer]
    read, is_weight = consumer.reads[edge.input], isinstance(edge, SharedWeight)
    there_bytes, back_bytes = (size * plan.micro_batches for size in edge_itemsizes(plan.graph, edge))
    if plan[edge.producer].stage == plan[edge.consumer].stage:
        # Tensors received from another stage are stored.
        there_bytes *= forward_passes(plan, edge.consumer)
    steps = edge_steps(plan, edge)
    back = return_steps(plan, edge, steps) if plan.graph.has_gradient(consumer, edge.input) else ()
    ways: list[tuple[str, Sequence[ReshardStep], Sequence[ReshardStep]]] = []
    if len(steps) > 1 and consumer.kind in JOINING_KINDS:
        # An input of another shape is first redistributed to the consumer's devices, then joined there.
        ways.append((edge.consumer, steps[-1:], back[:1]))
        steps, back = steps[:-1], back[1:]
    tensor = read.shared if is_weight else read.tensor
    for producer, there, returned in (*ways, (edge.producer, steps, back)):
        yield _flow(tensor, producer, edge.consumer, Phase.FORWARD, moved_pairs(there), there_bytes)
        yield _flow(tensor, producer, edge.consumer, Phase.BACKWARD, moved_pairs(returned), back_bytes)


def _layer_flows(plan: PlacedGraph, operator: Operator) -> Iterator[Flow]:
    mesh, name = layer_mesh(plan, operator.name), operator.name
    for found in layer_movements(plan, operator):
        pairs = all_reduce_pairs(mesh, found.over, found.points) if isinstance(found, Summed) else found.pairs
        yield _flow(found.tensor, name, name, found.phase, pairs, found.itemsize * found.times)


def _flow(tensor: str, producer: str, consumer: str, phase: Phase, points: Pairs, itemsize: int) -> Flow:
    return Flow(
        tensor=tensor,
        movement=Movement(producer=producer, consumer=consumer, phase=phase),
        bytes_by_pair={ends: count * itemsize for ends, count in points.items() if count},
    )


Slots = Callable[[tuple[int, ...]], Mapping[str, Sequence[int]]]
"""Maps a weight's shape to the optimiser's state tensors: by name, the dims of the weight that each tensor has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A weight of a layer.

    Attributes:
        parts: [devices] the box of it that each device holds; equal for replicas.
        is_trained: Whether it is trained, not frozen.
        updated: The box that the first device updates; a shard of its part where the state is sharded.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    parts: tuple[Box, ...]
    updated: Box
    is_trained: bool

    @property
    def size(self) -> int:
        """Number of elements of the whole weight."""
        return num_points(whole(self.shape))


def held_weights(plan: PlacedGraph) -> tuple[HeldWeight, ...]:
    """Return every weight of a placed graph once, at the layer that owns it: shared ones at their first user.

    Devices of other stages hold none of it.
    """
    shared = {(weight.consumer, weight.input) for weight in shared_weights(plan.graph)}
    found = []
    for operator in plan.graph.operators:
        for i, access in enumerate(operator.reads):
            if access.role is not Role.PARAMETER or (operator.name, i) in shared:
                continue
            layout = layout_of(layer_mesh(plan, operator.name), tensor_dims(operator, access), layer=operator.name)
            parts, nothing = layout.by_device, ((0, 0),) * len(layout.shape)
            found.append(
                HeldWeight(
                    layer=operator.name,
                    name=parameter_name(operator, access),
                    shape=layout.shape,
                    parts=tuple(parts.get(device, nothing) for device in range(plan.num_devices)),
                    updated=_updated(plan, operator, i, layout.boxes[0]),
                    is_trained=access.is_trained,
                )
            )
    return tuple(found)


def _updated(plan: PlacedGraph, operator: Operator, position: int, part: Box) -> Box:
    mesh = layer_mesh(plan, operator.name)
    for over in gradient_sums(plan, operator, position):
        dim = cut_along(plan, operator, position, over)
        if dim is not None:
            low, high = part[dim]
            cut = low, low + chunk(high - low, len(sum_groups(mesh, over)[0]), 0)[1]
            return (*part[:dim], cut, *part[dim + 1 :])
    return part


def parameters_per_device(weights: Sequence[HeldWeight]) -> tuple[int, ...]:
    """Return [devices] the number of parameters that each one holds."""
    return tuple(sum(map(num_points, parts)) for parts in zip(*(weight.parts for weight in weights), strict=True))


def optimiser_numbers(weights: Sequence[HeldWeight], slots: Slots) -> int:
    """Return how many numbers an optimiser with these slots stores on a device, if all parts have one size."""
    return sum(
        prod(high - low for i, (low, high) in enumerate(weight.updated) if i in kept)
        for weight in weights
        if weight.is_trained
        for kept in slots(weight.shape).values()
    )


def parameter_name(operator: Operator, access: Access) -> str:
    """Return the name of a parameter, the same for all layers that share it."""
    return access.shared or f"{operator.name}/{access.tensor}"
