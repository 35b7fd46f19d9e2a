"""`batch_norm` and `layer_norm`: statistics over some dims, then a scale and a shift for each point of the others."""

from dataclasses import replace

from pase.graph.body import Step
from pase.graph.operator import Access, AllReduce, Intermediate, Operator, Role, Work, dims_of, extents_of
from pase.graph.operators.pointwise import check_activation, finished
from pase.graph.operators.windows import position_names

EPSILON = 1e-5
"""Added to the variance, as in the common implementations of batch and layer normalisation."""


def batch_norm(name: str, x: tuple[int, ...], *, activation: str = "", num_frozen: int = 0) -> Operator:
    """Return batch normalisation of x, shape [b, c, …]: statistics over all but c, a scale and a shift per channel.

    x has one to three spatial dims, the last ones of d, h, w. If they or b are split, the forward pass all-reduces the
    mean and the mean square of each channel, so that the result does not depend on the strategy. The two sums of the
    backward pass are the gradients of the shift and the scale, which are all-reduced as such.

    Args:
        name: Name of the operator.
        x: Shape of the input.
        activation: Function applied to the result, "" for none.
        num_frozen: How many of scale and shift are not trained; their sums are all-reduced if x has a gradient.
    """
    positions = position_names(name, x)
    dims, over = ("b", "c", *positions), ("b", *positions)
    found = _normalisation(
        name, "batch_norm", x, dims, over=over, scale=("c",), backward_times=0, activation=activation
    )
    (moments,) = found.exchanges
    assert isinstance(moments, AllReduce)
    sums = replace(moments, tensor="gradient_sums", shape=(num_frozen, x[1]), backward_times=1)
    return replace(found, exchanges=(moments, sums)) if num_frozen else found


def layer_norm(name: str, x: tuple[int, ...], *, dims: tuple[str, ...] = ("b", "s", "d")) -> Operator:
    """Return layer normalisation of x, shape [dims…], over its last dim, with a scale and a shift per point of it."""
    extents_of(name, x, dims)
    last = dims[-1:]
    return _normalisation(name, "layer_norm", x, dims, over=last, scale=last, backward_times=1, activation="")


def _normalisation(
    name: str,
    kind: str,
    x: tuple[int, ...],
    names: tuple[str, ...],
    *,
    over: tuple[str, ...],
    scale: tuple[str, ...],
    backward_times: int,
    activation: str,
) -> Operator:
    extents = extents_of(name, x, names)
    kept = tuple(n for n in names if n not in over)
    moments = AllReduce(
        tensor="moments",
        shape=(2, *(extents[n] for n in kept)),
        index_map=(None, *kept),
        over=over,
        times=1 + backward_times,
        backward_times=backward_times,
        gradient_of=(0,),
    )
    scale_shape = tuple(extents[n] for n in scale)
    return Operator(
        name=name,
        kind=kind,
        dims=dims_of(extents),
        reads=(
            Access(tensor="x", shape=x, index_map=names),
            Access(tensor="scale", shape=scale_shape, index_map=scale, role=Role.PARAMETER),
            Access(tensor="shift", shape=scale_shape, index_map=scale, role=Role.PARAMETER),
        ),
        writes=(Access(tensor="y", shape=x, index_map=names),),
        exchanges=(moments,),
        intermediates=(
            Intermediate(
                tensor="moments", shape=(2, *(extents[n] for n in kept)), index_map=(None, *kept), kept=1, working=1
            ),
            Intermediate(tensor="normalised", shape=x, index_map=names, working=2),
        ),
        # The scale is stored minus 1, so that weights of zero leave the normalised tensor unchanged.
        body=finished(
            Step(result="factor", function="add", operands=("scale", 1.0)),
            Step(
                result="normalised",
                function="normalise",
                operands=("x", "factor", "shift"),
                dims=over,
                options=(("epsilon", EPSILON),),
            ),
            activation=activation,
        ),
        attributes=(("activation", check_activation(name, activation)),),
    )


def normalising(
    names: tuple[str, ...], *, flop_per_point: float, scale: int | None, has_shift: bool
) -> tuple[Work, ...]:
    """Return the work of normalising the first read.

    Args:
        names: Dims of the tensor.
        flop_per_point: FLOP before the scale and the shift, which are a product and a sum.
        scale: Position of the read that is the scale, None for no scale.
        has_shift: Whether there is a shift.
    """
    work = [Work(dims=names, flop_per_point=flop_per_point, inputs=(0,))]
    if scale is not None:
        work.append(Work(dims=names, flop_per_point=1, inputs=(0, scale)))
    if has_shift:
        work.append(Work(dims=names, flop_per_point=1))
    return tuple(work)
