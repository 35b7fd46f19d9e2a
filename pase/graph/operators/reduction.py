"""`reduction`: a tensor summed, or otherwise brought together, over some of its dims; `softmax`: over one of them."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.body import REDUCTIONS, Body, Step
from pase.graph.operator import AllReduce, Operator
from pase.graph.work import Work


def reduction(
    name: str, x: tuple[int, ...], *, dims: tuple[str, ...], over: tuple[str, ...], function: str
) -> Operator:
    """Return ``y = function over some dims of x[dims]``; GraphError where these are none of its dims."""
    _check(name, x, dims, over)
    kept = tuple(dim for dim in dims if dim not in over)
    extents = dict(zip(dims, x, strict=True))
    return Operator(
        name=name,
        kind="reduction",
        dims=tuple(Dim(n, e) for n, e in extents.items()),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=tuple(extents[dim] for dim in kept), index_map=kept),),
        # A function that has no step here reads each number once, as those that have one.
        work=(Work(dims=dims, flop_per_point=1, inputs=(0,)),),
        body=Body(steps=(Step(result="reduced", function=function, operands=("x",), dims=over),))
        if function in REDUCTIONS
        else None,
        attributes=(("function", function),),
    )


def softmax(name: str, x: tuple[int, ...], *, dims: tuple[str, ...], over: str, is_log: bool = False) -> Operator:
    """Return the softmax of x[dims] over one dim.

    A split of it all-reduces the maximum and the sum of each row, forward, and the sum of its gradient, backward.
    """
    _check(name, x, dims, (over,))
    kept = tuple(dim for dim in dims if dim != over)
    extents = dict(zip(dims, x, strict=True))
    rows = AllReduce(
        tensor="rows",
        shape=tuple(extents[dim] for dim in kept),
        index_map=kept,
        over=(over,),
        times=3,
        backward_times=1,
        gradient_of=(0,),
    )
    return Operator(
        name=name,
        kind="softmax",
        dims=tuple(Dim(n, e) for n, e in extents.items()),
        reads=(Access(tensor="x", shape=x, index_map=dims),),
        writes=(Access(tensor="y", shape=x, index_map=dims),),
        exchanges=(rows,),
        body=Body(
            steps=(
                Step(result="shares", function="log_softmax" if is_log else "softmax", operands=("x",), dims=(over,)),
            )
        ),
        attributes=(("over", over), ("is_log", is_log)),
    )


def _check(name: str, x: tuple[int, ...], dims: tuple[str, ...], over: tuple[str, ...]) -> None:
    if len(x) != len(dims) or not set(over) <= set(dims):
        raise GraphError(f"layer {name!r} reads shape {x} with dims {', '.join(dims)}, of which {', '.join(over)} go")
