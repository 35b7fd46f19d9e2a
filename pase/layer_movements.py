"""What moves within a layer of a placed plan: sums of partial results, and pieces that its devices send one another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod

from pase.costs import shared_weights
from pase.graph import Access, AllReduce, Axis, Exchange, Graph, Handoff, Operator, Part, Relayout, Role, Window
from pase.pairs import Pairs, add_pairs, moved_pairs
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.kinds import KINDS
from pase.targets.mesh_tensorflow.emitter.traffic import (
    joint_sum,
    joint_sum_of_weight,
    layer_mesh,
    single_points,
    summed_dims,
    weight_ends,
)
from pase.targets.mesh_tensorflow.runtime.layouts import DeviceMesh, PlainDim, layout_of
from pase.targets.mesh_tensorflow.runtime.refine import Hop, hops
from pase.targets.mesh_tensorflow.runtime.tensor_dims import tensor_dims
from pase.targets.mesh_tensorflow.runtime.traffic import Phase


class Purpose(StrEnum):
    """What moves within a layer: what it writes, gradients of what it reads, what it exchanges as it computes."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Partial sums that a layer adds up, between the devices that differ along some axes of its mesh.

    read: position of the read whose gradient it is, if it is one. over: axes. points: of a shard. times: how often in
    a step.
    """

    tensor: str
    phase: Phase
    purpose: Purpose
    over: tuple[str, ...]
    points: int
    read: int | None = None
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Points that a layer sends between its own devices; times: how often in a step."""

    tensor: str
    phase: Phase
    purpose: Purpose
    pairs: Pairs
    times: int = 1


def layer_movements(plan: Plan, operator: Operator, moved: dict[Hop, Pairs]) -> Iterator[Summed | Sent]:
    """Yield what moves within a layer, in this order: its sums, those of gradients, its exchanges.

    moved: movements that were looked at before; those of this layer are added. Raises as `flows` does.
    """
    graph, mesh = plan.graph, layer_mesh(plan, operator.name)
    is_loss = operator.kind in KINDS and KINDS[operator.kind].is_loss
    forward = Phase.FORWARD
    if is_loss:
        # What it writes is one number, the mean over all points.
        over = tuple(dim.name for dim in operator.dims[:-1])
        yield Summed(tensor="loss", phase=forward, purpose=Purpose.OUTPUT, over=over, points=1)
    else:
        for write in operator.writes:
            points = shard_points(operator, write.shape, write.axes, mesh)
            over = operator.partial_dims(write)
            yield Summed(tensor=write.tensor, phase=forward, purpose=Purpose.OUTPUT, over=over, points=points)
            for dim in single_points(write):
                # The part that computes it gives it to the others, which hold it in a program too.
                pairs = _handed(mesh, dim, points)
                yield Sent(tensor=write.tensor, phase=forward, purpose=Purpose.OUTPUT, pairs=pairs)
    for position, read in enumerate(operator.reads):
        phase = gradient_phase(graph, operator, position)
        if phase is not None:
            points = shard_points(operator, read.shape, read.axes, mesh)
            for over in gradient_sums(plan, operator, position):
                yield Summed(
                    tensor=f"gradient of {read.tensor}",
                    phase=phase,
                    purpose=Purpose.GRADIENT,
                    over=over,
                    points=points,
                    read=position,
                )
    for exchange in operator.exchanges_with(graph.read_gradients(operator)):
        yield _exchanged(operator, exchange, mesh, moved)


def _exchanged(operator: Operator, exchange: Exchange, mesh: DeviceMesh, moved: dict[Hop, Pairs]) -> Summed | Sent:
    def sent(pairs: Pairs) -> Sent:
        return Sent(
            tensor=exchange.tensor, phase=Phase.FORWARD, purpose=Purpose.EXCHANGE, pairs=pairs, times=exchange.times
        )

    match exchange:
        case AllReduce():
            return Summed(
                tensor=exchange.tensor,
                phase=Phase.FORWARD,
                purpose=Purpose.EXCHANGE,
                over=tuple(exchange.over),
                points=shard_points(operator, exchange.shape, exchange.axes, mesh),
                times=exchange.times,
            )
        case Relayout():
            written, read_back = (
                layout_of(mesh, _exchange_dims(operator, exchange.shape, axes), layer=operator.name)
                for axes in (exchange.written, exchange.read)
            )
            return sent(moved_pairs(hops(written, read_back), moved))
        case Handoff():
            return sent(_handed(mesh, exchange.across, shard_points(operator, exchange.shape, exchange.axes, mesh)))


def gradient_sums(plan: Plan, operator: Operator, position: int) -> tuple[tuple[str, ...], ...]:
    """Return the dims over which a layer sums the gradient of what it reads, by position: of each sum that it makes.

    A layer sums for those to which it hands the tensor, and what these sum is none of theirs.
    """
    read = operator.reads[position]
    own = tuple(dim for dim in operator.extents if dim in summed_dims(operator, read))
    if operator.is_fan_out:
        # Where nobody leaves parts of it there is nothing to sum.
        return (own,) if any(joint_sum(plan, edge) for edge in plan.graph.outgoing.get(operator.name, ())) else ()
    edge = plan.graph.incoming.get((operator.name, position))
    if edge is not None and joint_sum(plan, edge):
        return ()
    mesh = layer_mesh(plan, operator.name)
    sums = {tuple(dim for dim in own if mesh.size(dim) > 1)}
    for weight in shared_weights(plan.graph) if read.shared else ():
        if (weight.user, weight.user_read) == (operator.name, position) and joint_sum_of_weight(plan, weight):
            return ()
        if (weight.owner, weight.owner_read) == (operator.name, position) and joint_sum_of_weight(plan, weight):
            owner, _ = weight_ends(plan, weight)
            sums.add(owner.axes)
    return tuple(sorted(sums))


def gradient_phase(graph: Graph, operator: Operator, position: int) -> Phase | None:
    """Return when the gradient of what a layer reads, by position, is added up; None if it has none."""
    read = operator.reads[position]
    if read.role is Role.PARAMETER:
        # A shared weight's gradients are brought together before the update.
        return Phase.BACKWARD if read.shared and graph.num_uses[read.shared] > 1 else Phase.UPDATE
    return Phase.BACKWARD if graph.has_gradient(operator, position) else None


def _handed(mesh: DeviceMesh, across: str, points: int) -> Pairs:
    """Return what goes from each part along an axis to the next."""
    where = {tuple(point.items()): device for point, device in zip(mesh.coordinates, mesh.devices, strict=True)}
    pairs: Pairs = {}
    for point, device in zip(mesh.coordinates, mesh.devices, strict=True):
        following = where.get(tuple({**point, across: point[across] + 1}.items())) if across in point else None
        if following is not None:
            add_pairs(pairs, [((device, following), points)])
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
