"""`embedding`: rows of a table looked up by index; `gather`: one element of each row."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, Role
from pase.graph.body import Body, Step
from pase.graph.operator import Operator
from pase.graph.work import Work


def embedding(
    name: str, x: tuple[int, ...], *, vocabulary: int, size: int, dims: tuple[str, ...] = ("b", "s"), shared: str = ""
) -> Operator:
    """Return ``y[dims, d] = table[x[dims], d]``; x: integer indices [dims…], table: [v, d].

    v is a reduction dim of the output: a device that holds a part of the vocabulary looks up what it has
    and the parts are summed. Its FLOP are those of the look-ups alone. Raises GraphError where the rank of x
    does not fit.
    """
    if len(x) != len(dims):
        raise GraphError(f"layer {name!r} reads shape {x}; expected dims {', '.join(dims)}")
    lead = tuple(Dim(n, e) for n, e in zip(dims, x, strict=True))
    return Operator(
        name=name,
        kind="embedding",
        dims=(*lead, Dim("d", size), Dim("v", vocabulary)),
        reads=(
            Access(tensor="x", shape=x, index_map=dims, role=Role.INDEX),
            Access(tensor="table", shape=(vocabulary, size), index_map=("v", "d"), role=Role.PARAMETER, shared=shared),
        ),
        writes=(Access(tensor="y", shape=(*x, size), index_map=(*dims, "d")),),
        body=Body(steps=(Step(result="rows", function="embedding", operands=("table", "x")),)),
    )


def gather(name: str, x: tuple[int, ...], *, dims: tuple[str, ...], along: str, count: int = 1) -> Operator:
    """Return so many elements of ``x[dims]`` along one dim, at places that the other dims have each its own.

    `along` is a reduction dim of the output: a device that holds a part of it takes what it has (the target's column
    of its classes) and the parts are summed. Raises GraphError where `along` is none of the dims.
    """
    if len(x) != len(dims) or along not in dims:
        raise GraphError(f"layer {name!r} reads shape {x} with dims {', '.join(dims)}; expected {along} to be of these")
    taken = next(letter for letter in ("k", "k1", "k2") if letter not in dims) if count > 1 else None
    extents = dict(zip(dims, x, strict=True))
    axes: tuple[DimIndex, ...] = tuple(taken if dim == along else dim for dim in dims)
    shape = tuple(count if dim == along else extent for dim, extent in extents.items())
    points = (*(dim for dim in dims if dim != along), *([taken] if taken else []))
    return Operator(
        name=name,
        kind="gather",
        dims=(*(Dim(n, e) for n, e in extents.items()), *([Dim(taken, count)] if taken else [])),
        reads=(
            Access(tensor="x", shape=x, index_map=dims),
            Access(tensor="places", shape=shape, index_map=axes, role=Role.INDEX),
        ),
        writes=(Access(tensor="y", shape=shape, index_map=axes),),
        work=(Work(dims=points, flop_per_point=1, inputs=(0,)),),
        attributes=(("along", along),),
    )
