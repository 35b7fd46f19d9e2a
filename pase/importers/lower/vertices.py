"""`LoweredOperator`: a vertex as its kind defines it, with the sources of its tensors.

This module has elementwise functions, reductions, data movement, look-ups, products and windows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from math import prod
from typing import Any

from pase.common.words import short
from pase.errors import GraphError
from pase.graph import Access, AllReduce, AllToAll, Dim, Intermediate, Operator, Role, SliceOf, Work
from pase.graph.body import Body, Step
from pase.graph.operator import DimIndex, access_dims, axis_dims
from pase.graph.operators import (
    attention,
    batch_norm,
    concat,
    contract,
    conv1d,
    conv2d,
    conv3d,
    embedding,
    gather,
    layer_norm,
    opaque,
    padded,
    pointwise,
    pool1d,
    pool2d,
    pool3d,
    recurrent,
    reduction,
    reorder,
    softmax,
    transposed_convolution,
)
from pase.graph.operators.normalisation import normalising
from pase.graph.verify import IMPORTED_FUNCTIONS, OTHER_FUNCTION
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, Use, gates, recurrent_flop
from pase.importers.ir.views import View
from pase.importers.passes.views import seen_through


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredOperator:
    """A vertex in the shapes of its kind.

    Attributes:
        operator: The operator.
        sources: [reads] the use that each read reads, in that shape.
        orders: [writes] for each dim of the value in the trace, the dim of the write; None where they are equal.
        approximations: Approximations in its costs, in words.
    """

    operator: Operator
    sources: tuple[Use, ...]
    orders: tuple[tuple[int, ...] | None, ...] = (None,)
    approximations: tuple[str, ...] = field(default=())


def moving(operator: Operator, function: str) -> Operator:
    """Return an operator whose body moves the first tensor that it reads."""
    step = Step(result="moved", function=function, operands=(operator.reads[0].tensor,))
    return replace(operator, body=Body(steps=(step,)))


def functions_text(functions: Sequence[str]) -> str:
    """Return names of functions as an attribute stores them; all unknown functions share one name."""
    return ",".join(name if name in IMPORTED_FUNCTIONS else OTHER_FUNCTION for name in functions)


def shaped(trace: Trace, use: Use, shape: tuple[int, ...]) -> Use:
    """Return a use in another shape of the same size."""
    if trace.shape(use) == shape:
        return use
    view = View.plain(trace.shape(use)).reshaped(shape) if use.seen_as is None else None
    return seen_through(trace, use, view) or replace(use, piece=None, view=None, seen_as=shape)


def spare(taken: Sequence[str], num: int, letters: str) -> tuple[str, ...]:
    """Return `num` names of dims that are not taken, the letters first."""
    names = chain(letters, (f"i{number}" for number in count(1)))
    return tuple(islice((name for name in names if name not in taken), num))


def repeated(trace: Trace, use: Use, heads: int) -> Use:
    """Return a use of [b, g, t, k] with each of the g heads repeated to give `heads` heads."""
    shape = trace.shape(use)
    if use.seen_as is not None:
        return replace(use, seen_as=(shape[0], heads, *shape[2:]))
    plain = View.plain(shape)
    apart = plain.reshaped((*shape[:2], 1, *shape[2:]))
    assert apart is not None
    wide = apart.broadcast((*shape[:2], heads // shape[1], *shape[2:]), range(5))
    view = wide.reshaped((shape[0], heads, *shape[2:]))
    assert view is not None
    return seen_through(trace, use, view) or replace(use, piece=None, view=None, seen_as=view.shape)


def reordered(trace: Trace, use: Use, order: Sequence[int]) -> Use:
    """Return a use with its dims in another order."""
    shape = trace.shape(use)
    if tuple(order) == tuple(range(len(shape))):
        return use
    if use.seen_as is not None:
        return replace(use, seen_as=tuple(shape[i] for i in order))
    seen = seen_through(trace, use, View.plain(shape).transposed(order))
    assert seen is not None, "dims can always be put in another order"
    return seen


def shapes(trace: Trace, node: Node) -> list[tuple[int, ...]]:
    """Return the shapes in which a node reads its inputs."""
    return [trace.shape(use) for use in node.inputs]


OPERATORS: dict[str, Callable[..., Operator]] = {}
"""User-defined operators for source operators that front ends do not know, by name in the source without an overload.

