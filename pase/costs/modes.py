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

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.common.containers import FrozenDict
from pase.common.words import quantity, visible
from pase.costs.build import (
    BYTES_OF_COSTS,
    Allowance,
    KnownTransfers,
    TransferBytes,
    between,
    edge_signature,
    held_tables,
    hiding_layers,
    signature,
    traffic_of,
)
from pase.costs.collectives import Link, point_to_point
from pase.costs.memory import (
    DEFAULT_OPTIMISER,
    Keeping,
    LayerMemory,
    Parts,
    edge_memory,
    held_parts,
    held_points,
    layer_memory,
    num_points,
    state_size,
)
from pase.costs.model import CostModel
from pase.costs.traffic import Communication, LayerTraffic, Pattern, ReadTraits, layer_traffic, sum_name
from pase.graph import ITEMSIZES, Access, AllReduce, Edge, Graph, Operator
from pase.graph.operators import with_fan_outs
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
from pase.tables.cost_tables import CostTables, EdgeTable, Hiding, joint_classes, restricted, restricted_edge

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


CRITERIA = ("repeated", "streamed", "once", "summed", "cover", "static", "kept")
"""What adds up over layers and edges, in the order of the columns of arrays of weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """What choices cost, [C] each, in the cost model's unit.

    Attributes:
        repeated: For each micro-batch, with nothing to overlap with.
        streamed: For each micro-batch, too, communication that can overlap.
        once: Once a step.
        summed: Likewise, what can overlap.
        cover: Computation of one micro-batch that communication can overlap with.
        compute: Of `repeated`, what computing one micro-batch takes, without what is recomputed.
    """

    repeated: FloatArray
    streamed: FloatArray
    once: FloatArray
    summed: FloatArray
    cover: FloatArray
    compute: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """What choices have in memory, [C] bytes on each device.

    Attributes:
        static: Weights, gradients and the optimizer's state.
        kept: Saved for the backward pass, of one micro-batch.
        again: What of a recomputed layer is live while its run is gone back through, more than 0; of others 0.
        work: What the layer works with in its turn.
        gathered: Its weights, gathered for its turn.
        waiting: [lanes] gradients that wait.
    """

    static: FloatArray
    kept: FloatArray
    again: FloatArray
    work: FloatArray
    gathered: FloatArray
    waiting: tuple[FloatArray, ...] = ()


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


ColumnsT = TypeVar("ColumnsT", Figures, Held, PassCosts)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerModes:
    """The choices of a layer.

    Attributes:
        rows: [C] the configuration of each.
        state: [C] in `STATES`.
        again: [C] whether it is recomputed.
        figures: What they cost.
        held: What they have in memory; None where that was not asked for.
        passes: What passes cost; None where that was not asked for.
    """

    rows: NDArray[np.intp]
    state: NDArray[np.intp]
    again: BoolArray
    figures: Figures
    held: Held | None = None
    passes: PassCosts | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def columns(self) -> FloatArray:
        """[C, criteria]."""
        own, nothing = self.figures, np.zeros(len(self))
        memory = (nothing, nothing) if self.held is None else (self.held.static, self.held.kept)
        return np.column_stack([own.repeated, own.streamed, own.once, own.summed, own.cover, *memory])

    def with_columns(self, columns: FloatArray) -> "LayerModes":
        """Return the same choices with other [C, criteria]."""
        values = dict(zip(CRITERIA, columns.T, strict=True))
        static, kept = values.pop("static"), values.pop("kept")
        held = None if self.held is None else replace(self.held, static=static, kept=kept)
        return replace(self, figures=replace(self.figures, **values), held=held)

    def restricted(self, kept: IndexArray) -> "LayerModes":
        """Return some of the choices, [N] in their order."""
        return LayerModes(
            rows=self.rows[kept],
            state=self.state[kept],
            again=self.again[kept],
            figures=_joined([self.figures], kept),
            held=None if self.held is None else _joined([self.held], kept),
            passes=None if self.passes is None else _joined([self.passes], kept),
        )

    @property
    def recomputed(self) -> FloatArray:
        """[C] bytes of recomputed layers, as in `Held`."""
        return np.zeros(len(self)) if self.held is None else self.held.again

    @cached_property
    def passing(self) -> FloatArray:
        """[kinds, C] bytes that come and go: of each kind the largest of all layers counts."""
        if self.held is None:
            return np.zeros((1, len(self)))
        return np.stack([self.held.work, self.held.gathered, *self.held.waiting])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeModes:
    """What an edge costs for each micro-batch, and what its ends keep for one, by their choices.

    is_weight: whether it is a weight that two layers share: then what it costs can hide, and what is kept is kept once.
    forward: of the values of `cost`, what the forward pass pays the first time; moved: the bytes of one pass each way,
    by the same classes. Both None where that was not asked for.
    """

    cost: EdgeTable
    kept: EdgeTable | None
    is_weight: bool
    forward: FloatArray | None = None
    moved: TransferBytes | None = None

    def restricted(self, rows: IndexArray | None, cols: IndexArray | None) -> "EdgeModes":
        """Return it for some choices of its ends; None: all of them. What is paid and moved by pass is left out."""
        kept = None if self.kept is None else restricted_edge(self.kept, rows, cols)
        return replace(self, cost=restricted_edge(self.cost, rows, cols), kept=kept, forward=None, moved=None)

    def criterion(self, *, hides: bool) -> int:
        """Return which of `CRITERIA` its cost counts as; hides: whether communication can overlap."""
        return 1 if self.is_weight and hides else 0


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
        cls,
        graph: Graph,
        operator: Operator,
        traffic: LayerTraffic,
        model: CostModel,
        micro_batches: int,
        *,
        is_sharded: bool,
        has_passes: bool,
    ) -> "_MessageCosts":
        """Return those of a layer's configurations.

        is_sharded: whether weights can have any state but `REPLICATED`. has_passes: whether `there` is asked for.
        """
        others = [message for message in traffic.messages if not message.is_of_weight]
        asked = [[replace(message, times=message.forward_times) for message in others] if has_passes else []]
        asked += _sharded_messages(graph, operator, traffic, micro_batches) if is_sharded else [[], [], []]
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


def _sharded_messages(
    graph: Graph, operator: Operator, traffic: LayerTraffic, micro_batches: int
) -> list[list[Communication]]:
    """Return the messages of weights whose state is sharded, as far as it can be.

    All-reduces of gradients of what cannot be, reduce-scatters of other gradients, and all-gathers of weights.
    """
    positions = {sum_name(read.tensor, is_gradient=True): i for i, read in enumerate(operator.reads)}
    wider = graph.precision.itemsize / ITEMSIZES[graph.precision.collectives]
    whole, scattered, gathered = list[Communication](), list[Communication](), list[Communication]()
    for message in traffic.messages:
        if not message.is_of_weight:
            continue
        position = positions[message.tensor]
        is_in = sharded(operator, position, traffic.splits)
        padded = _padding(operator, position, traffic.splits)
        own = replace(message, times=micro_batches * message.times)
        part = replace(own, size_bytes=own.size_bytes * is_in * padded)
        whole.append(replace(own, size_bytes=own.size_bytes * ~is_in))
        scattered.append(replace(part, pattern=Pattern.REDUCE_SCATTER))
        gathered.append(replace(part, pattern=Pattern.ALL_GATHER, size_bytes=part.size_bytes * wider, times=1))
    return [whole, scattered, gathered]


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
    keeps: Keeping | None = None,
    hides: tuple[bool, bool] = (False, False),
    optimiser: str = DEFAULT_OPTIMISER,
    links: Links = (None, None),
    micro_batches: int = 1,
    is_whole: bool = False,
    has_passes: bool = False,
) -> LayerModes:
    """Return the choices of a layer and their figures; arguments as for `layer_choices`.

    traffic: of its configurations, as often as `once_a_step` has it. hides: whether its sums of weights' gradients can
    hide, and whether others' can behind it.
    """
    splits = traffic.splits
    num = len(splits.values)
    is_sharded = space.states != (REPLICATED,) and can_be_in_parts(operator, splits)
    may_repeat = space.recompute and operator.name in graph.trained and not operator.is_loss
    states = [STATES.index(state) for state in STATES if state in (space.states if is_sharded else (REPLICATED,))]
    messages = _MessageCosts.of(
        graph, operator, traffic, model, micro_batches, is_sharded=is_sharded, has_passes=may_repeat or has_passes
    )
    forward_work, backward_work = model.work(traffic.forward), model.work(traffic.backward)
    compute = forward_work + backward_work
    forward = forward_work + messages.there
    received_s, returned_s = _handed_over(graph, operator, splits, links)
    blocking = compute + messages.blocking + received_s + returned_s
    cover = model.overlap * backward_work * hides[1]
    copies = _sums_of_copies(graph, operator, splits, links)
    weights_s = _work_of_weights(graph, operator, traffic, model) if has_passes else np.zeros(num)
    figures, passes, found = list[Figures](), list[PassCosts](), list[tuple[int, bool]]()
    for number in states:
        state = STATES[number]
        for is_again in (False, True)[: 1 + may_repeat]:
            # For a layer that is recomputed, weights in parts are gathered once more.
            gathers = 1 + is_needed_backward(graph, operator) + is_again
            repeated_s, once_s = messages.in_state(state, gathers)
            waits = blocking + forward * is_again
            figures.append(
                Figures(
                    repeated=waits + repeated_s * (not hides[0]),
                    streamed=repeated_s * hides[0],
                    once=once_s * (not hides[0]) + copies,
                    summed=once_s * hides[0],
                    cover=cover,
                    compute=compute,
                )
            )
            if has_passes:
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
            found.append((number, is_again))
    held = []
    if keeps is not None:
        held = list(_held(graph, operator, splits, found, keeps=keeps, optimiser=optimiser, links=links))
    left = np.arange(num * len(found))
    if not is_whole and len(found) > 1:
        left = _unbeaten(figures, held, [is_again for _, is_again in found])
    return LayerModes(
        rows=left % num,
        state=np.array([number for number, _ in found])[left // num],
        again=np.array([is_again for _, is_again in found])[left // num],
        figures=_joined(figures, left),
        held=_joined(held, left) if held else None,
        passes=_joined(passes, left) if passes else None,
    )


def _held(
    graph: Graph,
    operator: Operator,
    splits: Splits,
    modes: Iterable[tuple[int, bool]],
    *,
    keeps: Keeping,
    optimiser: str,
    links: Links,
) -> Iterator[Held]:
    """Yield what a layer has in memory in each of some modes, (number of the state, whether it is recomputed)."""
    memory = layer_memory(graph, operator, splits.values, keeps, optimiser=optimiser)
    sizes = _ShardedBytes.of(graph, operator, splits, optimiser)
    handed = _held_of_stages(graph, operator, splits, keeps, links)
    for number, is_again in modes:
        static = sum(_in_state(sizes, memory, STATES[number]), np.zeros(len(splits.values), dtype=np.int64))
        gathered = sizes.gathered * (STATES[number] in GATHERED_OFTEN)
        yield Held(
            static=static.astype(np.float64),
            kept=(memory.activations * (not is_again) + handed).astype(np.float64),
            # A byte at least: no run of recomputed layers ends with one that keeps nothing.
            again=(np.maximum(memory.activations, 1) * is_again).astype(np.float64),
            work=(memory.peaks[0] + gathered).astype(np.float64),
            gathered=gathered.astype(np.float64),
            waiting=tuple(peak.astype(np.float64) for peak in memory.peaks[1:]),
        )


def _work_of_weights(graph: Graph, operator: Operator, traffic: LayerTraffic, model: CostModel) -> FloatArray:
    """Return the [K] work of the backward pass that goes when no weight is trained."""
    traits = tuple(
        ReadTraits(has_gradient=has and read not in operator.parameters, is_fed=False, is_owned=True)
        for read, has in zip(operator.reads, graph.read_gradients(operator), strict=True)
    )
    without = layer_traffic(operator, traffic.splits.values, traits, types=graph.types[operator.name])
    return np.maximum(model.work(traffic.backward) - model.work(without.backward), 0.0)


def _handed_over(graph: Graph, operator: Operator, splits: Splits, links: Links) -> tuple[FloatArray, FloatArray]:
    """Return what it takes to have a tensor of another stage, and its gradient: each device's part is one message."""
    received, returned = np.zeros((2, len(splits.values)))
    if not isinstance(graph, Stage):
        return received, returned
    types, (before, behind) = graph.types[operator.name], links
    for edge in graph.received:
        if before and edge.consumer == operator.name:
            size = held_points(operator, operator.reads[edge.input], splits) * types.read_bytes(edge.input)
            received = received + point_to_point(size, before)
    for producer, output in dict.fromkeys((edge.producer, edge.output) for edge in graph.sent):
        if behind and producer == operator.name:
            size = held_points(operator, operator.writes[output], splits) * types.write_bytes(output)
            returned = returned + point_to_point(size, behind) * (producer in graph.trained)
    return received, returned


