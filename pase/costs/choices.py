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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.costs.collectives import Link, point_to_point
from pase.costs.edges import (
    TransferBytes,
)
from pase.costs.memory import (
    Keeping,
    edge_memory,
    held_points,
    num_points,
)
from pase.costs.model import CostModel
from pase.costs.states import (
    GATHERED_OFTEN,
    REPLICATED,
    SCATTERED_OFTEN,
    STATES,
    BoolArray,
    ModeSpace,
    can_be_in_parts,
    shard_parts,
    sharded,
)
from pase.costs.traffic import Communication, LayerTraffic, Pattern, ReadTraits, layer_traffic, sum_name
from pase.graph import ITEMSIZES, Edge, Graph, Operator
from pase.graph.operator import axis_dims
from pase.graph.parts import Stage
from pase.sharding.edges import SharedWeight, edge_sides
from pase.sharding.shards import (
    FloatArray,
    IndexArray,
    IntArray,
    Splits,
    distinct_rows,
)
from pase.sharding.traffic import is_needed_backward
from pase.tables.cost_tables import EdgeTable, joined_edge, restricted_edge

Links = tuple[Link | None, Link | None]


CRITERIA = ("repeated", "streamed", "once", "summed", "cover", "static", "kept")
"""What adds up over layers and edges, in the order of the columns of arrays of weights."""