Each is called with a layer's name and the shapes of the tensors that the source passes, which it reads in that order;
its body describes its computation.
"""

_NORMALISE_FLOP = 3
"""Subtract the mean, square for the variance, divide."""

_NAMES = {1: "b", 2: "bn", 3: "bsd", 4: "bchw", 5: "bcdhw"}


def dim_names(rank: int) -> tuple[str, ...]:
    """Return names for the dims of a tensor of which nothing more is known."""
    return tuple(_NAMES[rank]) if rank in _NAMES else spare((), rank, "b")


def lower_pointwise(trace: Trace, node: Node, op: ops.Pointwise, name: str) -> LoweredOperator:
    """Return an elementwise function; inputs that do not broadcast to its result are needed completely."""
    out = node.outputs[0].shape or (1,)
    names = dim_names(len(out))
    uses = [use for use in node.inputs if trace.is_activation(use) or trace.is_parameter(use)]
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
    """Return a reduction; kept dims of extent 1 are omitted."""
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
    """Return a normalisation; scale and shift are read along its channels where they have these dims."""
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
        return LoweredOperator(
            operator=batch_norm(name, trace.shape(seen), num_frozen=sum(use.value in trace.frozen for use in affine)),
            sources=(seen, *affine),
            orders=(_inverse(order),),
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
    uses = [use for use in node.inputs if trace.is_activation(use)]
    weights = [use for use in node.inputs if trace.is_parameter(use)]
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
    """Return a normalisation of any kind: its statistics are all-reduced where their dims are split.

    Grouped channels are two dims, g and the channels of a group: a split of g leaves the statistics local.
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
    # RMS normalisation subtracts no mean.
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
    """Return whether the channels are one dim in several groups with separate statistics."""
    is_told = op.kind == "group" and op.groups > 1 and len(op.channels) == 1 and op.channels[0] in op.over
    return is_told and not set(op.channels) & set(op.mixes) and shape[op.channels[0]] % op.groups == 0


def _can_be_broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return len(shape) <= len(out) and all(a in (1, b) for a, b in zip(shape, out[len(out) - len(shape) :], strict=True))


# -- data movement and look-ups


def lower_concat(trace: Trace, node: Node, op: ops.Concat, name: str) -> LoweredOperator:
    """Return a concatenation; constant inputs are omitted from the reads."""
    out = node.outputs[0].shape
    names = dim_names(len(out))
    operator = concat(name, *shapes(trace, node), dims=names, along=names[op.dim])
    kept = [i for i, use in enumerate(node.inputs) if trace.is_activation(use) or trace.is_parameter(use)]
    if len(kept) < len(node.inputs):
        operator = replace(operator, reads=tuple(operator.reads[i] for i in kept))
    return LoweredOperator(operator=operator, sources=tuple(node.inputs[i] for i in kept))


def lower_slice(trace: Trace, node: Node, op: ops.Slice, name: str) -> LoweredOperator:
    """Return a slice of a tensor; every other element along a dim is a slice of one of two factors of the dim.

    With other steps, or backwards, only the other dims can be split.
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
    """Return a padded tensor; with negative padding only the other dims can be split."""
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    if any(first < 0 or first + old > new for first, old, new in zip(op.before, shape, out, strict=True)):
        passes = tuple((i, i) for i, (old, new) in enumerate(zip(shape, out, strict=True)) if old == new)
        operator = moving(opaque(name, [shape], [out], passes=passes, function="pad"), "padded")
    else:
        operator = padded(name, shape, dims=dim_names(len(shape)), before=op.before, out=out)
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_lookup(trace: Trace, node: Node, op: ops.Op, name: str) -> LoweredOperator:
    """Return an embedding, or a look-up of rows of any other tensor of any rank."""
    table, indices = shapes(trace, node)[:2]
    # Rows and their columns have names, too.
    names = ("b", "s") if len(indices) == 2 else spare(("v", "d"), len(indices), _NAMES.get(len(indices), "b"))
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
    """Return a look-up of computed rows by computed indices as an exchange of these rows (all-to-all).

    A device that holds some of the table's rows and some of the places sends to each other device the rows that its
    places need. Thus tokens are sent to their experts, and the results back. Where neither count divides the other, or
    the indices are not the source's own, it is an ordinary look-up.
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
    # The smaller count is split; a fixed number of the others belongs to each of them.
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
    """Return elements of a tensor at indices along one of its dims."""
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
    """Return a view that does not align with its tensor's dims: it can be split along unchanged leading dims."""
    shape, out = shapes(trace, node)[0], node.outputs[0].shape
    passes = []
    for i, (old, new) in enumerate(zip(shape, out, strict=False)):
        if old != new:
            break
        passes.append((i, i))
    operator = moving(opaque(name, [shape], [out], passes=passes, function="reshape"), "copy")
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def draft_of_view(use: Use, view: View, name: str) -> LoweredOperator:
    """Return the vertex that copies a tensor into the layout of a view, for consumers that cannot read the view."""
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