def _held_of_stages(graph: Graph, operator: Operator, splits: Splits, keeps: Keeping, links: Links) -> IntArray:
    """Return the bytes of what a layer of a stage is given, and gives, which stays until the backward pass."""
    held = np.zeros(len(splits.values), dtype=np.int64)
    if not isinstance(graph, Stage):
        return held
    types, (before, behind) = graph.types[operator.name], links
    for edge in graph.received:
        if before and edge.consumer == operator.name and (operator.name, edge.input) not in keeps.reads:
            held += held_points(operator, operator.reads[edge.input], splits) * types.read_bytes(edge.input)
    for producer, output in dict.fromkeys((edge.producer, edge.output) for edge in graph.sent):
        if behind and producer == operator.name and (producer, output) not in keeps.writes:
            held += held_points(operator, operator.writes[output], splits) * types.write_bytes(output)
    return held


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


def _unbeaten(figures: Sequence[Figures], held: Sequence[Held], again: Sequence[bool]) -> NDArray[np.intp]:
    """Return the choices that no other of the same configuration, recomputed or not as they are, beats in everything.

    Of equal ones the first stays.
    """
    columns = [np.stack([own.repeated, own.streamed, own.once, own.summed]) for own in figures]
    if held:
        memory = (np.stack([own.static, own.work, own.gathered]) for own in held)
        columns = [np.concatenate(pair) for pair in zip(columns, memory, strict=True)]
    kept = []
    for i, own in enumerate(columns):
        is_beaten = np.zeros(own.shape[1], dtype=np.bool_)
        for j, other in enumerate(columns):
            if i != j and again[i] == again[j]:
                is_beaten |= (other <= own).all(axis=0) & ((other < own).any(axis=0) | (j < i))
        kept.append(~is_beaten)
    return np.flatnonzero(np.concatenate(kept))


