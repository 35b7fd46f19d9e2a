"""`padded`: a tensor with zeros around it."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, SliceOf
from pase.graph.operator import Operator


def padded(
    name: str, x: tuple[int, ...], *, dims: tuple[str, ...], before: tuple[int, ...], out: tuple[int, ...]
) -> Operator:
    """Return x in the midst of a tensor of zeros, shape `out`; before: zeros before it in each dim."""
    axes: list[DimIndex] = []
    for dim, extent, full, first in zip(dims, x, out, before, strict=True):
        if first < 0 or first + extent > full:
            raise GraphError(f"layer {name!r} pads {dim} = {extent} with {first} before it to {full}")
        axes.append(dim if extent == full else SliceOf(dim=dim, offset=first, extent=extent))
    return Operator(
        name=name,
        kind="padded",
        dims=tuple(Dim(n, e) for n, e in zip(dims, out, strict=True)),
        reads=(Access(tensor="x", shape=x, index_map=tuple(axes)),),
        writes=(Access(tensor="y", shape=out, index_map=dims),),
    )
