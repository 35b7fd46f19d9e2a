"""Ring attention: keys and values split as the queries are, which go round from device to device (Liu et al. 2023)."""

from dataclasses import replace
from typing import TypeVar

from pase.graph.access import Access, DimIndex
from pase.graph.body import Body
from pase.graph.graph import Graph
from pase.graph.operator import AllReduce, Intermediate, Operator, Relayout

AxisT = TypeVar("AxisT", bound=DimIndex)

_PROBLEM = "its keys and values go round in a ring, which programs for PyTorch alone do"


def fused_attention(operator: Operator) -> Operator:
    """Return attention whose scores are never whole in memory, as PyTorch computes it; any other layer as it is."""
    statistic = _statistic(operator)
    if statistic is None:
        return operator
    log_sums = Intermediate(tensor="log_sums", shape=statistic.shape, index_map=statistic.index_map, kept=1)
    return replace(operator, intermediates=(log_sums,))


def ring_attention(operator: Operator) -> Operator:
    """Return attention whose split of the queries splits keys and values likewise; any other layer as it is.

    Each device has its part of the keys and values, and passes on what comes from the one before it, until all have
    been everywhere: (k - 1)/k of all of them forward and, backward, of them again and of their gradients. What it
    makes of each part is put together by the maximum and the sum of its scores, so that these are nowhere whole.
    Attention to others than one's own (queries and keys of two lengths), or with masks, gathers its keys and values.
    """
    extents = operator.extents
    if _statistic(operator) is None or len(operator.reads) != 3 or not {"s", "t"} <= {*extents}:
        return operator
    queries, keys, values = operator.reads
    if extents["s"] != extents["t"] or "s" not in queries.index_map or "t" not in keys.index_map:
        return operator

    def along(dims: tuple[AxisT, ...]) -> tuple[AxisT | str, ...]:
        return tuple("s" if dim == "t" else dim for dim in dims)

    def with_ring(body: Body) -> Body:
        return replace(
            body,
            steps=tuple(replace(step, dims=along(step.dims)) for step in body.steps),
            constants=tuple(replace(constant, dims=along(constant.dims)) for constant in body.constants),
            own=None,
        )

    def turned(access: Access) -> Access:
        return replace(access, index_map=along(access.index_map))

    features = {axis for access in operator.reads for axis in access.index_map[-1:] if isinstance(axis, str)}
    shape = (*keys.shape[:-1], keys.shape[-1] + values.shape[-1])
    pieces = Relayout(
        tensor="keys and values",
        shape=shape,
        index_map=(*along(keys.index_map[:-1]), None),
        read=(*keys.index_map[:-1], None),
        times=3,
        backward_times=2,
        gradient_of=(0, 1, 2),
        is_ring=True,
    )
    body = operator.body or Body()
    return replace(
        fused_attention(operator),
        reads=(queries, turned(keys), turned(values)),
        unsplittable=tuple(dict.fromkeys((*operator.unsplittable, "t", *sorted(features)))),
        exchanges=(pieces,),
        body=replace(body, steps=(), problem=_PROBLEM, own=with_ring(body.own or body)),
    )


def _statistic(operator: Operator) -> AllReduce | None:
    """Return what attention exchanges of its rows' scores; None for what is no attention, or has no such exchange."""
    of_rows = (x for x in operator.exchanges if isinstance(x, AllReduce) and x.tensor == "softmax")
    return next(of_rows, None) if operator.kind == "attention" else None


def with_fused_attention(graph: Graph) -> Graph:
    """Return a graph whose attention is computed in one kernel."""
    return replace(graph, operators=tuple(map(fused_attention, graph.operators)))


def with_rings(graph: Graph) -> Graph:
    """Return a graph whose attention passes keys and values round in a ring where its sequence is split."""
    return replace(graph, operators=tuple(map(ring_attention, graph.operators)))
