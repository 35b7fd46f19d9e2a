"""Where the batch lies: followed from what a network is given through its tensors, whatever its dims are called.

In a tensor, row-major, the batch is a factor of its elements: so many blocks, of so many examples each, of so many
elements. A reshape leaves that as it is, so that the dim of a reader that the factor falls on carries the batch, as a
whole or as the outer part of a product (tokens: batch · steps). From a dim of a layer's iteration space it goes on to
everything that the layer writes along it. Rows that are looked up by computed numbers (the tokens of each expert) hold
the examples in any order: whatever counts such rows, and no weight is indexed by, carries the batch. What is the same
for all examples has none, but where it fans out to layers that do, its gradient comes in parts, one for each of theirs.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from pase.common.containers import FrozenDict
from pase.graph.operator import Access, AllToAll, Operator, Role, SliceOf, Window, access_dims, axis_dims


class Span(NamedTuple):
    """Where the batch lies in a tensor, row-major: so many blocks of so many examples each.

    rows: of each block, where they are more than the examples and hold these in any order; 0 where they do not.
    """

    blocks: int
    examples: int
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Where the batch lies in a layer's iteration space.

    dims: those that carry it, and into how many parts each can be cut between examples. examples: into how many all of
    them can be cut together (where queries and keys are of one batch, two dims carry it).
    """

    dims: Mapping[str, int]
    examples: int


def batches(
    operators: Sequence[Operator], producers: Mapping[tuple[str, int], tuple[str, int]], repeated: Sequence[int]
) -> dict[str, Batch]:
    """Return where the batch lies in each layer of a graph, by its name.

    Layers that read nothing of the data have no such dim, unless what they make is read along with it (an initial state
    of zeros for each example). A dim that the batch is an inner part of (steps · batch) cannot be cut between examples,
    and is none of them.

    Args:
        operators: in topological order.
        producers: of each read that a layer feeds, (layer, position in its reads): the producer, which of its writes.
        repeated: position of the first operator that each one repeats.
    """
    layers = {operator.name: operator for operator in operators}
    is_marked = any(read.batch for operator in operators for read in operator.reads)
    spans: dict[tuple[str, int], tuple[Span, ...]] = {}
    found: dict[str, Batch] = {}
    known: dict[Hashable, tuple[Batch, list[tuple[Span, ...]]]] = {}
    for operator, like in zip(operators, repeated, strict=True):
        reads: list[tuple[int, tuple[Span, ...]]] = []
        for position, read in enumerate(operator.reads):
            producer = producers.get((operator.name, position))
            if producer is not None:
                reads.append((position, spans[producer]))
            elif read.batch:
                reads.append((position, (Span(*read.batch),)))
            elif read.role is not Role.PARAMETER and not is_marked and read.shape:
                # Of data of which nothing is told, the first dim is the batch.
                reads.append((position, (Span(1, read.shape[0]),)))
        key = like, *reads
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
    """Return where the batch lies in a fan-out of what is the same for all examples: in the parts of the gradient.

    A reader that is split between examples leaves the gradient in as many parts.
    """
    summed = reader.partial_dims(read)
    ways = prod(ways for dim, ways in batch.dims.items() if dim in summed)
    parts = {dim: gcd(writer.extents[dim], ways) for dim in writer.partial_dims(writer.reads[0])}
    return Batch(dims=FrozenDict({dim: ways for dim, ways in parts.items() if ways > 1}), examples=ways)


def _carried(operator: Operator, tensors: Iterable[tuple[Access, Sequence[Span]]]) -> tuple[Batch, frozenset[str]]:
    """Return where the batch lies in a layer that has it in some of its tensors, and the dims that count mixed rows."""
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
        # Rows go to whatever place asks for them.
        rows = frozenset(axis_dims(operator.writes[0].index_map[0]))
    elif looked_up:
        # Rows are taken out of a table of examples: the dims that count these are no dims of the table.
        tables = [read for read in operator.reads if not access_dims(read).isdisjoint(looked_up)]
        of_tables = {dim for table in tables for dim in access_dims(table)}
        rows = frozenset(dim for dim in operator.extents if dim not in of_tables)
        dims = {dim: gcd(extent, examples) for dim, extent in operator.extents.items() if dim in rows}
    return Batch(dims=FrozenDict(dims), examples=examples), rows


def _factors(operator: Operator, access: Access) -> Iterator[tuple[str | None, int]]:
    """Yield (iteration dim, extent) along a tensor, row-major; None for what no dim, or only a part of one, indexes."""
    for extent, axis in zip(access.shape, access.index_map, strict=True):
        match axis:
            case None | SliceOf() | Window():
                yield None, extent
            case str():
                yield axis, extent
            case _:
                yield from ((dim, operator.extents[dim]) for dim in axis)


def _carriers(operator: Operator, access: Access, span: Span) -> tuple[dict[str, int], frozenset[str]]:
    """Return the dims that the batch of a tensor falls on, with the parts that each can be cut into between examples.

    With them, where the rows are mixed, all dims that count rows: a weight's dims (experts) count some, but carry none.
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
            # A dim that begins within a block, or an example, cannot be cut between examples.
            if outside != span.blocks * (span.examples // left):
                break
            ways = gcd(extent, left)
            if dim is not None:
                found[dim] = ways
            # What goes on after the last example in a dim of its own ends there.
            if ways < extent:
                break
            left //= ways
        outside *= extent
    return found, frozenset(counting)


def _written(operator: Operator, access: Access, dims: Mapping[str, int], rows: frozenset[str]) -> Iterator[Span]:
    """Yield where the batch lies in a tensor along some dims; factors of it that lie side by side are one."""
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
    """Return where the batch lies in the tensors that a network is given; None for those that hold no batch.

    Args:
        shapes: of the tensors.
        batch: how many examples there are, where that is known: the first dim of so many is the batch. Otherwise, or
            where no tensor has such a dim, the first dim is, with as many examples as most tensors have there; or the
            second, where all tensors have equally many there, and not in the first.
    """
    if batch is not None and any(batch in shape for shape in shapes):
        return [Span(prod(shape[: shape.index(batch)]), batch) if batch in shape else None for shape in shapes]
    firsts, seconds = ([shape[dim] for shape in shapes if len(shape) > dim] for dim in (0, 1))
    if len(set(firsts)) > 1 and len(set(seconds)) == 1 and len(seconds) == len(shapes):
        # Sequences of several lengths, steps first: what they have in common is the batch.
        return [Span(shape[0], shape[1]) for shape in shapes]
    most = max(firsts, key=firsts.count, default=None)
    return [Span(1, shape[0]) if shape and shape[0] == most else None for shape in shapes]
