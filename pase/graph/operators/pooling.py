"""`pool1d`, `pool2d`, `pool3d`: maximum or average over windows, and `global_pool`: the mean over all positions."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.body import Body, Step
from pase.graph.operator import Operator
from pase.graph.operators.windows import Each, Padding, position_names, refuse_empty_windows, sliding

REDUCTIONS = ("max", "mean")


def pool1d(
    name: str,
    x: tuple[int, ...],
    *,
    kernel: Each,
    stride: Each,
    padding: Padding = 0,
    reduction: str = "max",
    count_padding: bool = False,
) -> Operator:
    """Return max or average pooling of x, shape [b, channels, width]; otherwise as `pool2d`, without h and r."""
    return _pooling(name, x, 1, kernel, stride, padding, reduction=reduction, count_padding=count_padding)


def pool2d(
    name: str,
    x: tuple[int, ...],
    *,
    kernel: Each,
    stride: Each,
    padding: Padding = 0,
    reduction: str = "max",
    count_padding: bool = False,
) -> Operator:
    """Return max or average pooling ("max", "mean") of x, shape [b, channels, height, width].

    Iteration space: b, c, h, w, r, s; the window itself is never split. count_padding: whether zeros of
    the padding count in a mean.
    """
    return _pooling(name, x, 2, kernel, stride, padding, reduction=reduction, count_padding=count_padding)


def pool3d(
    name: str,
    x: tuple[int, ...],
    *,
    kernel: Each,
    stride: Each,
    padding: Padding = 0,
    reduction: str = "max",
    count_padding: bool = False,
) -> Operator:
    """Return max or average pooling of x, shape [b, channels, depth, height, width]; as `pool2d`, with d and q."""
    return _pooling(name, x, 3, kernel, stride, padding, reduction=reduction, count_padding=count_padding)


def _pooling(
    name: str,
    x: tuple[int, ...],
    rank: int,
    kernel: Each,
    stride: Each,
    padding: Padding,
    *,
    reduction: str,
    count_padding: bool,
) -> Operator:
    if reduction not in REDUCTIONS:
        raise GraphError(f"layer {name!r}: unknown reduction {reduction!r}; expected 'max' or 'mean'")
    windows = sliding(name, x, rank, kernel=kernel, stride=stride, padding=padding)
    refuse_empty_windows(name, padding, windows)
    batch, channels = x[:2]
    dims = (Dim("b", batch), Dim("c", channels), *windows.positions, *windows.kernels)
    return Operator(
        name=name,
        kind=f"pool{rank}d",
        dims=dims,
        reads=(Access(tensor="x", shape=x, index_map=("b", "c", *windows.axes)),),
        writes=(
            Access(
                tensor="y",
                shape=(batch, channels, *windows.num_positions),
                index_map=("b", "c", *windows.position_names),
            ),
        ),
        unsplittable=windows.kernel_names,
        body=Body(
            steps=(
                Step(
                    result="pooled",
                    function="pool",
                    operands=("x",),
                    options=(("reduction", reduction), ("count_padding", count_padding and reduction == "mean")),
                ),
            )
        ),
        attributes=(("reduction", reduction), ("count_padding", count_padding)),
    )


def global_pool(name: str, x: tuple[int, ...]) -> Operator:
    """Return ``y[b, c] = mean over all positions of x[b, c, …]``. Iteration space: b, c and what of d, h, w x has."""
    names = ("b", "c", *position_names(name, x))
    return Operator(
        name=name,
        kind="global_pool",
        dims=tuple(Dim(n, e) for n, e in zip(names, x, strict=True)),
        reads=(Access(tensor="x", shape=x, index_map=names),),
        writes=(Access(tensor="y", shape=x[:2], index_map=names[:2]),),
        body=Body(steps=(Step(result="means", function="mean", operands=("x",), dims=names[2:]),)),
    )
