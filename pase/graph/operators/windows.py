"""Layers with sliding windows over lines, images or volumes: convolution, transposed convolution, and pooling.

Tensors are [b, channels, …] with one to three spatial dims, the last ones of d, h, w.
"""

from dataclasses import dataclass, replace
from typing import Literal, Required, TypedDict, Unpack

from pase.errors import GraphError
from pase.graph.body import Body, Step
from pase.graph.operator import Access, DimIndex, Operator, Role, Window, dims_of
from pase.graph.operators.pointwise import check_activation, finished

Shape = tuple[int, ...]
Pair = tuple[int, int]
Each = int | tuple[int, ...]
"""An option given once, or for each spatial dim."""

Padding = int | tuple[int | Pair, ...] | Literal["same"]
"""Zeros on each side, given once or for each spatial dim, optionally as (before, after)."""

POOLINGS = ("max", "mean")

SPATIAL = (("d", "q", "depth"), ("h", "r", "height"), ("w", "s", "width"))
"""Iteration dims of the positions and of the kernel, and the name of the extent. Lines have only the last of them,
images the last two, volumes all."""


class Convolving(TypedDict, total=False):
    """Options of a convolution."""

    out: Required[int]
    """Out-channels."""
    kernel: Required[Each]
    stride: Each
    padding: Padding
    """Default: none."""
    dilation: Each
    groups: int
    bias: bool
    """Default: True."""
    activation: str


class Pooling(TypedDict, total=False):
    """Options of a pooling."""

    kernel: Required[Each]
    stride: Required[Each]
    padding: Padding
    reduction: Literal["max", "mean"]
    count_padding: bool
    """Whether padding zeros count in a mean."""


def conv1d(name: str, x: Shape, **options: Unpack[Convolving]) -> Operator:
    """Return a convolution of x, shape [b, channels, width]; otherwise as `conv2d`, without h and r."""
    return _convolution(name, x, 1, **options)


def conv2d(name: str, x: Shape, **options: Unpack[Convolving]) -> Operator:
    """Return a convolution of x, shape [b, channels, height, width], to `out` channels.

    Iteration space: b, n (out-channels), h, w (output positions), c (in-channels), r, s (filter), and g
    first where groups > 1 (n and c are then those of one group). padding: zeros on each side (rows,
    columns) or "same". Raises GraphError where the rank, the groups or the window do not fit.
    """
    return _convolution(name, x, 2, **options)


def conv3d(name: str, x: Shape, **options: Unpack[Convolving]) -> Operator:
    """Return a convolution of x, shape [b, channels, depth, height, width]; as `conv2d`, with dims d and q."""
    return _convolution(name, x, 3, **options)


