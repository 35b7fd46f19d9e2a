"""What lies in a device's memory when: the peak of a training step, from the turns in which each tensor is needed.

A step has a turn for each layer forward, in the graph's order; two for each backward, in the reverse order, the first
for functions that a layer applies behind its product; and one for the optimizer. A tensor lies from the turn that makes
it to the last one that needs it:

- weights, the optimizer's state and the model's inputs always; a weight's gradient from its layer's turn backward on;
- what a layer writes until its last reader's turn, or, where the backward pass needs it (`pase.costs.memory.keeping`),
  until the turn of the earliest layer that does;
- the gradient of what a layer writes from its last reader's turn to its own;
- what kernels work with in their turn alone: a gradient that is added to others, one that is padded as its window is,
  the parts of sums that devices exchange, a bucket of weights' gradients that are summed together, what the optimizer
  makes of the largest weight.

The peak is the most that lies there in any turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from pase.costs.memory import Keeping, edge_memory, held_parts, held_points, keeping, optimiser_state
from pase.graph import ITEMSIZES, Access, AllReduce, AllToAll, Graph, Operator, Role
from pase.graph.access import Window
from pase.sharding.edges import table_edges
from pase.sharding.shards import IndexArray, IntArray, splits_of

BUCKET_BYTES, SMALL_BUCKET_BYTES, BUCKETS = 25 * 2**20, 2**18, 8
"""Weights' gradients are summed in buckets of up to the first, as `DistributedDataParallel` has it; where all of them
fill few of those, in an eighth of them, but no less than the second. In one bucket all would wait for the last."""


_UPDATE_TENSORS = {"adam": 2, "adamw": 2, "adafactor": 2}
"""How many tensors as large as a weight an optimizer works with beside it, weight by weight."""


def bucket_limit(total_bytes: int) -> int:
    """Return how large a bucket of gradients may become, from the bytes of all that are summed."""
    return min(BUCKET_BYTES, max(SMALL_BUCKET_BYTES, total_bytes // BUCKETS))


_BY_PLACES = frozenset({"gather"})
"""Kinds whose gradient is added to zeros, place by place."""


class Span(NamedTuple):
    """[K] bytes that lie in memory from one turn to another, both included."""

    first: int
    last: int
    size: IntArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """The turns of a step of a graph, and the last ones that need what its layers make."""

    graph: Graph
    keeps: Keeping

    @property
    def update(self) -> int:
        """The optimizer's turn, the last one; before it the last weights' gradients are brought together."""
        return 3 * len(self.graph.operators) + 1

    def backward(self, position: int) -> tuple[int, int]:
        """Return the two turns of a layer in the backward pass."""
        num_layers = len(self.graph.operators)
        first = num_layers + 2 * (num_layers - 1 - position)
        return first, first + 1

    def layer_of(self, turn: int) -> str:
        """Return the layer whose turn it is, "" for the optimizer's."""
        num_layers = len(self.graph.operators)
        if turn >= 3 * num_layers:
            return ""
        position = turn if turn < num_layers else num_layers - 1 - (turn - num_layers) // 2
        return self.graph.operators[position].name

    @cached_property
    def last_user(self) -> Mapping[str, int]:
        """The position of the last layer that uses a shared weight, by the weight's name."""
        layers = enumerate(self.graph.operators)
        return {access.shared: i for i, operator in layers for access in operator.parameters if access.shared}

    @cached_property
    def readers(self) -> Mapping[tuple[str, int], tuple[tuple[str, int], ...]]:
        """Who reads what is written, by layer and position, and as which of their reads."""
        found: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
        for edge in self.graph.edges:
            key = edge.producer, edge.output
            found[key] = (*found.get(key, ()), (edge.consumer, edge.input))
        return found

    @cached_property
    def _needed(self) -> Mapping[tuple[str, int], tuple[int, int, int]]:
        """For what is written: the last reader forward, the last that has a gradient, the first that keeps it."""
        graph, saved = self.graph, self.keeps.saved
        found: dict[tuple[str, int], tuple[int, int, int]] = {}
        for position, operator in reversed(list(enumerate(graph.operators))):
            for output in range(len(operator.writes)):
                last, graded, kept = position, position, len(graph.operators)
                if output in saved[operator.name].writes and not operator.is_fan_out:
                    kept = position
                for name, read in self.readers.get((operator.name, output), ()):
                    at = graph.index[name]
                    last = max(last, at)
                    if graph[name].is_fan_out:
                        further, more, first = found[name, 0]
                        last, kept = max(last, further), min(kept, first)
                        graded = max(graded, more)
                    elif graph.has_gradient(graph[name], read):
                        graded = max(graded, at)
                    if read in saved[name].reads:
                        kept = min(kept, at)
                found[operator.name, output] = last, graded, kept
        return found

    def last_read(self, name: str, output: int) -> int:
        """Return the turn forward after which nobody reads what a layer writes."""
        return self._needed[name, output][0]

    def last_gradient(self, name: str, output: int) -> int:
        """Return the position of the layer that is the first backward to give a gradient of what a layer writes."""
        return self._needed[name, output][1]

    def first_kept(self, name: str, output: int) -> int:
        """Return the position of the first layer that needs in the backward pass what a layer writes."""
        return self._needed[name, output][2]


