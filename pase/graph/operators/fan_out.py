"""`fan_out`: a tensor on its way to several readers, so that what their gradients have in common is summed once.

The broadcast, whose adjoint is the sum. It computes nothing: its configuration is the layout in which the tensor is
read, and over how many devices the gradient arrives in parts, which are added on each device and summed once for all.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import lcm, prod

from pase.graph.access import Access, Dim, DimIndex, access_dims, split_dim
from pase.graph.body import Body, Step
from pase.graph.graph import Edge, Graph
from pase.graph.operator import FAN_OUT, Operator

_PARTS = "g"
"""Name of the dim whose split is the number of devices over which the gradient arrives in parts."""


def fan_out(
    name: str, x: tuple[int, ...], *, axes: tuple[DimIndex, ...], extents: Mapping[str, int], parts: int
) -> Operator:
    """Return ``y = x``, the gradient of which is a sum over `parts` devices or a divisor of that.

    x: shape. axes: how its dims are indexed; extents: of these iteration dims. Iteration space: these, and g, which
    has another name where the tensor has a dim of that one.
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
    """Return a graph with a fan-out behind each tensor whose gradient two or more reads could leave in parts.

    All reads of the tensor that have a gradient are fed by the fan-out then. A graph that has them is returned as it
    is. behind: tensors, by layer and position among its writes, that get one wherever two or more reads have a
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
        parts = [_num_parts(graph[edge.consumer], edge.input) for edge in edges]
        if sum(count > 1 for count in parts) >= 2 or (len(edges) > 1 and (producer, output) in behind):
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
    """Return in how many parts a layer can leave the gradient of what it reads."""
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
    """Return a name that is none of those that are taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found
