"""What lies in a device's memory when: the peak of a training step, from the turns in which each tensor is needed.

A step has a turn for each layer forward, in the graph's order; two for each backward, in the reverse order, the first
for functions that a layer applies behind its product; and one for the optimizer. Layers that are recomputed, one after
the other, are a run: they have one more turn each, forward, before the first of them goes back. A tensor lies from the
turn that makes it to the last one that needs it:

- weights, the optimizer's state and the model's inputs always; a weight's gradient from its layer's turn backward on;
- what a layer writes until its last reader's turn, or, where the backward pass needs it (`pase.costs.memory.keeping`),
  until the turn of the earliest layer that does; what a run reads until it is computed again; what is made again
  within a run, and needed there, from then on;
- the gradient of what a layer writes from its last reader's turn to its own;
- what kernels work with in their turn alone: a gradient that is added to others, one that is padded as its window is,
  the parts of sums that devices exchange, a bucket of weights' gradients that are summed together, what the optimizer
  makes of the largest weight.

Weights that devices hold in pieces (zero3) are whole in their layer's turns and, as they are gathered ahead, in that of
the one before; their gradients (zero1 to zero3) until their bucket has been summed, which lies there until the next.

With micro-batches the turns are those of one of them. A stage of a pipeline holds besides, of each other one that is in
flight, what is live between its passes. The peak is the most in any turn of two micro-batches: of the first that goes
back, while as many as ever are in flight and no gradients are there, and of a later one, which finds gradients.
"""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pase.costs.memory import (
    Keeping,
    Parts,
    edge_memory,
    held_parts,
    held_points,
    num_points,
    state_size,
)
from pase.costs.states import STATES, BoolArray, shard_parts, sharded, sums_moments
from pase.graph import ITEMSIZES, Access, AllReduce, AllToAll, Graph, Operator, Role
from pase.graph.operator import Indexed, Window
from pase.graph.parts import Stage
from pase.sharding.buckets import gradient_buckets
from pase.sharding.edges import table_edges
from pase.sharding.shards import IndexArray, IntArray, Splits, shards_in_order, splits_of
from pase.sharding.traffic import is_needed_backward
from pase.tables.cost_tables import EdgeTable

UPDATE_TENSORS = {"adam": 2, "adamw": 2, "adafactor": 2}
"""How many tensors as large as a weight an optimizer works with beside it, weight by weight."""

_BY_PLACES = frozenset({"gather"})
"""Kinds whose gradient is added to zeros, place by place."""


WEIGHTS, GRADIENTS, OPTIMISER, KEPT, PASSING = range(5)
"""What bytes are of: weights, their gradients, the optimizer's state; what is kept to the backward pass; the rest."""


class Span(NamedTuple):
    """Bytes that are in memory from one turn to another, both included: [K], for each configuration of a layer.

    of: what they are of; PASSING may be kept, too, where they are there in the forward and in the backward pass.
    """

    first: int
    last: int
    size: IntArray
    of: int = PASSING


class Turn(NamedTuple):
    """A turn of a step.

    phase: "forward", "functions" or "product" (which a layer has backward), of a layer by its position; behind these
    "sums", where the last gradients are brought together, and "update". is_first: whether it is of the first of several
    micro-batches that goes back, which finds no gradients.
    """

    phase: str
    position: int
    is_first: bool = False


