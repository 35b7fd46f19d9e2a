"""Find the batch dimension: propagate it from the network's inputs through all tensors, independent of dim names.

In a row-major tensor, the batch is a factor of the elements: a number of blocks, of a number of examples each, of a
number of elements each. Reshapes preserve this. The consumer's dim that coincides with the factor carries the batch,
entirely or as the outer part of a product (tokens: batch · steps). From a dim of a layer's iteration space the batch
propagates to everything that the layer writes along it. Rows gathered by computed indices (the tokens of each expert)
contain the examples in any order: dims that count such rows, and that do not index a weight, carry the batch. Tensors
that are the same for all examples carry none. But where one fans out to layers with a batch, its gradient consists of
partial sums, one for each part of those layers' batch.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from pase.common.containers import FrozenDict
from pase.graph.operator import Access, AllToAll, Operator, Role, SliceOf, Window, access_dims, axis_dims


class Span(NamedTuple):
    """Position of the batch in a row-major tensor: `blocks` blocks of `examples` examples each.

    Attributes:
        rows: Rows of each block, if they outnumber the examples and contain them in any order; otherwise 0.
    """

    blocks: int
    examples: int
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Position of the batch in a layer's iteration space.

    Attributes:
        dims: Dims that carry the batch, with the number of parts into which each can be split between examples.
        examples: Number of parts into which all of them together can be split (where queries and keys have the same
            batch, two dims carry it).
    """

    dims: Mapping[str, int]
    examples: int


def batches(
    operators: Sequence[Operator], producers: Mapping[tuple[str, int], tuple[str, int]], repeated: Sequence[int]
) -> dict[str, Batch]:
    """Return the position of the batch in each layer of a graph, by the layer's name.

    Layers that do not depend on the data have no batch dim, unless their output is read along with it (an initial state
    of zeros for each example). A dim with the batch as its inner factor (steps · batch) cannot be split between
    examples and is not included.

    Args:
        operators: The layers in topological order.
        producers: For each read that a layer feeds, (layer, position in its reads): the producer and the number of its
            output.
        repeated: For each operator, the position of the first one that is equal to it except for names.
    """
    layers = {operator.name: operator for operator in operators}
    is_marked = any(read.batch for operator in operators for read in operator.reads)
    spans: dict[tuple[str, int], tuple[Span, ...]] = {}
    found: dict[str, Batch] = {}
    known: dict[Hashable, tuple[Batch, list[tuple[Span, ...]]]] = {}
    for operator, first in zip(operators, repeated, strict=True):
        reads: list[tuple[int, tuple[Span, ...]]] = []
        for position, read in enumerate(operator.reads):
            producer = producers.get((operator.name, position))
            if producer is not None:
                reads.append((position, spans[producer]))
            elif read.batch:
                reads.append((position, (Span(*read.batch),)))
            elif read.role is not Role.PARAMETER and not is_marked and read.shape:
                # Without further information, the first dim of the data is the batch.
                reads.append((position, (Span(1, read.shape[0]),)))
        key = first, *reads
        if key not in known:
            batch, rows = _carried(operator, [(operator.reads[position], own) for position, own in reads])
            known[key] = batch, [tuple(_written(operator, write, batch.dims, rows)) for write in operator.writes]
        found[operator.name], written = known[key]
        spans.update({(operator.name, output): own for output, own in enumerate(written)})
    for (reader, position), (writer, output) in reversed(list(producers.items())):
        if not found[writer].dims and found[reader].dims:
            along = list(_written(layers[reader], layers[reader].reads[position], found[reader].dims, frozenset()))
            found[writer], _ = _carried(layers[writer], [(layers[writer].writes[output], along)])
    for (reader, position), (writer, _) in producers.items():
        if layers[writer].is_fan_out and not found[writer].dims:
            found[writer] = _in_parts(layers[writer], layers[reader], layers[reader].reads[position], found[reader])
    return found


def _in_parts(writer: Operator, reader: Operator, read: Access, batch: Batch) -> Batch:
    """Return the batch of a fan-out whose tensor is the same for all examples: the partial sums of its gradient.

    A consumer that is split between examples leaves one partial sum per part.
    """
    summed = reader.partial_dims(read)
    ways = prod(ways for dim, ways in batch.dims.items() if dim in summed)
    parts = {dim: gcd(writer.extents[dim], ways) for dim in writer.partial_dims(writer.reads[0])}
    return Batch(dims=FrozenDict({dim: ways for dim, ways in parts.items() if ways > 1}), examples=ways)