def layer_spans(timeline: Timeline, operator: Operator, splits: IndexArray, *, optimiser: str) -> Iterator[Span]:
    """Yield what lies in memory for a layer under configurations [K, D], and when."""
    graph, keeps = timeline.graph, timeline.keeps
    name, position = operator.name, graph.index[operator.name]
    types, precision = graph.types[name], graph.precision
    configurations, num = splits_of(operator, splits), len(splits)
    functions, product = timeline.backward(position)
    is_trained, end = name in graph.trained, timeline.update

    def points(access: Access) -> IntArray:
        return held_points(operator, access, configurations, num)

    saved, state = keeps.saved[name], optimiser_state(optimiser)
    applies = is_trained and not operator.is_loss and bool(saved.results or saved.places or saved.writes)
    for number, read in enumerate(operator.reads):
        size = points(read)
        if read.role is Role.PARAMETER:
            if not read.shared or graph.owners[read.shared] == name:
                yield Span(0, end, size * precision.itemsize)
                moments = state(held_parts(operator, read, configurations), num) * ITEMSIZES[precision.moments]
                masters = size * ITEMSIZES[precision.masters] if precision.masters else 0
                yield Span(0, end, (moments + masters) * read.is_trained)
            if read.is_trained and is_trained:
                # Of a shared weight, the first gradient stays, and others are added to it.
                is_first = not read.shared or timeline.last_user[read.shared] == position
                yield Span(product, end if is_first else product, size * ITEMSIZES[precision.gradients])
            if types.is_cast(number):
                yield Span(position, product, size * types.operand_bytes(number))
                yield Span(product, product, size * types.operand_bytes(number) * read.is_trained)
            continue
        edge = graph.incoming.get((name, number))
        own = size * types.operand_bytes(number)
        if edge is None:
            yield Span(0, end, size * types.read_bytes(number))
            is_padded = any(isinstance(axis, Window) and axis.pad for axis in read.index_map)
            if (name, number) in keeps.reads and (is_padded or types.is_cast(number)):
                yield Span(position, product, own)
            continue
        if operator.is_fan_out:
            if (name, number) in keeps.reads:
                kept = timeline.first_kept(name, 0)
                yield Span(timeline.last_read(name, 0) + 1, timeline.backward(kept)[1], own)
            continue
        if (name, number) in keeps.reads:
            first = position if types.is_cast(number) else timeline.last_read(edge.producer, edge.output) + 1
            yield Span(first, product, own)
        if graph.has_gradient(operator, number):
            # A gradient that is added to others lies beside them; one of a padded window is longer than what it is of.
            is_added = timeline.last_gradient(edge.producer, edge.output) != position
            own_share = 0.0 if is_added else _own_share(operator, read)
            more = size - (size * own_share).astype(np.int64)
            more = more + size * (configurations.product(operator.partial_dims(read)) > 1)
            more = more + size * (operator.kind in _BY_PLACES)
            yield Span(product, product, more * types.read_bytes(number))
            if types.is_cast(number):
                yield Span(product, product, own)
    for output, write in enumerate(operator.writes):
        if operator.is_loss or operator.is_fan_out:
            continue
        size = points(write) * types.write_bytes(output)
        last = timeline.last_read(name, output)
        if (name, output) in keeps.writes:
            last = timeline.backward(timeline.first_kept(name, output))[1]
        yield Span(position, last, size)
        graded = timeline.last_gradient(name, output)
        if is_trained and graded > position:
            yield Span(timeline.backward(graded)[1], functions if applies else product, size)
        if applies:
            yield Span(functions, product, size)
            yield Span(position, functions, points(write) * saved.results_bytes(types.write_bytes(output)))
    for tensor in operator.intermediates if is_trained else ():
        access = Access(tensor=tensor.tensor, shape=tensor.shape, index_map=tensor.index_map)
        size = points(access) * types.intermediate_bytes(tensor)
        yield Span(position, product, size * tensor.kept)
    has_bias = operator.kind == "attention" and is_trained and any(read.is_trained for read in operator.parameters)
    for exchange in operator.exchanges:
        if isinstance(exchange, AllReduce) and exchange.tensor == "scores" and has_bias:
            # Products and a softmax of their own have a gradient of a bias: where these compute in a wider type, what
            # the softmax is of, queries and keys lie there in that.
            access = Access(tensor=exchange.tensor, shape=exchange.shape, index_map=exchange.index_map)
            wide, narrow = ITEMSIZES[types.statistics], types.operand_bytes(0)
            yield Span(position, product, points(access) * wide * (1 + (wide > narrow)))
            yield Span(position, product, (points(operator.reads[0]) + points(operator.reads[1])) * (wide - narrow))
        if isinstance(exchange, AllReduce | AllToAll):
            access = Access(tensor=exchange.tensor, shape=exchange.shape, index_map=exchange.index_map)
            size = points(access) * types.exchange_bytes(exchange) * (configurations.product(exchange.over) > 1)
            yield Span(position, position, size)


