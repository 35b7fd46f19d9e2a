"""Products of tensors: dense layers, contractions of any two tensors, and scaled dot-product attention."""

from collections.abc import Collection
from dataclasses import replace
from math import sqrt
from typing import TypeVar

from pase.errors import GraphError
from pase.graph.body import Body, Step
from pase.graph.graph import Graph
from pase.graph.operator import (
    WORK_OF_BODY,
    Access,
    AllReduce,
    Dim,
    DimIndex,
    Intermediate,
    Operator,
    Relayout,
    Role,
    Work,
    dims_of,
    extents_of,
)
from pase.graph.operators.pointwise import check_activation, finished

Shape = tuple[int, ...]
Names = tuple[str, ...]
NamedExtents = tuple[tuple[str, int], ...]


def dense(
    name: str,
    x: Shape,
    *,
    out: NamedExtents,
    lead: Names = ("b",),
    reduce: Names = ("c",),
    bias: bool = True,
    activation: str = "",
    shared: str = "",
) -> Operator:
    """Return ``y[lead, out] = activation(Σ_reduce x[lead, reduce] · w[reduce, out] + bias[out])``.

    Iteration space: lead, out, reduce.

    Args:
        name: Name of the operator.
        x: Shape [lead…, reduce…].
        out: Names and extents of the output dims.
        lead: Names of the leading dims.
        reduce: Names of the reduction dims.
        bias: Whether there is a bias.
        activation: Function applied to the result, "" for none.
        shared: Name of a weight that several layers share.

    Raises:
        GraphError: The rank of x does not fit.
    """
    extents_of(name, x, (*lead, *reduce))
    names, out_shape = tuple(n for n, _ in out), tuple(e for _, e in out)
    shape = (*x[len(lead) :], *out_shape)
    reads = [
        Access(tensor="x", shape=x, index_map=(*lead, *reduce)),
        Access(tensor="w", shape=shape, index_map=(*reduce, *names), role=Role.PARAMETER, shared=shared),
    ]
    if bias:
        # Added after the reduction: a split of a reduction dim leaves no partial sums of its gradient.
        reads.append(
            Access(tensor="bias", shape=out_shape, index_map=names, role=Role.PARAMETER, partial_over=tuple(lead))
        )
    step = Step(result="products", function="einsum", operands=("x", "w"), dims=(*lead, *names))
    return Operator(
        name=name,
        kind="dense",
        dims=tuple(Dim(n, e) for n, e in (*zip(lead, x, strict=False), *out, *zip(reduce, shape, strict=False))),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=x[: len(lead)] + out_shape, index_map=(*lead, *names)),),
        body=finished(step, has_bias=bias, activation=activation),
        attributes=(("activation", check_activation(name, activation)),),
    )