_LEAD = {1: "b", 2: "bs", 3: "bst"}


def lower_contract(trace: Trace, node: Node, op: ops.Contract, name: str) -> LoweredOperator:
    """Return a product; one with a weight is a dense layer."""
    x, y = shapes(trace, node)[:2]
    weights = [i for i in (0, 1) if trace.is_parameter(node.inputs[i])]
    is_dense = len(weights) == 1
    w = op.operands[weights[0]] if is_dense else ""
    lead = [letter for letter in op.output if letter not in w] if is_dense else list(op.output[:-2])
    summed = [letter for letter in dict.fromkeys(op.operands[0] + op.operands[1]) if letter not in op.output]
    names = dict(zip(lead, spare((), len(lead), _LEAD.get(len(lead), "bstuv")), strict=True))
    rest = [letter for letter in op.output if letter not in names]
    names |= dict(zip(rest, spare(tuple(names.values()), len(rest), "nm"), strict=True))
    names |= dict(zip(summed, spare(tuple(names.values()), len(summed), "ck"), strict=True))
    axes = tuple(tuple(names[letter] for letter in operand) for operand in op.operands)
    out = tuple(names[letter] for letter in op.output)
    operator = contract(
        name,
        x,
        y,
        axes=(axes[0], axes[1]),
        out=out,
        parameter=weights[0] if is_dense else None,
        kind="experts" if op.share < 1 else "dense" if is_dense else "contract",
        share=op.share,
    )
    if op.has_bias:
        bias = shapes(trace, node)[2]
        # Added after the sum: its gradient is not a partial sum of a split there.
        along = out[len(out) - len(bias) :]
        over = tuple(dim for dim in out if dim not in along)
        access = Access(tensor="bias", shape=bias, index_map=along, role=Role.PARAMETER, partial_over=over)
        added = Work(dims=out, flop_per_point=1)
        operator = replace(operator, reads=(*operator.reads, access), work=(*operator.work, added))
    sources = node.inputs[: 2 + op.has_bias]
    if op.has_ends:
        operator = replace(operator, exchanges=tuple(_regrouped(operator)))
        leaf = trace.leaf.get(node.inputs[-1].value)
        if leaf is None or leaf.role == "input":
            # Every device takes all of the numbers that tell where groups end.
            (ends,) = shapes(trace, node)[2:]
            access = Access(tensor="ends", shape=ends, index_map=(None,) * len(ends), role=Role.INDEX)
            operator, sources = replace(operator, reads=(*operator.reads, access)), node.inputs
    return LoweredOperator(operator=operator, sources=sources)


def _regrouped(operator: Operator) -> Iterator[AllToAll]:
    """Yield the exchanges where groups are split: rows to the devices with their group's matrix, and results back.

    Rows are sorted by group. If all groups have equally many, each row is already with its matrix; the excess is sent
    there, and the results back. Gradients are sent the other way.
    """
    (x, w), z = operator.reads[:2], operator.writes[0]
    groups = tuple(dim for dim in operator.extents if dim in access_dims(x) & access_dims(w) & access_dims(z))
    for tensor, access, gradient_of in (("rows", x, (0,)), ("products", z, (0, 1))):
        yield AllToAll(
            tensor=tensor,
            shape=access.shape,
            index_map=access.index_map,
            over=groups,
            excess=0.0,
            times=2,
            backward_times=1,
            gradient_of=gradient_of,
        )