def _joined(found: Sequence[ColumnsT], kept: NDArray[np.integer[Any]]) -> ColumnsT:
    """Return some of the choices of several as one: [C] columns, or tuples of them."""
    first = getattr(found[0], fields(found[0])[0].name)
    if len(found) == 1 and len(kept) == len(first):
        return found[0]

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(column, zip(*values, strict=True)))
        return np.concatenate(values)[kept]

    kind = type(found[0])
    return kind(**{each.name: column([getattr(own, each.name) for own in found]) for each in fields(kind)})


def _edge_modes(
    table: EdgeTable,
    by_pass: tuple[FloatArray, TransferBytes] | None,
    kept: EdgeTable | None,
    modes: tuple[LayerModes, LayerModes],
    *,
    is_weight: bool,
) -> EdgeModes:
    """Return what an edge costs and keeps.

    table: what it costs by configurations; by_pass: [L_u, L_v] what of it is paid forward, and what is moved.
    """
    u, v = modes
    cost = EdgeTable(
        row_class=_of_rows(table.row_class, u), col_class=_of_rows(table.col_class, v), values=table.values
    )
    if by_pass is None:
        assert is_weight or not v.again.any()
        return EdgeModes(cost=cost, kept=kept, is_weight=is_weight)
    forward, moved = by_pass
    if v.again.any() and not is_weight:
        values = np.concatenate([table.values, table.values + forward], axis=1)
        forward, there, back = (np.concatenate([own, own], axis=1) for own in (forward, moved.forward, moved.backward))
        moved = TransferBytes(forward=there, backward=back)
        col_class = cost.col_class + table.values.shape[1] * v.again.astype(np.int32)
        cost = EdgeTable(row_class=cost.row_class, col_class=col_class.astype(np.int32), values=values)
    return EdgeModes(cost=cost, kept=kept, is_weight=is_weight, forward=forward, moved=moved)


