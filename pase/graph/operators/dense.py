"""`dense`: a matrix product over any number of leading, reduced and produced dims, with bias and activation."""

from pase.errors import GraphError
from pase.graph.access import Access, Dim, Role
from pase.graph.body import Step
from pase.graph.operator import Operator
from pase.graph.operators.activations import check_activation, finished

NamedExtents = tuple[tuple[str, int], ...]


def dense(
    name: str,
    x: tuple[int, ...],
    *,
    out: NamedExtents,
    lead: tuple[str, ...] = ("b",),
    reduce: tuple[str, ...] = ("c",),
    bias: bool = True,
    activation: str = "",
    shared: str = "",
) -> Operator:
    """Return ``y[lead, out] = activation(Σ_reduce x[lead, reduce] · w[reduce, out] + bias[out])``.

    x: shape [lead…, reduce…]. out: names and extents of the produced dims. shared: name of a weight that
    several layers use. Iteration space: lead, out, reduce. Raises GraphError where the rank of x does not fit.
    """
    if len(x) != len(lead) + len(reduce):
        raise GraphError(f"layer {name!r} reads shape {x}; expected dims {', '.join((*lead, *reduce))}")
    lead_dims = tuple(Dim(n, e) for n, e in zip(lead, x, strict=False))
    reduce_dims = tuple(Dim(n, e) for n, e in zip(reduce, x[len(lead) :], strict=True))
    out_dims = tuple(Dim(n, e) for n, e in out)
    out_names, out_shape = tuple(d.name for d in out_dims), tuple(d.extent for d in out_dims)
    weight = Access(
        tensor="w",
        shape=x[len(lead) :] + out_shape,
        index_map=(*reduce, *out_names),
        role=Role.PARAMETER,
        shared=shared,
    )
    reads = [Access(tensor="x", shape=x, index_map=(*lead, *reduce)), weight]
    if bias:
        # Added after the sum over `reduce`: its gradient is not a partial sum of a split there.
        reads.append(
            Access(tensor="bias", shape=out_shape, index_map=out_names, role=Role.PARAMETER, partial_over=tuple(lead))
        )
    return Operator(
        name=name,
        kind="dense",
        dims=(*lead_dims, *out_dims, *reduce_dims),
        reads=tuple(reads),
        writes=(Access(tensor="y", shape=x[: len(lead)] + out_shape, index_map=(*lead, *out_names)),),
        body=finished(
            Step(result="products", function="einsum", operands=("x", "w"), dims=(*lead, *out_names)),
            has_bias=bias,
            activation=activation,
        ),
        attributes=(("activation", check_activation(name, activation)),),
    )
