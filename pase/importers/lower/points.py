"""Functions of points, reductions and normalisations as vertices."""

from dataclasses import replace
from math import prod

from pase.graph import Access, AllReduce, Dim, Intermediate, Operator, Role
from pase.graph.names import short
from pase.graph.operators.normalisation import batch_norm, layer_norm, normalising
from pase.graph.operators.opaque import opaque
from pase.graph.operators.pointwise import pointwise
from pase.graph.operators.reduction import reduction, softmax
from pase.importers.ir import Generic, Node, Normalise, Pointwise, Reduce, Softmax, Trace, Use
from pase.importers.lower.draft import LoweredOperator, functions_text, is_parameter, reordered, shaped, shapes, spare
from pase.importers.passes.regions import is_activation

_NORMALISE_FLOP = 3
"""Subtract the mean, square for the variance, divide."""

_NAMES = {1: "b", 2: "bn", 3: "bsd", 4: "bchw", 5: "bcdhw"}


def dim_names(rank: int) -> tuple[str, ...]:
    """Return names for the dims of a tensor of which nothing more is known."""
    return tuple(_NAMES[rank]) if rank in _NAMES else spare((), rank, "b")


def lower_pointwise(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a function of one or more tensors; what cannot be broadcast to its result is needed whole."""
    op = node.op
    assert isinstance(op, Pointwise)
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


def lower_reduce(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a reduction; the dims of extent 1 that it keeps are not told."""
    op = node.op
    assert isinstance(op, Reduce)
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


def lower_softmax(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a softmax."""
    op = node.op
    assert isinstance(op, Softmax)
    shape = shapes(trace, node)[0]
    names = dim_names(len(shape))
    operator = softmax(name, shape, dims=names, over=names[op.dim], is_log=op.is_log)
    return LoweredOperator(operator=operator, sources=node.inputs[:1])


def lower_normalisation(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return a normalisation; scale and shift are read along its channels where they are of these."""
    op = node.op
    assert isinstance(op, Normalise)
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
            operator=batch_norm(name, trace.shape(seen)),
            sources=(seen, *affine),
            orders=(None if is_same else inverse,),
        )
    names = dim_names(len(shape))
    if op.kind == "layer" and is_affine and op.over == op.channels == (len(shape) - 1,):
        return LoweredOperator(operator=layer_norm(name, shape, dims=names), sources=(x, *affine))
    return LoweredOperator(operator=_normalisation(trace, name, op, (x, *affine)), sources=(x, *affine))


def lower_generic(trace: Trace, node: Node, name: str) -> LoweredOperator:
    """Return an operator that can be split along the dims that pass through it."""
    op = node.op
    passes: tuple[tuple[int, int], ...] = op.passes if isinstance(op, Generic) else ()
    flop = op.flop_per_point if isinstance(op, Generic) else 0.0
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
        product_flop=op.product_flop if isinstance(op, Generic) else 0.0,
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


def _normalisation(trace: Trace, name: str, op: Normalise, uses: tuple[Use, ...]) -> Operator:
    """Return a normalisation of any kind: its statistics are all-reduced where the dims that they are of are split."""
    shape = trace.shape(uses[0])
    names = dim_names(len(shape))
    over = tuple(names[i] for i in op.over)
    kept = tuple(i for i in range(len(shape)) if i not in op.over)
    channels = tuple(names[i] for i in op.channels)
    reads = [Access(tensor="x", shape=shape, index_map=names)]
    tensors = [*(["scale"] if op.has_scale else []), *(["shift"] if op.has_shift else [])]
    for tensor, use in zip(tensors, uses[1:], strict=True):
        own = trace.shape(use)
        axes = channels if own == tuple(shape[i] for i in op.channels) else (None,) * len(own)
        summed = tuple(dim for dim in names if dim not in axes)
        reads.append(Access(tensor=tensor, shape=own, index_map=axes, role=Role.PARAMETER, partial_over=summed))
    count = 1 if op.kind in ("rms", "statistics") else 2
    moments = AllReduce(
        tensor="moments",
        shape=(count * op.groups, *(shape[i] for i in kept)),
        index_map=(None, *(names[i] for i in kept)),
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
        dims=tuple(Dim(n, e) for n, e in zip(names, shape, strict=True)),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=shape, index_map=names),),
        work=normalising(names, flop_per_point=flop, scale=1 if op.has_scale else None, has_shift=op.has_shift),
        exchanges=(moments,) if over else (),
        intermediates=(
            Intermediate(tensor="moments", shape=moments.shape, index_map=moments.index_map, kept=1),
            Intermediate(tensor="normalised", shape=shape, index_map=names, working=1),
        ),
        unsplittable=tuple(names[i] for i in op.mixes),
        attributes=(("epsilon", float(op.epsilon)), ("groups", op.groups)),
    )


def _can_be_broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return len(shape) <= len(out) and all(a in (1, b) for a, b in zip(shape, out[len(out) - len(shape) :], strict=True))