def _of_rows(classes: IndexArray, modes: LayerModes) -> IndexArray:
    """Return [C] the classes of choices by [K] those of their configurations."""
    is_plain = len(modes.rows) == len(classes) and (modes.rows == np.arange(len(classes))).all()
    return classes if is_plain else classes[modes.rows]


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

    Attributes:
        graph: With fan-outs.
        num_devices: That it has.
        configurations: [V] the [K, D] splits.
        layers: [V]; equal layers share a value.
        ends: [E] (producer, consumer) by number.
        edges: [E]; equal ones share a value.
        hides: Whether communication can overlap at all.
    """

    graph: Graph
    num_devices: int
    configurations: tuple[IndexArray, ...]
    layers: tuple[LayerModes, ...]
    ends: tuple[tuple[int, int], ...]
    edges: tuple[EdgeModes, ...]
    hides: bool

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its choices."""
        row = self.configurations[vertex][self.layers[vertex].rows[choice]]
        return {dim: int(k) for dim, k in zip(self.graph.operators[vertex].extents, row, strict=True)}

    def weighed(self, weights: FloatArray, left: Mapping[int, IndexArray] = FrozenDict()) -> CostTables:
        """Return the problem of the weighted sum of all criteria.

        Args:
            weights: [criteria].
            left: [N] choices that distinct layers have, by identity; by default all.
        """
        numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, self.layers)))}
        costs = list[FloatArray]()
        for layer in {id(layer): layer for layer in self.layers}.values():
            own = np.maximum(layer.columns @ weights, 0.0)
            costs.append(own[left[id(layer)]] if left else own)
        edges: dict[tuple[int, int, int], int] = {}
        tables, ends, edge_table = list[EdgeTable](), list(self.ends), list[int]()
        for edge, (u, v) in zip(self.edges, self.ends, strict=True):
            key = id(edge), id(self.layers[u]), id(self.layers[v])
            if key not in edges:
                edges[key] = len(tables)
                among = (left[key[1]], left[key[2]]) if left else None
                tables.append(self._weighed_edge(edge, weights, among))
            edge_table.append(edges[key])
        for first, other in _joins(len(self.layers), self.ends):
            # Nothing lies between parts of a graph that stand apart.
            rows, cols = (np.zeros(len(costs[numbers[id(self.layers[v])]]), dtype=np.int32) for v in (first, other))
            ends.append((first, other))
            edge_table.append(len(tables))
            tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
        return CostTables(
            vertex_names=tuple(operator.name for operator in self.graph.operators)
            if len(self.graph.operators) == len(self.layers)
            else tuple(map(str, range(len(self.layers)))),
            vertex_costs=tuple(costs),
            vertex_table=tuple(numbers[id(layer)] for layer in self.layers),
            edges=tuple(ends),
            edge_tables=tuple(tables),
            edge_table=tuple(edge_table),
        )

    def _weighed_edge(
        self, edge: EdgeModes, weights: FloatArray, among: tuple[IndexArray, IndexArray] | None
    ) -> EdgeTable:
        price = weights[edge.criterion(hides=self.hides)]
        held = weights[CRITERIA.index("static" if edge.is_weight else "kept")]
        cost = edge.cost if among is None else restricted_edge(edge.cost, *among)
        if edge.kept is None or held == 0:
            return cost if price == 1 else replace(cost, values=price * cost.values)
        kept = edge.kept if among is None else restricted_edge(edge.kept, *among)
        row_class, rows, kept_rows = joint_classes(cost.row_class, kept.row_class)
        col_class, cols, kept_cols = joint_classes(cost.col_class, kept.col_class)
        # Weighed before they grow: these are the largest arrays of all.
        values = (price * cost.values).take(rows, axis=0).take(cols, axis=1)
        values += (held * kept.values).take(kept_cols, axis=1).take(kept_rows, axis=0)
        return EdgeTable(row_class=row_class, col_class=col_class, values=values)

    def restricted(self, kept: Mapping[int, IndexArray]) -> "ModeTables":
        """Return the tables in which some vertices have some choices alone, numbered by position in `kept`."""
        known: dict[tuple[int, ...], Any] = {}
        layers, edges = list(self.layers), list(self.edges)
        for vertex, own in kept.items():
            key: tuple[int, ...] = id(layers[vertex]), id(own)
            if key not in known:
                known[key] = layers[vertex].restricted(own)
            layers[vertex] = known[key]
        for number, (u, v) in enumerate(self.ends):
            if u in kept or v in kept:
                ends = kept.get(u), kept.get(v)
                key = id(edges[number]), *map(id, ends)
                if key not in known:
                    known[key] = edges[number].restricted(*ends)
                edges[number] = known[key]
        return replace(self, layers=tuple(layers), edges=tuple(edges))

    def of_one_stage(self, micro_batches: int) -> CostTables:
        """Return what a step of one stage costs at least by the choices of its layers.

        What streams in each micro-batch counts once, as if it overlapped in all but the last: a strategy of which it
        does costs no more.
        """
        counted = {"repeated": float(micro_batches), "streamed": 1.0, "once": 1.0, "summed": 1.0}
        tables = self.weighed(np.array([counted.get(name, 0.0) for name in CRITERIA]))
        if not self.hides:
            return tables
        layers = {id(layer): layer.figures for layer in self.layers}
        # Behind the edges are those that join parts of a graph that stand apart.
        is_weight = dict(zip(tables.edge_table, (edge.is_weight for edge in self.edges), strict=False))
        edge_tables = enumerate(tables.edge_tables)
        hiding = Hiding(
            hideable=tuple(own.streamed + own.summed for own in layers.values()),
            cover=tuple(own.cover for own in layers.values()),
            edges=tuple(table.values if is_weight.get(number) else None for number, table in edge_tables),
        )
        return replace(tables, hiding=hiding)


