"""`pool2d`: maximum or average over sliding windows, and `global_pool`: the mean over all positions."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Window
from pase.graph.operator import Operator, Work
from pase.graph.operators.windows import Padding, Pair, output_extent, pad_pair, pair


def pool2d(
    name: str,
    x: tuple[int, ...],
    *,
    kernel: int | Pair,
    stride: int | Pair,
    padding: Padding = 0,
    reduction: str = "max",
    count_padding: bool = False,
) -> Operator:
    """Return max or average pooling ("max", "mean") of x, shape [b, channels, height, width].

    Iteration space: b, c, h, w, r, s; the window itself is never split. count_padding: whether zeros of
    the padding count in a mean.
    """
    if len(x) != 4:
        raise GraphError(f"layer {name!r} reads shape {x}; expected [batch, channels, height, width]")
    if reduction not in {"max", "mean"}:
        raise GraphError(f"layer {name!r}: unknown reduction {reduction!r}; expected 'max' or 'mean'")
    batch, channels, height, width = x
    kernels, strides = pair(kernel), pair(stride)
    pads = pad_pair(padding, (height, width), kernels, strides, (1, 1))
    for size, pad in zip(kernels, pads, strict=True):
        if max(pad) >= size > 0:
            # A window of padding alone has no maximum and no mean.
            raise GraphError(f"layer {name!r}: padding {pad} holds a whole window of {size}; use less on each side")
    rows, cols = (
        output_extent(name, extent, k, s, 1, p)
        for extent, k, s, p in zip((height, width), kernels, strides, pads, strict=True)
    )
    windows = (
        Window(out="h", kernel="r", stride=strides[0], pad=pads[0][0]),
        Window(out="w", kernel="s", stride=strides[1], pad=pads[1][0]),
    )
    dims = (
        Dim("b", batch), Dim("c", channels), Dim("h", rows), Dim("w", cols), Dim("r", kernels[0]), Dim("s", kernels[1]),
    )  # fmt: skip
    return Operator(
        name=name,
        kind="pool2d",
        dims=dims,
        reads=(Access(tensor="x", shape=x, axes=("b", "c", *windows)),),
        writes=(Access(tensor="y", shape=(batch, channels, rows, cols), axes=("b", "c", "h", "w")),),
        work=(Work(dims=tuple(dim.name for dim in dims), flop_per_point=1, inputs=(0,)),),
        unsplittable=("r", "s"),
        attributes=(("reduction", reduction), ("count_padding", count_padding)),
    )


def global_pool(name: str, x: tuple[int, ...]) -> Operator:
    """Return ``y[b, c] = mean over h, w of x[b, c, h, w]``. Iteration space: b, c, h, w."""
    if len(x) != 4:
        raise GraphError(f"layer {name!r} reads shape {x}; expected [batch, channels, height, width]")
    dims = tuple(Dim(n, e) for n, e in zip("bchw", x, strict=True))
    return Operator(
        name=name,
        kind="global_pool",
        dims=dims,
        reads=(Access(tensor="x", shape=x, axes=("b", "c", "h", "w")),),
        writes=(Access(tensor="y", shape=x[:2], axes=("b", "c")),),
        work=(Work(dims=("b", "c", "h", "w"), flop_per_point=1, inputs=(0,)),),
    )
