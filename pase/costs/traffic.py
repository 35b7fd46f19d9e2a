"""What one layer computes and communicates in a training step, as arrays over its configurations, before any machine.

This is where accesses become numbers; a cost model turns them into cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pase.costs.kernels import PassKernels, layer_kernels
from pase.graph import (
    Access,
    AllReduce,
    AllToAll,
    Exchange,
    Handoff,
    LayerTypes,
    Operator,
    Pipeline,
    Relayout,
    Role,
    SliceOf,
    Window,
    Work,
)
from pase.graph.operator import axis_dims
from pase.sharding.boxes import even_bounds
from pase.sharding.halos import halo_fetch
from pase.sharding.levels import PlacedAxes
from pase.sharding.shards import (
    Component,
    FloatArray,
    IndexArray,
    IntArray,
    Splits,
    components,
    distinct_rows,
    shard_size,
    split_columns,
    splits_of,
)


class Pattern(StrEnum):
    """How a message travels."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    MOVE = "move"
    HALO = "halo"
    HANDOFF = "handoff"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Communication:
    """One communication inside a layer.

    tensor: what is sent. pattern: how. size_bytes: [K] on each device, of a collective before it reduces or after it
    gathers. group: [K] devices that take part. times: how often in one training step, forward_times: of these, how
    often forward. over: the dims whose splits make the group. num_pieces: [K] or 1, messages
    that a device gets where it is not a sum. ends_on_edge: for a sum, whether it goes to one other layer alone, which
    may need no more than a part of it on each device. is_of_weight: whether it adds the parts of a weight's gradient.
    is_ring: whether pieces go round beside the layer's own computation, each with those that came before.
    """

    tensor: str
    pattern: Pattern
    size_bytes: FloatArray
    group: IntArray
    times: float
    forward_times: int = 0
    over: tuple[str, ...] = ()
    num_pieces: IntArray | int = 1
    ends_on_edge: bool = False
    is_of_weight: bool = False
    is_ring: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassWork:
    """[K] of one pass on the busiest device, waiting in a pipeline included; touched_bytes: read and written.

    product_flop: of the FLOP, those of products, which multiply in the type `product`; None: it is all one. kernels:
    that it is computed by; None where nothing is.
    """

    flop: FloatArray
    touched_bytes: FloatArray
    product: str = "float32"
    product_flop: FloatArray | None = None
    kernels: PassKernels | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTraffic:
    """What a layer computes and communicates under each of its configurations.

    Attributes:
        splits: The configurations.
        forward: Work of the forward pass.
        backward: Work of the backward pass.
        messages: What is communicated inside the layer.
        joint_sums: By position of the read, sums of gradients that stand on an edge: another layer may make them.
        axes: Where the devices of its one configuration lie; None: over the levels of a machine as suits it best.
    """

    splits: Splits
    forward: PassWork
    backward: PassWork
    messages: tuple[Communication, ...]
    joint_sums: Mapping[int, Communication]
    axes: PlacedAxes | None = None

    @property
    def flop(self) -> FloatArray:
        """[K] FLOP of one training step on the busiest device."""
        return self.forward.flop + self.backward.flop

    def under(self, row: int) -> "LayerTraffic":
        """Return what is communicated under one configuration; of the work FLOP and bytes alone."""

        def at(values: Any) -> Any:
            return values[row : row + 1] if np.ndim(values) and len(values) > 1 else values

        def one(message: Communication) -> Communication:
            sizes = {"size_bytes": at(message.size_bytes), "group": at(message.group)}
            return replace(message, num_pieces=at(message.num_pieces), **sizes)

        works = (PassWork(flop=at(w.flop), touched_bytes=at(w.touched_bytes)) for w in (self.forward, self.backward))
        forward, backward = works
        return LayerTraffic(
            splits=replace(self.splits, values=self.splits.values[row : row + 1]),
            forward=forward,
            backward=backward,
            messages=tuple(map(one, self.messages)),
            joint_sums={position: one(message) for position, message in self.joint_sums.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraits:
    """What the graph around a layer says of one of its reads.

    has_gradient: the backward pass computes its gradient. is_fed: another layer produces it (training data is
    delivered as it is needed, halos included). is_owned: its gradient is summed by this layer alone: no earlier layer
    uses the same weight, and no fan-out hands it to other layers too. Where one does, what the sum costs depends on
    both (`sharing`).
    """

    has_gradient: bool
    is_fed: bool
    is_owned: bool


def layer_traffic(
    operator: Operator,
    values: IndexArray,
    reads: tuple[ReadTraits, ...],
    *,
    types: LayerTypes,
    single_use: tuple[bool, ...] = (),
) -> LayerTraffic:
    """Return what a layer does under each of its configurations, values: [K, D]; reads: what the graph says of each.

    types: of its tensors. single_use: for each tensor that is written, whether one other layer alone reads it, all of
    it; by default none is.
    """
    splits = splits_of(operator, values)
    sizes = _Sizes(
        reads=tuple(shard_size(access, splits) for access in operator.reads),
        writes=tuple(shard_size(access, splits) for access in operator.writes),
    )
    messages: list[Communication] = []
    for position, (access, points) in enumerate(zip(operator.writes, sizes.writes, strict=True)):
        if position not in operator.wholes:
            is_single = bool(single_use) and single_use[position]
            itemsize = types.write_bytes(position)
            messages.append(_partial_sum(operator, access, points, splits, itemsize, ends_on_edge=is_single))
    joint_sums: dict[int, Communication] = {}
    for position, (access, read) in enumerate(zip(operator.reads, reads, strict=True)):
        if read.has_gradient:
            itemsize, points = types.gradient_sum_bytes(operator, position), sizes.reads[position]
            own = _partial_sum(operator, access, points, splits, itemsize, is_gradient=True, ends_on_edge=read.is_fed)
            if read.is_owned:
                messages.append(own)
            else:
                joint_sums[position] = own
        if read.is_fed and any(isinstance(axis, Window) for axis in access.index_map):
            messages.append(_halo(access, splits, types.read_bytes(position), times=2 if read.has_gradient else 1))
    has_gradient = tuple(read.has_gradient for read in reads)
    for exchange in operator.exchanges_with(has_gradient):
        goes_back = any(has_gradient[read] for read in exchange.gradient_of)
        forward_times = exchange.times - exchange.backward_times * goes_back
        messages.append(_exchange(exchange, splits, types.exchange_bytes(exchange), forward_times))
    forward, backward = _work(operator, splits, sizes, has_gradient, types)
    return LayerTraffic(
        splits=splits,
        forward=forward,
        backward=backward,
        messages=tuple(m for m in messages if np.any(m.size_bytes)),
        joint_sums=joint_sums,
    )


def sum_name(tensor: str, *, is_gradient: bool) -> str:
    """Return the name of the message that adds up a tensor, or its gradient."""
    return f"gradient of {tensor}" if is_gradient else tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """[K] elements of the largest shard of each tensor that a layer reads and writes."""

    reads: tuple[FloatArray, ...]
    writes: tuple[FloatArray, ...]


def _work(
    operator: Operator, splits: Splits, sizes: _Sizes, has_gradient: tuple[bool, ...], types: LayerTypes
) -> tuple[PassWork, PassWork]:
    """Return the work of the forward and of the backward pass.

    Forward, every tensor is touched once. Backward, what was read is read again, the gradients of what was written
    are read, and those of what was read are written. What is computed with in another type is first read as it is and
    written in that one, its gradient likewise.
    """
    if operator.is_fan_out:
        # It hands on what is there.
        nothing = PassWork(flop=np.zeros(len(splits.values)), touched_bytes=np.zeros(len(splits.values)))
        return nothing, nothing
    points = _Points.of(operator.work, splits)
    flop_there = [work.flop_per_point for work in operator.work]
    flop_back = [work.flop_per_point * work.num_gradients(has_gradient) for work in operator.work]
    forward, backward = points.busiest(flop_there), points.busiest(flop_back)
    written, read, again, gradients = (np.zeros(len(splits.values)) for _ in range(4))
    for position, size in enumerate(sizes.writes):
        if position not in operator.wholes:
            written += size * types.write_bytes(position)
    for position, (size, flows_back) in enumerate(zip(sizes.reads, has_gradient, strict=True)):
        taken = types.operand_bytes(position)
        casting = (types.read_bytes(position) + taken) * types.is_cast(position)
        read += size * (taken + casting)
        again += size * taken
        gradients += size * (taken + casting) * flows_back
    waiting = _pipeline_factor(operator.pipeline, splits) if operator.pipeline else _excess_factor(operator, splits)
    touched_back = (again + written + gradients) * any(has_gradient)
    products: tuple[FloatArray | None, FloatArray | None] = None, None
    if types.product != "float32":
        # Elsewhere products and all else go at the same rate.
        is_product = [work.contraction for work in operator.work]
        products = (
            points.busiest([cost * own for cost, own in zip(flop_there, is_product, strict=True)]) * waiting,
            points.busiest([cost * own for cost, own in zip(flop_back, is_product, strict=True)]) * waiting,
        )
    flop = []
    for number, cost in enumerate(flop_there):
        alone = [0.0] * number + [cost] + [0.0] * (len(flop_there) - number - 1)
        flop.append(points.busiest(alone) * waiting)
    kernels = layer_kernels(operator, splits, has_gradient, types, flop, written=sizes.writes[0])
    ways = zip((forward, backward), (read + written, touched_back), products, kernels, strict=True)
    there, back = (
        PassWork(
            flop=flop * waiting,
            touched_bytes=touched * waiting,
            product=types.product,
            product_flop=product,
            kernels=own,
        )
        for flop, touched, product, own in ways
    )
    return there, back


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """How many points of each piece of work devices have under configurations.

    Attributes:
        num: How many configurations there are.
        groups: [N] configurations, the numbers of parts of dims whose parts differ in what there is to do, and [pieces]
            the points, [N, *those parts]; of all other dims the first part has most of every piece of work.
    """

    num: int
    groups: tuple[tuple[NDArray[np.intp], tuple[int, ...], tuple[FloatArray, ...]], ...]

    @classmethod
    def of(cls, works: Sequence[Work], splits: Splits) -> "_Points":
        """Return those of pieces of work."""
        uneven = tuple(dict.fromkeys(dim.dim for work in works for dim in work.dims if isinstance(dim, SliceOf)))
        rows, inverse = distinct_rows(splits.values[:, [tuple(splits.extents).index(dim) for dim in uneven]])
        groups = []
        for number, row in enumerate(rows.tolist()):
            chosen = np.flatnonzero(inverse == number)
            bounds = {dim: even_bounds(splits.extents[dim], k) for dim, k in zip(uneven, row, strict=True)}
            parts: dict[str | SliceOf, FloatArray] = {}
            for dim in dict.fromkeys(dim for work in works for dim in work.dims):
                name = dim.dim if isinstance(dim, SliceOf) else dim
                if name in bounds:
                    first, extent = (dim.offset, dim.extent) if isinstance(dim, SliceOf) else (0, splits.extents[name])
                    share = np.minimum(bounds[name][1:], first + extent) - np.maximum(bounds[name][:-1], first)
                    behind = len(uneven) - 1 - uneven.index(name)
                    parts[dim] = np.clip(share, 0, None).reshape(-1, *(1 for _ in range(behind)))
                else:
                    part = np.ceil(splits.extents[name] / splits.of(name)[chosen])
                    parts[dim] = part.reshape(-1, *(1 for _ in row))
            nothing = np.ones((len(chosen), *(1 for _ in row)))
            points = tuple(prod((parts[dim] for dim in work.dims), start=nothing) for work in works)
            groups.append((chosen, tuple(row), points))
        return cls(len(splits.values), tuple(groups))

    def busiest(self, flop: Sequence[float]) -> FloatArray:
        """Return the [K] FLOP on the device that has most; flop: what a point of each piece of work costs."""
        total = np.zeros(self.num)
        for chosen, row, pieces in self.groups:
            devices = np.zeros((len(chosen), *row))
            for cost, points in zip(flop, pieces, strict=True):
                devices += cost * points
            total[chosen] = devices.reshape(len(chosen), -1).max(axis=1)
        return total


def _pipeline_factor(pipeline: Pipeline, splits: Splits) -> FloatArray:
    """Return by how much a wavefront over (stage, sequence) is longer than one device's own work.

    A device works through n stages of m steps each, one point at a time, after the stages and the steps before
    it. Stage by stage, the next group of stages starts (n - 1) m + 1 points later and the next part of the
    sequence m points later; step by step, n and (m - 1) n + 1 later. The better of the two orders counts.
    """
    groups, parts = splits.of(pipeline.stage).astype(np.int64), splits.of(pipeline.sequence).astype(np.int64)
    stages = np.ceil(splits.extents[pipeline.stage] / groups)
    steps = np.ceil(splits.extents[pipeline.sequence] / parts)
    stage_by_stage = (groups - 1) * ((stages - 1) * steps + 1) + (parts - 1) * steps
    step_by_step = (groups - 1) * stages + (parts - 1) * ((steps - 1) * stages + 1)
    factor: FloatArray = 1 + np.minimum(stage_by_stage, step_by_step) / (stages * steps)
    return factor


def _excess_factor(operator: Operator, splits: Splits) -> FloatArray:
    """Return by how much the device whose groups have most rows has more to do than an equal share."""
    factor = np.ones(len(splits.values))
    for exchange in operator.exchanges:
        if isinstance(exchange, AllToAll) and exchange.excess:
            factor = np.maximum(factor, 1 + exchange.excess * (splits.product(exchange.over) > 1))
    return factor


def _partial_sum(
    operator: Operator,
    access: Access,
    points: FloatArray,
    splits: Splits,
    itemsize: int,
    *,
    is_gradient: bool = False,
    ends_on_edge: bool = False,
) -> Communication:
    """Return the all-reduce of the partial sums of a tensor, or of its gradient; points: [K] of its largest shard."""
    over = operator.partial_dims(access)
    group = splits.product(over)
    size = points * itemsize * (group > 1)
    return Communication(
        tensor=sum_name(access.tensor, is_gradient=is_gradient),
        pattern=Pattern.ALL_REDUCE,
        size_bytes=size,
        group=group,
        times=1,
        forward_times=0 if is_gradient else 1,
        over=over,
        ends_on_edge=ends_on_edge,
        is_of_weight=is_gradient and access.role is Role.PARAMETER,
    )


def _halo(access: Access, splits: Splits, itemsize: int, *, times: int) -> Communication:
    """Return what a split of windows exchanges: one message from each device that owns a part of a halo."""
    elements, owners = halo_fetch(access, splits)
    size = elements * itemsize
    return Communication(
        tensor=access.tensor,
        pattern=Pattern.HALO,
        size_bytes=size,
        group=_two(size),
        times=times,
        forward_times=1,
        over=tuple(axis.out for axis in access.index_map if isinstance(axis, Window)),
        num_pieces=owners,
    )


def _exchange(exchange: Exchange, splits: Splits, itemsize: int, forward_times: int) -> Communication:
    pieces: IntArray | int = 1
    match exchange:
        case AllReduce():
            over = exchange.over
            group = splits.product(over)
            size = shard_size(exchange, splits) * (group > 1)
            pattern = Pattern.ALL_REDUCE
        case Relayout():
            over = tuple(dict.fromkeys(dim for pair in exchange.changes for axis in pair for dim in axis_dims(axis)))
            size = _relayout_size(exchange, splits)
            group, pattern, pieces = _two(size), Pattern.MOVE, splits.product(over) - 1
        case Handoff():
            over = (exchange.across,)
            crossing = splits.of(exchange.across) > 1
            size = shard_size(exchange, splits) * crossing
            group, pattern = _two(size), Pattern.HANDOFF
        case AllToAll():
            over, group, pattern = exchange.over, splits.product(exchange.over), Pattern.MOVE
            size = shard_size(exchange, splits) * (group > 1)
            if exchange.excess is None:
                # As many rows of each other device, or all of its own where each is needed here.
                size = size * np.minimum(1.0, group / exchange.copies) * (group - 1) / group
            else:
                size = size * exchange.excess
            pieces = np.maximum(group - 1, 1)
    return Communication(
        tensor=exchange.tensor,
        pattern=pattern,
        size_bytes=size * itemsize,
        group=group,
        times=exchange.times,
        forward_times=forward_times,
        over=over,
        num_pieces=pieces,
        is_ring=isinstance(exchange, Relayout) and exchange.is_ring,
    )


def _relayout_size(exchange: Relayout, splits: Splits) -> FloatArray:
    """Return the [K] elements that the worst-placed device fetches.

    Unlike on an edge nothing is left to place: a device's part of every dim is given, so that where the two
    layouts split a tensor dim by different iteration dims, some device needs the part that it has least of.
    """
    needed, kept = np.ones(len(splits.values)), np.ones(len(splits.values))
    written = components(exchange, splits.extents)
    read = components(replace(exchange, index_map=exchange.read), splits.extents)
    for ours, theirs in zip(read, written, strict=True):
        columns = split_columns((ours, theirs), splits)
        rows, inverse = distinct_rows(columns)
        pieces = np.array([_piece(ours, theirs, int(a), int(b)) for a, b in rows])[inverse]
        needed *= pieces[:, 0]
        kept *= pieces[:, 1]
    return needed - kept


def _piece(read: Component, written: Component, read_split: int, written_split: int) -> tuple[float, float]:
    """Return (needed, of which held) of one tensor dim for the device that lacks most of it."""
    need = -(-read.length // read_split)
    if read.axis == written.axis:
        return float(need), float(need)
    a, b = even_bounds(read.length, read_split), even_bounds(read.length, written_split)
    common = np.minimum(a[1:, None], b[None, 1:]) - np.maximum(a[:-1, None], b[None, :-1])
    return float(need), float(np.clip(common, 0, None).min())


def _two(like: FloatArray) -> IntArray:
    return np.full(len(like), 2, dtype=np.int64)
