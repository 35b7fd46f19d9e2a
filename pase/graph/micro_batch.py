"""A micro-batch: the graph of some of the examples of a training step, all else as it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from pase.common.names import visible
from pase.errors import ConfigurationError, GraphError
from pase.graph.access import Access, Dim, DimIndex, SliceOf, Window
from pase.graph.body import Body
from pase.graph.graph import Graph
from pase.graph.operator import Operator
from pase.graph.verify import verify

Factors = Mapping[str, int]
"""By how much each dim of a layer that carries the batch has fewer points."""


def micro_batch(graph: Graph, count: int) -> Graph:
    """Return the graph of one of so many equal parts of the batch.

    Raises:
        ConfigurationError: A layer's batch has no such parts, or its examples are not apart (losses between pairs).
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
        _along(operator, piece, factors)  # which refuses pieces of the batch
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
    """Return a layer that has of what it reads whole (routes) as much as there is."""
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
    """Return by how much a tensor's dim has fewer elements."""
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
    """Return a body whose inputs and outputs have fewer examples, where the model has them."""

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
    """Return how a model was called, with fewer examples in the first dim of what has all of them there."""
    match told:
        case {"shape": [first, *rest], **others} if first == examples:
            return {"shape": [first // count, *rest], **others}
        case dict():
            return {key: _called(value, examples, count) for key, value in told.items()}
        case list():
            return [_called(value, examples, count) for value in told]
        case _:
            return told