def _own_share(operator: Operator, read: Access) -> float:
    """Return how much of what an operator lays out for its windows is the tensor that it reads."""
    if not any(isinstance(axis, Window) for axis in read.index_map):
        return 1.0
    whole = splits_of(operator, np.ones((1, len(operator.extents)), dtype=np.int32))
    return min(prod(read.shape) / int(held_points(operator, read, whole, 1)[0]), 1.0)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that lie in a device's memory, and in whose turn: forward, backward, or of the update."""

    bytes: int
    layer: str
    phase: str


def live_bytes(graph: Graph, splits: Sequence[Mapping[str, int]], *, optimiser: str) -> tuple[Timeline, IntArray]:
    """Return the turns of a step, and the bytes on each device in each of them."""
    timeline = Timeline(graph, keeping(graph))
    changes = np.zeros(timeline.update + 2, dtype=np.int64)

    def add(first: int, last: int, size: int) -> None:
        if last >= first and size:
            changes[first] += size
            changes[last + 1] -= size

    rows = [
        np.array([[split[dim] for dim in operator.extents]], dtype=np.int32)
        for operator, split in zip(graph.operators, splits, strict=True)
    ]
    for operator, row in zip(graph.operators, rows, strict=True):
        for span in layer_spans(timeline, operator, row, optimiser=optimiser):
            add(span.first, span.last, int(span.size[0]))
    weights = list(_weights(graph, rows))
    for first, size in _buckets(timeline, weights):
        add(first, first, size)
    largest = max((weight.points for weight in weights), default=0) * graph.precision.itemsize
    add(timeline.update, timeline.update, _UPDATE_TENSORS.get(optimiser, 0) * largest)
    for edge in table_edges(graph):
        if (edge.consumer, edge.input) in timeline.keeps.copies:
            u, v = graph.index[edge.producer], graph.index[edge.consumer]
            size = int(edge_memory(graph, edge, rows[u], rows[v]).cost(0, 0))
            add(v, timeline.backward(v)[1], size)
    return timeline, np.cumsum(changes[:-1])


class _Weight(NamedTuple):
    """A trained weight of a strategy: its layer's position, the points of a part, the devices with parts of its sum."""

    position: int
    points: int
    parts: int


def _weights(graph: Graph, rows: Sequence[IndexArray]) -> Iterator[_Weight]:
    """Yield the trained weights, the last layer's first; a shared one with the first layer that uses it."""
    for position in range(len(rows) - 1, -1, -1):
        operator = graph.operators[position]
        configurations = splits_of(operator, rows[position])
        for read in operator.parameters:
            if read.is_trained and (not read.shared or graph.owners[read.shared] == operator.name):
                points = int(held_points(operator, read, configurations, 1)[0])
                yield _Weight(position, points, int(configurations.product(operator.partial_dims(read))[0]))


def _buckets(timeline: Timeline, weights: Sequence[_Weight]) -> Iterator[tuple[int, int]]:
    """Yield the turn in which a bucket of weights' gradients is brought together, and its bytes beside these."""
    itemsize = ITEMSIZES[timeline.graph.precision.collectives]
    summed = [weight for weight in weights if weight.parts > 1]
    limit = bucket_limit(sum(weight.points for weight in summed) * itemsize)
    filled: dict[int, list[int]] = {}
    for weight in summed:
        bucket, size = filled.setdefault(weight.parts, []), weight.points * itemsize
        if sum(bucket) + size > limit:
            if len(bucket) > 1:
                yield timeline.backward(weight.position)[1] + 1, sum(bucket)
            bucket.clear()
        bucket.append(size)
    yield from ((timeline.backward(0)[1] + 1, sum(bucket)) for bucket in filled.values() if len(bucket) > 1)


def step_peak(graph: Graph, splits: Sequence[Mapping[str, int]], *, optimiser: str) -> Peak:
    """Return the most that lies in a device's memory in a step of a strategy."""
    timeline, live = live_bytes(graph, splits, optimiser=optimiser)
    turn = int(live.argmax())
    phase = "forward" if turn < len(graph.operators) else "backward" if turn < timeline.update else "update"
    return Peak(bytes=int(live[turn]), layer=timeline.layer_of(turn), phase=phase)
