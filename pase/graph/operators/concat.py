"""`concat`: tensors laid end to end along one dim."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, SliceOf
from pase.graph.body import Body, Step
from pase.graph.operator import Operator


def concat(
    name: str, *inputs: tuple[int, ...], dims: tuple[str, ...] = ("b", "c", "h", "w"), along: str = "c"
) -> Operator:
    """Return the concatenation of the inputs, shapes [dims…] that differ in `along` alone, without FLOP."""
    if along not in dims or any(len(shape) != len(dims) for shape in inputs) or not inputs:
        raise GraphError(f"layer {name!r} joins shapes {inputs} along {along!r}; expected dims {', '.join(dims)}")
    position = dims.index(along)
    rest = {shape[:position] + shape[position + 1 :] for shape in inputs}
    if len(rest) != 1:
        raise GraphError(f"layer {name!r} joins shapes {inputs}; they may differ in {along!r} alone")
    total = sum(shape[position] for shape in inputs)
    offsets = [sum(shape[position] for shape in inputs[:i]) for i in range(len(inputs))]
    output = (*inputs[0][:position], total, *inputs[0][position + 1 :])
    return Operator(
        name=name,
        kind="concat",
        dims=tuple(Dim(n, e) for n, e in zip(dims, output, strict=True)),
        reads=tuple(
            Access(
                tensor=f"x{i}",
                shape=shape,
                index_map=_replace(dims, position, SliceOf(dim=along, offset=offset, extent=shape[position])),
            )
            for i, (shape, offset) in enumerate(zip(inputs, offsets, strict=True))
        ),
        writes=(Access(tensor="y", shape=output, index_map=dims),),
        body=Body(
            steps=(
                Step(
                    result="joined",
                    function="concat",
                    operands=tuple(f"x{i}" for i in range(len(inputs))),
                    options=(("along", along),),
                ),
            )
        ),
        attributes=(("along", along),),
    )


def _replace(dims: tuple[str, ...], position: int, axis: DimIndex) -> tuple[DimIndex, ...]:
    return (*dims[:position], axis, *dims[position + 1 :])