def lower_attention(trace: Trace, node: Node, op: ops.Attention, name: str) -> LoweredOperator:
    """Return attention; keys and values of fewer heads than the queries are read by several of these."""
    uses = list(node.inputs[:3])
    q, k, v = shapes(trace, node)[:3]
    for i, shape in ((1, k), (2, v)):
        if shape[1] != q[1]:
            uses[i] = repeated(trace, uses[i], q[1])
    swapped = (q[0], q[2], q[1], q[3]), (k[0], k[2], q[1], k[3])
    operator = attention(name, swapped[0], swapped[1], swapped[1], causal=op.is_causal, is_fused=op.is_fused)
    # The kind's own order of dims is [b, s, h, k]; here heads come first.
    reads = [_heads_first(access) for access in operator.reads]
    writes = [_heads_first(operator.writes[0])]
    dims = operator.dims
    work = operator.work
    if v[3] != q[3]:
        # Values of another width than the keys.
        dims = (*dims, Dim("e", v[3]))
        reads[2] = replace(reads[2], shape=(*reads[2].shape[:3], v[3]), index_map=(*reads[2].index_map[:3], "e"))
        writes[0] = replace(
            writes[0],
            shape=(*writes[0].shape[:3], v[3]),
            index_map=(*writes[0].index_map[:3], "e"),
            partial_over=("t",),
        )
        work = (work[0], replace(work[1], dims=(*work[1].dims[:-1], "e")), *work[2:])
    for use in node.inputs[3:]:
        if trace.is_activation(use) or trace.is_parameter(use):
            # Added to the scores, or multiplied with them.
            shape = trace.shape(use)
            along = zip(("b", "h", "s", "t")[4 - len(shape) :], (q[0], q[1], q[2], k[2])[4 - len(shape) :], strict=True)
            axes = tuple(dim if extent == full else None for extent, (dim, full) in zip(shape, along, strict=True))
            summed = tuple(dim for dim in "bhst" if dim not in axes)
            uses.append(use)
            reads.append(Access(tensor=f"m{len(reads)}", shape=shape, index_map=axes, partial_over=summed))
    scores = (0, 1, *range(3, len(reads)))
    work = (work[0], *(replace(w, inputs=(scores, *w.inputs[1:])) for w in work[1:]))
    exchanges = tuple(replace(exchange, gradient_of=scores) for exchange in operator.exchanges)
    operator = replace(operator, dims=dims, reads=tuple(reads), writes=tuple(writes), work=work, exchanges=exchanges)
    if op.needs_keys:
        operator = replace(operator, unsplittable=("t", "k"))
    return LoweredOperator(operator=operator, sources=tuple(uses))


def _heads_first(access: Access) -> Access:
    order = (0, 2, 1, 3)
    return replace(
        access, shape=tuple(access.shape[i] for i in order), index_map=tuple(access.index_map[i] for i in order)
    )


def lower_recurrent(trace: Trace, node: Node, op: ops.Recurrent, name: str) -> LoweredOperator:
    """Return a recurrent network: its steps are not split, its units are."""
    x = node.inputs[0]
    weights = [use for use in node.inputs[1:] if trace.is_parameter(use)]
    others = [use for use in node.inputs[1:] if not trace.is_parameter(use)]
    states = [use for use in others if trace.is_activation(use)]
    if len(trace.shape(x)) != 3 or not trace.is_activation(x):
        return lower_generic(trace, node, op, name)
    operator = recurrent(
        name,
        trace.shape(x),
        weights=[trace.shape(use) for use in weights],
        states=[trace.shape(use) for use in states],
        has_hidden=others[:1] == states[:1] != [],
        outputs=[value.shape for value in node.outputs],
        units=op.units,
        gates=gates(op),
        layers=op.layers,
        directions=2 if op.is_bidirectional else 1,
        product_flop=recurrent_flop(op, trace.shape(x)),
        is_batch_first=op.is_batch_first,
        cell=op.cell,
    )
    return LoweredOperator(operator=operator, sources=(x, *weights, *states), orders=(None,) * len(node.outputs))


_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
_POOLS = {1: pool1d, 2: pool2d, 3: pool3d}


