"""Sliding windows over one, two or three dims, shared by convolution, pooling and what else works on images."""

from dataclasses import dataclass
from typing import Literal

from pase.errors import GraphError
from pase.graph.access import Dim, Window

Pair = tuple[int, int]
Each = int | tuple[int, ...]
"""An option given once, or for each spatial dim."""

Padding = int | tuple[int | Pair, ...] | Literal["same"]
"""Zeros on each side, given once or for each spatial dim, there perhaps as (before, after)."""

SPATIAL = (("d", "q", "depth"), ("h", "r", "height"), ("w", "s", "width"))
"""Iteration dims of the positions and of the kernel, and what the extent is called; lines have the last of them alone,
images the last two, volumes all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows that slide over a tensor [b, channels, …].

    positions, kernels: iteration dims. axes: how the tensor's spatial dims are read. extents: of these.
    """

    positions: tuple[Dim, ...]
    kernels: tuple[Dim, ...]
    axes: tuple[Window, ...]

    @property
    def position_names(self) -> tuple[str, ...]:
        """Names of the iteration dims of the positions."""
        return tuple(dim.name for dim in self.positions)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the iteration dims of the kernel."""
        return tuple(dim.name for dim in self.kernels)

    @property
    def num_positions(self) -> tuple[int, ...]:
        """Extents of the positions."""
        return tuple(dim.extent for dim in self.positions)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """Extents of the kernel."""
        return tuple(dim.extent for dim in self.kernels)


def position_names(name: str, x: tuple[int, ...], rank: int | None = None) -> tuple[str, ...]:
    """Return the iteration dims of the spatial dims of x, shape [b, channels, …].

    rank: how many there must be. Raises GraphError where there are others.
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

    Positions are as many as fit: floor((extent + pads - reach) / stride) + 1. Raises GraphError for a shape of
    another rank, for options that are not given once or for each dim, and where a window does not fit.
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
        positions=tuple(Dim(n, e) for n, e in zip(positions, counts, strict=True)),
        kernels=tuple(Dim(n, e) for n, e in zip(names, kernels, strict=True)),
        axes=tuple(
            Window(
                out=out, kernel=k, stride=s, dilation=d, pad=pad[0], beyond=max(0, (n - 1) * s - pad[0] - extent + 1)
            )
            for out, k, s, d, pad, n, extent in zip(
                positions, names, strides, dilations, pads, counts, extents, strict=True
            )
        ),
    )


def refuse_empty_windows(name: str, padding: Padding, windows: Windows) -> None:
    """Raise GraphError where a window may lie in the padding alone: it has no maximum and no mean."""
    if padding == "same":
        return
    kernels = windows.kernel_shape
    for size, pad in zip(kernels, _pads(name, padding, kernels, kernels, kernels, kernels), strict=True):
        if max(pad) >= size > 0:
            raise GraphError(f"layer {name!r}: padding {pad} holds a whole window of {size}; use less on each side")


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
    # What is no window is refused where its outputs are counted.
    outputs = -(-extent // max(stride, 1))
    total = max((outputs - 1) * stride + dilation * (kernel - 1) + 1 - extent, 0)
    return total // 2, total - total // 2
