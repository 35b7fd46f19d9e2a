"""Which dims of different layers are the same: both index one dim of a tensor that flows between the layers.

The heads of an attention, for instance, are a produced dim of the three projections before it and a reduced dim of the
one behind it. What Mesh-TensorFlow's layouts and Megatron's rule name once is found here in any network.
"""

from collections.abc import Iterator, Sequence

from pase.costs import shared_weights
from pase.costs.layouts import Component, components
from pase.graph import Access, Graph, Operator
from pase.graph.access import split_dim

DimClass = int
"""A set of dims that are the same, by number."""


def same_dims(graph: Graph) -> dict[tuple[str, str], DimClass]:
    """Return the class of every dim, by (layer, dim).

    Where a view takes a dim apart (a width into heads and channels), its first factor is the same as the whole: a split
    of either into as many parts gives the same parts. A split of a concatenation counts as one of its pieces.
    """
    root = {(operator.name, dim): (operator.name, dim) for operator in graph.operators for dim in operator.extents}

    def find(dim: tuple[str, str]) -> tuple[str, str]:
        while root[dim] != dim:
            root[dim] = root[root[dim]]
            dim = root[dim]
        return dim

    for one, other in _pairs(graph):
        root[find(one)] = find(other)
    numbers: dict[tuple[str, str], DimClass] = {}
    return {dim: numbers.setdefault(find(dim), len(numbers)) for dim in root}


def _pairs(graph: Graph) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for edge in graph.edges:
        u, v = graph[edge.producer], graph[edge.consumer]
        for one, other in _aligned(_components(u, u.writes[edge.output]), _components(v, v.reads[edge.input])):
            yield (u.name, one), (v.name, other)
    for weight in shared_weights(graph):
        owned, used = graph[weight.owner].reads[weight.owner_read], graph[weight.user].reads[weight.user_read]
        for one, other in _of_one_weight(owned, used):
            yield (weight.owner, one), (weight.user, other)


def _of_one_weight(owned: Access, used: Access) -> Iterator[tuple[str, str]]:
    """Yield the dims of a weight's two users that are the same; the one may read it transposed, dims named alike."""
    axes = owned.axes if set(owned.axes) == set(used.axes) else used.axes
    for one, other in zip(owned.axes, axes, strict=False):
        if isinstance(one, str) and isinstance(other, str):
            yield one, other


def _components(operator: Operator, access: Access) -> list[Component]:
    return [part for part in components(access.shape, access.axes, operator.extents) if part.length > 1]


def _aligned(written: Sequence[Component], read: Sequence[Component]) -> Iterator[tuple[str, str]]:
    """Yield the dims that begin at the same place of a tensor, row-major, taken apart by its producer and consumer."""
    i = j = 0
    while i < len(written) and j < len(read):
        one, other = split_dim(written[i].axis), split_dim(read[j].axis)
        if one and other:
            yield one, other
        left, right = written[i].length, read[j].length
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(written):
                left, i = left * written[i].length, i + 1
            elif right < left and j < len(read):
                right, j = right * read[j].length, j + 1
            else:
                return