class NeededBy(NamedTuple):
    """The layers that need a tensor, by their positions.

    readers: each with the fan-out that it reads it of and that saves it; -1 for none. graded: the last reader that has
    its gradient. kept: those that need it backward.
    """

    readers: tuple[tuple[int, int], ...]
    graded: int
    kept: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepTensors:
    """What devices hold of the tensors of a step, and which layers need them, whichever layers are recomputed.

    Attributes:
        graph: Of one micro-batch; a stage, perhaps.
        keeps: Which tensors are kept to the backward pass.
        rows: [V] the [K, D] configurations of each layer.
    """

    graph: Graph
    keeps: Keeping
    rows: Sequence[IndexArray]

    def splits(self, operator: Operator) -> Splits:
        """Return the configurations of a layer."""
        return splits_of(operator, self.rows[self.graph.index[operator.name]])

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """[V] numbers of layers, equal where all that a device holds of their tensors is."""
        numbers: dict[Hashable, int] = {}
        configurations = {id(rows): rows.tobytes() for rows in self.rows}
        keys = ((like, configurations[id(rows)]) for like, rows in zip(self.graph.repeated, self.rows, strict=True))
        return tuple(numbers.setdefault(key, len(numbers)) for key in keys)

    @cached_property
    def of_layers(self) -> tuple["LayerTensors", ...]:
        """[V] what a device holds of each layer's tensors; layers of one kind share a value."""
        operators = self.graph.operators
        first = {kind: position for position, kind in reversed(list(enumerate(self.kinds)))}
        of_kind = {kind: LayerTensors(operators[v], self.splits(operators[v])) for kind, v in first.items()}
        return tuple(of_kind[kind] for kind in self.kinds)

    @cached_property
    def last_user(self) -> Mapping[str, int]:
        """The position of the last layer that uses a shared weight, by the weight's name."""
        layers = enumerate(self.graph.operators)
        return {access.shared: i for i, operator in layers for access in operator.parameters if access.shared}

    @cached_property
    def needed(self) -> "Mapping[tuple[str, int], NeededBy]":
        """The layers that need what is written."""
        graph, saved = self.graph, self.keeps.saved
        found: dict[tuple[str, int], NeededBy] = {}
        for position, operator in reversed(list(enumerate(graph.operators))):
            for output in range(len(operator.writes)):
                readers, graded, kept = list[tuple[int, int]](), position, list[int]()
                if output in saved[operator.name].writes and not operator.is_fan_out:
                    kept.append(position)
                for edge in graph.readers.get((operator.name, output), ()):
                    name, read, at = edge.consumer, edge.input, graph.index[edge.consumer]
                    readers.append((at, -1))
                    if graph[name].is_fan_out:
                        further = found[name, 0]
                        through = at if (name, 0) in self.keeps.reads else -1
                        readers += [(reader, through) for reader, _ in further.readers]
                        kept, graded = [*kept, *further.kept], max(graded, further.graded)
                    elif graph.has_gradient(graph[name], read):
                        graded = max(graded, at)
                    if read in saved[name].reads:
                        kept.append(at)
                found[operator.name, output] = NeededBy(readers=tuple(readers), graded=graded, kept=tuple(kept))
        return found

    def made_again(self, recomputed: Sequence[bool]) -> tuple[bool, ...]:
        """Return [V] which layers are made again in the backward pass, of those that are to be.

        A fan-out makes nothing: it is one of those with the layer before it and all that need what it has.
        """
        graph, found = self.graph, list(recomputed)
        for position, operator in enumerate(graph.operators):
            if operator.is_fan_out and found[position]:
                edge = graph.incoming.get((operator.name, 0))
                before = edge is None or found[graph.index[edge.producer]]
                found[position] = before and all(found[at] for at in self.needed[operator.name, 0].kept)
        return tuple(found)

    @cached_property
    def copies(self) -> list[tuple[int, tuple[int, int], EdgeTable]]:
        """Copies of what layers read in layouts of their own: number of the edge, its ends, and how large they are."""
        graph, found = self.graph, []
        known: dict[Hashable, EdgeTable] = {}
        for number, edge in enumerate(table_edges(graph)):
            if (edge.consumer, edge.input) in self.keeps.copies:
                ends = u, v = graph.index[edge.producer], graph.index[edge.consumer]
                rows = [self.rows[end] for end in ends]
                key = type(edge), self.kinds[u], self.kinds[v], edge.output, edge.input
                if key not in known:
                    known[key] = edge_memory(graph, edge, *rows)
                found.append((number, ends, known[key]))
        return found


