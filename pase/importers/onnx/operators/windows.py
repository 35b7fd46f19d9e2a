"""Convolutions and pooling."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from pase.importers.ir import Convolve, Pool, Reduce, Step, Value
from pase.importers.onnx.operators.call import Call, Translation, generic, node, step


def convolution(call: Call) -> list[Step]:
    """Return a convolution over all dims but the batch and the channels."""
    x, w = call.value(0), call.value(1)
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        return generic(call)
    kernel = w.shape[2:]
    stride, dilation = _each(call, "strides", rank), _each(call, "dilations", rank)
    is_transposed = call.operator == "ConvTranspose"
    bias = [call.value(2)] if call.has(2) else []
    extents = x.shape[2:], call.out.shape[2:]
    pads = _pads_of(call, rank) if is_transposed else _pads(call, *extents, kernel, stride, dilation)
    op = Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=stride,
        dilation=dilation,
        pads=pads,
        groups=call.whole("group", 1),
        is_transposed=is_transposed,
        has_bias=bool(bias),
    )
    return step(call, op, x, w, *bias)


def pool(call: Call) -> list[Step]:
    """Return the maximum or mean over windows; of indices of the maxima only the shape is known."""
    x = call.x
    rank = len(x.shape) - 2
    kernel = call.wholes("kernel_shape")
    if kernel is None or len(kernel) != rank:
        raise ValueError(f"kernel_shape is {kernel}; expected {rank} extents")
    if rank not in (1, 2, 3) or call.result(1) is not None:
        return generic(call, passes=((0, 0), (1, 1)), flop=float(prod(kernel)))
    stride, dilation = _each(call, "strides", rank), _each(call, "dilations", rank)
    op = Pool(
        function="max" if call.operator == "MaxPool" else "mean",
        spatial=tuple(range(2, 2 + rank)),
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        pads=_pads(call, x.shape[2:], call.out.shape[2:], kernel, stride, dilation),
        counts_padding=bool(call.whole("count_include_pad", 0)),
    )
    return step(call, op, x)


def global_pool(call: Call) -> list[Step]:
    """Return the maximum or mean over all dims but the batch and the channels."""
    x: Value = call.x
    function = {"GlobalMaxPool": "max", "GlobalAveragePool": "mean"}.get(call.operator, "norm")
    op = Reduce(function=function, over=tuple(range(2, len(x.shape))), keeps_dims=True)
    return [node(op, (x,), call.out)]


def _each(call: Call, name: str, rank: int) -> tuple[int, ...]:
    """Return an attribute that has one number for each spatial dim; ones where it is left out."""
    found = call.wholes(name) or (1,) * rank
    if len(found) != rank or min(found) < 1:
        raise ValueError(f"{name} is {found}; expected {rank} positive whole numbers")
    return found


def _pads(
    call: Call,
    extents: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each spatial dim, those that auto_pad stands for included."""
    mode = call.text("auto_pad", "NOTSET")
    if mode == "VALID":
        return ((0, 0),) * len(kernel)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return _pads_of(call, len(kernel))
    found = []
    for extent, output, k, s, d in zip(extents, outputs, kernel, stride, dilation, strict=True):
        total = max(0, (output - 1) * s + d * (k - 1) + 1 - extent)
        less, more = total // 2, total - total // 2
        found.append((less, more) if mode == "SAME_UPPER" else (more, less))
    return tuple(found)


def _pads_of(call: Call, rank: int) -> tuple[tuple[int, int], ...]:
    given = call.wholes("pads") or (0,) * (2 * rank)
    if len(given) != 2 * rank:
        raise ValueError(f"pads is {given}; expected {2 * rank} whole numbers")
    return tuple(zip(given[:rank], given[rank:], strict=True))


WINDOWS: Mapping[str, Translation] = MappingProxyType(
    {
        **dict.fromkeys(("Conv", "ConvTranspose"), convolution),
        **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), pool),
        **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"), global_pool),
    }
)
"""By the operator's name."""