def lower_convolution(trace: Trace, node: Node, op: ops.Convolve, name: str) -> LoweredOperator:
    """Return a convolution with its dims as [b, channels, …]."""
    order = (op.batch, op.channels, *op.spatial)
    x, w = (reordered(trace, use, o) for use, o in zip(node.inputs[:2], (order, op.filters), strict=True))
    (x_shape, w_shape), output = (trace.shape(x), trace.shape(w)), node.outputs[0].shape
    _, channels, *extents = written = tuple(output[i] for i in order)
    alike: dict[str, Any] = {"stride": op.stride, "dilation": op.dilation, "groups": op.groups, "bias": op.has_bias}
    if not op.is_transposed:
        pads = _pads(x_shape[2:], extents, w_shape[2:], op.stride, op.dilation, op.pads)
        make = _CONVOLUTIONS[len(op.spatial)]
        operator = make(name, x_shape, out=w_shape[0], kernel=w_shape[2:], padding=pads, **alike)
    elif (x_shape[0], *w_shape[:2]) != (written[0], x_shape[1], channels // op.groups):
        raise GraphError(
            f"layer {name!r} reads shapes {x_shape} and {w_shape}, in {op.groups} groups, and writes {written}"
        )
    else:
        operator = transposed_convolution(
            name, x_shape, out=channels, kernel=w_shape[2:], padding=op.pads, positions=tuple(extents), **alike
        )
        assert operator.body is not None
        if op.is_reversed and operator.body.steps:
            spread, *others = operator.body.steps
            turned = replace(spread, options=(*spread.options, ("backwards", True)))
            operator = replace(operator, body=Body(steps=(turned, *others)))
    sources = (x, w, *node.inputs[2 : 2 + op.has_bias])
    return LoweredOperator(operator=operator, sources=sources, orders=(_inverse(order),))


def lower_pool(trace: Trace, node: Node, op: ops.Pool, name: str) -> LoweredOperator:
    """Return pooling with dims [b, channels, …]; additional dims before the spatial ones are merged."""
    shape = shapes(trace, node)[0]
    rest = tuple(i for i in range(len(shape)) if i not in op.spatial)
    output = node.outputs[0].shape
    is_plain = len(rest) == 2 and all(d == 1 for d in op.dilation) and len(op.spatial) in _POOLS
    if not is_plain:
        passes = tuple((i, i) for i in rest)
        operator = opaque(
            name, [shape], [output], passes=passes, flop=float(prod((*output, *op.kernel))), function="pool"
        )
        return LoweredOperator(operator=operator, sources=node.inputs[:1])
    order = (*rest, *op.spatial)
    x = reordered(trace, node.inputs[0], order)
    extents = tuple(output[i] for i in op.spatial)
    before = trace.shape(x)[2:]
    operator = _POOLS[len(op.spatial)](
        name,
        trace.shape(x),
        kernel=op.kernel,
        stride=op.stride,
        padding=_pads(before, extents, op.kernel, op.stride, op.dilation, op.pads),
        reduction=op.function,
        count_padding=op.counts_padding,
    )
    return LoweredOperator(operator=operator, sources=(x,), orders=(_inverse(order),))


def _pads(
    extents: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int], ...]:
    """Return zeros (before, after); after as many as the outputs need, since a pool may round up."""
    found = []
    for extent, output, k, s, d, (before, _) in zip(extents, outputs, kernel, stride, dilation, pads, strict=True):
        reach = (output - 1) * s + d * (k - 1) + 1
        found.append((before, max(0, reach - before - extent)))
    return tuple(found)


def _inverse(order: Sequence[int]) -> tuple[int, ...] | None:
    inverse = tuple(order.index(i) for i in range(len(order)))
    return None if inverse == tuple(range(len(order))) else inverse


Lower = Callable[[Trace, Node, Any, str], LoweredOperator]

LOWER: dict[type, Lower] = {
    ops.Attention: lower_attention,
    ops.Broadcast: lower_view,
    ops.Concat: lower_concat,
    ops.Contract: lower_contract,
    ops.Convolve: lower_convolution,
    ops.Gather: lower_gather,
    ops.Generic: lower_generic,
    ops.Lookup: lower_lookup,
    ops.Normalise: lower_normalisation,
    ops.Pad: lower_pad,
    ops.Pointwise: lower_pointwise,
    ops.Pool: lower_pool,
    ops.Recurrent: lower_recurrent,
    ops.Reduce: lower_reduce,
    ops.Reshape: lower_view,
    ops.Slice: lower_slice,
    ops.Softmax: lower_softmax,
    ops.Transpose: lower_view,
}
"""How each operator of the intermediate form becomes a vertex."""
