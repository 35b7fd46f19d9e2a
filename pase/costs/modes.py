"""Modes of layers beside their splits: who holds weights' state, and what is computed again instead of kept.

The devices that hold the same part of a weight, k of them, hold it, its gradient and the optimizer's state whole
(*replicated*), the optimizer's state in k parts (*zero1*), the gradient, too (*zero2*), or all three (*zero3*). A layer
that is *recomputed* keeps nothing of what its backward pass needs: its forward work, messages and the re-shardings of
what it reads are done once more. What it reads stays where the layer before is not recomputed.

A mode changes what a layer costs and holds. Of an edge it changes what is sent again, and which end keeps the tensor,
so that tables of edges have two classes for each layout, and layers have up to eight choices for each configuration;
choices that another of the same configuration beats in everything are left out.

A step of m micro-batches pays some costs m times and some once, so that a choice has several figures (`Figures`), and
its cost is only known with m, the stages and their order (`pase.planning.stages`).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.costs.build import Allowance, between, edge_signature, hiding_layers, signature, traffic_of
from pase.costs.collectives import Link, point_to_point
from pase.costs.memory import (
    DEFAULT_OPTIMISER,
    Keeping,
    LayerMemory,
    Parts,
    edge_memory,
    held_parts,
    held_points,
    keeping,
    layer_memory,
    num_points,
    state_size,
)
from pase.costs.model import CostModel
from pase.costs.traffic import LayerTraffic, Pattern, ReadTraits, layer_traffic, sum_name
from pase.graph import ITEMSIZES, Access, AllReduce, Edge, Graph, Operator
from pase.graph.parts import Stage
from pase.sharding.edges import SharedWeight, edge_sides, table_edges
from pase.sharding.levels import PlacedAxes
from pase.sharding.shards import (
    FloatArray,
    IndexArray,
    IntArray,
    Splits,
    distinct_rows,
    enumerate_configurations,
    shard_dims,
    sharded_extents,
    shards_in_order,
)
from pase.sharding.traffic import is_needed_backward
from pase.tables.cost_tables import EdgeTable

REPLICATED = "replicated"
STATES = (REPLICATED, "zero1", "zero2", "zero3")
"""How the devices that hold the same part of a weight hold it: whole, with the optimizer's state in parts; with the
gradient in parts, too; with the weight in parts, too, which is gathered when the layer's turn comes."""

SCATTERED_OFTEN, GATHERED_OFTEN = ("zero2", "zero3"), ("zero3",)
"""States in which gradients are reduced and scattered, and weights gathered, for each micro-batch, not once a step."""