def _convolution(
    name: str,
    x: Shape,
    rank: int,
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
    windows = sliding(name, x, rank, kernel=kernel, stride=stride, dilation=dilation, padding=padding)
    batch, channels = x[:2]
    group, inner, outer = _channels(name, channels, out, groups)
    positions, kernels = windows.positions, windows.kernels
    reads = [
        Access(tensor="x", shape=x, index_map=("b", inner, *windows.axes)),
        Access(
            tensor="w",
            shape=(out, channels // groups, *kernels.values()),
            index_map=(outer, "c", *kernels),
            role=Role.PARAMETER,
        ),
    ]
    if bias:
        reads.append(_bias(out, outer, ("b", *positions)))
    step = Step(result="products", function="convolve", operands=("x", "w"))
    return Operator(
        name=name,
        kind=f"conv{rank}d",
        dims=dims_of({"b": batch, **group, "n": out // groups, **positions, "c": channels // groups, **kernels}),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=(batch, out, *positions.values()), index_map=("b", outer, *positions)),),
        body=finished(step, has_bias=bias, activation=activation),
        attributes=(("activation", check_activation(name, activation)), ("groups", groups)),
    )


def _channels(name: str, channels: int, out: int, groups: int) -> tuple[dict[str, int], DimIndex, DimIndex]:
    """Return the extent of the group dim, if there are several groups, and the indices of in- and out-channels."""
    if groups < 1 or channels % groups or out % groups:
        raise GraphError(
            f"layer {name!r} has {groups} groups; expected a number that divides {channels} in- and {out} out-channels"
        )
    return ({"g": groups}, ("g", "c"), ("g", "n")) if groups > 1 else ({}, "c", "n")


def _bias(out: int, outer: DimIndex, over: tuple[str, ...]) -> Access:
    # Added after the reduction over c and the filter: their splits leave no partial sums of its gradient.
    return Access(tensor="bias", shape=(out,), index_map=(outer,), role=Role.PARAMETER, partial_over=over)


def transposed_convolution(
    name: str,
    x: Shape,
    *,
    out: int,
    kernel: Each,
    stride: Each = 1,
    padding: Padding = 0,
    dilation: Each = 1,
    groups: int = 1,
    bias: bool = True,
    positions: Shape | None = None,
) -> Operator:
    """Return the adjoint of a convolution of x, shape [b, channels, …]: each point spreads over a window of the result.

    Iteration space: b, g (where groups > 1), n (out-channels), c (in-channels), i0 … (positions read), o0 … (positions
    written) and k0 … (window points). The last three are never split, as windows of the result overlap.

    Args:
        name: Name of the layer.
        x: Shape of the input.
        out: Number of out-channels; the filters are [channels, out-channels of one group, window …].
        kernel: Extents of the window.
        stride: Distance of the windows of neighbouring points.
        padding: Number of result points that are cropped on each side.
        dilation: Distance of the points of a window.
        groups: Number of channel groups.
        bias: Whether there is a bias.
        positions: Extents of the result, if they exceed the fewest that the windows reach, by less than a stride.

    Raises:
        GraphError: Rank, groups or window do not fit.
    """
    rank = len(x) - 2
    position_names(name, x)
    if padding == "same":
        raise GraphError(f"layer {name!r}: padding 'same' of a transposed convolution; give it as numbers")
    kernels, strides, dilations = (
        _each(name, what, value, rank)
        for what, value in (("kernel", kernel), ("stride", stride), ("dilation", dilation))
    )
    pads = _pads(name, padding, x[2:], kernels, strides, dilations)
    reached = [(i - 1) * s + (k - 1) * d + 1 for i, s, d, k in zip(x[2:], strides, dilations, kernels, strict=True)]
    fewest = tuple(reach - sum(pad) for reach, pad in zip(reached, pads, strict=True))
    extents = fewest if positions is None else positions
    if len(extents) != rank or min(extents) < 1 or min((*kernels, *strides, *dilations)) < 1:
        raise GraphError(
            f"layer {name!r}: kernel {kernels}, stride {strides}, dilation {dilations}, padding {pads} "
            f"of {x[2:]} points give {extents}"
        )
    group, inner, outer = _channels(name, x[1], out, groups)
    read, written, window = (tuple(f"{letter}{i}" for i in range(rank)) for letter in "iok")
    spatial = dict(zip((*read, *written, *window), (*x[2:], *extents, *kernels), strict=True))
    reads = [
        Access(tensor="x", shape=x, index_map=("b", inner, *read)),
        Access(tensor="w", shape=(x[1], out // groups, *kernels), index_map=(inner, "n", *window), role=Role.PARAMETER),
    ]
    if bias:
        reads.append(_bias(out, outer, ("b",)))
    before = tuple(max(0, first) for first, _ in pads)
    step = Step(
        result="spread",
        function="convolve_transposed",
        operands=("x", "w"),
        dims=(*read, *written, *window),
        options=(("strides", strides), ("dilations", dilations), ("pads", before)),
    )
    operator = Operator(
        name=name,
        kind="transposed_convolution",
        dims=dims_of({"b": x[0], **group, "n": out // groups, "c": x[1] // groups, **spatial}),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=(x[0], out, *extents), index_map=("b", outer, *written)),),
        unsplittable=tuple(spatial),
        body=finished(step, has_bias=bias),
        attributes=(("groups", groups),),
    )
    is_told = all(
        min(pad) >= 0 and 0 <= extent - least < max(s, d)
        for pad, extent, least, s, d in zip(pads, extents, fewest, strides, dilations, strict=True)
    )
    return operator if is_told else replace(operator, body=Body(problem=_FAR_POINTS))


_FAR_POINTS = "points of the result that no window of the transposed convolution reaches"


def pool1d(name: str, x: Shape, **options: Unpack[Pooling]) -> Operator:
    """Return max or average pooling of x, shape [b, channels, width]; otherwise as `pool2d`, without h and r."""
    return _pooling(name, x, 1, **options)


def pool2d(name: str, x: Shape, **options: Unpack[Pooling]) -> Operator:
    """Return max or average pooling ("max", "mean") of x, shape [b, channels, height, width].

    Iteration space: b, c, h, w, r, s; the window itself is never split. count_padding: whether zeros of
    the padding count in a mean.
    """
    return _pooling(name, x, 2, **options)


def pool3d(name: str, x: Shape, **options: Unpack[Pooling]) -> Operator:
    """Return max or average pooling of x, shape [b, channels, depth, height, width]; as `pool2d`, with d and q."""
    return _pooling(name, x, 3, **options)


def _pooling(
    name: str,
    x: Shape,
    rank: int,
    *,
    kernel: Each,
    stride: Each,
    padding: Padding = 0,
    reduction: str = "max",
    count_padding: bool = False,
) -> Operator:
    if reduction not in POOLINGS:
        raise GraphError(f"layer {name!r}: unknown reduction {reduction!r}; expected 'max' or 'mean'")
    windows = sliding(name, x, rank, kernel=kernel, stride=stride, padding=padding)
    for size, pad in zip(windows.kernels.values(), windows.pads, strict=True):
        if max(pad) >= size:  # such a window has no maximum and no mean
            raise GraphError(f"layer {name!r}: padding {pad} holds a whole window of {size}; use less on each side")
    batch, channels = x[:2]
    positions = windows.positions
    told = (("reduction", reduction), ("count_padding", count_padding and reduction == "mean"))
    return Operator(
        name=name,
        kind=f"pool{rank}d",
        dims=dims_of({"b": batch, "c": channels, **positions, **windows.kernels}),
        reads=(Access(tensor="x", shape=x, index_map=("b", "c", *windows.axes)),),
        writes=(Access(tensor="y", shape=(batch, channels, *positions.values()), index_map=("b", "c", *positions)),),
        unsplittable=tuple(windows.kernels),
        body=Body(steps=(Step(result="pooled", function="pool", operands=("x",), options=told),)),
        attributes=(("reduction", reduction), ("count_padding", count_padding)),
    )


def global_pool(name: str, x: Shape) -> Operator:
    """Return ``y[b, c] = mean over all positions of x[b, c, …]``. Iteration space: b, c and the spatial dims of x."""
    names = ("b", "c", *position_names(name, x))
    return Operator(
        name=name,
        kind="global_pool",
        dims=dims_of(dict(zip(names, x, strict=True))),
        reads=(Access(tensor="x", shape=x, index_map=names),),
        writes=(Access(tensor="y", shape=x[:2], index_map=names[:2]),),
        body=Body(steps=(Step(result="means", function="mean", operands=("x",), dims=names[2:]),)),
    )


# -- windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows that slide over a tensor [b, channels, …].

    Attributes:
        positions: Extents of the iteration dims of the positions.
        kernels: Extents of the iteration dims of the kernels.
        pads: Padding before and after each spatial dim.
        axes: Indices of the spatial dims.
    """

    positions: dict[str, int]
    kernels: dict[str, int]
    pads: tuple[Pair, ...]
    axes: tuple[Window, ...]


def position_names(name: str, x: tuple[int, ...], rank: int | None = None) -> tuple[str, ...]:
    """Return the iteration dims of the spatial dims of x, shape [b, channels, …].

    Raises GraphError where x does not have `rank` spatial dims, or 1 to 3 of them if `rank` is None.
    """
    if rank is None:
        if not 3 <= len(x) <= 2 + len(SPATIAL):
            raise GraphError(f"layer {name!r} reads shape {x}; expected [batch, channels] and 1 to 3 of {_list(3)}")
        rank = len(x) - 2
    if len(x) != 2 + rank:
        raise GraphError(f"layer {name!r} reads shape {x}; expected [batch, channels, {_list(rank)}]")
    return tuple(dim for dim, _, _ in SPATIAL[-rank:])


def _list(rank: int) -> str:
    return ", ".join(word for _, _, word in SPATIAL[-rank:])


def sliding(
    name: str, x: tuple[int, ...], rank: int, *, kernel: Each, stride: Each, padding: Padding, dilation: Each = 1
) -> Windows:
    """Return the windows of a layer over the last `rank` dims of x, shape [b, channels, …].

    There are as many positions as fit: floor((extent + pads - reach) / stride) + 1. Raises GraphError for a shape of
    another rank, for options that are not given once or for each dim, and for windows that do not fit.
    """
    positions = position_names(name, x, rank)
    extents = x[2:]
    kernels, strides, dilations = (
        _each(name, what, value, rank)
        for what, value in (("kernel", kernel), ("stride", stride), ("dilation", dilation))
    )
    pads = _pads(name, padding, extents, kernels, strides, dilations)
    counts = tuple(
        _output_extent(name, *values) for values in zip(extents, kernels, strides, dilations, pads, strict=True)
    )
    names = tuple(dim for _, dim, _ in SPATIAL[-rank:])
    return Windows(
        positions=dict(zip(positions, counts, strict=True)),
        kernels=dict(zip(names, kernels, strict=True)),
        pads=pads,
        axes=tuple(
            Window(
                out=out, kernel=k, stride=s, dilation=d, pad=pad[0], beyond=max(0, (n - 1) * s - pad[0] - extent + 1)
            )
            for out, k, s, d, pad, n, extent in zip(
                positions, names, strides, dilations, pads, counts, extents, strict=True
            )
        ),
    )


def _each(name: str, what: str, value: Each, rank: int) -> tuple[int, ...]:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(values) != rank:
        raise GraphError(f"layer {name!r}: {what} {value} for {rank} dims ({_list(rank)}); give it once or for each")
    return values


def _pads(
    name: str,
    padding: Padding,
    extents: tuple[int, ...],
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> tuple[Pair, ...]:
    """Return (before, after) for each dim; "same" gives ceil(extent / stride) outputs."""
    if padding == "same":
        return tuple(_same(*values) for values in zip(extents, kernels, strides, dilations, strict=True))
    if isinstance(padding, int):
        return ((padding, padding),) * len(extents)
    assert not isinstance(padding, str)
    if len(padding) != len(extents):
        listed = _list(len(extents))
        raise GraphError(
            f"layer {name!r}: padding {padding} for {len(extents)} dims ({listed}); give it once or for each"
        )
    return tuple((pad, pad) if isinstance(pad, int) else pad for pad in padding)


def _output_extent(name: str, extent: int, kernel: int, stride: int, dilation: int, pad: Pair) -> int:
    if kernel < 1 or stride < 1 or dilation < 1 or min(pad) < 0:
        raise GraphError(
            f"layer {name!r}: kernel {kernel}, stride {stride}, dilation {dilation}, padding {pad} is not possible"
        )
    reach = dilation * (kernel - 1) + 1
    room = extent + sum(pad) - reach
    if room < 0:
        raise GraphError(
            f"layer {name!r}: a window of {reach} does not fit {extent} points with padding {pad}; use a larger input"
        )
    return room // stride + 1


def _same(extent: int, kernel: int, stride: int, dilation: int) -> Pair:
    # Invalid windows are rejected where their outputs are counted.
    outputs = -(-extent // max(stride, 1))
    total = max((outputs - 1) * stride + dilation * (kernel - 1) + 1 - extent, 0)
    return total // 2, total - total // 2
