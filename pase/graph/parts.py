"""Parts of a training step: micro-batches, which have some of its examples, and pipeline stages, some of its layers.

Each part is a graph of its own. A graph can be cut into stages between two consecutive layers if a single tensor
crosses the cut, to one layer. A stage reads tensors of earlier stages as it reads data, except that it sends gradients
back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod
from typing import Any

from pase.common.containers import FrozenDict
from pase.common.words import visible
from pase.errors import ConfigurationError, GraphError
from pase.graph.batch import Batch
from pase.graph.body import Body
from pase.graph.graph import Edge, Graph
from pase.graph.operator import Access, Dim, DimIndex, Operator, SliceOf, Window
from pase.graph.operators import with_fan_outs
from pase.graph.precision import LayerTypes
from pase.graph.verify import verify

Factors = Mapping[str, int]
"""By what factor each dim of a layer that carries the batch is smaller."""


def micro_batch(graph: Graph, count: int) -> Graph:
    """Return the graph of one of `count` equal parts of the batch.

    Raises:
        ConfigurationError: A layer's batch is not divisible by `count`, or its examples interact (losses of pairs).
    """
    if count == 1:
        return graph
    examples = max(graph.batch[operator.name].examples for operator in graph.operators)
    small = [_smaller(operator, _factors(graph, operator, count), count) for operator in graph.operators]
    small = [_as_fed(graph, operator, small) for operator in small]
    call = json.dumps(_called(json.loads(graph.call), examples, count), separators=(",", ":")) if graph.call else ""
    arguments = tuple(
        (name, value // count if name == "batch" and isinstance(value, int) else value)
        for name, value in graph.arguments
    )
    try:
        return verify(replace(graph, operators=tuple(small), arguments=arguments, call=call))
    except GraphError as error:
        raise ConfigurationError(
            f"the batch of {visible(graph.name)} cannot be taken apart in micro-batches: {error}; use one"
        ) from None


def _factors(graph: Graph, operator: Operator, count: int) -> Factors:
    batch = graph.batch[operator.name]
    where, factors, left = f"layer {visible(operator.name)}", dict[str, int](), count
    if prod(batch.dims.values()) > max(batch.examples, 1):
        raise ConfigurationError(
            f"{where} works with pairs of examples, so that micro-batches are not the whole batch: use one (1)"
        )
    for dim, ways in batch.dims.items():
        factors[dim] = gcd(left, ways)
        left //= factors[dim]
    if batch.dims and left > 1:
        raise ConfigurationError(
            f"{where} has {batch.examples} examples, which {count} micro-batches cannot share equally: use a divisor"
        )
    return factors


def _smaller(operator: Operator, factors: Factors, count: int) -> Operator:
    if not any(factor > 1 for factor in factors.values()):
        return operator

    def shape(whole: Sequence[int], index_map: Sequence[DimIndex]) -> tuple[int, ...]:
        return tuple(extent // _along(operator, axis, factors) for extent, axis in zip(whole, index_map, strict=True))

    def access(of: Access) -> Access:
        batch = of.batch and (of.batch[0], of.batch[1] // count)
        return replace(of, shape=shape(of.shape, of.index_map), batch=batch)

    for piece in (dim for work in operator.work for dim in work.dims if isinstance(dim, SliceOf)):
        _along(operator, piece, factors)  # rejects slices of the batch
    return replace(
        operator,
        dims=tuple(Dim(dim.name, dim.extent // factors.get(dim.name, 1)) for dim in operator.dims),
        reads=tuple(map(access, operator.reads)),
        writes=tuple(map(access, operator.writes)),
        exchanges=tuple(replace(e, shape=shape(e.shape, e.index_map)) for e in operator.exchanges),
        intermediates=tuple(replace(t, shape=shape(t.shape, t.index_map)) for t in operator.intermediates),
        body=operator.body and _body(operator, operator.body, factors, count),
    )


def _as_fed(graph: Graph, operator: Operator, small: Sequence[Operator]) -> Operator:
    """Return a layer whose completely replicated inputs (routes) have the size that the smaller graph produces."""
    reads, inputs = list(operator.reads), list(operator.body.inputs if operator.body else ())
    for position, read in enumerate(reads):
        edge = graph.incoming.get((operator.name, position))
        if edge is None or None not in read.index_map:
            continue
        there = small[graph.index[edge.producer]].writes[edge.output].shape
        if len(there) != len(read.shape):
            continue
        shape = tuple(
            size if axis is None else own for size, own, axis in zip(there, read.shape, read.index_map, strict=True)
        )
        reads[position] = replace(read, shape=shape)
        inputs = [replace(i, shape=shape) if i.read == position and i.shape == read.shape else i for i in inputs]
    if reads == list(operator.reads):
        return operator
    return replace(operator, reads=tuple(reads), body=operator.body and replace(operator.body, inputs=tuple(inputs)))


def _along(operator: Operator, axis: DimIndex, factors: Factors) -> int:
    """Return by what factor a tensor's dim is smaller."""
    match axis:
        case str():
            return factors.get(axis, 1)
        case tuple():
            return prod(factors.get(dim, 1) for dim in axis)
        case Window() if factors.get(axis.out, 1) > 1 or factors.get(axis.kernel, 1) > 1:
            raise ConfigurationError(f"layer {visible(operator.name)} has windows over its batch: use one micro-batch")
        case SliceOf() if factors.get(axis.dim, 1) > 1:
            raise ConfigurationError(f"layer {visible(operator.name)} reads pieces of its batch: use one micro-batch")
        case _:
            return 1