def _joins(num_layers: int, ends: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of layers that join the parts of a graph that no edge does."""
    part = list(range(num_layers))

    def root(v: int) -> int:
        while part[v] != v:
            part[v] = part[part[v]]
            v = part[v]
        return v

    for u, v in ends:
        part[root(u)] = root(v)
    roots = sorted({root(v) for v in range(num_layers)})
    return [(roots[0], other) for other in roots[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class KnownModes:
    """What tables of graphs under one cost model and one space of modes have in common; filled as they are made.

    numbers: Of signatures, which are long to compare.
    transfers: What costs of edges under other models follow from, too; None where there is one model. Of graphs under
        several models the numbers of all layers and edges are known, too.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    graphs: dict[tuple[int, str], tuple[Graph, tuple[int, ...]]] = field(default_factory=dict)
    traffic: dict[Hashable, LayerTraffic] = field(default_factory=dict)
    layers: dict[Hashable, LayerModes] = field(default_factory=dict)
    edges: dict[Hashable, EdgeModes] = field(default_factory=dict)
    transfers: KnownTransfers | None = None

    def for_another_model(self) -> "KnownModes":
        """Return what tables under another cost model have in common with these."""
        return KnownModes(numbers=self.numbers, graphs=self.graphs, traffic=self.traffic, transfers=self.transfers)

    def numbers_of_layers(self, graph: Graph) -> tuple[int, ...]:
        """Return numbers of the layers of a graph that are equal where signatures are."""
        return self._numbers(graph, "layers", lambda: (signature(graph, operator) for operator in graph.operators))

    def numbers_of_edges(self, graph: Graph) -> tuple[int, ...]:
        """Return numbers of the edges of a graph's tables that are equal where signatures are."""
        return self._numbers(graph, "edges", lambda: (edge_signature(graph, edge) for edge in table_edges(graph)))

    def _numbers(self, graph: Graph, of: str, signatures: Callable[[], Iterable[Hashable]]) -> tuple[int, ...]:
        key = id(graph), of
        if key in self.graphs:
            return self.graphs[key][1]
        found = tuple(self.numbers.setdefault(own, len(self.numbers)) for own in signatures())
        if self.transfers is not None:
            self.graphs[key] = graph, found
        return found


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
    has_passes: bool = False,
    allowance: Allowance | None = None,
    axes: Mapping[str, PlacedAxes] = FrozenDict(),
    on_progress: Callable[[str, float], None] | None = None,
) -> tuple[list[LayerModes], list[LayerTraffic]]:
    """Return the choices of all layers of a graph with fan-outs, and the traffic of their configurations.

    Args:
        graph: Of one micro-batch; a stage of a pipeline, perhaps.
        num_devices: That the graph has.
        model: Of costs.
        space: Which modes there are.
        known: Of the same model, space and optimizer.
        keeps: What the graph saves for its backward pass; None where memory is not asked for.
        fixed: Layers that are not recomputed in any case.
        only: The configurations of some layers, [K, D] by name; of others, all.
        optimiser: Whose state counts.
        links: To the devices of the stages before and behind.
        hides: Of each layer as `hiding_layers` has it, of a larger graph perhaps; by default the graph's own.
        among: Of the layers by name those that are of interest, in the graph's order; by default all.
        micro_batches: Of a step, which sums gradients of weights once.
        is_whole: Whether choices that others beat stay.
        has_passes: Whether costs are told apart by passes.
        allowance: Of time and memory; TimeUpError or SolverError is raised beyond that.
        axes: Where the devices of layers with one configuration lie; of others, as suits them.
        on_progress: Called with what is being done and the fraction of it that is done.
    """
    allowance = allowance or Allowance()
    if not model.overlap:
        hides = ((False, False),) * len(graph.operators)
    hides = hiding_layers(graph) if hides is None else hides
    crossing = {(edge.consumer, edge.input) for edge in graph.received} if isinstance(graph, Stage) else set()
    leaving = {edge.producer for edge in graph.sent} if isinstance(graph, Stage) else set()
    told = {id(chosen): chosen.tobytes() for chosen in only.values()}
    layers, does = list[LayerModes](), list[LayerTraffic]()
    least: dict[int, float] = {}
    numbers = known.numbers_of_layers(graph)
    for operator, number, own in zip(graph.operators, numbers, hides, strict=True):
        name = operator.name
        if among is not None and name not in among:
            continue
        chosen = only.get(name)
        kind: Hashable = number, None if chosen is None else told[id(chosen)], axes.get(name)
        if kind not in known.traffic:
            splits = enumerate_configurations(operator, num_devices) if chosen is None else chosen
            what = f"the costs of the {len(splits):,} configurations of layer {visible(name)}"
            allowance.hold(splits.nbytes + BYTES_OF_COSTS * len(splits), what)
            traffic = replace(traffic_of(graph, operator, splits), axes=axes.get(name))
            known.traffic[kind] = once_a_step(traffic, micro_batches)
        own_space = space.of(name)
        may_repeat = own_space.recompute and name not in fixed
        copies = tuple(elsewhere(graph, operator, i) for i in range(len(operator.reads)))
        saved: Hashable = None
        if keeps is not None:
            reads = tuple((name, i) in keeps.reads for i in range(len(operator.reads)))
            writes = ((keeps.lanes.get((name, i), 0), (name, i) in keeps.writes) for i in range(len(operator.writes)))
            saved = reads, tuple(writes)
        key = (
            kind,
            own,
            own_space.states,
            may_repeat,
            name in graph.trained,
            tuple((graph.has_gradient(operator, i), (name, i) in crossing) for i in range(len(operator.reads))),
            saved,
            name in leaving,
            copies,
            links if any(copies) or name in leaving or any(consumer == name for consumer, _ in crossing) else None,
        )
        if key not in known.layers:
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
                has_passes=has_passes,
            )
        modes = known.layers[key]
        if id(modes) not in least:
            # What streams or is summed may be hidden.
            least[id(modes)] = float((micro_batches * modes.figures.repeated + modes.figures.once).min())
        allowance.bound += least[id(modes)]
        allowance.check()
        layers.append(modes)
        does.append(known.traffic[kind])
        if on_progress:
            on_progress("costing layers", len(layers) / len(graph.operators))
    return layers, does


