"""Functions of points, reductions, normalisations, look-ups and what moves data alone as vertices."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from pase.common.names import short
from pase.graph import Access, AllReduce, AllToAll, Dim, Intermediate, Operator, Role, SliceOf
from pase.graph.access import DimIndex, access_dims, axis_dims
from pase.graph.body import Body
from pase.graph.operators import (
    batch_norm,
    concat,
    embedding,
    gather,
    layer_norm,
    opaque,
    padded,
    pointwise,
    reduction,
    reorder,
    softmax,
)
from pase.graph.operators.normalisation import normalising
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use
from pase.importers.ir.views import View
from pase.importers.lower.draft import (
    LoweredOperator,
    functions_text,
    is_parameter,
    moving,
    reordered,
    shaped,
    shapes,
    spare,
)
from pase.importers.passes.regions import is_activation

OPERATORS: dict[str, Callable[..., Operator]] = {}
"""Operators of one's own for what front ends know nothing of, by its name in the source, without an overload.

Each is made from a layer's name and the shapes of the tensors that the source gives, which it reads in that order; its
body says how it is computed.
"""

_NORMALISE_FLOP = 3
"""Subtract the mean, square for the variance, divide."""

_NAMES = {1: "b", 2: "bn", 3: "bsd", 4: "bchw", 5: "bcdhw"}


def dim_names(rank: int) -> tuple[str, ...]:
    """Return names for the dims of a tensor of which nothing more is known."""
    return tuple(_NAMES[rank]) if rank in _NAMES else spare((), rank, "b")


def lower_pointwise(trace: Trace, node: Node, op: ops.Pointwise, name: str) -> LoweredOperator:
    """Return a function of one or more tensors; what cannot be broadcast to its result is needed whole."""
    out = node.outputs[0].shape or (1,)
    names = dim_names(len(out))
    uses = [use for use in node.inputs if is_activation(trace, use) or is_parameter(trace, use)]
    fits = [_can_be_broadcast(trace.shape(use), out) for use in uses]
    function = functions_text(op.functions)
    operator = pointwise(
        name,
        *(trace.shape(use) if fit else () for use, fit in zip(uses, fits, strict=True)),
        dims=names,
        out=out,
        function=function,
        flop_per_point=op.flop_per_point,
        mixes=tuple(names[i] for i in op.mixes),
    )
    reads = [
        access if fit else replace(access, shape=trace.shape(use), index_map=(None,) * len(trace.shape(use)))
        for access, use, fit in zip(operator.reads, uses, fits, strict=True)
    ]
    return LoweredOperator(operator=replace(operator, reads=tuple(reads)), sources=tuple(uses))


def lower_reduce(trace: Trace, node: Node, op: ops.Reduce, name: str) -> LoweredOperator:
    """Return a reduction; the dims of extent 1 that it keeps are not told."""
    (shape, *_) = shapes(trace, node)
    names = dim_names(len(shape))
    if not shape:
        operator = pointwise(name, (), dims=("b",), out=(1,), function=functions_text([op.function]))
        return LoweredOperator(operator=operator, sources=node.inputs[:1])
    operator = reduction(
        name, shape, dims=names, over=tuple(names[i] for i in op.over), function=functions_text([op.function])
    )
    (write,) = operator.writes
    if op.keeps_dims and write.shape != node.outputs[0].shape:
        axes = tuple(None if i in op.over else dim for i, dim in enumerate(names))
        operator = replace(operator, writes=(replace(write, shape=node.outputs[0].shape, index_map=axes),))
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_softmax(trace: Trace, node: Node, op: ops.Softmax, name: str) -> LoweredOperator:
    """Return a softmax."""
    shape = shapes(trace, node)[0]
    names = dim_names(len(shape))
    operator = softmax(name, shape, dims=names, over=names[op.dim], is_log=op.is_log)
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_normalisation(trace: Trace, node: Node, op: ops.Normalise, name: str) -> LoweredOperator:
    """Return a normalisation; scale and shift are read along its channels where they are of these."""
    shape = shapes(trace, node)[0]
    x, affine = node.inputs[0], node.inputs[1 : 1 + op.has_scale + op.has_shift]
    extents = tuple(shape[i] for i in op.channels)
    is_told = all(prod(trace.shape(use)) == prod(extents) for use in affine)
    if is_told:
        affine = tuple(shaped(trace, use, extents) for use in affine)
    is_affine = op.has_scale and op.has_shift and is_told and not op.mixes
    if op.kind == "batch" and is_affine and len(op.channels) == 1 and 3 <= len(shape) <= 5:
        channel = op.channels[0]
        batch = 0 if channel else 1
        order = (batch, channel, *(i for i in range(len(shape)) if i not in (batch, channel)))
        seen = reordered(trace, x, order)
        inverse = tuple(order.index(i) for i in range(len(order)))
        is_same = inverse == tuple(range(len(order)))
        return LoweredOperator(
            operator=batch_norm(name, trace.shape(seen), num_frozen=sum(use.value in trace.frozen for use in affine)),
            sources=(seen, *affine),
            orders=(None if is_same else inverse,),
        )
    names = dim_names(len(shape))
    if op.kind == "layer" and is_affine and op.over == op.channels == (len(shape) - 1,):
        return LoweredOperator(operator=layer_norm(name, shape, dims=names), sources=(x, *affine))
    return LoweredOperator(operator=_normalisation(trace, name, op, (x, *affine)), sources=(x, *affine))


def lower_generic(trace: Trace, node: Node, op: ops.Op, name: str) -> LoweredOperator:
    """Return an operator that can be split along the dims that pass through it."""
    make = OPERATORS.get(node.origin.operator) or OPERATORS.get(node.origin.operator.rpartition(".")[0])
    if make is not None:
        return LoweredOperator(operator=make(name, *map(trace.shape, node.inputs)), sources=node.inputs)
    passes: tuple[tuple[int, int], ...] = op.passes if isinstance(op, ops.Generic) else ()
    flop = op.flop_per_point if isinstance(op, ops.Generic) else 0.0
    uses = [use for use in node.inputs if is_activation(trace, use)]
    weights = [use for use in node.inputs if is_parameter(trace, use)]
    floats = [use for use in node.inputs if trace.values[use.value].is_float]
    if not uses or uses[:1] != floats[:1]:
        # The dims that pass are those of a tensor that is not read any more.
        passes = ()
    read = {use.value for other in trace.nodes for use in other.inputs}
    outputs = [value for value in node.outputs if value.is_float or value.name in read] or list(node.outputs)
    operator = opaque(
        name,
        [trace.shape(use) for use in (*uses, *weights)],
        [value.shape for value in outputs],
        passes=passes,
        flop=flop * prod(outputs[0].shape),
        product_flop=op.product_flop if isinstance(op, ops.Generic) else 0.0,
        function=short(node.origin.operator),
        num_weights=len(weights),
    )
    others = [dim for dim in operator.unsplittable if operator.extents[dim] > 1]
    note = f"{node.origin.operator} is treated generically: only dims that pass through it can be split"
    return LoweredOperator(
        operator=operator,
        sources=(*uses, *weights),
        orders=(None,) * len(outputs),
        approximations=(note,) if others or operator.work else (),
    )


def _normalisation(trace: Trace, name: str, op: ops.Normalise, uses: tuple[Use, ...]) -> Operator:
    """Return a normalisation of any kind: its statistics are all-reduced where the dims that they are of are split.

    Channels in groups are two dims, g and the channels of a group: a split of g leaves the statistics where they are.
    """
    shape = trace.shape(uses[0])
    named = dim_names(len(shape))
    index: list[DimIndex] = list(named)
    extents = dict(zip(named, shape, strict=True))
    over = tuple(named[i] for i in op.over)
    groups = ("g",) if _has_groups(op, shape) else ()
    if groups:
        (place,) = op.channels
        index[place] = (*groups, named[place])
        extents |= {"g": op.groups, named[place]: shape[place] // op.groups}
    names = tuple(dim for axis in index for dim in axis_dims(axis))
    kept = tuple(dim for dim in names if dim not in over)
    channels = tuple(index[i] for i in op.channels)
    reads = [Access(tensor="x", shape=shape, index_map=tuple(index))]
    tensors = [*(["scale"] if op.has_scale else []), *(["shift"] if op.has_shift else [])]
    for tensor, use in zip(tensors, uses[1:], strict=True):
        own = trace.shape(use)
        axes = channels if own == tuple(shape[i] for i in op.channels) else (None,) * len(own)
        read = Access(tensor=tensor, shape=own, index_map=axes, role=Role.PARAMETER)
        reads.append(replace(read, partial_over=tuple(dim for dim in names if dim not in access_dims(read))))
    count = 1 if op.kind in ("rms", "response", "statistics") else 2
    moments = AllReduce(
        tensor="moments",
        shape=(count if groups else count * op.groups, *(extents[dim] for dim in kept)),
        index_map=(None, *kept),
        over=over,
        times=2,
        backward_times=1,
        gradient_of=(0,),
    )
    # No mean is subtracted from what is only squared.
    flop = _NORMALISE_FLOP if count == 2 else _NORMALISE_FLOP - 1
    return Operator(
        name=name,
        kind="statistics" if op.kind == "statistics" else f"{op.kind}_norm",
        dims=tuple(Dim(dim, extents[dim]) for dim in names),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=shape, index_map=tuple(index)),),
        work=normalising(names, flop_per_point=flop, scale=1 if op.has_scale else None, has_shift=op.has_shift),
        exchanges=(moments,) if over else (),
        intermediates=(
            Intermediate(tensor="moments", shape=moments.shape, index_map=moments.index_map, kept=1),
            Intermediate(tensor="normalised", shape=shape, index_map=tuple(index), working=1),
        ),
        unsplittable=tuple(named[i] for i in op.mixes),
        attributes=(("epsilon", float(op.epsilon)), ("groups", op.groups)),
    )


def _has_groups(op: ops.Normalise, shape: tuple[int, ...]) -> bool:
    """Return whether the channels are one dim in groups of several, whose statistics are apart."""
    is_told = op.kind == "group" and op.groups > 1 and len(op.channels) == 1 and op.channels[0] in op.over
    return is_told and not set(op.channels) & set(op.mixes) and shape[op.channels[0]] % op.groups == 0


def _can_be_broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return len(shape) <= len(out) and all(a in (1, b) for a, b in zip(shape, out[len(out) - len(shape) :], strict=True))


# -- what moves data alone, and look-ups


def lower_concat(trace: Trace, node: Node, op: ops.Concat, name: str) -> LoweredOperator:
    """Return a concatenation; pieces that are constants are left out of what is read."""
    out = node.outputs[0].shape
    names = dim_names(len(out))
    operator = concat(name, *shapes(trace, node), dims=names, along=names[op.dim])
    kept = [i for i, use in enumerate(node.inputs) if is_activation(trace, use) or is_parameter(trace, use)]
    if len(kept) < len(node.inputs):
        operator = replace(operator, reads=tuple(operator.reads[i] for i in kept))
    return LoweredOperator(operator=operator, sources=tuple(node.inputs[i] for i in kept))


def lower_slice(trace: Trace, node: Node, op: ops.Slice, name: str) -> LoweredOperator:
    """Return a piece of a tensor; every other element along a dim is a piece of a dim that is made of two.

    With other steps, or backwards, it can be split along the other dims alone.
    """
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    steps = list(zip(shape, out, op.starts, op.steps, strict=True))
    strided = [i for i, (old, new, start, step) in enumerate(steps) if step > 1 and new * step == old and start < step]
    cut = [i for i, (old, new, _, _) in enumerate(steps) if old != new and i not in strided]
    if any(step != 1 for i, (_, _, _, step) in enumerate(steps) if i not in strided):
        passes = tuple((i, i) for i, (old, new, _, step) in enumerate(steps) if old == new and step == 1)
        operator = moving(opaque(name, [shape], [out], passes=passes, function="slice"), "piece")
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
    return LoweredOperator(operator=moving(operator, "piece"), sources=node.inputs[:1])


def lower_pad(trace: Trace, node: Node, op: ops.Pad, name: str) -> LoweredOperator:
    """Return a tensor with values around it; one that is cut instead can be split along the other dims alone."""
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    if any(first < 0 or first + old > new for first, old, new in zip(op.before, shape, out, strict=True)):
        passes = tuple((i, i) for i, (old, new) in enumerate(zip(shape, out, strict=True)) if old == new)
        operator = moving(opaque(name, [shape], [out], passes=passes, function="pad"), "padded")
    else:
        operator = padded(name, shape, dims=dim_names(len(shape)), before=op.before, out=out)
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_lookup(trace: Trace, node: Node, op: ops.Op, name: str) -> LoweredOperator:
    """Return an embedding, or rows of any other tensor of any rank, which are looked up alike."""
    table, indices = shapes(trace, node)[:2]
    names = dim_names(len(indices)) if indices else ()
    if len(indices) in (1, 2):
        names = ("b", "s")[: len(indices)]
    if prod(node.outputs[0].shape) != prod((*indices, *table[1:])):
        return lower_generic(trace, node, op, name)
    operator = embedding(name, indices, vocabulary=table[0], size=prod(table[1:]), dims=names)
    assert operator.body is not None
    if isinstance(op, ops.Lookup) and op.frozen >= 0:
        (step,) = operator.body.steps
        operator = replace(operator, body=Body(steps=(replace(step, options=(("frozen", op.frozen),)),)))
    if len(table) != 2:
        operator = _of_rank(operator, table, indices)
    return LoweredOperator(operator=operator, sources=(node.inputs[1], node.inputs[0]))


def with_routes(operator: Operator) -> Operator:
    """Return a look-up of rows that a layer computes, by numbers that another one does, as an exchange of these rows.

    A device that holds some of the table's rows and some of the places sends each other one the rows that this one's
    places ask for. So tokens go to their experts, and what these make of them comes back. Where neither count divides
    the other, or the numbers are not the source's own, it is a look-up as any other.
    """
    body = operator.body.own if operator.body else None
    functions = [step.function for step in body.steps] if body else []
    if operator.kind != "embedding" or body is None or functions.count("embedding") != 1 or len(operator.writes) > 1:
        return operator
    at = functions.index("embedding")
    last, seen = body.steps[at], body.steps[at - 1]
    (numbers, table, *_), write = operator.reads, operator.writes[0]
    places = write.index_map[0]
    is_computed = table.role is Role.ACTIVATION and set(numbers.index_map) <= {None} and len(operator.reads) == 2
    is_seen = seen.function == "view" and seen.dims[seen.option("replaced", 0) :] == (places,)
    is_named = any({places, "v"} & {*step.dims} for step in body.steps[at:])
    if is_named or not (is_computed and is_seen and last.operands == ("table", seen.result)):
        return operator
    assert isinstance(places, str)
    counts = operator.extents[places], table.shape[0]
    few, many = sorted(counts)
    if many % few:
        return operator
    # The fewer ones are split; so many of the others lie with each of them.
    outer, inner = (places, "v") if counts[0] == few else ("v", places)
    names = {places: (outer, inner)[: 1 + (inner == places)], "v": (outer, inner)[: 1 + (inner == "v" and many > few)]}

    def index(access: Access) -> Access:
        first = names[str(access.index_map[0])]
        return replace(access, index_map=(first if len(first) > 1 else first[0], *access.index_map[1:]))

    table, write = index(table), index(write)
    rows = AllToAll(
        tensor="rows",
        shape=write.shape,
        index_map=write.index_map,
        over=(outer,),
        copies=many // few if inner == places else 1,
        times=2,
        backward_times=1,
        gradient_of=(1,),
    )
    step = replace(
        last,
        function="routed",
        operands=("table", *seen.operands),
        dims=(*names[places], *names["v"]),
        options=(("rows", len(names[places])),),
    )
    steps = (*body.steps[: at - 1], step, *body.steps[at + 1 :])
    return replace(
        operator,
        dims=tuple(
            Dim(dim.name, {outer: few, inner: many // few}.get(dim.name, dim.extent))
            for dim in operator.dims
            if dim.name != inner or many > few
        ),
        unsplittable=(*operator.unsplittable, *([inner] if many > few else [])),
        reads=(numbers, table),
        writes=(write,),
        work=tuple(
            replace(work, dims=tuple(name for dim in work.dims for name in names.get(str(dim), (dim,))))
            for work in operator.work
        ),
        exchanges=(rows,),
        body=operator.body and replace(operator.body, own=replace(body, steps=steps)),
    )


def lower_gather(trace: Trace, node: Node, op: ops.Gather, name: str) -> LoweredOperator:
    """Return elements of a tensor at places along one of its dims."""
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


def lower_view(trace: Trace, node: Node, op: ops.Op, name: str) -> LoweredOperator:
    """Return a view that lies across its tensor's dims: it can be split along leading dims that stay."""
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    passes = []
    for i, (old, new) in enumerate(zip(shape, out, strict=False)):
        if old != new:
            break
        passes.append((i, i))
    operator = moving(opaque(name, [shape], [out], passes=passes, function="reshape"), "copy")
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
