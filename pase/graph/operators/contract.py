"""`contract`: a sum of products of two tensors over named dims (einsum), neither of which need be a parameter."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role
from pase.graph.body import Body, Step
from pase.graph.operator import WORK_OF_BODY, Operator
from pase.graph.work import Work

Names = tuple[str, ...]


def contract(
    name: str,
    x: tuple[int, ...],
    y: tuple[int, ...],
    *,
    axes: tuple[Names, Names],
    out: Names,
    parameter: int | None = None,
    kind: str = "contract",
    share: float = 1.0,
) -> Operator:
    """Return ``z[out] = Σ x[axes[0]] · y[axes[1]]`` over the dims that `out` lacks, one iteration dim for each name.

    parameter: which of the two is trained, if any. share: of the products that are computed at all, evenly over every
    dim (1/8 where each token goes to one of eight experts). Raises GraphError where extents or names disagree.
    """
    extents: dict[str, int] = {}
    for shape, names in zip((x, y), axes, strict=True):
        if len(shape) != len(names) or len(set(names)) != len(names):
            raise GraphError(f"layer {name!r} reads shape {shape} with dims {', '.join(names)}; expected one name each")
        for dim, extent in zip(names, shape, strict=True):
            if extents.setdefault(dim, extent) != extent:
                raise GraphError(
                    f"layer {name!r}: dim {dim} has extent {extents[dim]} in one tensor, {extent} in another"
                )
    if not set(out) <= set(extents):
        raise GraphError(f"layer {name!r} writes dims {', '.join(out)}; it reads {', '.join(extents)}")
    order = (*out, *(dim for dim in extents if dim not in out))
    reads = tuple(
        Access(
            tensor="w" if parameter == i else "xy"[i],
            shape=shape,
            index_map=names,
            role=Role.PARAMETER if parameter == i else Role.ACTIVATION,
        )
        for i, (shape, names) in enumerate(zip((x, y), axes, strict=True))
    )
    return Operator(
        name=name,
        kind=kind,
        dims=tuple(Dim(dim, extents[dim]) for dim in order),
        reads=reads,
        writes=(Access(tensor="z", shape=tuple(extents[dim] for dim in out), index_map=out),),
        # Of the products only a share is computed, of which the body does not tell.
        work=(Work(dims=order, flop_per_point=2 * share, inputs=(0, 1), contraction=True),)
        if share < 1
        else WORK_OF_BODY,
        body=Body(
            steps=(
                Step(
                    result="products",
                    function="einsum",
                    operands=tuple(read.tensor for read in reads),
                    dims=out,
                ),
            )
        ),
    )
