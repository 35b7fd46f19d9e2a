"""Bytes that a placed plan moves between devices in a step, by edge, by layer and by pair of devices: no framework.

Edges move what the boxes of their two ends say, on the way back the adjoint. Within a layer, partial sums are added:
each of k devices adds a k-th of them and the others gather it; small ones are added on the first device. Weights
that several layers share go from their first user to the others, their gradients back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from pase.costs import SharedWeight, shared_weights
from pase.emitter.kinds import KINDS
from pase.emitter.traffic import INDEX_BYTES, edge_hops, layer_mesh, needs_gradient
from pase.graph import Access, AllReduce, Axis, Graph, Handoff, Operator, Part, Relayout, Role, Window
from pase.plan import Plan
from pase.runtime.boxes import num_points
from pase.runtime.initial import shared_order
from pase.runtime.layouts import DeviceMesh, PlainDim, layout_of
from pase.runtime.moves import pieces
from pase.runtime.refine import Hop, hops
from pase.runtime.tensor_dims import tensor_dims
from pase.runtime.traffic import SMALL_POINTS, Movement, Phase

Pairs = dict[tuple[int, int], int]
"""Points, or bytes, that go from one device to another."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one tensor moves in one phase: of an edge, or within a layer. bytes_by_pair: (sender, receiver) → bytes."""

    tensor: str
    movement: Movement
    bytes_by_pair: Mapping[tuple[int, int], int]

    @cached_property
    def total_bytes(self) -> int:
        """Between all devices."""
        return sum(self.bytes_by_pair.values())

    @property
    def is_of_edge(self) -> bool:
        """Whether two layers are involved."""
        return self.movement.producer != self.movement.consumer


def flows(plan: Plan) -> tuple[Flow, ...]:
    """Return what a placed plan moves in a step; RuntimeFailure or EmitError where a layer's splits fit no mesh.

    Words are those of the plan's graph, 4 bytes by default. What an operator exchanges inside itself counts as forward,
    whatever pass it is of.
    """
    moved: dict[Hop, Pairs] = {}
    found = [*_edge_flows(plan, moved), *_shared_flows(plan, moved)]
    for operator in plan.graph.operators:
        found += _layer_flows(plan, operator, moved)
    return tuple(flow for flow in found if flow.bytes_by_pair)


