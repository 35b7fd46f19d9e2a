"""`opaque`: an operator of which only the dims that pass through it are known; `reorder`: a tensor laid out anew."""

from collections.abc import Sequence

from pase.errors import GraphError
from pase.graph.access import Access, Dim, DimIndex, Role
from pase.graph.operator import Operator
from pase.graph.work import Work


def opaque(
    name: str,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    *,
    passes: Sequence[tuple[int, int]] = (),
    flop: float = 0.0,
    product_flop: float = 0.0,
    function: str = "",
    num_weights: int = 0,
) -> Operator:
    """Return an operator that can be split along the dims that pass through unchanged, and along no others.

    passes: pairs (dim of the first input, dim of every output). flop, product_flop: of the whole forward pass, point
    by point and of products. The last inputs, num_weights, are trained and needed whole by every device; so are the
    others but along those dims in which they are as long as the first one. Raises GraphError where nothing is written.
    """
    if not outputs:
        raise GraphError(f"layer {name!r} writes nothing")
    passed = {place: f"p{i}" for i, (place, _) in enumerate(passes)}
    dims = [Dim(passed[place], inputs[0][place]) for place, _ in passes]
    writes = []
    for number, shape in enumerate(outputs):
        axes: list[DimIndex] = []
        for dim, extent in enumerate(shape):
            source = next((place for place, target in passes if target == dim), None)
            if source is not None and inputs[0][source] == extent:
                axes.append(passed[source])
                continue
            own = f"y{number}_{dim}"
            dims.append(Dim(own, extent))
            axes.append(own)
        writes.append(Access(tensor=f"y{number}", shape=shape, index_map=tuple(axes), partial_over=()))
    reads = []
    for number, shape in enumerate(inputs):
        is_weight = number >= len(inputs) - num_weights
        along: tuple[DimIndex, ...] = tuple(
            passed.get(dim) if not is_weight and dim < len(inputs[0]) and inputs[0][dim] == extent else None
            for dim, extent in enumerate(shape)
        )
        role = Role.PARAMETER if is_weight else Role.ACTIVATION
        reads.append(Access(tensor=f"x{number}", shape=shape, index_map=along, role=role))
    points = tuple(axis for axis in writes[0].index_map if isinstance(axis, str))
    size = max(1, writes[0].size)
    every, weights = tuple(range(len(inputs))), tuple(range(len(inputs) - num_weights, len(inputs)))
    work = [Work(dims=points, flop_per_point=flop / size, inputs=(every,))] if flop else []
    if product_flop:
        # Of a loop, that is: of what it has computed before with its weights, or with the rest of what it reads.
        operands = (every, weights) if weights else every[:2]
        work.append(Work(dims=points, flop_per_point=product_flop / size, inputs=operands, contraction=True))
    return Operator(
        name=name,
        kind="opaque",
        dims=tuple(dims) or (Dim("p0", 1),),
        reads=tuple(reads),
        writes=tuple(writes),
        work=tuple(work),
        unsplittable=tuple(dim.name for dim in dims if dim.name not in passed.values()),
        attributes=(("function", function),),
    )


def reorder(name: str, factors: Sequence[int], *, read: Sequence[int], written: Sequence[Sequence[int]]) -> Operator:
    """Return a tensor of the given factors laid out anew, without FLOP.

    factors: extents. read: positions of the factors in the order of the tensor that is read; written: for each dim of
    the result, those that make it up. Factors that are not read are repeated.
    """
    names = tuple(f"f{i}" for i in range(len(factors)))
    shape = tuple(_product(factors, places) for places in written)
    axes = tuple(
        names[places[0]] if len(places) == 1 else (tuple(names[i] for i in places) or None) for places in written
    )
    return Operator(
        name=name,
        kind="reorder",
        dims=tuple(Dim(n, e) for n, e in zip(names, factors, strict=True)) or (Dim("f0", 1),),
        reads=(Access(tensor="x", shape=tuple(factors[i] for i in read), index_map=tuple(names[i] for i in read)),),
        writes=(Access(tensor="y", shape=shape, index_map=axes),),
    )


def _product(factors: Sequence[int], places: Sequence[int]) -> int:
    size = 1
    for place in places:
        size *= factors[place]
    return size
