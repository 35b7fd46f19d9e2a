"""What moves data alone as vertices: concatenations, pieces, padding, look-ups, views that lie across dims."""

from dataclasses import replace
from math import prod

from pase.graph import Access, Dim, Operator, SliceOf
from pase.graph.access import DimIndex
from pase.graph.operators.concat import concat
from pase.graph.operators.embedding import embedding, gather
from pase.graph.operators.opaque import opaque, reorder
from pase.graph.operators.pieces import padded
from pase.importers.ir import Concat, Gather, Node, Pad, Slice, Trace, Use, View
from pase.importers.lower.draft import LoweredOperator, is_parameter, shapes, spare
from pase.importers.lower.points import dim_names, lower_generic
from pase.importers.passes.regions import is_activation


def lower_concat(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a concatenation; pieces that are constants are left out of what is read."""
    op = node.op
    assert isinstance(op, Concat)
    out = node.outputs[0].shape
    names = dim_names(len(out))
    operator = concat(name, *shapes(trace, node), dims=names, along=names[op.dim])
    kept = [i for i, use in enumerate(node.inputs) if is_activation(trace, use) or is_parameter(trace, use)]
    if len(kept) < len(node.inputs):
        operator = replace(operator, reads=tuple(operator.reads[i] for i in kept))
    return LoweredOperator(operator=operator, sources=tuple(node.inputs[i] for i in kept))


def lower_slice(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a piece of a tensor; every other element along a dim is a piece of a dim that is made of two.

    With other steps, or backwards, it can be split along the other dims alone.
    """
    op = node.op
    assert isinstance(op, Slice)
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    steps = list(zip(shape, out, op.starts, op.steps, strict=True))
    strided = [i for i, (old, new, start, step) in enumerate(steps) if step > 1 and new * step == old and start < step]
    cut = [i for i, (old, new, _, _) in enumerate(steps) if old != new and i not in strided]
    if any(step != 1 for i, (_, _, _, step) in enumerate(steps) if i not in strided):
        passes = tuple((i, i) for i, (old, new, _, step) in enumerate(steps) if old == new and step == 1)
        operator = opaque(name, [shape], [out], passes=passes, function="slice")
        return LoweredOperator(operator=operator, sources=node.inputs[:1])
    names = dim_names(len(shape))
    dims: list[Dim] = []
    read: list[DimIndex] = []
    written: list[tuple[int, DimIndex]] = []
    for i, (dim, (old, new, start, step)) in enumerate(zip(names, steps, strict=True)):
        if i in strided:
            outer, inner = f"{dim}1", f"{dim}2"
            dims += [Dim(outer, new), Dim(inner, step)]
            read.append((outer, inner))
            written += [(new, outer), (1, SliceOf(dim=inner, offset=start, extent=1))]
            continue
        dims.append(Dim(dim, old))
        read.append(dim)
        written.append((new, SliceOf(dim=dim, offset=start, extent=new) if i in cut else dim))
    write = Access(tensor="y", shape=tuple(e for e, _ in written), index_map=tuple(axis for _, axis in written))
    operator = Operator(
        name=name,
        kind="piece",
        dims=tuple(dims),
        reads=(Access(tensor="x", shape=shape, index_map=tuple(read)),),
        writes=(write,),
    )
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_pad(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a tensor with values around it; one that is cut instead can be split along the other dims alone."""
    op = node.op
    assert isinstance(op, Pad)
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    if any(first < 0 or first + old > new for first, old, new in zip(op.before, shape, out, strict=True)):
        passes = tuple((i, i) for i, (old, new) in enumerate(zip(shape, out, strict=True)) if old == new)
        operator = opaque(name, [shape], [out], passes=passes, function="pad")
    else:
        operator = padded(name, shape, dims=dim_names(len(shape)), before=op.before, out=out)
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_lookup(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return an embedding, or rows of any other tensor of any rank, which are looked up alike."""
    table, indices = shapes(trace, node)[:2]
    names = dim_names(len(indices)) if indices else ()
    if len(indices) in (1, 2):
        names = ("b", "s")[: len(indices)]
    if prod(node.outputs[0].shape) != prod((*indices, *table[1:])):
        return lower_generic(trace, node, name)
    operator = embedding(name, indices, vocabulary=table[0], size=prod(table[1:]), dims=names)
    if len(table) != 2:
        operator = _of_rank(operator, table, indices)
    return LoweredOperator(operator=operator, sources=(node.inputs[1], node.inputs[0]))


def lower_gather(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return elements of a tensor at places along one of its dims."""
    op = node.op
    assert isinstance(op, Gather)
    shape, places = shapes(trace, node)[:2]
    names = dim_names(len(shape))
    operator = gather(name, shape, dims=names, along=names[op.dim], count=places[op.dim])
    return LoweredOperator(operator=operator, sources=node.inputs[:2])


def _of_rank(operator: Operator, table: tuple[int, ...], indices: tuple[int, ...]) -> Operator:
    """Return an embedding whose rows have any number of dims in place of d."""
    lead = operator.reads[0].index_map
    names = spare([*operator.extents], len(table) - 1, "cdefghijk")
    index, rows = operator.reads
    (write,), (work,) = operator.writes, operator.work
    return replace(
        operator,
        dims=(
            *operator.dims[: len(indices)],
            *(Dim(n, e) for n, e in zip(names, table[1:], strict=True)),
            *operator.dims[-1:],
        ),
        reads=(index, replace(rows, shape=table, index_map=("v", *names))),
        writes=(replace(write, shape=(*indices, *table[1:]), index_map=(*lead, *names)),),
        work=(replace(work, dims=(*(dim for dim in work.dims if dim != "d"), *names)),),
    )


def lower_view(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a view that lies across its tensor's dims: it can be split along leading dims that stay."""
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    passes = []
    for i, (old, new) in enumerate(zip(shape, out, strict=False)):
        if old != new:
            break
        passes.append((i, i))
    operator = opaque(name, [shape], [out], passes=passes, function="reshape")
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def draft_of_view(use: Use, view: View, name: str) -> LoweredOperator:
    """Return the vertex that lays a tensor out as a view has it, for those who cannot read it so."""
    flat = [factor for dim in view.dims for factor in dim]
    places = {factor: i for i, factor in enumerate(flat) if factor.base is not None}
    repeated = [i for i, factor in enumerate(flat) if factor.base is None]
    read = [place for _, place in sorted((factor.base or 0, place) for factor, place in places.items())]
    written, count = [], 0
    for dim in view.dims:
        written.append(list(range(count, count + len(dim))))
        count += len(dim)
    assert sorted([*read, *repeated]) == list(range(len(flat)))
    operator = reorder(name, [factor.extent for factor in flat], read=read, written=written)
    return LoweredOperator(operator=operator, sources=(replace(use, view=None),))
