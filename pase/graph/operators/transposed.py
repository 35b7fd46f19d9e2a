"""`transposed_convolution`: the adjoint of a convolution, which spreads every position over a window of the result."""

from math import prod

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, Role
from pase.graph.operator import Operator
from pase.graph.work import Work


def transposed_convolution(
    name: str, x: tuple[int, ...], w: tuple[int, ...], *, out: tuple[int, ...], groups: int = 1, bias: bool = False
) -> Operator:
    """Return a transposed convolution of x, shape [b, channels, positions…], to a tensor of shape `out`.

    w: [channels, out-channels of one group, window…]. Iteration space: b, g (where there are groups), n (out-channels),
    c (in-channels), i0 … (positions that are read), o0 … (that are written) and k0 … (of the window), of which no split
    is known: windows of the result overlap. Raises GraphError where channels or batch do not fit.
    """
    if x[1] % groups or w[0] != x[1] or out[1] != w[1] * groups or out[0] != x[0] or len(x) != len(w) or len(x) < 3:
        raise GraphError(f"layer {name!r} reads shapes {x} and {w}, in {groups} groups, and writes {out}")
    group = ("g",) if groups > 1 else ()
    read = tuple(f"i{i}" for i in range(len(x) - 2))
    written = tuple(f"o{i}" for i in range(len(x) - 2))
    kernel = tuple(f"k{i}" for i in range(len(x) - 2))
    extents = {"b": x[0], **dict.fromkeys(group, groups), "n": w[1], "c": x[1] // groups}
    extents |= dict(zip((*read, *written, *kernel), (*x[2:], *out[2:], *w[2:]), strict=True))
    inner: DimIndex = (*group, "c") if group else "c"
    outer: DimIndex = (*group, "n") if group else "n"
    points = ("b", *group, "n", "c", *read)
    reads = [
        Access(tensor="x", shape=x, index_map=("b", inner, *read)),
        Access(tensor="w", shape=w, index_map=(inner, "n", *kernel), role=Role.PARAMETER),
    ]
    work = [Work(dims=points, flop_per_point=2.0 * prod(w[2:]), inputs=(0, 1), contraction=True)]
    if bias:
        shape = (w[1] * groups,)
        reads.append(Access(tensor="bias", shape=shape, index_map=(outer,), role=Role.PARAMETER, partial_over=("b",)))
        work.append(Work(dims=("b", *group, "n", *written), flop_per_point=1))
    return Operator(
        name=name,
        kind="transposed_convolution",
        dims=tuple(Dim(dim, extent) for dim, extent in extents.items()),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=out, index_map=("b", outer, *written)),),
        work=tuple(work),
        unsplittable=(*read, *written, *kernel),
        attributes=(("groups", groups),),
    )