@dataclass(frozen=True, eq=False)
class Timeline:
    """The turns of a step of a graph, and the last ones that need what its layers make.

    Attributes:
        tensors: Of the step.
        recomputed: [V] whether layers are.
    """

    tensors: StepTensors
    recomputed: Sequence[bool]

    @property
    def graph(self) -> Graph:
        """Of one micro-batch; a stage, perhaps."""
        return self.tensors.graph

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """[V] the first layer of the run that each layer is of, -1 for none."""
        found: list[int] = []
        for position, is_again in enumerate(self.recomputed):
            is_further = position > 0 and self.recomputed[position - 1]
            found.append((found[-1] if is_further else position) if is_again else -1)
        return tuple(found)

    @cached_property
    def _order(self) -> tuple[tuple[str, int], ...]:
        """What each turn is of: a layer, by position, forward, again, or one of its two backward."""
        num = len(self.recomputed)
        order = [("forward", position) for position in range(num)]
        for position in reversed(range(num)):
            if self.recomputed[position] and not any(self.recomputed[position + 1 : position + 2]):
                order += [("again", other) for other in range(self.runs[position], position + 1)]
            order += [("functions", position), ("product", position)]
        return tuple(order)

    @cached_property
    def _turns(self) -> Mapping[tuple[str, int], int]:
        return {of: turn for turn, of in enumerate(self._order)}

    @property
    def update(self) -> int:
        """The optimizer's turn, the last one; before it the last weights' gradients are brought together."""
        return len(self._order) + 1

    def backward(self, position: int) -> tuple[int, int]:
        """Return the two turns of a layer in the backward pass."""
        return self._turns["functions", position], self._turns["product", position]

    def again(self, position: int) -> int:
        """Return the last turn of a layer forward: where it is recomputed that in the backward pass."""
        return self._turns["again" if self.recomputed[position] else "forward", position]

    def turn(self, number: int) -> Turn:
        """Return which turn one is; where layers are made again, that of the first of them to go back."""
        if number >= len(self._order):
            return Turn("update" if number == self.update else "sums", -1)
        phase, position = next(of for of in self._order[number:] if of[0] != "again")
        return Turn(phase, position)

    def number(self, turn: Turn) -> int:
        """Return the number of a turn."""
        return self.update - (turn.phase == "sums") if turn.position < 0 else self._turns[turn.phase, turn.position]

    def is_lasting(self, span: Span) -> bool:
        """Return whether something stays until all of the backward pass is over, so that it is never recomputed."""
        return span.last == self.update - 1

    def layer_of(self, number: int) -> str:
        """Return the layer whose turn it is, "" for the optimizer's."""
        return self.graph.operators[self._order[number][1]].name if number < len(self._order) else ""

    def last_gradient(self, name: str, output: int) -> int:
        """Return the position of the layer that is the first backward to give a gradient of what a layer writes."""
        return self.tensors.needed[name, output].graded

    def copies(self, name: str, output: int) -> list[tuple[int, int, int]]:
        """Return when a tensor is made, last needed forward, and last needed at all where layers keep it.

        Once, and where it is made in a run that is computed again, once more.
        """
        return self._copies[name, output]

    @cached_property
    def _copies(self) -> Mapping[tuple[str, int], list[tuple[int, int, int]]]:
        return {tensor: self._copies_of(self.graph.index[tensor[0]], of) for tensor, of in self.tensors.needed.items()}

    def _copies_of(self, position: int, needed: NeededBy) -> list[tuple[int, int, int]]:
        runs = self.runs
        own = runs[position]
        if own < 0 and not any(self.recomputed[at] for at, _ in needed.readers):
            first = max([position, *(at for at, _ in needed.readers)])
            return [(position, first, max([self.backward(at)[1] for at in needed.kept], default=first))]

        def within(at: int) -> bool:
            return runs[at] >= 0 and runs[at] == own

        readers = [at for at, _ in needed.readers]
        # A run holds what it reads of others until it is computed again: of a fan-out what that has, if it saves it.
        waits = [self.again(at) for at, of in needed.readers if not within(at) and (of < 0 or self.recomputed[of])]
        ends = [self.backward(at)[1] for at in needed.kept if not within(at)]
        if self.graph.operators[position].is_fan_out and not self.recomputed[position]:
            ends, waits = [*ends, *waits], []
        first = max([position, *readers, *waits])
        found = [(position, first, max(ends, default=first))]
        if own >= 0:
            again = max([self.again(position), *(self.again(at) for at in readers if within(at))])
            ends = [self.backward(at)[1] for at in needed.kept if within(at)]
            found.append((self.again(position), again, max(ends, default=again)))
        return found

    def freed(self, name: str, output: int, reader: int) -> int:
        """Return the turn in which a reader is the last to need what a layer writes, for making what it keeps of it."""
        copies = self.copies(name, output)
        is_within = self.runs[reader] >= 0 and self.runs[reader] == self.runs[self.graph.index[name]]
        return copies[-1 if is_within else 0][1]


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """The [K] points of a layer's tensors that a device holds.

    Attributes:
        operator: The layer.
        splits: Its configurations.
    """

    operator: Operator
    splits: Splits

    @cached_property
    def reads(self) -> tuple[IntArray, ...]:
        """Of what it reads."""
        return self._points_of(self.operator.reads)

    @cached_property
    def writes(self) -> tuple[IntArray, ...]:
        """Of what it writes."""
        return self._points_of(self.operator.writes)

    @cached_property
    def intermediates(self) -> tuple[IntArray, ...]:
        """Of what it makes for itself."""
        return self._points_of(self.operator.intermediates)

    @cached_property
    def exchanges(self) -> tuple[IntArray, ...]:
        """Of what its devices exchange; of all-reduces and all-to-alls none where one device has all."""
        points = self._points_of(self.operator.exchanges)
        return tuple(
            own * self._is_split(exchange.over) if isinstance(exchange, AllReduce | AllToAll) else own
            for own, exchange in zip(points, self.operator.exchanges, strict=True)
        )

    @cached_property
    def gradients(self) -> tuple[tuple[IntArray, IntArray], ...]:
        """Of what it reads, what its gradient takes besides, where it is the first one and where it is added to it."""
        found = []
        for read, points in zip(self.operator.reads, self.reads, strict=True):
            # A gradient that is added to others lies beside them; one of a padded window is longer than what it is of.
            more = points * self._is_split(self.operator.partial_dims(read))
            more = more + points * (self.operator.kind in _BY_PLACES)
            padding = points - (points * _own_share(self.operator, read)).astype(np.int64)
            found.append((padding + more, points + more))
        return tuple(found)

    def _points_of(self, tensors: Sequence[Indexed]) -> tuple[IntArray, ...]:
        return tuple(held_points(self.operator, tensor, self.splits) for tensor in tensors)

    def _is_split(self, dims: tuple[str, ...]) -> BoolArray:
        found: BoolArray = self.splits.product(dims) > 1
        return found


