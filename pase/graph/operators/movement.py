"""Operators that move data: concatenation, padding, layout changes, look-ups and fan-outs; and opaque operators.

Of an opaque operator, only the dims that pass through it unchanged are known. A fan-out passes a tensor to several
consumers so that their gradients are reduced once: the broadcast, whose adjoint is the sum. It computes nothing. Its
configuration consists of the layout in which the tensor is read, and the number of devices that hold partial gradients,
which are added on each device and then all-reduced once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod

from pase.errors import GraphError
from pase.graph.body import Body, Step
from pase.graph.graph import Edge, Graph
from pase.graph.operator import (
    FAN_OUT,
    Access,
    Dim,
    DimIndex,
    Operator,
    Role,
    SliceOf,
    Work,
    access_dims,
    dims_of,
    extents_of,
    split_dim,
)

Shape = tuple[int, ...]
Names = tuple[str, ...]


def concat(name: str, *inputs: Shape, dims: Names = ("b", "c", "h", "w"), along: str = "c") -> Operator:
    """Return the concatenation of the inputs, shapes [dims…] that differ in `along` alone, without FLOP."""
    if along not in dims or any(len(shape) != len(dims) for shape in inputs) or not inputs:
        raise GraphError(f"layer {name!r} joins shapes {inputs} along {along!r}; expected dims {', '.join(dims)}")
    place = dims.index(along)
    if len({shape[:place] + shape[place + 1 :] for shape in inputs}) != 1:
        raise GraphError(f"layer {name!r} joins shapes {inputs}; they may differ in {along!r} alone")
    reads, offset = list[Access](), 0
    for i, shape in enumerate(inputs):
        piece = SliceOf(dim=along, offset=offset, extent=shape[place])
        reads.append(Access(tensor=f"x{i}", shape=shape, index_map=(*dims[:place], piece, *dims[place + 1 :])))
        offset += shape[place]
    output = (*inputs[0][:place], offset, *inputs[0][place + 1 :])
    told = (("along", along),)
    step = Step(result="joined", function="concat", operands=tuple(read.tensor for read in reads), options=told)
    return Operator(
        name=name,
        kind="concat",
        dims=dims_of(extents_of(name, output, dims)),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=output, index_map=dims),),
        body=Body(steps=(step,)),
        attributes=told,
    )


def padded(name: str, x: Shape, *, dims: Names, before: Shape, out: Shape) -> Operator:
    """Return x embedded in a tensor of zeros of shape `out`; `before` is the number of zeros before it in each dim."""
    axes: list[DimIndex] = []
    for dim, extent, full, first in zip(dims, x, out, before, strict=True):
        if first < 0 or first + extent > full:
            raise GraphError(f"layer {name!r} pads {dim} = {extent} with {first} before it to {full}")
        axes.append(dim if extent == full else SliceOf(dim=dim, offset=first, extent=extent))
    return Operator(
        name=name,
        kind="padded",
        dims=dims_of(extents_of(name, out, dims)),
        reads=(Access(tensor="x", shape=x, index_map=tuple(axes)),),
        writes=(Access(tensor="y", shape=out, index_map=dims),),
        body=Body(steps=(Step(result="padded", function="padded", operands=("x",)),)),
    )


def reorder(name: str, factors: Sequence[int], *, read: Sequence[int], written: Sequence[Sequence[int]]) -> Operator:
    """Return a tensor of the given factors in another dim order, without FLOP.

    Args:
        name: Name of the operator.
        factors: Extents of the factors.
        read: Positions of the factors in the order of the tensor that is read.
        written: For each dim of the result, the positions of the factors that make it up. Factors that are not read are
            broadcast.
    """
    names = tuple(f"f{i}" for i in range(len(factors)))
    shape = tuple(prod(factors[i] for i in places) for places in written)
    axes = tuple(
        names[places[0]] if len(places) == 1 else (tuple(names[i] for i in places) or None) for places in written
    )
    return Operator(
        name=name,
        kind="reorder",
        dims=dims_of(dict(zip(names, factors, strict=True))) or (Dim("f0", 1),),
        reads=(Access(tensor="x", shape=tuple(factors[i] for i in read), index_map=tuple(names[i] for i in read)),),
        writes=(Access(tensor="y", shape=shape, index_map=axes),),
        body=Body(steps=(Step(result="copied", function="copy", operands=("x",)),)),
    )


# -- look-ups


def embedding(
    name: str, x: Shape, *, vocabulary: int, size: int, dims: Names = ("b", "s"), shared: str = ""
) -> Operator:
    """Return ``y[dims, d] = table[x[dims], d]``; x: integer indices [dims…], table: [v, d].

    v is a reduction dim of the output: a device that holds a part of the vocabulary looks up the indices in its part,
    and the results are reduced. The FLOP are those of the look-ups only. Raises GraphError where the rank of x does not
    fit.
    """
    return Operator(
        name=name,
        kind="embedding",
        dims=(*dims_of(extents_of(name, x, dims)), Dim("d", size), Dim("v", vocabulary)),
        reads=(
            Access(tensor="x", shape=x, index_map=dims, role=Role.INDEX),
            Access(tensor="table", shape=(vocabulary, size), index_map=("v", "d"), role=Role.PARAMETER, shared=shared),
        ),
        writes=(Access(tensor="y", shape=(*x, size), index_map=(*dims, "d")),),
        body=Body(steps=(Step(result="rows", function="embedding", operands=("table", "x")),)),
    )


def gather(name: str, x: Shape, *, dims: Names, along: str, count: int = 1) -> Operator:
    """Return `count` elements of ``x[dims]`` along one dim, at an index for each point of the other dims.

    `along` is a reduction dim of the output: a device that holds a part of it takes the elements in its part (a target
    class), and the results are reduced. Raises GraphError where `along` is not among the dims.
    """
    if len(x) != len(dims) or along not in dims:
        raise GraphError(f"layer {name!r} reads shape {x} with dims {', '.join(dims)}; expected {along} to be of these")
    taken = next(letter for letter in ("k", "k1", "k2") if letter not in dims) if count > 1 else None
    extents = extents_of(name, x, dims)
    axes: tuple[DimIndex, ...] = tuple(taken if dim == along else dim for dim in dims)
    shape = tuple(count if dim == along else extent for dim, extent in extents.items())
    return Operator(
        name=name,
        kind="gather",
        dims=dims_of(extents | ({taken: count} if taken else {})),
        reads=(
            Access(tensor="x", shape=x, index_map=dims),
            Access(tensor="places", shape=shape, index_map=axes, role=Role.INDEX),
        ),
        writes=(Access(tensor="y", shape=shape, index_map=axes),),
        body=Body(steps=(Step(result="picked", function="pick", operands=("x", "places"), dims=(along,)),)),
        attributes=(("along", along),),
    )


# -- opaque operators


def opaque(
    name: str,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    *,
    passes: Sequence[tuple[int, int]] = (),
    flop: float = 0.0,
    product_flop: float = 0.0,
    function: str = "",
    num_weights: int = 0,
) -> Operator:
    """Return an operator that can be split only along dims that pass through it unchanged.

    Args:
        name: Name of the operator.
        inputs: Shapes of its inputs. The others are needed completely by every device, except along passed dims in
            which they have the extent of the first.
        outputs: Shapes of its outputs.
        passes: Pairs (dim of the first input, dim of every output).
        flop: Elementwise FLOP of the whole forward pass.
        product_flop: FLOP of products in the whole forward pass.
        function: Name of the function.
        num_weights: The number of last inputs that are trained, and needed completely by every device.

    Raises:
        GraphError: No output is given.
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
    # Without a body, the work cannot be derived.
    points = tuple(axis for axis in writes[0].index_map if isinstance(axis, str))
    size = max(1, writes[0].size)
    every, weights = tuple(range(len(inputs))), tuple(range(len(inputs) - num_weights, len(inputs)))
    work = [Work(dims=points, flop_per_point=flop / size, inputs=(every,))] if flop else []
    if product_flop:
        # A loop depends on its earlier results together with its weights, or with its other inputs.
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


