"""`dims` and `window`: how a layer's block names its iteration space and its sliding windows."""

from typing import Any

from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.runtime.compat import mtf


def dims(*named: tuple[str, int], **extents: int) -> tuple[Any, ...]:
    """Return dimensions: ``b, n = dims(b=64, n=10)``, or ``dims(("b", 64))`` where a name is no identifier."""
    return tuple(mtf.Dimension(name, extent) for name, extent in (*named, *extents.items()))


def window(out: Any, kernel: Any, *, of: int, stride: int = 1, dilation: int = 1, pad: int = 0) -> WindowDim:
    """Return a tensor dim of extent `of` that output dim `out` reads through a window of dim `kernel`.

    Output o reads points ``o·stride + k·dilation - pad``, k = 0 … kernel - 1.
    """
    return WindowDim(
        out=out.name,
        out_extent=out.size,
        kernel=kernel.name,
        kernel_extent=kernel.size,
        extent=of,
        stride=stride,
        dilation=dilation,
        pad=pad,
    )