def bytes_by_movement(found: Iterable[Flow]) -> dict[Movement, int]:
    """Return the bytes of each edge and each layer, by phase."""
    total: dict[Movement, int] = {}
    for flow in found:
        total[flow.movement] = total.get(flow.movement, 0) + flow.total_bytes
    return total


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
    for group in _groups(mesh, frozenset(over)):
        count = len(group)
        if shard_points < max(SMALL_POINTS, count):
            first, *others = group
            _add(pairs, ((ends, shard_points) for other in others for ends in ((other, first), (first, other))))
            continue
        shares = [shard_points // count + (i < shard_points % count) for i in range(count)]
        for device, share in zip(group, shares, strict=True):
            others = [other for other in group if other != device]
            # To the one that adds this share, and from it.
            _add(pairs, ((ends, share) for other in others for ends in ((other, device), (device, other))))
    return pairs


def _groups(mesh: DeviceMesh, over: frozenset[str]) -> list[list[int]]:
    """Return the devices that differ along some axes alone."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device, point in zip(mesh.devices, mesh.coordinates, strict=True):
        key = tuple((axis, at) for axis, at in point.items() if axis not in over)
        groups.setdefault(key, []).append(device)
    return [group for group in groups.values() if len(group) > 1]


def _edge_flows(plan: Plan, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    gradients: dict[str, bool] = {}
    for edge in plan.graph.edges:
        read = plan.graph[edge.consumer].reads[edge.input]
        if read.is_differentiable and edge.producer not in gradients:
            gradients[edge.producer] = needs_gradient(plan.graph, edge)
        word_bytes = plan.graph.word_bytes if read.is_differentiable else INDEX_BYTES
        has_gradient = read.is_differentiable and gradients[edge.producer]
        steps = list(edge_hops(plan, edge))
        consumer = plan.graph[edge.consumer]
        if len(steps) > 1 and consumer.kind in KINDS and KINDS[consumer.kind].joins:
            # What comes in another shape is brought to the consumer's devices before it is joined there.
            last = [steps.pop()]
            yield from _both_ways(read.tensor, edge.consumer, edge.consumer, last, moved, word_bytes, has_gradient)
        yield from _both_ways(read.tensor, edge.producer, edge.consumer, steps, moved, word_bytes, has_gradient)


def _both_ways(
    tensor: str,
    producer: str,
    consumer: str,
    steps: Sequence[Hop],
    moved: dict[Hop, Pairs],
    word_bytes: int,
    has_gradient: bool,
) -> Iterator[Flow]:
    yield _flow(tensor, producer, consumer, Phase.FORWARD, _moved(steps, moved), word_bytes)
    if has_gradient:
        back = [hop.adjoint for hop in steps]
        yield _flow(tensor, producer, consumer, Phase.BACKWARD, _moved(back, moved), word_bytes)


def _shared_flows(plan: Plan, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    for weight in shared_weights(plan.graph):
        tensor = plan.graph[weight.user].reads[weight.user_read].shared
        steps = _shared_hops(plan, weight)
        yield from _both_ways(tensor, weight.owner, weight.user, steps, moved, plan.graph.word_bytes, True)


def _shared_hops(plan: Plan, weight: SharedWeight) -> tuple[Hop, ...]:
    owner, user = plan.graph[weight.owner], plan.graph[weight.user]
    owned, used = owner.reads[weight.owner_read], user.reads[weight.user_read]
    dims = tensor_dims(user, used)
    order = shared_order(plan.graph, user, used)
    if len(dims) == len(order):
        dims = tuple(dims[order.index(i)] for i in range(len(order)))
    source = layout_of(layer_mesh(plan, owner.name), tensor_dims(owner, owned), layer=owner.name)
    return hops(source, layout_of(layer_mesh(plan, user.name), dims, layer=user.name))


def _layer_flows(plan: Plan, operator: Operator, moved: dict[Hop, Pairs]) -> Iterator[Flow]:
    graph, mesh, name = plan.graph, layer_mesh(plan, operator.name), operator.name
    is_loss = operator.kind in KINDS and KINDS[operator.kind].is_loss

    def summed(tensor: str, phase: Phase, over: Iterable[str], points: int, times: int = 1) -> Flow:
        pairs = all_reduce_pairs(mesh, over, points)
        return _flow(tensor, name, name, phase, pairs, graph.word_bytes * times)

    if is_loss:
        # What it writes is one number, the mean over all points.
        yield summed("loss", Phase.FORWARD, [dim.name for dim in operator.dims[:-1]], 1)
    else:
        for write in operator.writes:
            points = shard_points(operator, write.shape, write.axes, mesh)
            yield summed(write.tensor, Phase.FORWARD, operator.partial_dims(write), points)
            for dim in _single_points(write):
                # The part that computes it gives it to the others, which hold it in a program too.
                pairs = _handed(mesh, dim, points)
                yield _flow(write.tensor, name, name, Phase.FORWARD, pairs, graph.word_bytes)
    for position, read in enumerate(operator.reads):
        phase = _gradient_phase(graph, operator, position)
        if phase is not None:
            points = shard_points(operator, read.shape, read.axes, mesh)
            # Parts of a kernel read different windows: on their way back these are added where they overlap.
            kernels = {axis.kernel for axis in read.axes if isinstance(axis, Window)}
            # All parts hold what the first alone reads: theirs are sums to which the others add nothing.
            over = {*operator.partial_dims(read), *_single_points(read)} - kernels
            yield summed(f"gradient of {read.tensor}", phase, over, points)
    for exchange in operator.exchanges:
        match exchange:
            case AllReduce():
                points = shard_points(operator, exchange.shape, exchange.axes, mesh)
                yield summed(exchange.tensor, Phase.FORWARD, exchange.over, points, exchange.times)
            case Relayout():
                written, read_back = (
                    layout_of(mesh, _exchange_dims(operator, exchange.shape, axes), layer=name)
                    for axes in (exchange.written, exchange.read)
                )
                pairs = _moved(hops(written, read_back), moved)
                yield _flow(exchange.tensor, name, name, Phase.FORWARD, pairs, graph.word_bytes * exchange.times)
            case Handoff():
                points = shard_points(operator, exchange.shape, exchange.axes, mesh)
                pairs = _handed(mesh, exchange.across, points)
                yield _flow(exchange.tensor, name, name, Phase.FORWARD, pairs, graph.word_bytes * exchange.times)


def _gradient_phase(graph: Graph, operator: Operator, position: int) -> Phase | None:
    """Return when the gradient of what a layer reads is added up; None if it has none."""
    read = operator.reads[position]
    if read.role is Role.PARAMETER:
        # A shared weight's gradients are brought together before the update.
        users = [access for other in graph.operators for access in other.parameters if access.shared == read.shared]
        return Phase.BACKWARD if read.shared and len(users) > 1 else Phase.UPDATE
    edge = graph.incoming.get((operator.name, position))
    return Phase.BACKWARD if edge is not None and needs_gradient(graph, edge) else None


def _single_points(access: Access) -> tuple[str, ...]:
    """Return the dims of which one point is read or written, such as a stack's first layer or its last."""
    return tuple(axis.dim for axis in access.axes if isinstance(axis, Part) and axis.extent == 1)


def _handed(mesh: DeviceMesh, across: str, points: int) -> Pairs:
    """Return what goes from each part along an axis to the next."""
    where = {tuple(point.items()): device for point, device in zip(mesh.coordinates, mesh.devices, strict=True)}
    pairs: Pairs = {}
    for point, device in zip(mesh.coordinates, mesh.devices, strict=True):
        following = where.get(tuple({**point, across: point[across] + 1}.items())) if across in point else None
        if following is not None:
            _add(pairs, [((device, following), points)])
    return pairs


def shard_points(operator: Operator, shape: Sequence[int], axes: Sequence[Axis], mesh: DeviceMesh) -> int:
    """Return the points of the largest shard as a program holds it: those under all its windows, padding included."""
    points = 1
    for extent, axis in zip(shape, axes, strict=True):
        match axis:
            case str():
                points *= ceil(extent / mesh.size(axis))
            case tuple():
                points *= prod(ceil(operator.extents[dim] / mesh.size(dim)) for dim in axis)
            case Window():
                outs = ceil(operator.extents[axis.out] / mesh.size(axis.out))
                kernel = ceil(operator.extents[axis.kernel] / mesh.size(axis.kernel))
                points *= (outs - 1) * axis.stride + (kernel - 1) * axis.dilation + 1
            case Part():
                points *= ceil(axis.extent / mesh.size(axis.dim))
            case None:
                points *= extent
    return points


def _exchange_dims(operator: Operator, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> tuple[PlainDim, ...]:
    dims = tensor_dims(operator, Access(tensor="exchanged", shape=shape, axes=axes))
    plain = tuple(dim for dim in dims if isinstance(dim, PlainDim))
    assert len(plain) == len(dims), f"{operator.name} exchanges windows"
    return plain


def _moved(steps: Iterable[Hop], known: dict[Hop, Pairs]) -> Pairs:
    total: Pairs = {}
    for hop in steps:
        # Repeated layers move alike: each distinct movement is looked at once.
        if hop not in known:
            known[hop] = hop_pairs(hop)
        _add(total, known[hop].items())
    return total


def _add(pairs: Pairs, more: Iterable[tuple[tuple[int, int], int]]) -> None:
    for ends, points in more:
        pairs[ends] = pairs.get(ends, 0) + points


def _flow(tensor: str, producer: str, consumer: str, phase: Phase, points: Pairs, word_bytes: int) -> Flow:
    return Flow(
        tensor=tensor,
        movement=Movement(producer=producer, consumer=consumer, phase=phase),
        bytes_by_pair={ends: count * word_bytes for ends, count in points.items() if count},
    )