_PARTS = "g"
"""Name of the dim whose split is the number of devices that hold partial gradients."""


def fan_out(
    name: str, x: tuple[int, ...], *, axes: tuple[DimIndex, ...], extents: Mapping[str, int], parts: int
) -> Operator:
    """Return ``y = x``, whose gradient is a sum over `parts` devices or a divisor of that.

    Args:
        name: Name of the operator.
        x: Shape of the tensor.
        axes: How its dims are indexed.
        extents: Extents of these iteration dims. The iteration space also has g, renamed if the tensor has a dim g.
        parts: Largest number of devices with partial gradients.
    """
    over = _unused(_PARTS, extents)
    read = Access(tensor="x", shape=x, index_map=axes, partial_over=(over,))
    return Operator(
        name=name,
        kind=FAN_OUT,
        dims=(*(Dim(dim, extent) for dim, extent in extents.items()), Dim(over, parts)),
        reads=(read,),
        writes=(Access(tensor="y", shape=x, index_map=axes, partial_over=()),),
        body=Body(steps=(Step(result="handed", function="fan_out", operands=("x",), dims=(over,)),)),
    )


def with_fan_outs(graph: Graph, *, behind: Collection[tuple[str, int]] = ()) -> Graph:
    """Return a graph with a fan-out after each tensor whose gradient two or more consumers could leave partial.

    All reads of the tensor that have a gradient are then fed by the fan-out. A graph that already has them is returned
    unchanged.

    Args:
        graph: The graph.
        behind: Tensors, by layer and position among its writes, that get a fan-out wherever two or more reads have a
            gradient.
    """
    readers = {
        tensor: [edge for edge in edges if graph.has_gradient(graph[edge.consumer], edge.input)]
        for tensor, edges in graph.readers.items()
        if not graph[tensor[0]].is_fan_out
    }
    added: dict[tuple[str, int], Operator] = {}
    names = set(graph.index)
    for (producer, output), edges in readers.items():
        if len(edges) < 2:
            continue
        parts = [_num_parts(graph[edge.consumer], edge.input) for edge in edges]
        if sum(count > 1 for count in parts) >= 2 or (producer, output) in behind:
            found = _behind(graph[producer], output, lcm(*parts), names)
            names.add(found.name)
            added[producer, output] = found
    if not added:
        return graph
    fed = {(edge.consumer, edge.input) for key in added for edge in readers[key]}
    edges = []
    for edge in graph.edges:
        operator = added.get((edge.producer, edge.output))
        if operator is None or (edge.consumer, edge.input) not in fed:
            edges.append(edge)
            continue
        if edge is readers[edge.producer, edge.output][0]:
            edges.append(Edge(producer=edge.producer, output=edge.output, consumer=operator.name, input=0))
        edges.append(Edge(producer=operator.name, output=0, consumer=edge.consumer, input=edge.input))
    operators: list[Operator] = []
    for operator in graph.operators:
        own = (added.get((operator.name, output)) for output in range(len(operator.writes)))
        operators += [operator, *(one for one in own if one is not None)]
    return replace(graph, operators=tuple(operators), edges=tuple(edges))


