"""Extents of sliding windows, shared by convolution and pooling."""

from typing import Literal

from pase.errors import GraphError

Pair = tuple[int, int]
Padding = int | Pair | tuple[Pair, Pair] | Literal["same"]


def pair(value: int | Pair) -> Pair:
    """Return (rows, columns) of an option given once or for each."""
    return (value, value) if isinstance(value, int) else value


def pad_pair(padding: Padding, extents: Pair, kernels: Pair, strides: Pair, dilations: Pair) -> tuple[Pair, Pair]:
    """Return ((before, after) of the rows, the same of the columns); "same" gives ceil(extent / stride) outputs."""
    if padding == "same":
        rows, cols = (
            _same(extent, k, s, d) for extent, k, s, d in zip(extents, kernels, strides, dilations, strict=True)
        )
        return rows, cols
    if isinstance(padding, int):
        return (padding, padding), (padding, padding)
    assert not isinstance(padding, str)
    first, second = padding
    before_after = [(p, p) if isinstance(p, int) else p for p in (first, second)]
    return before_after[0], before_after[1]


def output_extent(name: str, extent: int, kernel: int, stride: int, dilation: int, pad: Pair) -> int:
    """Return how many windows fit: floor((extent + pads - reach) / stride) + 1; GraphError if none does."""
    if kernel < 1 or stride < 1 or dilation < 1 or min(pad) < 0:
        raise GraphError(
            f"layer {name!r}: kernel {kernel}, stride {stride}, dilation {dilation}, padding {pad} is no window"
        )
    reach = dilation * (kernel - 1) + 1
    room = extent + sum(pad) - reach
    if room < 0:
        raise GraphError(
            f"layer {name!r}: a window of {reach} does not fit {extent} points with padding {pad}; use a larger input"
        )
    return room // stride + 1


def _same(extent: int, kernel: int, stride: int, dilation: int) -> Pair:
    outputs = -(-extent // stride)
    total = max((outputs - 1) * stride + dilation * (kernel - 1) + 1 - extent, 0)
    return total // 2, total - total // 2