def _carried(operator: Operator, tensors: Iterable[tuple[Access, Sequence[Span]]]) -> tuple[Batch, frozenset[str]]:
    """Return the batch of a layer that some of its tensors carry, and the dims that count rows in any order."""
    dims, examples, rows = dict[str, int](), 1, frozenset[str]()
    for access, spans in tensors:
        for span in spans:
            carriers, counting = _carriers(operator, access, span)
            dims = {dim: max(dims.get(dim, 1), carriers.get(dim, 1)) for dim in {**dims, **carriers}}
            examples, rows = max(examples, prod(carriers.values())), rows | counting
    written = {dim for write in operator.writes for dim in access_dims(write)}
    worked = {dim for work in operator.work for dim in work.dims}
    looked_up = dims.keys() - written - worked
    if any(isinstance(exchange, AllToAll) and exchange.excess is None for exchange in operator.exchanges):
        # Rows are sent to the place that reads them.
        rows = frozenset(axis_dims(operator.writes[0].index_map[0]))
    elif looked_up:
        # Rows are gathered from a table of examples: the dims that count them do not index the table.
        tables = [read for read in operator.reads if not access_dims(read).isdisjoint(looked_up)]
        of_tables = {dim for table in tables for dim in access_dims(table)}
        rows = frozenset(dim for dim in operator.extents if dim not in of_tables)
        dims = {dim: gcd(extent, examples) for dim, extent in operator.extents.items() if dim in rows}
    return Batch(dims=FrozenDict(dims), examples=examples), rows


def _factors(operator: Operator, access: Access) -> Iterator[tuple[str | None, int]]:
    """Yield (iteration dim, extent) along a row-major tensor; None where no dim, or only a part of one, indexes it."""
    for extent, axis in zip(access.shape, access.index_map, strict=True):
        match axis:
            case None | SliceOf() | Window():
                yield None, extent
            case str():
                yield axis, extent
            case _:
                yield from ((dim, operator.extents[dim]) for dim in axis)


def _carriers(operator: Operator, access: Access, span: Span) -> tuple[dict[str, int], frozenset[str]]:
    """Return the dims that a tensor's batch coincides with, with the number of parts for splitting between examples.

    Also returned, where rows are in any order, are all dims that count rows: dims of a weight (experts) count some but
    do not carry the batch.
    """
    found: dict[str, int] = {}
    counting: set[str] = set()
    weighted = {dim for weight in operator.parameters for dim in access_dims(weight)}
    outside, left = 1, span.examples
    for dim, extent in _factors(operator, access):
        inside = span.blocks <= outside and outside * extent <= span.blocks * (span.rows or span.examples)
        if span.rows and inside and dim is not None and extent > 1:
            counting.add(dim)
            if dim not in weighted and gcd(extent, left) > 1:
                found[dim] = gcd(extent, left)
                left //= found[dim]
        elif not span.rows and outside >= span.blocks and left > 1 and extent > 1:
            # A dim that starts within a block, or within an example, cannot be split between examples.
            if outside != span.blocks * (span.examples // left):
                break
            ways = gcd(extent, left)
            if dim is not None:
                found[dim] = ways
            # A factor that continues after the last example, in a dim of its own, ends there.
            if ways < extent:
                break
            left //= ways
        outside *= extent
    return found, frozenset(counting)


def _written(operator: Operator, access: Access, dims: Mapping[str, int], rows: frozenset[str]) -> Iterator[Span]:
    """Yield the batch's positions in a tensor along some dims; adjacent factors are merged."""
    outside, last = 1, None
    for dim, extent in _factors(operator, access):
        ways = dims.get(dim, 1) if dim is not None else 1
        if dim in rows and extent > 1:
            joins = last is not None and last.blocks * last.rows == outside
            if last is not None and not joins:
                yield last
            before = last if joins and last is not None else Span(outside, 1, 1)
            last = Span(before.blocks, before.examples * ways, before.rows * extent)
        elif ways > 1:
            joins = last is not None and not last.rows and last.blocks * last.examples == outside
            if last is not None and not joins:
                yield last
            before = last if joins and last is not None else Span(outside, 1)
            last = Span(before.blocks, before.examples * ways)
        outside *= extent
    if last is not None and last.examples > 1:
        yield last


def given_spans(shapes: Sequence[tuple[int, ...]], batch: int | None) -> list[Span | None]:
    """Return the position of the batch in a network's input tensors; None for inputs without a batch.

    Args:
        shapes: Shapes of the inputs.
        batch: Number of examples, if known: the first dim of that extent is the batch. If it is unknown, or no input
            has such a dim, it is the first dim, with the extent that most inputs have there. It is the second dim if
            all inputs agree there and not in the first.
    """
    if batch is not None and any(batch in shape for shape in shapes):
        return [Span(prod(shape[: shape.index(batch)]), batch) if batch in shape else None for shape in shapes]
    firsts, seconds = ([shape[dim] for shape in shapes if len(shape) > dim] for dim in (0, 1))
    if len(set(firsts)) > 1 and len(set(seconds)) == 1 and len(seconds) == len(shapes):
        # Sequences of several lengths, steps first: the common extent is the batch.
        return [Span(shape[0], shape[1]) for shape in shapes]
    most = max(firsts, key=firsts.count, default=None)
    return [Span(1, shape[0]) if shape and shape[0] == most else None for shape in shapes]