def layer_spans(
    timeline: Timeline, operator: Operator, without: Container[tuple[str, int]] = frozenset()
) -> Iterator[Span]:
    """Yield what lies in memory of a layer's tensors, and when, but for its weights.

    without: Reads of which what is saved is left out.
    """
    graph, keeps = timeline.graph, timeline.tensors.keeps
    name, position = operator.name, graph.index[operator.name]
    types, tensors = graph.types[name], timeline.tensors.of_layers[position]
    functions, product = timeline.backward(position)
    again, is_trained = timeline.again(position), name in graph.trained
    turns = {position, again}
    # What is saved of a layer that is recomputed is there while it goes back alone.
    kept = PASSING if timeline.recomputed[position] else KEPT

    saved = keeps.saved[name]
    applies = is_trained and not operator.is_loss and bool(saved.results or saved.places or saved.writes)
    received = {edge.input for edge in graph.received if edge.consumer == name} if isinstance(graph, Stage) else set()
    for number, read in enumerate(operator.reads):
        if read.role is Role.PARAMETER:
            continue
        size = tensors.reads[number]
        edge = graph.incoming.get((name, number))
        own = size * types.operand_bytes(number)
        if edge is None:
            if number in received:
                # What came of the stage before, and its gradient, until all of the backward pass is over.
                yield Span(0, timeline.update - 1, size * types.read_bytes(number))
                yield Span(product, timeline.update - 1, size * types.read_bytes(number) * is_trained)
            is_padded = any(isinstance(axis, Window) and axis.pad for axis in read.index_map)
            if (name, number) in keeps.reads and (is_padded or types.is_cast(number)):
                yield Span(again, product, own)
            continue
        if operator.is_fan_out:
            if (name, number) in keeps.reads and (name, number) not in without:
                for _, freed, last in timeline.copies(name, 0):
                    yield Span(freed + 1, last, own, kept)
            continue
        if (name, number) in keeps.reads and (name, number) not in without:
            freed = timeline.freed(edge.producer, edge.output, position)
            yield Span(again if types.is_cast(number) else freed + 1, product, own, kept)
        if graph.has_gradient(operator, number):
            is_added = timeline.last_gradient(edge.producer, edge.output) != position
            yield Span(product, product, tensors.gradients[number][is_added] * types.read_bytes(number))
            if types.is_cast(number):
                yield Span(product, product, own)
    sent = {edge.output for edge in graph.sent if edge.producer == name} if isinstance(graph, Stage) else set()
    for output, points in enumerate(tensors.writes):
        if operator.is_loss or operator.is_fan_out:
            continue
        size = points * types.write_bytes(output)
        copies = timeline.copies(name, output)
        for made, freed, needed in copies:
            last = needed if (name, output) in keeps.writes else freed
            # What goes to another stage stays until all of the backward pass is over, and so does its gradient.
            yield Span(made, timeline.update - 1 if output in sent and made == position else last, size)
        graded = timeline.last_gradient(name, output)
        if output in sent and is_trained:
            yield Span(len(timeline.recomputed), timeline.update - 1, size)
        elif is_trained and graded > position:
            yield Span(timeline.backward(graded)[1], functions if applies else product, size)
        if applies:
            yield Span(functions, product, size)
            yield Span(again, functions, points * saved.results_bytes(types.write_bytes(output)))
    for tensor, points in zip(operator.intermediates, tensors.intermediates, strict=True) if is_trained else ():
        yield Span(again, product, points * types.intermediate_bytes(tensor) * tensor.kept)
    has_bias = operator.kind == "attention" and is_trained and any(read.is_trained for read in operator.parameters)
    for exchange, points in zip(operator.exchanges, tensors.exchanges, strict=True):
        if isinstance(exchange, AllReduce) and exchange.tensor == "scores" and has_bias:
            # Products and a softmax of their own have a gradient of a bias: where these compute in a wider type, what
            # the softmax is of, queries and keys lie there in that.
            wide, narrow = ITEMSIZES[types.statistics], types.operand_bytes(0)
            scores = held_points(operator, exchange, tensors.splits)
            yield Span(again, product, scores * wide * (1 + (wide > narrow)))
            yield Span(again, product, (tensors.reads[0] + tensors.reads[1]) * (wide - narrow))
        if isinstance(exchange, AllReduce | AllToAll):
            size = points * types.exchange_bytes(exchange)
            for turn in turns:
                yield Span(turn, turn, size)


