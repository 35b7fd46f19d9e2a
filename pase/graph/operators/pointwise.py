"""`pointwise`: a function of tensors that are broadcast to one shape, point by point."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.operator import Operator, Work


def pointwise(
    name: str,
    *inputs: tuple[int, ...],
    dims: tuple[str, ...],
    out: tuple[int, ...],
    function: str,
    flop_per_point: float = 1.0,
    mixes: tuple[str, ...] = (),
) -> Operator:
    """Return ``y[dims] = function(x0, x1, …)``; inputs: shapes that are broadcast to `out`, [dims…], as NumPy does.

    mixes: dims along which points read each other after all; they cannot be split. Raises GraphError where a shape
    cannot be broadcast.
    """
    reads = []
    for i, shape in enumerate(inputs):
        last = tuple(zip(dims[len(dims) - len(shape) :], out[len(out) - len(shape) :], strict=True))
        if len(shape) > len(out) or any(extent not in (1, full) for extent, (_, full) in zip(shape, last, strict=True)):
            raise GraphError(f"layer {name!r} reads shape {shape}, which cannot be broadcast to {out}")
        axes = tuple(None if extent < full else dim for extent, (dim, full) in zip(shape, last, strict=True))
        reads.append(Access(tensor=f"x{i}", shape=shape, axes=axes))
    return Operator(
        name=name,
        kind="pointwise",
        dims=tuple(Dim(n, e) for n, e in zip(dims, out, strict=True)),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=out, axes=dims),),
        # A sum's gradient is a copy; anything else works again for each of what it reads.
        work=(
            Work(
                dims=dims, flop_per_point=flop_per_point, inputs=() if function == "add" else tuple(range(len(reads)))
            ),
        ),
        unsplittable=mixes,
        attributes=(("function", function),),
    )