def contract(
    name: str,
    x: Shape,
    y: Shape,
    *,
    axes: tuple[Names, Names],
    out: Names,
    parameter: int | None = None,
    kind: str = "contract",
    share: float = 1.0,
) -> Operator:
    """Return ``z[out] = Σ x[axes[0]] · y[axes[1]]`` over the dims that `out` lacks, one iteration dim for each name.

    Args:
        name: Name of the operator.
        x: Shape of the first factor.
        y: Shape of the second factor.
        axes: Names of the dims of either factor.
        out: Names of the dims of the result.
        parameter: Which factor, 0 or 1, is trained, if any.
        kind: Kind of the operator.
        share: Fraction of the products that are computed, evenly over every dim (1/8 where each token is sent to one of
            eight experts).

    Raises:
        GraphError: Extents or names disagree.
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
    step = Step(result="products", function="einsum", operands=tuple(read.tensor for read in reads), dims=out)
    # No step expresses which of the products are computed, where only some are.
    part = (Work(dims=order, flop_per_point=2 * share, inputs=(0, 1), contraction=True),)
    return Operator(
        name=name,
        kind=kind,
        dims=dims_of({dim: extents[dim] for dim in order}),
        reads=reads,
        writes=(Access(tensor="z", shape=tuple(extents[dim] for dim in out), index_map=out),),
        work=part if share < 1 else WORK_OF_BODY,
        body=Body(steps=(step,)),
    )


def attention(name: str, q: Shape, k: Shape, v: Shape, *, causal: bool = False, is_fused: bool = False) -> Operator:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] / √k) v[b,t,h,k]``.

    Iteration space: b, h, s (queries), t (keys), k. A split of t exchanges the running maximum and sum of each query; a
    split of k exchanges the partial scores.

    Args:
        name: Name of the operator.
        q: Shape [b, s, h, k].
        k: Shape [b, t, h, k].
        v: Shape [b, t, h, k].
        causal: Whether a query attends to no later key (costed as the full square, as it is computed).
        is_fused: Whether the scores are never fully materialised, and are recomputed in the backward pass. One number
            per query is then saved; otherwise the softmax of the scores is.
    """
    if len(q) != 4 or len(k) != 4 or k != v or (q[0], *q[2:]) != (k[0], *k[2:]):
        raise GraphError(f"layer {name!r} reads shapes {q}, {k}, {v}; expected [b, s, h, k] and twice [b, t, h, k]")
    batch, queries, heads, size = q
    keys = k[1]
    dims = ("b", "h", "s", "t", "k")
    of_queries, of_keys, over_scores = ("b", "s", "h", "k"), ("b", "t", "h", "k"), dims[:4]
    # Forward, the maximum and the sum of each row; backward, the sum of its gradient.
    statistic = AllReduce(
        tensor="softmax",
        shape=(batch, heads, queries),
        index_map=("b", "h", "s"),
        over=("t",),
        times=3,
        backward_times=1,
        gradient_of=(0, 1),
    )
    scores = AllReduce(
        tensor="scores",
        shape=(batch, heads, queries, keys),
        index_map=over_scores,
        over=("k",),
        times=2,
        backward_times=1,
        gradient_of=(0, 1),
    )
    step = Step(
        result="attended",
        function="attention",
        operands=("q", "k", "v"),
        dims=dims,
        options=(("causal", causal), ("scale", 1 / sqrt(size))),
    )
    return Operator(
        name=name,
        kind="attention",
        dims=dims_of(dict(zip(dims, (batch, heads, queries, keys, size), strict=True))),
        reads=(
            Access(tensor="q", shape=q, index_map=of_queries),
            Access(tensor="k", shape=k, index_map=of_keys),
            Access(tensor="v", shape=v, index_map=of_keys),
        ),
        writes=(Access(tensor="y", shape=q, index_map=of_queries),),
        exchanges=(statistic, scores),
        intermediates=(
            Intermediate(tensor="log_sums", shape=statistic.shape, index_map=statistic.index_map, kept=1)
            if is_fused
            # Backward, its gradient, and that of the scores in its own type and in the product's type.
            else Intermediate(tensor="softmax", shape=scores.shape, index_map=over_scores, kept=1, working=3),
        ),
        body=Body(steps=(step,)),
        attributes=(("causal", causal),),
    )


# -- fused attention and ring attention: keys and values are split as the queries are and circulate (Liu et al. 2023)

AxisT = TypeVar("AxisT", bound=DimIndex)

_RING_PROBLEM = "its keys and values circulate in a ring, which only programs for PyTorch support"


def fused_attention(operator: Operator) -> Operator:
    """Return attention that never materialises all scores, as PyTorch's kernel does; any other layer unchanged."""
    statistic = _statistic(operator)
    if statistic is None:
        return operator
    log_sums = Intermediate(tensor="log_sums", shape=statistic.shape, index_map=statistic.index_map, kept=1)
    return replace(operator, intermediates=(log_sums,))


def ring_attention(operator: Operator) -> Operator:
    """Return ring attention, in which splitting the queries also splits keys and values; any other layer unchanged.

    Each device holds its part of the keys and values, and passes on the part that it received from the previous device
    until all devices have seen all parts. It sends (k - 1)/k of all keys and values forward; backward, the same again
    and their gradients. Partial results are combined by the maximum and the sum of their scores, so that the scores are
    never fully materialised. Cross-attention (queries and keys of different lengths) and masked attention all-gather
    their keys and values instead.
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
        body=replace(body, steps=(), problem=_RING_PROBLEM, own=with_ring(body.own or body)),
    )


def _statistic(operator: Operator) -> AllReduce | None:
    """Return the score statistics that attention all-reduces; None for other layers, or if there are none."""
    of_rows = (x for x in operator.exchanges if isinstance(x, AllReduce) and x.tensor == "softmax")
    return next(of_rows, None) if operator.kind == "attention" else None


def with_fused_attention(graph: Graph) -> Graph:
    """Return a graph whose attention is computed in one kernel."""
    return replace(graph, operators=tuple(map(fused_attention, graph.operators)))


def with_rings(graph: Graph, layers: Collection[str] | None = None) -> Graph:
    """Return a graph whose attention circulates keys and values in a ring where its sequence is split.

    Args:
        graph: The graph.
        layers: Names of the layers that may; None for all.
    """
    operators = (
        ring_attention(operator) if layers is None or operator.name in layers else operator
        for operator in graph.operators
    )
    return replace(graph, operators=tuple(operators))
