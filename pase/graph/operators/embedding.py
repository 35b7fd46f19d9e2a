"""`embedding`: rows of a table looked up by index."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role
from pase.graph.operator import Operator, Work


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
            Access(tensor="x", shape=x, axes=dims, role=Role.INDEX),
            Access(tensor="table", shape=(vocabulary, size), axes=("v", "d"), role=Role.PARAMETER, shared=shared),
        ),
        writes=(Access(tensor="y", shape=(*x, size), axes=(*dims, "d")),),
        work=(Work(dims=(*dims, "d"), flop_per_point=1, inputs=(1,)),),
    )
