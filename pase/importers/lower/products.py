"""Products as vertices: contractions, attention, recurrent networks, convolutions; and pooling, through windows too."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from pase.errors import GraphError
from pase.graph import Access, AllToAll, Dim, Operator, Role, Work
from pase.graph.access import access_dims
from pase.graph.body import Body
from pase.graph.operators import (
    attention,
    contract,
    conv1d,
    conv2d,
    conv3d,
    opaque,
    pool1d,
    pool2d,
    pool3d,
    recurrent,
    transposed_convolution,
)
from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Trace, gates, recurrent_flop
from pase.importers.lower.draft import LoweredOperator, is_parameter, reordered, repeated, shapes, spare
from pase.importers.lower.points import lower_generic
from pase.importers.passes.regions import is_activation

_LEAD = {1: "b", 2: "bs", 3: "bst"}


def lower_contract(trace: Trace, node: Node, op: ops.Contract, name: str) -> LoweredOperator:
    """Return a product; one with a weight is a dense layer."""
    x, y = shapes(trace, node)[:2]
    weights = [i for i in (0, 1) if is_parameter(trace, node.inputs[i])]
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
    """Yield what moves where groups are split: rows to the devices that have their group's matrix, and from there.

    Rows are sorted by group. Where all groups have equally many each row lies where its matrix is; those beyond that
    are sent there, and what is made of them back. The gradients go the other way.
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
        if is_activation(trace, use) or is_parameter(trace, use):
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
    return LoweredOperator(operator=operator, sources=tuple(uses))


def _heads_first(access: Access) -> Access:
    order = (0, 2, 1, 3)
    return replace(
        access, shape=tuple(access.shape[i] for i in order), index_map=tuple(access.index_map[i] for i in order)
    )


def lower_recurrent(trace: Trace, node: Node, op: ops.Recurrent, name: str) -> LoweredOperator:
    """Return a recurrent network: its steps are not split, its units are."""
    x = node.inputs[0]
    weights = [use for use in node.inputs[1:] if is_parameter(trace, use)]
    others = [use for use in node.inputs[1:] if not is_parameter(trace, use)]
    states = [use for use in others if is_activation(trace, use)]
    if len(trace.shape(x)) != 3 or not is_activation(trace, x):
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
    x_shape, w_shape = trace.shape(x), trace.shape(w)
    output = node.outputs[0].shape
    if op.is_transposed:
        written = tuple(output[i] for i in order)
        if (x_shape[0], *w_shape[:2]) != (written[0], x_shape[1], written[1] // op.groups):
            raise GraphError(
                f"layer {name!r} reads shapes {x_shape} and {w_shape}, in {op.groups} groups, and writes {written}"
            )
        transposed = transposed_convolution(
            name,
            x_shape,
            out=written[1],
            kernel=w_shape[2:],
            stride=op.stride,
            padding=op.pads,
            dilation=op.dilation,
            groups=op.groups,
            bias=op.has_bias,
            positions=written[2:],
        )
        assert transposed.body is not None
        if op.is_reversed and transposed.body.steps:
            spread, *others = transposed.body.steps
            turned = replace(spread, options=(*spread.options, ("backwards", True)))
            transposed = replace(transposed, body=Body(steps=(turned, *others)))
        return LoweredOperator(
            operator=transposed, sources=(x, w, *node.inputs[2 : 2 + op.has_bias]), orders=(_inverse(order),)
        )
    extents = tuple(output[i] for i in op.spatial)
    operator = _CONVOLUTIONS[len(op.spatial)](
        name,
        x_shape,
        out=w_shape[0],
        kernel=w_shape[2:],
        stride=op.stride,
        dilation=op.dilation,
        padding=_pads(x_shape[2:], extents, w_shape[2:], op.stride, op.dilation, op.pads),
        groups=op.groups,
        bias=op.has_bias,
    )
    return LoweredOperator(
        operator=operator, sources=(x, w, *node.inputs[2 : 2 + op.has_bias]), orders=(_inverse(order),)
    )


def lower_pool(trace: Trace, node: Node, op: ops.Pool, name: str) -> LoweredOperator:
    """Return pooling with its dims as [b, channels, …]; dims before the spatial ones that are more are put together."""
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
