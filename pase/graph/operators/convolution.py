"""`conv1d`, `conv2d`, `conv3d`: convolutions of lines, images and volumes, with groups, bias and activation."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, Role
from pase.graph.body import Step
from pase.graph.operator import Operator
from pase.graph.operators.activations import check_activation, finished
from pase.graph.operators.windows import Each, Padding, sliding


def conv1d(
    name: str,
    x: tuple[int, ...],
    *,
    out: int,
    kernel: Each,
    stride: Each = 1,
    padding: Padding = 0,
    dilation: Each = 1,
    groups: int = 1,
    bias: bool = True,
    activation: str = "",
) -> Operator:
    """Return a convolution of x, shape [b, channels, width]; otherwise as `conv2d`, without h and r."""
    windows = {"kernel": kernel, "stride": stride, "dilation": dilation}
    return _convolution(name, x, 1, windows, padding, out=out, groups=groups, bias=bias, activation=activation)


def conv2d(
    name: str,
    x: tuple[int, ...],
    *,
    out: int,
    kernel: Each,
    stride: Each = 1,
    padding: Padding = 0,
    dilation: Each = 1,
    groups: int = 1,
    bias: bool = True,
    activation: str = "",
) -> Operator:
    """Return a convolution of x, shape [b, channels, height, width], to `out` channels.

    Iteration space: b, n (out-channels), h, w (output positions), c (in-channels), r, s (filter), and g
    first where groups > 1 (n and c are then those of one group). padding: zeros on each side (rows,
    columns) or "same". Raises GraphError where the rank, the groups or the window do not fit.
    """
    windows = {"kernel": kernel, "stride": stride, "dilation": dilation}
    return _convolution(name, x, 2, windows, padding, out=out, groups=groups, bias=bias, activation=activation)


def conv3d(
    name: str,
    x: tuple[int, ...],
    *,
    out: int,
    kernel: Each,
    stride: Each = 1,
    padding: Padding = 0,
    dilation: Each = 1,
    groups: int = 1,
    bias: bool = True,
    activation: str = "",
) -> Operator:
    """Return a convolution of x, shape [b, channels, depth, height, width]; as `conv2d`, with d and q besides."""
    windows = {"kernel": kernel, "stride": stride, "dilation": dilation}
    return _convolution(name, x, 3, windows, padding, out=out, groups=groups, bias=bias, activation=activation)


def _convolution(
    name: str,
    x: tuple[int, ...],
    rank: int,
    options: dict[str, Each],
    padding: Padding,
    *,
    out: int,
    groups: int,
    bias: bool,
    activation: str,
) -> Operator:
    windows = sliding(
        name,
        x,
        rank,
        kernel=options["kernel"],
        stride=options["stride"],
        dilation=options["dilation"],
        padding=padding,
    )
    batch, channels = x[:2]
    if groups < 1 or channels % groups or out % groups:
        raise GraphError(
            f"layer {name!r} has {groups} groups; expected a number that divides {channels} in- and {out} out-channels"
        )
    group = (Dim("g", groups),) if groups > 1 else ()
    channel = Dim("c", channels // groups)
    dims = (Dim("b", batch), *group, Dim("n", out // groups), *windows.positions, channel, *windows.kernels)
    out_channels: DimIndex = ("g", "n") if group else "n"
    in_channels: DimIndex = ("g", "c") if group else "c"
    reads = [
        Access(tensor="x", shape=x, index_map=("b", in_channels, *windows.axes)),
        Access(
            tensor="w",
            shape=(out, channels // groups, *windows.kernel_shape),
            index_map=(out_channels, "c", *windows.kernel_names),
            role=Role.PARAMETER,
        ),
    ]
    if bias:
        # Added after the sum over c and the filter: its gradient is not a partial sum of a split there.
        reads.append(
            Access(
                tensor="bias",
                shape=(out,),
                index_map=(out_channels,),
                role=Role.PARAMETER,
                partial_over=("b", *windows.position_names),
            )
        )
    y = Access(
        tensor="y",
        shape=(batch, out, *windows.num_positions),
        index_map=("b", out_channels, *windows.position_names),
    )
    return Operator(
        name=name,
        kind=f"conv{rank}d",
        dims=dims,
        reads=tuple(reads),
        writes=(y,),
        body=finished(
            Step(result="products", function="convolve", operands=("x", "w")), has_bias=bias, activation=activation
        ),
        attributes=(("activation", check_activation(name, activation)), ("groups", groups)),
    )
