"""`attention`: scaled dot-product attention over heads, as one vertex."""

from math import sqrt

from pase.errors import GraphError
from pase.graph.access import Access, Dim
from pase.graph.body import Body, Step
from pase.graph.operator import AllReduce, Intermediate, Operator


def attention(
    name: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    *,
    causal: bool = False,
    is_fused: bool = False,
) -> Operator:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] / √k) v[b,t,h,k]``.

    q: shape [b, s, h, k]; k, v: [b, t, h, k]. Iteration space: b, h, s (queries), t (keys), k. A split of t
    exchanges the running maximum and sum of each query; a split of k the partial scores. causal: a query
    attends to no later key (costed as the full square, as it is computed). is_fused: the scores are never
    whole in memory, and computed again backward: one number is kept for each query; otherwise their softmax is.
    """
    if len(q) != 4 or len(k) != 4 or k != v or (q[0], *q[2:]) != (k[0], *k[2:]):
        raise GraphError(f"layer {name!r} reads shapes {q}, {k}, {v}; expected [b, s, h, k] and twice [b, t, h, k]")
    batch, queries, heads, size = q
    keys = k[1]
    over_scores = ("b", "h", "s", "t")
    # Forward the maximum and the sum of each row, backward the sum of its gradient.
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
    return Operator(
        name=name,
        kind="attention",
        dims=(Dim("b", batch), Dim("h", heads), Dim("s", queries), Dim("t", keys), Dim("k", size)),
        reads=(
            Access(tensor="q", shape=q, index_map=("b", "s", "h", "k")),
            Access(tensor="k", shape=k, index_map=("b", "t", "h", "k")),
            Access(tensor="v", shape=v, index_map=("b", "t", "h", "k")),
        ),
        writes=(Access(tensor="y", shape=q, index_map=("b", "s", "h", "k")),),
        exchanges=(statistic, scores),
        intermediates=(
            Intermediate(tensor="log_sums", shape=statistic.shape, index_map=statistic.index_map, kept=1)
            if is_fused
            # Backward, its gradient, and that of the scores as it is and as a product takes it.
            else Intermediate(tensor="softmax", shape=scores.shape, index_map=over_scores, kept=1, working=3),
        ),
        body=Body(
            steps=(
                Step(
                    result="attended",
                    function="attention",
                    operands=("q", "k", "v"),
                    dims=(*over_scores, "k"),
                    options=(("causal", causal), ("scale", 1 / sqrt(size))),
                ),
            )
        ),
        attributes=(("causal", causal),),
    )