def criteria_weights(**weights: float) -> FloatArray:
    """Return [criteria] weights by name; of the others, 0."""
    return np.array([float(weights.get(name, 0.0)) for name in CRITERIA])


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
    """What choices have in memory in some turn, [C] bytes on each device, at least (`pase.costs.step_memory`).

    Attributes:
        static: However many micro-batches are in flight.
        kept: Of each one that is.
    """

    static: FloatArray
    kept: FloatArray


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
class LayerChoices:
    """The choices of a layer.

    Attributes:
        rows: [C] the configuration of each.
        state: [C] in `STATES`.
        again: [C] whether it is recomputed.
        ring: [C] whether it is attention that passes keys and values round.
        figures: What they cost.
        held: What they have in memory, in the turn that counts; None where none does.
        passes: What passes cost; None where that was not asked for.
    """

    rows: NDArray[np.intp]
    state: NDArray[np.intp]
    again: BoolArray
    ring: BoolArray
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

    def nearness(self, state: str, *, is_recomputed: bool) -> IntArray:
        """Return [C] how near each choice is to a mode.

        A layer may not have the mode: without weights to shard there is one state, and without a backward pass nothing
        is recomputed.
        """
        near: IntArray = 2 * (self.again == is_recomputed) + (self.state == STATES.index(state))
        return near

    def holding(self, static: FloatArray, kept: FloatArray) -> "LayerChoices":
        """Return the same choices with what they have in memory in a turn, as in `Held`."""
        return replace(self, held=Held(static=static, kept=kept))

    def with_columns(self, columns: FloatArray) -> "LayerChoices":
        """Return the same choices with other [C, criteria]."""
        values = dict(zip(CRITERIA, columns.T, strict=True))
        static, kept = values.pop("static"), values.pop("kept")
        held = None if self.held is None else replace(self.held, static=static, kept=kept)
        return replace(self, figures=replace(self.figures, **values), held=held)

    def restricted(self, kept: IndexArray) -> "LayerChoices":
        """Return some of the choices, [N] in their order."""
        return LayerChoices(
            rows=self.rows[kept],
            state=self.state[kept],
            again=self.again[kept],
            ring=self.ring[kept],
            figures=_joined([self.figures], kept),
            held=None if self.held is None else _joined([self.held], kept),
            passes=None if self.passes is None else _joined([self.passes], kept),
        )

    def with_rings(self, rings: "LayerChoices", rows: IndexArray) -> "LayerChoices":
        """Return these choices of attention, and behind them those of it as a ring.

        Args:
            rings: The choices as a ring.
            rows: The configuration of each one of these.
        """
        every = np.arange(len(self) + len(rings))
        return LayerChoices(
            rows=np.concatenate([self.rows, rows[rings.rows]]),
            state=np.concatenate([self.state, rings.state]),
            again=np.concatenate([self.again, rings.again]),
            ring=np.concatenate([self.ring, ~rings.ring]),
            figures=_joined([self.figures, rings.figures], every),
            held=None if self.held is None or rings.held is None else _joined([self.held, rings.held], every),
            passes=None if self.passes is None or rings.passes is None else _joined([self.passes, rings.passes], every),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeChoices:
    """What an edge costs for each micro-batch, and what its ends keep for one, by their choices.

    is_weight: whether it is a weight that two layers share: then what it costs can hide. forward: of the values of
    `cost`, what the forward pass pays the first time; moved: the bytes of one pass each way, by the same classes. Both
    None where that was not asked for.
    """

    cost: EdgeTable
    kept: EdgeTable | None
    is_weight: bool
    forward: FloatArray | None = None
    moved: TransferBytes | None = None

    def restricted(self, rows: IndexArray | None, cols: IndexArray | None) -> "EdgeChoices":
        """Return it for some choices of its ends; None: all of them. What is paid and moved by pass is left out."""
        kept = None if self.kept is None else restricted_edge(self.kept, rows, cols)
        return replace(self, cost=restricted_edge(self.cost, rows, cols), kept=kept, forward=None, moved=None)

    @classmethod
    def joined(cls, blocks: Sequence[Sequence["EdgeChoices"]]) -> "EdgeChoices":
        """Return what an edge costs whose ends have several kinds of choices, of which each kind has an edge.

        blocks: [kinds of the producer][kinds of the consumer].
        """
        first = blocks[0][0]

        def of(values: Callable[[EdgeChoices], EdgeTable]) -> EdgeTable:
            return joined_edge([[values(block) for block in row] for row in blocks])

        every = [block for row in blocks for block in row]
        found = replace(first, cost=of(lambda block: block.cost), forward=None, moved=None)
        if any(block.kept is not None for block in every):
            found = replace(found, kept=of(lambda block: block.kept or _nothing_kept(block.cost)))
        if any(block.moved is None for block in every):
            return found

        def values_of(part: Callable[[EdgeChoices], Any]) -> FloatArray:
            return of(lambda block: replace(block.cost, values=part(block))).values

        moved = TransferBytes(
            forward=values_of(lambda block: block.moved and block.moved.forward),
            backward=values_of(lambda block: block.moved and block.moved.backward),
        )
        return replace(found, forward=values_of(lambda block: block.forward), moved=moved)

    def criterion(self, *, hides: bool) -> int:
        """Return which of `CRITERIA` its cost counts as; hides: whether communication can overlap."""
        return 1 if self.is_weight and hides else 0


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
        asked += sharded_messages(graph, operator, traffic, micro_batches) if is_sharded else [[], [], []]
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


def sharded_messages(
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


def choices_of_layer(
    graph: Graph,
    operator: Operator,
    traffic: LayerTraffic,
    model: CostModel,
    space: ModeSpace,
    *,
    hides: tuple[bool, bool] = (False, False),
    links: Links = (None, None),
    micro_batches: int = 1,
    is_whole: bool = False,
    has_passes: bool = False,
) -> LayerChoices:
    """Return the choices of a layer and their figures; arguments as for `choices_of_layers`.

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
    left = np.arange(num * len(found))
    if not is_whole and len(found) > 1:
        left = _unbeaten(figures, [is_again for _, is_again in found])
    return LayerChoices(
        rows=left % num,
        state=np.array([number for number, _ in found])[left // num],
        again=np.array([is_again for _, is_again in found])[left // num],
        ring=np.zeros(len(left), dtype=np.bool_),
        figures=_joined(figures, left),
        passes=_joined(passes, left) if passes else None,
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


def _unbeaten(figures: Sequence[Figures], again: Sequence[bool]) -> NDArray[np.intp]:
    """Return the choices that no other of the same configuration, recomputed or not as they are, beats in everything.

    Of equal ones the first stays.
    """
    columns = [np.stack([own.repeated, own.streamed, own.once, own.summed]) for own in figures]
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


def edge_choices(
    table: EdgeTable,
    by_pass: tuple[FloatArray, TransferBytes] | None,
    kept: EdgeTable | None,
    modes: tuple[LayerChoices, LayerChoices],
    *,
    is_weight: bool,
) -> EdgeChoices:
    """Return what an edge costs and keeps.

    table: what it costs by configurations; by_pass: [L_u, L_v] what of it is paid forward, and what is moved.
    """
    u, v = modes
    cost = EdgeTable(
        row_class=_of_rows(table.row_class, u), col_class=_of_rows(table.col_class, v), values=table.values
    )
    if by_pass is None:
        assert is_weight or not v.again.any()
        return EdgeChoices(cost=cost, kept=kept, is_weight=is_weight)
    forward, moved = by_pass
    if v.again.any() and not is_weight:
        values = np.concatenate([table.values, table.values + forward], axis=1)
        forward, there, back = (np.concatenate([own, own], axis=1) for own in (forward, moved.forward, moved.backward))
        moved = TransferBytes(forward=there, backward=back)
        col_class = cost.col_class + table.values.shape[1] * v.again.astype(np.int32)
        cost = EdgeTable(row_class=cost.row_class, col_class=col_class.astype(np.int32), values=values)
    return EdgeChoices(cost=cost, kept=kept, is_weight=is_weight, forward=forward, moved=moved)


def _nothing_kept(cost: EdgeTable) -> EdgeTable:
    """Return a table of zeros for the same ends."""
    rows, cols = np.zeros_like(cost.row_class), np.zeros_like(cost.col_class)
    return EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1)))


def _of_rows(classes: IndexArray, modes: LayerChoices) -> IndexArray:
    """Return [C] the classes of choices by [K] those of their configurations."""
    is_plain = len(modes.rows) == len(classes) and (modes.rows == np.arange(len(classes))).all()
    return classes if is_plain else classes[modes.rows]


def kept_on_edge(
    graph: Graph,
    edge: Edge,
    ends: tuple[LayerTraffic, LayerTraffic],
    modes: tuple[LayerChoices, LayerChoices],
    keeps: Keeping,
    *,
    recomputes: bool,
) -> EdgeTable | None:
    """Return what an edge's tensor takes besides what its ends count themselves, at least.

    Neither end recomputed: a reader's copy in a layout of its own. The reader alone: what it reads, as the producer has
    it, unless that is kept in any case. The producer alone: what the reader needs, as that has it. A tensor of several
    readers (`is_on_edge`) lies as one or the other has it, for which the smaller one counts.

    recomputes: whether layers of the graph can be recomputed, by which that depends on more than layouts.
    """
    u, v = modes
    us, vs = (end.splits.values for end in ends)
    copies = edge_memory(graph, edge, us, vs) if (edge.consumer, edge.input) in keeps.copies else None
    if copies is None:
        nothing = np.zeros(1, dtype=np.int32)
        copies = EdgeTable(
            row_class=np.repeat(nothing, len(us)), col_class=np.repeat(nothing, len(vs)), values=np.zeros((1, 1))
        )
    if isinstance(edge, SharedWeight) or not recomputes:
        left, needed = np.zeros(len(us), dtype=np.int64), np.zeros(len(vs), dtype=np.int64)
        counted = CountedOnEdge()
    else:
        (producer, write), (consumer, read) = edge_sides(graph, edge)
        itemsize = graph.types[edge.consumer].read_bytes(edge.input)
        left = held_points(producer, write, ends[0].splits) * itemsize
        needed = held_points(consumer, read, ends[1].splits) * itemsize
        counted = CountedOnEdge.of(graph, edge, keeps)
    u_rows = np.column_stack([copies.row_class[u.rows], left[u.rows], u.again])
    v_rows = np.column_stack([copies.col_class[v.rows], needed[v.rows], v.again])
    u_distinct, row_class = distinct_rows(u_rows)
    v_distinct, col_class = distinct_rows(v_rows)
    waiting, read_whole = u_distinct[:, 1, None], v_distinct[None, :, 1]
    u_again, v_again = u_distinct[:, 2, None] > 0, v_distinct[None, :, 2] > 0
    copied = copies.values[np.ix_(u_distinct[:, 0].astype(np.intp), v_distinct[:, 0].astype(np.intp))]
    if counted.is_saved:
        copied = copied + np.minimum(waiting, read_whole)
    of_recomputed = np.maximum(copied, read_whole // counted.sharing) if counted.sharing else copied
    # A layer that is recomputed copies what it reads anew.
    values = np.where(
        v_again, np.where(u_again, 0, waiting * counted.is_left), np.where(u_again, of_recomputed, copied)
    )
    if not values.any():
        return None
    return EdgeTable(
        row_class=row_class.astype(np.int32), col_class=col_class.astype(np.int32), values=values.astype(np.float64)
    )


def is_on_edge(graph: Graph, edge: Edge, keeps: Keeping) -> bool:
    """Return whether what a reader saves of a tensor counts on the edge, where layers can be recomputed.

    Other readers of it that are recomputed have it wait as its producer has it.
    """
    several = len(graph.readers[edge.producer, edge.output]) > 1 and not graph[edge.consumer].is_fan_out
    # In another type each reader makes its own when it reads.
    is_cast = graph.types[edge.consumer].is_cast(edge.input)
    return several and not is_cast and (edge.consumer, edge.input) in keeps.reads


@dataclass(frozen=True, slots=True)
class CountedOnEdge:
    """What of a tensor counts on an edge, where layers can be recomputed.

    Several readers may share the tensor. It counts once for recomputed ones: for the one that saves it, or the first.
    Of those that need what a recomputed layer writes each counts its share. A fan-out has what the layer before it has;
    that readers need of a recomputed one counts for each: it is the same as if it were not (`StepTensors.made_again`).

    Attributes:
        is_saved: What the reader saves of it.
        is_left: What a recomputed reader has wait.
        sharing: How many readers need it of a recomputed layer; 0 where the edge's does not.
    """

    is_saved: bool = False
    is_left: bool = False
    sharing: int = 0

    @classmethod
    def of(cls, graph: Graph, edge: Edge, keeps: Keeping) -> "CountedOnEdge":
        """Return what counts on an edge."""
        tensor, is_fan_out = (edge.producer, edge.output), graph[edge.producer].is_fan_out
        readers, is_kept = graph.readers[tensor], tensor in keeps.writes
        saving = [other for other in readers if (other.consumer, other.input) in keeps.reads]
        needing = [other for other in readers if is_kept and other.input in keeps.saved[other.consumer].reads]
        if is_fan_out and (edge.producer, 0) in keeps.reads and (edge.consumer, edge.input) in keeps.copies:
            needing = [edge]
        return cls(
            is_saved=is_on_edge(graph, edge, keeps),
            is_left=not is_fan_out and not is_kept and edge == (saving or readers)[0],
            sharing=len(needing) if edge in needing else 0,
        )


# -- attention that may pass keys and values round


def ring_rows(operator: Operator, ring: Operator, splits: Splits) -> IndexArray:
    """Return which configurations of attention it may have as a ring, too.

    Where the sequence is not split a ring is no other layer.

    Args:
        operator: The attention.
        ring: The same as a ring; the attention itself where it has none, or is one.
        splits: Configurations of the attention.
    """
    if ring is operator or ring == operator or ring.ring is None:
        return np.empty(0, dtype=np.int32)
    sequence, _ = ring.ring.changes[0]
    whole = tuple(dim for dim in ring.unsplittable if dim not in operator.unsplittable)
    found = (splits.product(whole) == 1) & (splits.product(axis_dims(sequence)) > 1)
    return np.flatnonzero(found).astype(np.int32)


# -- all layers and edges of a graph


def once_a_step(traffic: LayerTraffic, micro_batches: int) -> LayerTraffic:
    """Return traffic whose sums of weights' gradients are sent as often as they are for one of some micro-batches.

    How a layer's devices lie over the levels of a machine is up to what they send each other in the whole step.
    """
    messages = tuple(
        replace(message, times=message.times / micro_batches) if message.is_of_weight else message
        for message in traffic.messages
    )
    return traffic if micro_batches == 1 else replace(traffic, messages=messages)
