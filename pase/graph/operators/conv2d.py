"""`conv2d`: a two-dimensional convolution, plain or grouped, with bias and activation."""

from pase.errors import GraphError
from pase.graph.access import Access, Axis, Dim, Role, Window
from pase.graph.operator import Operator, Work
from pase.graph.operators.activations import check_activation
from pase.graph.operators.windows import Padding, Pair, output_extent, pad_pair, pair


def conv2d(
    name: str,
    x: tuple[int, ...],
    *,
    out: int,
    kernel: int | Pair,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    bias: bool = True,
    activation: str = "",
) -> Operator:
    """Return a convolution of x, shape [b, channels, height, width], to `out` channels.

    Iteration space: b, n (out-channels), h, w (output positions), c (in-channels), r, s (filter), and g
    first where groups > 1 (n and c are then those of one group). padding: zeros on each side (rows,
    columns) or "same". Raises GraphError where the rank, the groups or the window do not fit.
    """
    if len(x) != 4:
        raise GraphError(f"layer {name!r} reads shape {x}; expected [batch, channels, height, width]")
    batch, channels, height, width = x
    if groups < 1 or channels % groups or out % groups:
        raise GraphError(
            f"layer {name!r} has {groups} groups; expected a number that divides {channels} in- and {out} out-channels"
        )
    kernels, strides, dilations = pair(kernel), pair(stride), pair(dilation)
    pads = pad_pair(padding, (height, width), kernels, strides, dilations)
    rows, cols = (
        output_extent(name, extent, k, s, d, p)
        for extent, k, s, d, p in zip((height, width), kernels, strides, dilations, pads, strict=True)
    )
    group = (Dim("g", groups),) if groups > 1 else ()
    dims = (
        Dim("b", batch), *group, Dim("n", out // groups), Dim("h", rows), Dim("w", cols),
        Dim("c", channels // groups), Dim("r", kernels[0]), Dim("s", kernels[1]),
    )  # fmt: skip
    out_channels: Axis = ("g", "n") if group else "n"
    in_channels: Axis = ("g", "c") if group else "c"
    windows = (
        Window(out="h", kernel="r", stride=strides[0], dilation=dilations[0], pad=pads[0][0]),
        Window(out="w", kernel="s", stride=strides[1], dilation=dilations[1], pad=pads[1][0]),
    )
    reads = [
        Access(tensor="x", shape=x, axes=("b", in_channels, *windows)),
        Access(
            tensor="w",
            shape=(out, channels // groups, *kernels),
            axes=(out_channels, "c", "r", "s"),
            role=Role.PARAMETER,
        ),
    ]
    every = tuple(dim.name for dim in dims)
    work = [Work(dims=every, flop_per_point=2, inputs=(0, 1), contraction=True)]
    if bias:
        # Added after the sum over c, r and s: its gradient is not a partial sum of a split there.
        reads.append(
            Access(
                tensor="bias",
                shape=(out,),
                axes=(out_channels,),
                role=Role.PARAMETER,
                partial_over=("b", "h", "w"),
            )
        )
    if bias or activation:
        outputs = tuple(d for d in every if d not in {"c", "r", "s"})
        work.append(Work(dims=outputs, flop_per_point=int(bias) + int(bool(activation)), inputs=(0,)))
    return Operator(
        name=name,
        kind="conv2d",
        dims=dims,
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=(batch, out, rows, cols), axes=("b", out_channels, "h", "w")),),
        work=tuple(work),
        attributes=(("activation", check_activation(name, activation)), ("groups", groups)),
    )