def mode_tables(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    space: ModeSpace,
    *,
    known: KnownModes,
    keeps: Keeping | None = None,
    has_passes: bool = False,
    has_bytes: bool = False,
    allowance: Allowance | None = None,
    on_progress: Callable[[str, float], None] | None = None,
    **asked: Any,
) -> ModeTables:
    """Return the choices of all layers of a graph with fan-outs, and of its edges; arguments: `layer_choices`'s.

    has_bytes: whether what edges move is asked for. An edge of the tables is an edge of that graph, in its order, or a
    weight that two layers share, after them.
    """
    allowance = allowance or Allowance()
    layers, does = layer_choices(
        graph, num_devices, model, space, known=known, keeps=keeps, has_passes=has_passes,
        allowance=allowance, on_progress=on_progress, **asked,
    )  # fmt: skip
    keys, ends = list[Hashable](), list[tuple[int, int]]()
    unmade: dict[Hashable, tuple[Edge, int]] = {}
    numbers = known.numbers_of_edges(graph)
    for edge, kind in zip(table_edges(graph), numbers, strict=True):
        u, v = graph.index[edge.producer], graph.index[edge.consumer]
        key: Hashable = id(layers[u]), id(layers[v]), kind
        if keeps is not None:
            producer = graph[edge.producer]
            is_kept = producer.is_fan_out and _fan_out_is_kept(graph, producer, keeps)
            tensor, read = (edge.producer, edge.output), (edge.consumer, edge.input)
            key = key, edge.output, edge.input, read in keeps.copies, tensor in keeps.writes, is_kept
        if key not in known.edges:
            unmade.setdefault(key, (edge, kind))
        keys.append(key)
        ends.append((u, v))

    def sides(edge: Edge) -> tuple[int, int]:
        return graph.index[edge.producer], graph.index[edge.consumer]

    edges = [edge for edge, _ in unmade.values()]
    traffic = [(does[u], does[v]) for u, v in map(sides, edges)]
    # Sizes are known long before costs: what does not fit is refused before any edge is costed.
    tables = [] if known.transfers else held_tables(graph, edges, traffic, model, allowance)
    if on_progress and tables:
        on_progress(f"cost tables of {quantity(allowance.held_bytes, 'B')}", 0.0)
    for number, (key, (edge, kind)) in enumerate(unmade.items()):
        (u, v), is_weight = sides(edge), isinstance(edge, SharedWeight)
        modes = layers[u], layers[v]
        by_pass = None
        if has_passes or has_bytes or (modes[1].again.any() and not is_weight):
            own = tables[number] if tables else between(graph, edge, *traffic[number], model, allowance)
            table, forward, moved = own.costs()
            by_pass = forward, moved
        elif known.transfers:
            ends_and_kind = *map(id, traffic[number]), kind
            table = known.transfers.table(ends_and_kind, graph, edge, traffic[number], model, allowance)
        else:
            table = tables[number].total()
        kept = None if keeps is None else _kept_on(graph, edge, traffic[number], modes, keeps)
        known.edges[key] = _edge_modes(table, by_pass, kept, modes, is_weight=is_weight)
        if on_progress:
            on_progress("costing edges", (number + 1) / len(unmade))
    return ModeTables(
        graph=graph,
        num_devices=num_devices,
        configurations=tuple(traffic.splits.values for traffic in does),
        layers=tuple(layers),
        ends=tuple(ends),
        edges=tuple(known.edges[key] for key in keys),
        hides=model.overlap > 0,
    )