def _body(operator: Operator, body: Body, factors: Factors, count: int) -> Body:
    """Return a body in which the model's inputs and outputs have fewer examples."""

    def examples(shape: tuple[int, ...], blocks: int) -> tuple[int, ...]:
        before = 1
        for place, extent in enumerate(shape):
            if before == blocks and extent % count == 0:
                return (*shape[:place], extent // count, *shape[place + 1 :])
            before *= extent
        raise ConfigurationError(
            f"layer {visible(operator.name)} has a tensor of shape {list(shape)}, whose dims {count} micro-batches "
            "cannot share: use another number of them"
        )

    inputs = []
    for given in body.inputs:
        batch = operator.reads[given.read].batch
        inputs.append(replace(given, shape=examples(given.shape, batch[0])) if batch else given)
    outputs = []
    for output in body.outputs:
        dims = list(output.dims)
        first = next((place for place, dim in enumerate(dims) if factors.get(dim, 1) > 1), None)
        if first is None:
            outputs.append(output)
        else:
            blocks = prod(operator.extents[dim] for dim in dims[:first])
            outputs.append(replace(output, shape=examples(output.shape, blocks)))
    own = body.own and _body(operator, body.own, factors, count)
    return replace(body, inputs=tuple(inputs), outputs=tuple(outputs), own=own)


def _called(told: Any, examples: int, count: int) -> Any:
    """Return the arguments of the model call, with fewer examples in the first dim of tensors of the batch."""
    match told:
        case {"shape": [first, *rest], **others} if first == examples:
            return {"shape": [first // count, *rest], **others}
        case dict():
            return {key: _called(value, examples, count) for key, value in told.items()}
        case list():
            return [_called(value, examples, count) for value in told]
        case _:
            return told


@dataclass(frozen=True, kw_only=True)
class Stage(Graph):
    """A subgraph of consecutive layers of the graph `whole`. A weight shared by stages belongs to each of them."""

    whole: Graph

    @cached_property
    def received(self) -> tuple[Edge, ...]:
        """Edges that bring tensors from earlier stages."""
        return tuple(e for e in self.whole.edges if e.consumer in self.index and e.producer not in self.index)

    @cached_property
    def sent(self) -> tuple[Edge, ...]:
        """Edges that take tensors to later stages."""
        return tuple(e for e in self.whole.edges if e.producer in self.index and e.consumer not in self.index)

    @cached_property
    def types(self) -> Mapping[str, LayerTypes]:
        """Number types of each layer's tensors, by its name."""
        return FrozenDict({name: self.whole.types[name] for name in self.index})

    @cached_property
    def batch(self) -> Mapping[str, Batch]:
        """Position of the batch in the iteration space of each layer, by its name."""
        return FrozenDict({name: self.whole.batch[name] for name in self.index})

    @cached_property
    def _gradients(self) -> frozenset[tuple[str, int]]:
        return frozenset(read for read in self.whole._gradients if read[0] in self.index)


def with_cuts(graph: Graph) -> Graph:
    """Return a graph with fan-outs wherever needed, and where several layers read the only tensor that crosses a cut.

    The graph can then be cut there.
    """
    graph = with_fan_outs(graph)
    return with_fan_outs(graph, behind={tensor for _, tensor in _narrow(graph)})


def with_fan_outs_of(graph: Graph, other: Graph) -> Graph:
    """Return a graph with the same fan-outs as another graph of the same model: those that are needed, or for cuts."""
    plain = with_fan_outs(graph)
    return plain if plain.index.keys() == other.index.keys() else with_cuts(graph)


def cuts(graph: Graph) -> tuple[int, ...]:
    """Return the positions before which a graph can be cut: one tensor, read by one layer, crosses the cut."""
    return tuple(at for at, tensor in _narrow(graph) if len(graph.readers[tensor]) == 1)


def narrow_writers(graph: Graph) -> tuple[int, ...]:
    """Return the layers, by position, one tensor of which is all that crosses some cut."""
    return tuple(dict.fromkeys(graph.index[name] for _, (name, _) in _narrow(graph)))


def _narrow(graph: Graph) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield each position at which a single tensor crosses the cut, with that tensor, by layer and output."""
    last = {tensor: max(graph.index[edge.consumer] for edge in edges) for tensor, edges in graph.readers.items()}
    under_way: set[tuple[str, int]] = set()
    for position, operator in enumerate(graph.operators):
        under_way = {tensor for tensor in under_way if last[tensor] >= position}
        if len(under_way) == 1:
            yield position, next(iter(under_way))
        under_way.update((operator.name, o) for o in range(len(operator.writes)) if (operator.name, o) in last)


def stages(graph: Graph, at: Sequence[int]) -> tuple[Graph, ...]:
    """Return the stages of a graph that is cut before the layers at some positions; the graph itself without any."""
    between = pairwise((0, *at, len(graph.operators)))
    return tuple(stage(graph, first, stop) for first, stop in between) if at else (graph,)


def stage(graph: Graph, first: int, stop: int) -> Stage:
    """Return the layers in the half-open range [first, stop) of positions as a graph."""
    operators = graph.operators[first:stop]
    names = {operator.name for operator in operators}
    return Stage(
        name=graph.name,
        operators=operators,
        edges=tuple(edge for edge in graph.edges if edge.producer in names and edge.consumer in names),
        arguments=graph.arguments,
        precision=graph.precision,
        framework=graph.framework,
        call=graph.call,
        untrained=graph.untrained,
        whole=graph,
    )
