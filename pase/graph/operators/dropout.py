"""`dropout`: random points of a tensor set to zero while a network is trained (Srivastava et al. 2014)."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.body import Body, Step
from pase.graph.operator import Intermediate, Operator


def dropout(name: str, x: tuple[int, ...], *, dims: tuple[str, ...], rate: float) -> Operator:
    """Return ``y = x / (1 - rate)`` where a point is kept, 0 where it is dropped; x: shape [dims…], all of which split.

    rate: the probability that a point is dropped. Which points are dropped depends on the seed, the layer's name, the
    step and the point alone, not on the strategy, so that nothing moves. Raises GraphError for a rate outside [0, 1)
    and where the rank of x does not fit.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise GraphError(f"layer {name!r} drops a fraction of {rate!r}; expected a rate from 0 to below 1")
    if len(x) != len(dims) or not dims:
        raise GraphError(f"layer {name!r} reads shape {x}; expected dims {', '.join(dims)}")
    return Operator(
        name=name,
        kind="dropout",
        dims=tuple(Dim(n, e) for n, e in zip(dims, x, strict=True)),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        # The mask is drawn again backward, from whole numbers of 64 bits.
        intermediates=(Intermediate(tensor="drawn", shape=x, index_map=dims, working=6),),
        body=Body(
            steps=(
                Step(
                    result="kept",
                    function="dropout",
                    operands=("x",),
                    dims=dims,
                    options=(("rate", float(rate)),),
                ),
            )
        ),
        attributes=(("rate", float(rate)),),
    )