BoolArray = NDArray[np.bool_]
Links = tuple[Link | None, Link | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSpace:
    """Which modes there are to choose from.

    states: in `STATES`; layers that have no weights to hold in parts are `REPLICATED` in any case. recompute: whether
    layers may be recomputed. layers: of some layers, by name, what they have instead.
    """

    states: tuple[str, ...] = (REPLICATED,)
    recompute: bool = False
    layers: Mapping[str, "ModeSpace"] = field(default_factory=FrozenDict, hash=False)

    def of(self, layer: str) -> "ModeSpace":
        """Return the modes that a layer may have."""
        return self.layers.get(layer) or replace(self, layers=FrozenDict())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """What choices cost and hold, [C] each: costs in the cost model's unit, sizes in bytes on each device.

    repeated: for each micro-batch, with nothing to hide behind. streamed: for each micro-batch, too, communication that
    can hide. once: once a step; summed: likewise, what can hide. cover: computation that communication can hide behind,
    of one micro-batch. static: weights, gradients and the optimizer's state. kept: for the backward pass, of one
    micro-batch. again: what of a recomputed layer lies there while its run is gone back through, more than 0; of others
    0. work: that the layer works with in its turn. gathered: its weights, brought together for its turn. waiting:
    [lanes] gradients that wait.
    """

    repeated: FloatArray
    streamed: FloatArray
    once: FloatArray
    summed: FloatArray
    cover: FloatArray
    static: FloatArray
    kept: FloatArray
    again: FloatArray
    work: FloatArray
    gathered: FloatArray
    waiting: tuple[FloatArray, ...] = ()

    def columns(self, names: Sequence[str]) -> FloatArray:
        """Return some of them by name, [C, names]."""
        return np.column_stack([getattr(self, name) for name in names])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassCosts:
    """What `Figures.repeated` is made of; the rest is the backward pass.

    [C] each. forward: the forward pass. remade: it, once more. received, returned: having a tensor of the stage before,
    and its gradient of the stage behind. weights: gradients of weights, which a schedule may put off.
    """

    forward: FloatArray
    remade: FloatArray
    received: FloatArray
    returned: FloatArray
    weights: FloatArray


FiguresT = TypeVar("FiguresT", Figures, PassCosts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerModes:
    """The choices of a layer. rows: [C] the configuration of each. state: [C] in `STATES`. again: [C] recomputed.

    passes: where choices that others beat stay, which no search needs.
    """

    rows: NDArray[np.intp]
    state: NDArray[np.intp]
    again: BoolArray
    figures: Figures
    passes: PassCosts | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeModes:
    """What an edge costs for each micro-batch, and what its ends keep for one, by their choices.

    is_weight: whether it is a weight that two layers share: then what it costs can hide, and what is kept is kept once.
    forward: of the values of `cost`, what the forward pass pays the first time.
    """

    cost: EdgeTable
    kept: EdgeTable | None
    is_weight: bool
    forward: FloatArray


def sharded(operator: Operator, position: int, splits: Splits) -> BoolArray:
    """Return [K] whether the devices that all-reduce the gradient of a weight can shard its state over themselves."""
    access = operator.reads[position]
    group = splits.product(operator.partial_dims(access))
    part = [size for _, size in held_parts(operator, access, splits)]
    found: BoolArray = np.broadcast_to(shard_dims(part, group) >= 0, len(splits.values))
    return found & access.is_trained & (not access.shared) & ~sums_moments(operator, splits)


def shard_parts(operator: Operator, weight: Access, splits: Splits) -> Parts:
    """Return the largest shard of a device's part of a weight, of those of the devices that add up its gradient."""
    parts = held_parts(operator, weight, splits)
    group = splits.product(operator.partial_dims(weight))
    sizes = sharded_extents([size for _, size in parts], group)
    return [(extent, size) for (extent, _), size in zip(parts, sizes, strict=True)]


def sums_moments(operator: Operator, splits: Splits) -> BoolArray:
    """Return [K] whether a batch normalisation's moments are sums over devices.

    The gradient of what it reads needs those of its weights then, whole and summed.
    """
    found: BoolArray = np.zeros(len(splits.values), dtype=np.bool_)
    for exchange in operator.exchanges if operator.kind == "batch_norm" else ():
        found |= splits.product(exchange.over if isinstance(exchange, AllReduce) else ()) > 1
    return found


def can_be_in_parts(operator: Operator, splits: Splits) -> bool:
    """Return whether the state of any weight of a layer can lie in parts, under any of some configurations."""
    return any(
        bool(sharded(operator, position, splits).any())
        for position, read in enumerate(operator.reads)
        if read in operator.parameters
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageCosts:
    """What a layer's messages take, [K] each.

    blocking: all that are not of weights' gradients; there: of these, forward. summed: all gradients of weights; rest:
    those that lie in no parts; scattered, gathered: gradients, and weights, that do.
    """

    blocking: FloatArray
    there: FloatArray
    summed: FloatArray
    rest: FloatArray
    scattered: FloatArray
    gathered: FloatArray

    @classmethod
    def of(
        cls, graph: Graph, operator: Operator, traffic: LayerTraffic, model: CostModel, micro_batches: int
    ) -> "_MessageCosts":
        """Return those of a layer's configurations."""
        positions = {sum_name(read.tensor, is_gradient=True): i for i, read in enumerate(operator.reads)}
        precision = graph.precision
        wider = precision.itemsize / ITEMSIZES[precision.collectives]
        sums = [
            replace(message, times=micro_batches * message.times)
            for message in traffic.messages
            if message.is_of_weight
        ]
        others = [message for message in traffic.messages if not message.is_of_weight]
        in_parts = [sharded(operator, positions[message.tensor], traffic.splits) for message in sums]
        padded = [_padding(operator, positions[message.tensor], traffic.splits) for message in sums]
        parts = [
            replace(message, size_bytes=message.size_bytes * is_in * factor)
            for message, is_in, factor in zip(sums, in_parts, padded, strict=True)
        ]
        asked = (
            [replace(message, times=message.forward_times) for message in others],
            [replace(m, size_bytes=m.size_bytes * ~is_in) for m, is_in in zip(sums, in_parts, strict=True)],
            [replace(part, pattern=Pattern.REDUCE_SCATTER) for part in parts],
            [replace(part, pattern=Pattern.ALL_GATHER, size_bytes=part.size_bytes * wider, times=1) for part in parts],
        )
        # All at once: what of them lies where on the machine is worked out once.
        costs = model.messages(traffic, list(chain(*asked)))
        own, more = costs[: len(traffic.messages)], iter(costs[len(traffic.messages) :])
        nothing = np.zeros(len(traffic.splits.values))
        there, rest, scattered, gathered = (sum(islice(more, len(group)), nothing) for group in asked)
        mine = list(zip(own, traffic.messages, strict=True))
        return cls(
            blocking=sum((cost for cost, message in mine if not message.is_of_weight), nothing),
            there=there,
            summed=micro_batches * sum((cost for cost, message in mine if message.is_of_weight), nothing),
            rest=rest,
            scattered=scattered,
            gathered=gathered,
        )

    def in_state(self, state: str, gathers: int) -> tuple[FloatArray, FloatArray]:
        """Return what a state takes for each micro-batch, weights gathered so often where they are, and once a step."""
        if state == REPLICATED:
            return np.zeros_like(self.summed), self.summed
        scattered_often, gathered_often = state in SCATTERED_OFTEN, state in GATHERED_OFTEN
        often = self.scattered * scattered_often + gathers * self.gathered * gathered_often
        return often, self.rest + self.scattered * (not scattered_often) + self.gathered * (not gathered_often)


def _padding(operator: Operator, position: int, splits: Splits) -> FloatArray:
    """Return [K] how much more than a weight's part is sent of its shards, all of which are as long as the largest."""
    weight = operator.reads[position]
    num = len(splits.values)
    shards = num_points(shard_parts(operator, weight, splits), num) * splits.product(operator.partial_dims(weight))
    factor: FloatArray = shards / np.maximum(held_points(operator, weight, splits), 1)
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardedBytes:
    """[K] bytes of the weights of a layer whose state can be sharded.

    Attributes:
        replicated: [3, K] of the weights, their gradients and the optimizer's state where every device has all of its
            part.
        sharded: [3, K] of these where a device has a shard, the largest one.
        gathered: Of the weights as they are gathered: as many shards as devices, all as long as the largest.
        apart: Of the weights' shards that do not follow one another in memory.
    """

    replicated: IntArray
    sharded: IntArray
    gathered: IntArray
    apart: IntArray

    @classmethod
    def of(cls, graph: Graph, operator: Operator, splits: Splits, optimiser: str) -> "_ShardedBytes":
        """Return those of a layer under its configurations."""
        precision, num = graph.precision, len(splits.values)
        replicated, shards = np.zeros((3, num), dtype=np.int64), np.zeros((3, num), dtype=np.int64)
        gathered, apart = np.zeros((2, num), dtype=np.int64)
        for position, read in enumerate(operator.reads):
            if read not in operator.parameters:
                continue
            is_sharded = sharded(operator, position, splits)
            shard = shard_parts(operator, read, splits)
            for total, parts in ((replicated, held_parts(operator, read, splits)), (shards, shard)):
                points = num_points(parts, num) * is_sharded
                total[0] += points * precision.itemsize
                total[1] += points * ITEMSIZES[precision.gradients]
                total[2] += state_size(parts, num, precision, optimiser) * is_sharded
            count = splits.product(operator.partial_dims(read))
            own = num_points(shard, num) * precision.itemsize * is_sharded
            gathered += own * count
            in_order = shards_in_order([size for _, size in held_parts(operator, read, splits)], count)
            apart += own * ~in_order
        return cls(replicated=replicated, sharded=shards, gathered=gathered, apart=apart)


def state_bytes(
    graph: Graph, operator: Operator, splits: Splits, memory: LayerMemory, state: str, optimiser: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Return [K] what a layer's weights, their gradients and the optimizer's state take; memory: where all is whole."""
    return _in_state(_ShardedBytes.of(graph, operator, splits, optimiser), memory, state)


def _in_state(sizes: _ShardedBytes, memory: LayerMemory, state: str) -> tuple[IntArray, IntArray, IntArray]:
    weights, gradients, moments = memory.weights, memory.gradients, memory.optimiser
    if state == REPLICATED:
        return weights, gradients, moments
    # A device that has all of its part has room in it for what is gathered, and its shard in it or beside it.
    held = sizes.sharded[0] if state in GATHERED_OFTEN else sizes.gathered + sizes.apart
    weights = weights - sizes.replicated[0] + held
    if state in SCATTERED_OFTEN:
        gradients = gradients - sizes.replicated[1] + sizes.sharded[1]
    return weights, gradients, moments - sizes.replicated[2] + sizes.sharded[2]


def layer_modes(
    graph: Graph,
    operator: Operator,
    traffic: LayerTraffic,
    model: CostModel,
    space: ModeSpace,
    *,
    keeps: Keeping,
    hides: tuple[bool, bool] = (False, False),
    optimiser: str = DEFAULT_OPTIMISER,
    links: Links = (None, None),
    micro_batches: int = 1,
    is_whole: bool = False,
) -> LayerModes:
    """Return the choices of a layer and their figures; arguments as for `layer_choices`.

    traffic: of its configurations, as often as `once_a_step` has it. hides: whether its sums of weights' gradients can
    hide, and whether others' can behind it.
    """
    splits = traffic.splits
    num = len(splits.values)
    memory = layer_memory(graph, operator, splits.values, keeps, optimiser=optimiser)
    messages = _MessageCosts.of(graph, operator, traffic, model, micro_batches)
    forward_work, backward_work = model.work(traffic.forward), model.work(traffic.backward)
    forward = forward_work + messages.there
    blocking = forward_work + backward_work + messages.blocking
    cover = model.overlap * backward_work * hides[1]
    received_s, returned_s, handed = _handed_over(graph, operator, splits, keeps, links)
    blocking = blocking + received_s + returned_s
    copies = _sums_of_copies(graph, operator, splits, links)
    sizes = _ShardedBytes.of(graph, operator, splits, optimiser)
    weights_s = _work_of_weights(graph, operator, traffic, model) if is_whole else np.zeros(num)
    has_weights = bool(np.any(sizes.gathered))
    may_repeat = space.recompute and operator.name in graph.trained and not operator.is_loss
    rows, states, again, found, passes = [], [], [], [], []
    for number, state in enumerate(STATES):
        if state not in (space.states if has_weights else (REPLICATED,)):
            continue
        static = sum(_in_state(sizes, memory, state), np.zeros(num, dtype=np.int64))
        gathered = sizes.gathered * (state in GATHERED_OFTEN)
        for is_again in (False, True)[: 1 + may_repeat]:
            # For a layer that is recomputed, weights in parts are gathered once more.
            gathers = 1 + is_needed_backward(graph, operator) + is_again
            repeated_s, once_s = messages.in_state(state, gathers)
            waits = blocking + forward * is_again
            found.append(
                Figures(
                    repeated=waits + repeated_s * (not hides[0]),
                    streamed=repeated_s * hides[0],
                    once=once_s * (not hides[0]) + copies,
                    summed=once_s * hides[0],
                    cover=cover,
                    static=static.astype(np.float64),
                    kept=(memory.activations * (not is_again) + handed).astype(np.float64),
                    # A byte at least: no run of recomputed layers ends with one that keeps nothing.
                    again=(np.maximum(memory.activations, 1) * is_again).astype(np.float64),
                    work=(memory.peaks[0] + gathered).astype(np.float64),
                    gathered=gathered.astype(np.float64),
                    waiting=tuple(peak.astype(np.float64) for peak in memory.peaks[1:]),
                )
            )
            if is_whole:
                there_s = forward + messages.gathered * (state in GATHERED_OFTEN and not hides[0])
                scattered_s = messages.scattered * (state in SCATTERED_OFTEN and not hides[0])
                passes.append(
                    PassCosts(
                        forward=there_s,
                        remade=there_s * is_again,
                        received=received_s,
                        returned=returned_s,
                        weights=weights_s + scattered_s,
                    )
                )
            rows.append(np.arange(num))
            states.append(np.full(num, number))
            again.append(np.full(num, is_again))
    kept = np.arange(num * len(found)) if is_whole else _unbeaten(found, again)
    return LayerModes(
        rows=np.concatenate(rows)[kept],
        state=np.concatenate(states)[kept],
        again=np.concatenate(again)[kept],
        figures=_joined(found, kept),
        passes=_joined(passes, kept) if is_whole else None,
    )


def _work_of_weights(graph: Graph, operator: Operator, traffic: LayerTraffic, model: CostModel) -> FloatArray:
    """Return the [K] work of the backward pass that goes when no weight is trained."""
    traits = tuple(
        ReadTraits(has_gradient=has and read not in operator.parameters, is_fed=False, is_owned=True)
        for read, has in zip(operator.reads, graph.read_gradients(operator), strict=True)
    )
    without = layer_traffic(operator, traffic.splits.values, traits, types=graph.types[operator.name])
    return np.maximum(model.work(traffic.backward) - model.work(without.backward), 0.0)


def _handed_over(
    graph: Graph, operator: Operator, splits: Splits, keeps: Keeping, links: Links
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Return what it takes to have a tensor of another stage, and its gradient, and the bytes that stay for that.

    A device gets its part in one message. What a stage is given, and what it gives, stays there until the backward
    pass.
    """
    num = len(splits.values)
    received, returned, held = np.zeros(num), np.zeros(num), np.zeros(num, dtype=np.int64)
    if not isinstance(graph, Stage):
        return received, returned, held
    types, (before, behind) = graph.types[operator.name], links
    for edge in graph.received:
        if before and edge.consumer == operator.name:
            size = held_points(operator, operator.reads[edge.input], splits) * types.read_bytes(edge.input)
            received = received + point_to_point(size, before)
            held = held + size * ((operator.name, edge.input) not in keeps.reads)
    for producer, output in dict.fromkeys((edge.producer, edge.output) for edge in graph.sent):
        if behind and producer == operator.name:
            size = held_points(operator, operator.writes[output], splits) * types.write_bytes(output)
            returned = returned + point_to_point(size, behind) * (producer in graph.trained)
            held = held + size * ((producer, output) not in keeps.writes)
    return received, returned, held


def elsewhere(graph: Graph, operator: Operator, position: int) -> int:
    """Return how many layers of other stages use a weight that a layer of a stage has."""
    shared = operator.reads[position].shared
    if not shared or not isinstance(graph, Stage):
        return 0
    layers = (other for other in graph.whole.operators if other.name not in graph.index)
    return sum(any(read.shared == shared for read in other.parameters) for other in layers)


def _sums_of_copies(graph: Graph, operator: Operator, splits: Splits, links: Links) -> FloatArray:
    """Return what it takes to add up gradients of a weight that layers of other stages have, too: a message for each.

    On the slower of the links to the stages around.
    """
    num = len(splits.values)
    cost = np.zeros(num)
    own = [link for link in links if link]
    for position, read in enumerate(operator.reads):
        others = elsewhere(graph, operator, position)
        if own and others and read.is_trained:
            size = held_points(operator, read, splits) * ITEMSIZES[graph.precision.collectives]
            cost = cost + others * point_to_point(size, max(own, key=lambda link: link.s_per_byte))
    return cost


def _unbeaten(found: Sequence[Figures], again: Sequence[BoolArray]) -> NDArray[np.intp]:
    """Return the choices that no other of the same configuration, recomputed or not as they are, beats in everything.

    Of equal ones the first stays.
    """
    columns = [np.stack([f.repeated, f.streamed, f.once, f.summed, f.static, f.work, f.gathered]) for f in found]
    kept = []
    for i, own in enumerate(columns):
        is_beaten = np.zeros(own.shape[1], dtype=np.bool_)
        for j, other in enumerate(columns):
            if i != j and again[i][0] == again[j][0]:
                is_beaten |= (other <= own).all(axis=0) & ((other < own).any(axis=0) | (j < i))
        kept.append(~is_beaten)
    return np.flatnonzero(np.concatenate(kept))


def _joined(found: Sequence[FiguresT], kept: NDArray[np.intp]) -> FiguresT:
    """Return some of the choices of several as one: [C] columns, or tuples of them."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(column, zip(*values, strict=True)))
        return np.concatenate(values)[kept]

    kind = type(found[0])
    return kind(**{name: column([getattr(each, name) for each in found]) for name in kind.__slots__})


def edge_modes(
    graph: Graph,
    edge: Edge,
    ends: tuple[LayerTraffic, LayerTraffic],
    modes: tuple[LayerModes, LayerModes],
    model: CostModel,
    keeps: Keeping,
    allowance: Allowance | None = None,
) -> EdgeModes:
    """Return what an edge costs and keeps; ends, modes: of its producer and of its consumer; allowance: of time."""
    table, forward = between(graph, edge, *ends, model, allowance).costs()
    u, v = modes
    is_weight = isinstance(edge, SharedWeight)
    cost = EdgeTable(row_class=table.row_class[u.rows], col_class=table.col_class[v.rows], values=table.values)
    if v.again.any() and not is_weight:
        values = np.concatenate([table.values, table.values + forward], axis=1)
        forward = np.concatenate([forward, forward], axis=1)
        col_class = cost.col_class + table.values.shape[1] * v.again.astype(np.int32)
        cost = EdgeTable(row_class=cost.row_class, col_class=col_class.astype(np.int32), values=values)
    return EdgeModes(cost=cost, kept=_kept_on(graph, edge, ends, modes, keeps), is_weight=is_weight, forward=forward)


def _kept_on(
    graph: Graph,
    edge: Edge,
    ends: tuple[LayerTraffic, LayerTraffic],
    modes: tuple[LayerModes, LayerModes],
    keeps: Keeping,
) -> EdgeTable | None:
    """Return what an edge's tensor takes beside what its ends count themselves.

    Neither end recomputed: a reader's copy in a layout of its own. The reader alone: what it reads, as the producer has
    it, unless that is kept in any case. The producer alone: what the reader needs, as that has it.
    """
    u, v = modes
    us, vs = (end.splits.values for end in ends)
    key = edge.consumer, edge.input
    copies = edge_memory(graph, edge, us, vs) if key in keeps.copies else None
    if isinstance(edge, SharedWeight) or not (u.again.any() or v.again.any()):
        if copies is None:
            return None
        return EdgeTable(row_class=copies.row_class[u.rows], col_class=copies.col_class[v.rows], values=copies.values)
    (producer, write), (consumer, read) = edge_sides(graph, edge)
    tensor = edge.producer, edge.output
    itemsize = graph.types[edge.consumer].read_bytes(edge.input)
    left = held_points(producer, write, ends[0].splits) * itemsize
    needed = held_points(consumer, read, ends[1].splits) * itemsize
    is_counted = tensor in keeps.writes or (producer.is_fan_out and _fan_out_is_kept(graph, producer, keeps))
    is_needed = key in keeps.copies or (tensor in keeps.writes and edge.input in keeps.saved[edge.consumer].reads)
    if copies is None:
        nothing = np.zeros(1, dtype=np.int32)
        copies = EdgeTable(
            row_class=np.repeat(nothing, len(us)), col_class=np.repeat(nothing, len(vs)), values=np.zeros((1, 1))
        )
    u_rows = np.column_stack([copies.row_class[u.rows], left[u.rows], u.again])
    v_rows = np.column_stack([copies.col_class[v.rows], needed[v.rows], v.again])
    u_distinct, row_class = distinct_rows(u_rows)
    v_distinct, col_class = distinct_rows(v_rows)
    u_again, v_again = u_distinct[:, 2, None] > 0, v_distinct[None, :, 2] > 0
    values = np.where(
        v_again,
        np.where(u_again, 0, u_distinct[:, 1, None] * (not is_counted)),
        np.where(
            u_again, v_distinct[None, :, 1] * is_needed, copies.values[np.ix_(u_distinct[:, 0], v_distinct[:, 0])]
        ),
    )
    if not values.any():
        return None
    return EdgeTable(
        row_class=row_class.astype(np.int32), col_class=col_class.astype(np.int32), values=values.astype(np.float64)
    )


def _fan_out_is_kept(graph: Graph, fan_out: Operator, keeps: Keeping) -> bool:
    edge = graph.incoming.get((fan_out.name, 0))
    return (fan_out.name, 0) in keeps.reads or (edge is not None and (edge.producer, edge.output) in keeps.writes)


# -- all layers and edges of a graph


@dataclass(frozen=True, kw_only=True, eq=False)
class ModeTables:
    """The choices of every layer of a graph, and what they and its edges cost and hold.

    configurations: [V] the [K, D] splits. layers: [V]; equal layers share a value. edges: [E] as `ends` are. hides:
    whether communication can hide at all.
    """

    graph: Graph
    num_devices: int
    configurations: tuple[IndexArray, ...]
    layers: tuple[LayerModes, ...]
    ends: tuple[tuple[int, int], ...]
    edges: tuple[EdgeModes, ...]
    hides: bool


@dataclass(frozen=True, slots=True, eq=False)
class KnownModes:
    """What tables of graphs under one cost model and one space of modes have in common; filled as they are made."""

    traffic: dict[Hashable, LayerTraffic] = field(default_factory=dict)
    layers: dict[Hashable, LayerModes] = field(default_factory=dict)
    edges: dict[Hashable, EdgeModes] = field(default_factory=dict)


def once_a_step(traffic: LayerTraffic, micro_batches: int) -> LayerTraffic:
    """Return traffic whose sums of weights' gradients are sent as often as they are for one of some micro-batches.

    How a layer's devices lie over the levels of a machine is up to what they send each other in the whole step.
    """
    messages = tuple(
        replace(message, times=message.times / micro_batches) if message.is_of_weight else message
        for message in traffic.messages
    )
    return traffic if micro_batches == 1 else replace(traffic, messages=messages)


def layer_choices(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    space: ModeSpace,
    *,
    known: KnownModes,
    keeps: Keeping | None = None,
    fixed: frozenset[str] = frozenset(),
    only: Mapping[str, IndexArray] = FrozenDict(),
    optimiser: str = DEFAULT_OPTIMISER,
    links: Links = (None, None),
    hides: Sequence[tuple[bool, bool]] | None = None,
    among: frozenset[str] | None = None,
    micro_batches: int = 1,
    is_whole: bool = False,
    allowance: Allowance | None = None,
    axes: Mapping[str, PlacedAxes] = FrozenDict(),
) -> tuple[list[LayerModes], list[LayerTraffic]]:
    """Return the choices of all layers of a graph with fan-outs, and the traffic of their configurations.

    Args:
        graph: of one micro-batch; a stage of a pipeline, perhaps.
        num_devices: that the graph has.
        model: of costs.
        space: which modes there are.
        known: of the same model, space and optimizer.
        keeps: of the graph.
        fixed: layers that are not recomputed in any case.
        only: the configurations of some layers, [K, D] by name; of others, all.
        optimiser: whose state counts.
        links: to the devices of the stages before and behind.
        hides: of each layer as `hiding_layers` has it, of a larger graph perhaps; by default the graph's own.
        among: of the layers by name those that are of interest, in the graph's order; by default all.
        micro_batches: of a step, which sums gradients of weights once.
        is_whole: whether choices that others beat stay.
        allowance: until when; TimeUpError is raised beyond that.
        axes: where the devices of layers with one configuration lie; of others, as suits them.
    """
    keeps = keeps or keeping(graph)
    if not model.overlap:
        hides = ((False, False),) * len(graph.operators)
    hides = hiding_layers(graph) if hides is None else hides
    crossing = {(edge.consumer, edge.input) for edge in graph.received} if isinstance(graph, Stage) else set()
    leaving = {edge.producer for edge in graph.sent} if isinstance(graph, Stage) else set()
    told = {id(chosen): chosen.tobytes() for chosen in only.values()}
    layers, does = [], []
    for operator, own in zip(graph.operators, hides, strict=True):
        name = operator.name
        if among is not None and name not in among:
            continue
        chosen = only.get(name)
        kind: Hashable = signature(graph, operator), None if chosen is None else told[id(chosen)], axes.get(name)
        if kind not in known.traffic:
            splits = enumerate_configurations(operator, num_devices) if chosen is None else chosen
            traffic = replace(traffic_of(graph, operator, splits), axes=axes.get(name))
            known.traffic[kind] = once_a_step(traffic, micro_batches)
        own_space = space.of(name)
        may_repeat = own_space.recompute and name not in fixed
        copies = tuple(elsewhere(graph, operator, i) for i in range(len(operator.reads)))
        key = (
            kind,
            own,
            own_space.states,
            may_repeat,
            name in graph.trained,
            tuple(
                (graph.has_gradient(operator, i), (name, i) in keeps.reads, (name, i) in crossing)
                for i in range(len(operator.reads))
            ),
            tuple((keeps.lanes.get((name, i), 0), (name, i) in keeps.writes) for i in range(len(operator.writes))),
            name in leaving,
            copies,
            links if any(copies) or name in leaving or any(consumer == name for consumer, _ in crossing) else None,
        )
        if key not in known.layers:
            if allowance:
                allowance.check()
            known.layers[key] = layer_modes(
                graph,
                operator,
                known.traffic[kind],
                model,
                replace(own_space, recompute=may_repeat),
                keeps=keeps,
                hides=own,
                optimiser=optimiser,
                links=links,
                micro_batches=micro_batches,
                is_whole=is_whole,
            )
        layers.append(known.layers[key])
        does.append(known.traffic[kind])
    return layers, does


def mode_tables(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    space: ModeSpace,
    *,
    known: KnownModes,
    keeps: Keeping | None = None,
    allowance: Allowance | None = None,
    **asked: Any,
) -> ModeTables:
    """Return the choices of all layers of a graph with fan-outs, and of its edges; arguments: `layer_choices`'s."""
    keeps = keeps or keeping(graph)
    layers, does = layer_choices(
        graph, num_devices, model, space, known=known, keeps=keeps, allowance=allowance, **asked
    )
    ends, edges = [], []
    for edge in table_edges(graph):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        tensor, read = (edge.producer, edge.output), (edge.consumer, edge.input)
        producer = graph[edge.producer]
        told = (
            id(layers[u]),
            id(layers[v]),
            edge_signature(graph, edge),
            edge.output,
            edge.input,
            read in keeps.copies,
            tensor in keeps.writes,
            producer.is_fan_out and _fan_out_is_kept(graph, producer, keeps),
        )
        if told not in known.edges:
            ends_of_edge = (does[u], does[v]), (layers[u], layers[v])
            known.edges[told] = edge_modes(graph, edge, *ends_of_edge, model, keeps, allowance)
        ends.append((u, v))
        edges.append(known.edges[told])
    return ModeTables(
        graph=graph,
        num_devices=num_devices,
        configurations=tuple(traffic.splits.values for traffic in does),
        layers=tuple(layers),
        ends=tuple(ends),
        edges=tuple(edges),
        hides=model.overlap > 0,
    )