def _num_parts(operator: Operator, read: int) -> int:
    """Return the number of partial gradients that a layer can leave of what it reads."""
    dims = [dim for dim in operator.partial_dims(operator.reads[read]) if dim not in operator.unsplittable]
    return prod(operator.extents[dim] for dim in dims)


def _behind(producer: Operator, output: int, parts: int, names: Iterable[str]) -> Operator:
    """Return the fan-out of a tensor, its dims named like its producer's."""
    write = producer.writes[output]
    extents: dict[str, int] = {}
    axes: list[DimIndex] = []
    for axis, extent in zip(write.index_map, write.shape, strict=True):
        match axis:
            case tuple():
                extents |= {dim: producer.extents[dim] for dim in axis}
                axes.append(axis)
            case None if extent == 1:
                axes.append(None)
            case _:
                dim = split_dim(axis) or _unused("whole", {*extents, *access_dims(write)})
                extents[dim] = extent
                axes.append(dim)
    name = f"{producer.name}_{FAN_OUT}" if len(producer.writes) == 1 else f"{producer.name}_{output}_{FAN_OUT}"
    return fan_out(_unused(name, names), write.shape, axes=tuple(axes), extents=extents, parts=parts)


def _unused(name: str, taken: Iterable[str]) -> str:
    """Return a name that is not taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found
