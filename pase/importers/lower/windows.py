"""Convolutions and pooling as vertices, whatever the order of their dims."""

from collections.abc import Sequence

from pase.graph.operators.convolution import conv1d, conv2d, conv3d
from pase.graph.operators.opaque import opaque
from pase.graph.operators.pooling import pool1d, pool2d, pool3d
from pase.graph.operators.transposed import transposed_convolution
from pase.importers.ir import Convolve, Node, Pool, Trace
from pase.importers.lower.draft import Draft, reordered, shapes

_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
_POOLS = {1: pool1d, 2: pool2d, 3: pool3d}


def lower_convolution(trace: Trace, node: Node, name: str) -> Draft:
    """Return a convolution with its dims as [b, channels, …]."""
    op = node.op
    assert isinstance(op, Convolve)
    order = (op.batch, op.channels, *op.spatial)
    x, w = (reordered(trace, use, o) for use, o in zip(node.inputs[:2], (order, op.filters), strict=True))
    x_shape, w_shape = trace.shape(x), trace.shape(w)
    output = node.outputs[0].shape
    if op.is_transposed:
        written = tuple(output[i] for i in order)
        transposed = transposed_convolution(name, x_shape, w_shape, out=written, groups=op.groups, bias=op.has_bias)
        return Draft(operator=transposed, sources=(x, w, *node.inputs[2 : 2 + op.has_bias]), orders=(_inverse(order),))
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
    return Draft(operator=operator, sources=(x, w, *node.inputs[2 : 2 + op.has_bias]), orders=(_inverse(order),))


def lower_pool(trace: Trace, node: Node, name: str) -> Draft:
    """Return pooling with its dims as [b, channels, …]; dims before the spatial ones that are more are put together."""
    op = node.op
    assert isinstance(op, Pool)
    shape = shapes(trace, node)[0]
    rest = tuple(i for i in range(len(shape)) if i not in op.spatial)
    output = node.outputs[0].shape
    is_plain = len(rest) == 2 and all(d == 1 for d in op.dilation) and len(op.spatial) in _POOLS
    if not is_plain:
        passes = tuple((i, i) for i in rest)
        operator = opaque(name, [shape], [output], passes=passes, flop=_pool_flop(output, op.kernel), function="pool")
        return Draft(operator=operator, sources=node.inputs[:1])
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
    return Draft(operator=operator, sources=(x,), orders=(_inverse(order),))


def _pool_flop(output: Sequence[int], kernel: Sequence[int]) -> float:
    total = 1.0
    for extent in (*output, *kernel):
        total *= extent
    return total


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