def _own_share(operator: Operator, read: Access) -> float:
    """Return how much of what an operator lays out for its windows is the tensor that it reads."""
    if not any(isinstance(axis, Window) for axis in read.index_map):
        return 1.0
    whole = splits_of(operator, np.ones((1, len(operator.extents)), dtype=np.int32))
    return min(prod(read.shape) / int(held_points(operator, read, whole)[0]), 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPart:
    """A device's part of a weight.

    Attributes:
        points: [K] of the part.
        parts: [K] the devices that add up its gradient behind the layer's turn.
        is_cut: [K] whether these share it out among them.
        shard: The largest piece of it, where they do.
        is_in_order: [K] whether the pieces follow one another in memory.
        is_gathered: Whether the whole of it is there in the layer's turns alone.
    """

    points: IntArray
    parts: IntArray
    is_cut: BoolArray
    shard: Parts
    is_in_order: BoolArray
    is_gathered: bool

    @cached_property
    def is_whole(self) -> bool:
        """Whether devices hold all of their parts under every configuration."""
        return not self.is_cut.any()

    @cached_property
    def shard_points(self) -> IntArray:
        """[K] the points of the largest piece; of the part where it is not shared out."""
        return num_points(self.shard, len(self.points))

    @cached_property
    def gathered_points(self) -> IntArray:
        """[K] the points of all pieces in a collective, which takes all as long as the largest."""
        return self.shard_points * np.where(self.is_cut, self.parts, 1)

    @cached_property
    def held_points(self) -> IntArray:
        """[K] the points that are there throughout a step."""
        if self.is_gathered:
            return self.shard_points
        return self.gathered_points + self.shard_points * (self.is_cut & ~self.is_in_order)

    def under(self, configuration: int) -> "WeightPart":
        """Return it under one of its configurations."""
        if len(self.points) == 1:
            return self

        def own(values: Any) -> Any:
            return np.broadcast_to(values, self.points.shape)[configuration : configuration + 1]

        return replace(
            self,
            points=own(self.points),
            parts=own(self.parts),
            is_cut=own(self.is_cut),
            shard=[(extent, own(size)) for extent, size in self.shard],
            is_in_order=own(self.is_in_order),
        )


class AllocatedWeight(NamedTuple):
    """A weight that a layer, by its position, is the first to use, or uses alone; state: one of `STATES`."""

    position: int
    operator: Operator
    read: Access
    state: str
    part: WeightPart

    def under(self, configuration: int) -> "AllocatedWeight":
        """Return the weight under one of its layer's configurations."""
        part = self.part.under(configuration)
        return self._replace(part=part, state=STATES[0] if part.is_whole else self.state)


def allocated_weights(timeline: Timeline, states: Sequence[str]) -> Iterator[AllocatedWeight]:
    """Yield the weights of layers, in order; a shared one with the first layer that uses it.

    states: [V] of layers.
    """
    graph = timeline.graph
    known: dict[tuple[int, int, str], WeightPart] = {}
    for position, operator in enumerate(graph.operators):
        for number, read in enumerate(operator.reads):
            if read.role is not Role.PARAMETER or (read.shared and graph.owners[read.shared] != operator.name):
                continue
            key = timeline.tensors.kinds[position], number, states[position]
            if key not in known:
                known[key] = _weight_part(operator, number, timeline.tensors.splits(operator), states[position])
            part = known[key]
            state = STATES[0] if part.is_whole else states[position]
            yield AllocatedWeight(position=position, operator=operator, read=read, state=state, part=part)


def _weight_part(operator: Operator, number: int, configurations: Splits, state: str) -> WeightPart:
    read = operator.reads[number]
    part = held_parts(operator, read, configurations)
    is_cut = np.zeros(len(configurations.values), dtype=np.bool_)
    if state != STATES[0]:
        is_cut = sharded(operator, number, configurations)
    shard = part
    if is_cut.any():
        cut = shard_parts(operator, read, configurations)
        shard = [(extent, np.where(is_cut, least, own)) for (extent, own), (_, least) in zip(part, cut, strict=True)]
    count = configurations.product(operator.partial_dims(read))
    return WeightPart(
        points=num_points(part, len(configurations.values)),
        parts=np.where(sums_moments(operator, configurations), 1, count),
        is_cut=is_cut,
        shard=shard,
        is_in_order=np.asarray(shards_in_order([size for _, size in part], count), dtype=np.bool_),
        is_gathered=state == "zero3",
    )


def weight_spans(
    timeline: Timeline, weights: Sequence[AllocatedWeight], optimiser: str, *, is_first: bool, is_last: bool
) -> Iterator[tuple[int, Span]]:
    """Yield what is allocated of weights, their gradients and the optimizer's state, and when, each with its layer.

    is_first, is_last: Whether the micro-batch is the first one, before which no gradients are there, and the last one
    of the step, after which gradients are reduced that are not reduced in each.
    """
    precision, end = timeline.graph.precision, timeline.update
    itemsize = ITEMSIZES[precision.gradients]
    launched = {} if all(weight.part.is_whole for weight in weights) else _launches(timeline, weights)
    scattered = {
        launched[weight.position, weight.read.tensor]
        for weight in weights
        if not weight.part.is_whole and (is_last or weight.state != "zero1")
    }
    for weight in weights:
        points = weight.part.points
        yield weight.position, Span(0, end, weight.part.held_points * precision.itemsize, WEIGHTS)
        if not weight.read.is_trained:
            continue
        yield weight.position, Span(0, end, state_size(weight.part.shard, len(points), precision, optimiser), OPTIMISER)
        if weight.operator.name not in timeline.graph.trained:
            continue
        last = timeline.tensors.last_user[weight.read.shared] if weight.read.shared else weight.position
        product, size = timeline.backward(last)[1], points * itemsize
        if weight.part.is_whole:
            yield weight.position, Span(product if is_first else 0, end, size, GRADIENTS)
            yield weight.position, Span(product, product, size * (not is_first))
            continue
        # Whole until its bucket is launched, then a piece; those of micro-batches before are pieces or, under zero1,
        # whole.
        launch = launched[weight.position, weight.read.tensor]
        is_accumulated = weight.state == "zero1" and not is_first
        if weight.state == "zero1" and not is_last:
            yield weight.position, Span(product, end, size, GRADIENTS)
            continue
        yield weight.position, Span(0 if is_accumulated else product, launch, size, GRADIENTS)
        yield weight.position, Span(product, product, size * is_accumulated)
        # Its shard's sum is made when the next reduce-scatter begins.
        made = min((turn for turn in scattered if turn > launch), default=end - 1) + 1
        begin = made if is_first or is_accumulated else 0
        yield weight.position, Span(begin, end, weight.part.shard_points * itemsize, GRADIENTS)
    # Of layers that read a weight which others have, too: gradients that are added, and weights in another type.
    graph = timeline.graph
    for position, operator in enumerate(graph.operators):
        types, product = graph.types[operator.name], timeline.backward(position)[1]
        for number, read in enumerate(operator.reads):
            if read.role is not Role.PARAMETER:
                continue
            points = timeline.tensors.of_layers[position].reads[number]
            if read.is_trained and read.shared and timeline.tensors.last_user[read.shared] != position:
                yield position, Span(product, product, points * itemsize)
            if types.is_cast(number):
                size = points * types.operand_bytes(number)
                yield position, Span(timeline.again(position), product, size)
                yield position, Span(product, product, size * read.is_trained)
    yield from _gathered(timeline, [weight for weight in weights if weight.state == "zero3"])


def _gathered(timeline: Timeline, weights: Sequence[AllocatedWeight]) -> Iterator[tuple[int, Span]]:
    """Yield the whole of weights in pieces: in their layers' turns, and in those before, as they are gathered ahead."""
    sizes: dict[int, IntArray] = {}
    for weight in weights:
        size = weight.part.gathered_points * timeline.graph.precision.itemsize
        sizes[weight.position] = sizes[weight.position] + size if weight.position in sizes else size
    for before, position in pairwise([-1, *sizes]):
        yield position, Span(max(before, 0), position, sizes[position])
        if timeline.recomputed[position]:
            yield position, Span(timeline.again(position), timeline.again(position), sizes[position])
    needed = [at for at in reversed(sizes) if is_needed_backward(timeline.graph, timeline.graph.operators[at])]
    for behind, position in pairwise([-1, *needed]):
        product = timeline.backward(position)[1]
        is_ahead = behind >= 0 and timeline.runs[position] in (-1, timeline.runs[behind])
        yield position, Span(timeline.backward(behind)[1] if is_ahead else product, product, sizes[position])


def _in_buckets(timeline: Timeline, weights: Sequence[AllocatedWeight]) -> list[list[AllocatedWeight]]:
    """Return the weights whose gradients are reduced together, in the order in which these reductions begin.

    weights: Each under one configuration.
    """
    itemsize = ITEMSIZES[timeline.graph.precision.collectives]
    summed = [weight for weight in weights if weight.read.is_trained and weight.part.parts[0] > 1]
    keys = [(int(weight.part.parts[0]), weight.part.is_whole, weight.state in STATES[:2]) for weight in summed]
    buckets = gradient_buckets(keys, [int(weight.part.points[0]) * itemsize for weight in summed])
    return [[summed[position] for position in bucket] for bucket in buckets]


def _launches(timeline: Timeline, weights: Sequence[AllocatedWeight]) -> Mapping[tuple[int, str], int]:
    """Return the turn in which the bucket of each weight is full and goes, by its layer and name."""
    return {
        (weight.position, weight.read.tensor): timeline.backward(bucket[-1].position)[1]
        for bucket in _in_buckets(timeline, weights)
        for weight in bucket
    }


def bucket_spans(timeline: Timeline, weights: Sequence[AllocatedWeight], *, is_last: bool) -> Iterator[Span]:
    """Yield what buckets take besides the gradients in them: copies, and sums of shards until the next ones.

    is_last: See `weight_spans`.
    """
    itemsize = ITEMSIZES[timeline.graph.precision.collectives]
    launched = _launches(timeline, weights)
    # Of those that go in one turn, one after the other, the largest counts.
    copied, launching, scattered = dict[int, int](), dict[int, int](), dict[int, int]()
    for bucket in _in_buckets(timeline, weights):
        if bucket[0].state in STATES[:2] and not is_last:
            continue
        turn = launched[bucket[0].position, bucket[0].read.tensor] + 1
        size = sum(int(weight.part.gathered_points[0]) for weight in bucket) * itemsize
        is_alone = len(bucket) == 1 and bool(bucket[0].part.is_in_order[0])
        is_copied = not is_alone or bucket[0].part.gathered_points[0] != bucket[0].part.points[0]
        if bucket[0].part.is_whole:
            copied[turn] = max(copied.get(turn, 0), size * is_copied)
            continue
        # Autograd holds the gradient that comes last while a bucket is copied: of the layer's first weight, or under
        # zero3, where those of a layer come together, of its last.
        own = [weight for weight in weights if weight.position == bucket[-1].position and weight.read.is_trained]
        last = int(own[-1 if own[0].state == "zero3" else 0].part.points[0]) * itemsize
        launching[turn] = max(launching.get(turn, 0), 2 * size + last * is_copied)
        scattered[turn] = max(scattered.get(turn, 0), 2 * size)
    yield from (_span(turn, turn, size) for turn, size in copied.items())
    # What is sent and what is received of a reduce-scatter, until the next one begins.
    for turn, following in pairwise([*scattered, timeline.update]):
        yield _span(turn, turn, launching[turn])
        yield _span(turn + 1, following - 1, scattered[turn])


def _span(first: int, last: int, size: int) -> Span:
    return Span(first, last, np.array([size]))


def input_spans(timeline: Timeline) -> Iterator[tuple[int, Span]]:
    """Yield what a micro-batch of a step is given, each with its layer."""
    graph = timeline.graph
    received = {(e.consumer, e.input) for e in graph.received} if isinstance(graph, Stage) else set[tuple[str, int]]()
    for position, operator in enumerate(graph.operators):
        for number, read in enumerate(operator.reads):
            key = operator.name, number
            if read.role is not Role.PARAMETER and key not in graph.incoming and key not in received:
                size = timeline.tensors.of_layers[position].reads[number] * graph.types[operator.name].read_bytes(
                    number
                )
                yield position, Span(0, timeline.update, size, KEPT)