# -- the problem of a step of one stage


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The search problem of a step of one stage.

    A plain plan is such a step: one micro-batch, whose layers have one mode.

    Attributes:
        modes: The choices of its layers, what they cost and hold.
        tables: What these cost altogether.
        micro_batches: Of a step.
    """

    modes: ModeTables
    tables: CostTables
    micro_batches: int = 1

    @classmethod
    def of(cls, modes: ModeTables, micro_batches: int = 1) -> "Problem":
        """Return the problem of some tables."""
        return cls(modes=modes, tables=modes.of_one_stage(micro_batches), micro_batches=micro_batches)

    @property
    def graph(self) -> Graph:
        """Of one micro-batch, with a fan-out wherever one is needed (`with_fan_outs`)."""
        return self.modes.graph

    @property
    def num_devices(self) -> int:
        """That the graph has."""
        return self.modes.num_devices

    @property
    def configurations(self) -> tuple[IndexArray, ...]:
        """[V] the [K, D] splits."""
        return self.modes.configurations

    def splits(self, vertex: int, choice: int) -> dict[str, int]:
        """Return the split factor of each dim of a vertex under one of its choices."""
        return self.modes.splits(vertex, choice)

    def choice(self, vertex: int, splits: tuple[int, ...]) -> int | None:
        """Return the first choice of a vertex with a configuration; None if it is not among them."""
        rows = self.modes.layers[vertex].rows
        found = np.flatnonzero((self.configurations[vertex] == np.array(splits)).all(axis=1)[rows])
        return int(found[0]) if len(found) else None

    def restricted(self, kept: Mapping[int, IndexArray]) -> "Problem":
        """Return the problem in which some vertices have some choices alone, numbered by position in `kept`."""
        return replace(self, modes=self.modes.restricted(kept), tables=restricted(self.tables, kept))


def build_problem(
    graph: Graph,
    num_devices: int,
    model: CostModel,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    allowance: Allowance | None = None,
    only: Callable[[Graph, Operator], IndexArray] | None = None,
    known: KnownModes | None = None,
) -> Problem:
    """Return the search problem of a plain plan (Eq. 1's t_l and r · t_x for every configuration).

    Args:
        graph: To be planned.
        num_devices: p.
        model: Of costs.
        on_progress: Called with what is being done and the fraction that is done.
        allowance: Of time and memory.
        only: Returns the configurations, [K, D], that are considered of each layer of the graph with fan-outs; None:
            every one.
        known: Of the same graph, devices and cost model.

    Raises:
        ConfigurationError: A layer has too many configurations.
        SolverError: Tables need more memory than is allowed.
        TimeUpError: They take longer.
    """
    graph = with_fan_outs(graph)
    tables = mode_tables(
        graph,
        num_devices,
        model,
        ModeSpace(),
        known=known or KnownModes(),
        only={} if only is None else {operator.name: only(graph, operator) for operator in graph.operators},
        allowance=allowance,
        on_progress=on_progress,
    )
    return Problem.of(tables)
