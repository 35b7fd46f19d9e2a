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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from pase.costs.memory import Keeping, Parts, edge_memory, held_parts, held_points, keeping, num_points, state_size
from pase.costs.modes import STATES, shard_parts, sharded, sums_moments
from pase.graph import ITEMSIZES, Access, AllReduce, AllToAll, Graph, Operator, Role
from pase.graph.operator import Indexed, Window
from pase.graph.parts import Stage
from pase.sharding.buckets import gradient_buckets
from pase.sharding.edges import LayerMode, table_edges
from pase.sharding.shards import IndexArray, IntArray, Splits, shards_in_order, splits_of
from pase.sharding.traffic import is_needed_backward

_UPDATE_TENSORS = {"adam": 2, "adamw": 2, "adafactor": 2}
"""How many tensors as large as a weight an optimizer works with beside it, weight by weight."""

_BY_PLACES = frozenset({"gather"})
"""Kinds whose gradient is added to zeros, place by place."""


class Span(NamedTuple):
    """Bytes that lie in memory from one turn to another, both included."""

    first: int
    last: int
    size: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """The turns of a step of a graph, and the last ones that need what its layers make.

    rows: [V] the [1, D] configuration of each layer. recomputed: [V] whether layers are.
    """

    graph: Graph
    keeps: Keeping
    rows: Sequence[IndexArray]
    recomputed: Sequence[bool]

    def splits(self, operator: Operator) -> Splits:
        """Return the configuration of a layer."""
        return splits_of(operator, self.rows[self.graph.index[operator.name]])

    def points(self, operator: Operator, tensor: Indexed) -> int:
        """Return the points of a layer's tensor that a device holds."""
        return int(held_points(operator, tensor, self.splits(operator))[0])

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

    def layer_of(self, turn: int) -> str:
        """Return the layer whose turn it is, "" for the optimizer's."""
        return self.graph.operators[self._order[turn][1]].name if turn < len(self._order) else ""

    @cached_property
    def last_user(self) -> Mapping[str, int]:
        """The position of the last layer that uses a shared weight, by the weight's name."""
        layers = enumerate(self.graph.operators)
        return {access.shared: i for i, operator in layers for access in operator.parameters if access.shared}

    @cached_property
    def _needed(self) -> Mapping[tuple[str, int], tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """For what is written: its readers, the last one that has a gradient, and the layers that keep it."""
        graph, saved = self.graph, self.keeps.saved
        found: dict[tuple[str, int], tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        for position, operator in reversed(list(enumerate(graph.operators))):
            for output in range(len(operator.writes)):
                readers, graded, kept = list[int](), position, list[int]()
                if output in saved[operator.name].writes and not operator.is_fan_out:
                    kept.append(position)
                for edge in graph.readers.get((operator.name, output), ()):
                    name, read, at = edge.consumer, edge.input, graph.index[edge.consumer]
                    readers.append(at)
                    if graph[name].is_fan_out:
                        further, more, others = found[name, 0]
                        readers, kept, graded = [*readers, *further], [*kept, *others], max(graded, more)
                    elif graph.has_gradient(graph[name], read):
                        graded = max(graded, at)
                    if read in saved[name].reads:
                        kept.append(at)
                found[operator.name, output] = tuple(readers), graded, tuple(kept)
        return found

    def last_gradient(self, name: str, output: int) -> int:
        """Return the position of the layer that is the first backward to give a gradient of what a layer writes."""
        return self._needed[name, output][1]

    def copies(self, name: str, output: int) -> list[tuple[int, int, int]]:
        """Return when a tensor is made, last needed forward, and last needed at all where layers keep it.

        Once, and where it is made in a run that is computed again, once more.
        """
        position, runs = self.graph.index[name], self.runs
        readers, _, kept = self._needed[name, output]
        own = runs[position]

        def within(at: int) -> bool:
            return runs[at] >= 0 and runs[at] == own

        # A run holds what it reads of others until it is computed again.
        first = max([position, *readers, *(self.again(at) for at in readers if not within(at))])
        ends = [self.backward(at)[1] for at in kept if not within(at)]
        found = [(position, first, max(ends, default=first))]
        if own >= 0:
            again = max([self.again(position), *(self.again(at) for at in readers if within(at))])
            ends = [self.backward(at)[1] for at in kept if within(at)]
            found.append((self.again(position), again, max(ends, default=again)))
        return found

    def freed(self, name: str, output: int, reader: int) -> int:
        """Return the turn in which a reader is the last to need what a layer writes, for making what it keeps of it."""
        copies = self.copies(name, output)
        is_within = self.runs[reader] >= 0 and self.runs[reader] == self.runs[self.graph.index[name]]
        return copies[-1 if is_within else 0][1]


def layer_spans(timeline: Timeline, operator: Operator) -> Iterator[Span]:
    """Yield what lies in memory of a layer's tensors, and when, but for its weights."""
    graph, keeps = timeline.graph, timeline.keeps
    name, position = operator.name, graph.index[operator.name]
    types, configurations = graph.types[name], timeline.splits(operator)
    functions, product = timeline.backward(position)
    again, is_trained = timeline.again(position), name in graph.trained
    turns = {position, again}

    points = partial(timeline.points, operator)

    def parts(*dims: str) -> int:
        return int(configurations.product(dims)[0])

    saved = keeps.saved[name]
    applies = is_trained and not operator.is_loss and bool(saved.results or saved.places or saved.writes)
    received = {edge.input for edge in graph.received if edge.consumer == name} if isinstance(graph, Stage) else set()
    for number, read in enumerate(operator.reads):
        if read.role is Role.PARAMETER:
            continue
        size = points(read)
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
            if (name, number) in keeps.reads:
                for _, freed, last in timeline.copies(name, 0):
                    yield Span(freed + 1, last, own)
            continue
        if (name, number) in keeps.reads:
            freed = timeline.freed(edge.producer, edge.output, position)
            yield Span(again if types.is_cast(number) else freed + 1, product, own)
        if graph.has_gradient(operator, number):
            # A gradient that is added to others lies beside them; one of a padded window is longer than what it is of.
            is_added = timeline.last_gradient(edge.producer, edge.output) != position
            own_share = 0.0 if is_added else _own_share(operator, read)
            more = size - int(size * own_share)
            more += size * (parts(*operator.partial_dims(read)) > 1) + size * (operator.kind in _BY_PLACES)
            yield Span(product, product, more * types.read_bytes(number))
            if types.is_cast(number):
                yield Span(product, product, own)
    sent = {edge.output for edge in graph.sent if edge.producer == name} if isinstance(graph, Stage) else set()
    for output, write in enumerate(operator.writes):
        if operator.is_loss or operator.is_fan_out:
            continue
        size = points(write) * types.write_bytes(output)
        copies = timeline.copies(name, output)
        for made, freed, kept in copies:
            last = kept if (name, output) in keeps.writes else freed
            # What goes to another stage stays until all of the backward pass is over, and so does its gradient.
            yield Span(made, timeline.update - 1 if output in sent and made == position else last, size)
        graded = timeline.last_gradient(name, output)
        if output in sent and is_trained:
            yield Span(len(timeline.recomputed), timeline.update - 1, size)
        elif is_trained and graded > position:
            yield Span(timeline.backward(graded)[1], functions if applies else product, size)
        if applies:
            yield Span(functions, product, size)
            yield Span(again, functions, points(write) * saved.results_bytes(types.write_bytes(output)))
    for tensor in operator.intermediates if is_trained else ():
        yield Span(again, product, points(tensor) * types.intermediate_bytes(tensor) * tensor.kept)
    has_bias = operator.kind == "attention" and is_trained and any(read.is_trained for read in operator.parameters)
    for exchange in operator.exchanges:
        if isinstance(exchange, AllReduce) and exchange.tensor == "scores" and has_bias:
            # Products and a softmax of their own have a gradient of a bias: where these compute in a wider type, what
            # the softmax is of, queries and keys lie there in that.
            wide, narrow = ITEMSIZES[types.statistics], types.operand_bytes(0)
            yield Span(again, product, points(exchange) * wide * (1 + (wide > narrow)))
            yield Span(again, product, (points(operator.reads[0]) + points(operator.reads[1])) * (wide - narrow))
        if isinstance(exchange, AllReduce | AllToAll):
            size = points(exchange) * types.exchange_bytes(exchange) * (parts(*exchange.over) > 1)
            for turn in turns:
                yield Span(turn, turn, size)


def _own_share(operator: Operator, read: Access) -> float:
    """Return how much of what an operator lays out for its windows is the tensor that it reads."""
    if not any(isinstance(axis, Window) for axis in read.index_map):
        return 1.0
    whole = splits_of(operator, np.ones((1, len(operator.extents)), dtype=np.int32))
    return min(prod(read.shape) / int(held_points(operator, read, whole)[0]), 1.0)


class _Weight(NamedTuple):
    """A weight that a layer is the first to use, or uses alone, and how a device holds it.

    position: of the layer. points: of its part. parts: the devices that add up its gradient behind the layer's turn.
    state: in `STATES`. shard: the largest one of its part, where it is sharded. is_in_order: whether the shards follow
    one another in memory.
    """

    position: int
    operator: Operator
    read: Access
    points: int
    parts: int
    state: str
    shard: Parts
    is_in_order: bool = True

    @property
    def pieces(self) -> int:
        """In how many pieces devices hold what its state says."""
        return 1 if self.state == STATES[0] else self.parts

    @property
    def shard_points(self) -> int:
        """The points of the largest shard; of the part where it is not sharded."""
        return int(num_points(self.shard, 1)[0])

    @property
    def gathered_points(self) -> int:
        """The points of all shards in a collective, which takes all as long as the largest."""
        return self.shard_points * self.pieces


def _weights(timeline: Timeline, layers: Sequence[LayerMode]) -> Iterator[_Weight]:
    """Yield the weights of layers, in order; a shared one with the first layer that uses it."""
    graph = timeline.graph
    for position, operator in enumerate(graph.operators):
        configurations = timeline.splits(operator)
        for number, read in enumerate(operator.reads):
            if read not in operator.parameters or (read.shared and graph.owners[read.shared] != operator.name):
                continue
            is_cut = bool(sharded(operator, number, configurations)[0])
            is_summed = bool(sums_moments(operator, configurations)[0])
            state = layers[position].state if is_cut else STATES[0]
            part = held_parts(operator, read, configurations)
            count = configurations.product(operator.partial_dims(read))
            yield _Weight(
                position=position,
                operator=operator,
                read=read,
                points=timeline.points(operator, read),
                parts=1 if is_summed else int(count[0]),
                state=state,
                shard=part if state == STATES[0] else shard_parts(operator, read, configurations),
                is_in_order=bool(shards_in_order([size for _, size in part], count)),
            )


def _weight_spans(
    timeline: Timeline, weights: Sequence[_Weight], optimiser: str, *, is_first: bool, is_last: bool
) -> Iterator[Span]:
    """Yield what is allocated of weights, their gradients and the optimizer's state, and when.

    is_first, is_last: Whether the micro-batch is the first one, before which no gradients are there, and the last one
    of the step, after which gradients are reduced that are not reduced in each.
    """
    precision, end = timeline.graph.precision, timeline.update
    itemsize = ITEMSIZES[precision.gradients]
    launched = _launches(timeline, weights)
    scattered = {
        launched[weight.position, weight.read.tensor]
        for weight in weights
        if weight.pieces > 1 and (is_last or weight.state != "zero1")
    }
    for weight in weights:
        points = weight.points
        held = weight.shard_points
        if weight.state != "zero3":
            held = weight.gathered_points + (0 if weight.is_in_order or weight.pieces == 1 else weight.shard_points)
        yield Span(0, end, held * precision.itemsize)
        if not weight.read.is_trained:
            continue
        yield Span(0, end, int(state_size(weight.shard, 1, precision, optimiser)[0]))
        if weight.operator.name not in timeline.graph.trained:
            continue
        last = timeline.last_user[weight.read.shared] if weight.read.shared else weight.position
        product, size = timeline.backward(last)[1], points * itemsize
        if weight.pieces == 1:
            yield Span(product if is_first else 0, end, size)
            yield Span(product, product, 0 if is_first else size)
            continue
        # Whole until its bucket is launched, then a piece; those of micro-batches before are pieces or, under zero1,
        # whole.
        launch = launched[weight.position, weight.read.tensor]
        is_accumulated = weight.state == "zero1" and not is_first
        if weight.state == "zero1" and not is_last:
            yield Span(product, end, size)
            continue
        yield Span(0 if is_accumulated else product, launch, size)
        yield Span(product, product, size * is_accumulated)
        # Its shard's sum is made when the next reduce-scatter begins.
        made = min((turn for turn in scattered if turn > launch), default=end - 1) + 1
        yield Span(made if is_first or is_accumulated else 0, end, weight.shard_points * itemsize)
    # Of layers that read a weight which others have, too: gradients that are added, and weights in another type.
    graph = timeline.graph
    for position, operator in enumerate(graph.operators):
        types, product = graph.types[operator.name], timeline.backward(position)[1]
        for number, read in enumerate(operator.reads):
            if read.role is not Role.PARAMETER:
                continue
            points = timeline.points(operator, read)
            if read.is_trained and read.shared and timeline.last_user[read.shared] != position:
                yield Span(product, product, points * itemsize)
            if types.is_cast(number):
                size = points * types.operand_bytes(number)
                yield Span(timeline.again(position), product, size)
                yield Span(product, product, size * read.is_trained)
    yield from _gathered(timeline, [weight for weight in weights if weight.state == "zero3"])


def _gathered(timeline: Timeline, weights: Sequence[_Weight]) -> Iterator[Span]:
    """Yield the whole of weights in pieces: in their layers' turns, and in those before, as they are gathered ahead."""
    sizes: dict[int, int] = {}
    for weight in weights:
        size = weight.gathered_points * timeline.graph.precision.itemsize
        sizes[weight.position] = sizes.get(weight.position, 0) + size
    for before, position in pairwise([-1, *sizes]):
        yield Span(max(before, 0), position, sizes[position])
        if timeline.recomputed[position]:
            yield Span(timeline.again(position), timeline.again(position), sizes[position])
    needed = [at for at in reversed(sizes) if is_needed_backward(timeline.graph, timeline.graph.operators[at])]
    for behind, position in pairwise([-1, *needed]):
        product = timeline.backward(position)[1]
        is_ahead = behind >= 0 and timeline.runs[position] in (-1, timeline.runs[behind])
        yield Span(timeline.backward(behind)[1] if is_ahead else product, product, sizes[position])


def _in_buckets(timeline: Timeline, weights: Sequence[_Weight]) -> list[list[_Weight]]:
    """Return the weights whose gradients are reduced together, in the order in which these reductions begin."""
    itemsize = ITEMSIZES[timeline.graph.precision.collectives]
    summed = [weight for weight in weights if weight.read.is_trained and weight.parts > 1]
    keys = [(weight.parts, weight.pieces == 1, weight.state in STATES[:2]) for weight in summed]
    buckets = gradient_buckets(keys, [weight.points * itemsize for weight in summed])
    return [[summed[position] for position in bucket] for bucket in buckets]


def _launches(timeline: Timeline, weights: Sequence[_Weight]) -> Mapping[tuple[int, str], int]:
    """Return the turn in which the bucket of each weight is full and goes, by its layer and name."""
    return {
        (weight.position, weight.read.tensor): timeline.backward(bucket[-1].position)[1]
        for bucket in _in_buckets(timeline, weights)
        for weight in bucket
    }


def _bucket_spans(timeline: Timeline, weights: Sequence[_Weight], *, is_last: bool) -> Iterator[Span]:
    """Yield what buckets take besides the gradients in them: copies, and sums of shards until the next ones.

    is_last: See `_weight_spans`.
    """
    itemsize = ITEMSIZES[timeline.graph.precision.collectives]
    launched = _launches(timeline, weights)
    # Of those that go in one turn, one after the other, the largest counts.
    copied, launching, scattered = dict[int, int](), dict[int, int](), dict[int, int]()
    for bucket in _in_buckets(timeline, weights):
        if bucket[0].state in STATES[:2] and not is_last:
            continue
        turn = launched[bucket[0].position, bucket[0].read.tensor] + 1
        size = sum(weight.gathered_points for weight in bucket) * itemsize
        is_copied = len(bucket) > 1 or not bucket[0].is_in_order or bucket[0].gathered_points != bucket[0].points
        if bucket[0].pieces == 1:
            copied[turn] = max(copied.get(turn, 0), size * is_copied)
            continue
        # Autograd holds the gradient that comes last while a bucket is copied: of the layer's first weight, or under
        # zero3, where those of a layer come together, of its last.
        own = [weight for weight in weights if weight.position == bucket[-1].position and weight.read.is_trained]
        last = own[-1 if own[0].state == "zero3" else 0].points * itemsize
        launching[turn] = max(launching.get(turn, 0), 2 * size + last * is_copied)
        scattered[turn] = max(scattered.get(turn, 0), 2 * size)
    yield from (Span(turn, turn, size) for turn, size in copied.items())
    # What is sent and what is received of a reduce-scatter, until the next one begins.
    for turn, following in pairwise([*scattered, timeline.update]):
        yield Span(turn, turn, launching[turn])
        yield Span(turn + 1, following - 1, scattered[turn])


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that lie in a device's memory, and in whose turn: forward, backward, or of the update."""

    bytes: int
    layer: str
    phase: str


def step_peak(
    graph: Graph,
    layers: Sequence[LayerMode],
    *,
    optimiser: str,
    micro_batches: int = 1,
    in_flight: int = 1,
    keeps: Keeping | None = None,
) -> Peak:
    """Return the most that lies in a device's memory in a step of a strategy.

    Args:
        graph: of one micro-batch; a stage where it is of a pipeline.
        layers: how each of its layers is split and what modes it has, in its order.
        optimiser: whose state counts.
        micro_batches: in a step.
        in_flight: of how many a stage has something at once.
        keeps: of the whole graph, where it is a stage.
    """
    rows = [
        np.array([[layer.splits[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, layer in zip(graph.operators, layers, strict=True)
    ]
    timeline = Timeline(graph, keeps or keeping(graph), rows, [layer.is_recomputed for layer in layers])
    weights = list(_weights(timeline, layers))
    inputs = list(_inputs(timeline))
    spans = [span for operator in graph.operators for span in layer_spans(timeline, operator)]
    for edge in table_edges(graph):
        if (edge.consumer, edge.input) in timeline.keeps.copies:
            u, v = graph.index[edge.producer], graph.index[edge.consumer]
            size = int(edge_memory(graph, edge, rows[u], rows[v]).cost(0, 0))
            spans.append(Span(timeline.again(v), timeline.backward(v)[1], size))
    if micro_batches > 1:
        # Each has its own copy of its part of the step's inputs.
        spans += [Span(0, timeline.update - 1, span.size) for span in inputs]
    between = sum(span.size for span in spans if span.first < len(rows) <= span.last)
    of_pass = _lying(timeline, spans)
    of_step = _lying(timeline, inputs) * micro_batches
    largest = max((w.shard_points for w in weights if w.read.is_trained), default=0) * graph.precision.itemsize
    of_step[timeline.update] += _UPDATE_TENSORS.get(optimiser, 0) * largest
    # The first backward pass finds no gradients; a later one finds these, and no more micro-batches than there are.
    passes = (
        [(True, in_flight)] if micro_batches == 1 else [(True, in_flight), (False, min(in_flight, micro_batches - 1))]
    )
    peaks = []
    for is_first, num_in_flight in passes:
        is_last = not is_first or micro_batches == 1
        of_weights = [
            *_weight_spans(timeline, weights, optimiser, is_first=is_first, is_last=is_last),
            *_bucket_spans(timeline, weights, is_last=is_last),
        ]
        live = of_step + _lying(timeline, of_weights) + of_pass + (num_in_flight - 1) * between
        turn = int(live.argmax())
        phase = "forward" if turn < len(rows) else "backward" if turn < timeline.update else "update"
        peaks.append(Peak(bytes=int(live[turn]), layer=timeline.layer_of(turn), phase=phase))
    return max(peaks, key=lambda peak: peak.bytes)


def _lying(timeline: Timeline, spans: Iterable[Span]) -> IntArray:
    """Return the bytes that lie there in each turn."""
    changes = np.zeros(timeline.update + 2, dtype=np.int64)
    for first, last, size in spans:
        if last >= first:
            changes[first] += size
            changes[last + 1] -= size
    return np.cumsum(changes[:-1])


def _inputs(timeline: Timeline) -> Iterator[Span]:
    """Yield what a micro-batch of a step is given."""
    graph = timeline.graph
    received = {(e.consumer, e.input) for e in graph.received} if isinstance(graph, Stage) else set[tuple[str, int]]()
    for operator in graph.operators:
        for number, read in enumerate(operator.reads):
            key = operator.name, number
            if read.role is not Role.PARAMETER and key not in graph.incoming and key not in received:
                size = timeline.points(operator, read) * graph.types[operator.name].read_bytes(number)
                yield Span(0, timeline.update, size)
