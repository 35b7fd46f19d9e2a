"""`normalise`: statistics over dims that may be split, the same for every strategy.

The mean and the variance are those of the whole tensor, not of a rank's part (synchronised normalisation), in two
passes: squares of differences from the mean lose no digits where the mean is large.
"""

from collections.abc import Sequence
from typing import Any

from torch.nn import functional

from pase.targets.torch.layers.points import apply, arrange
from pase.targets.torch.layers.reductions import mean
from pase.targets.torch.tensor import Dim, Tensor, in_order, local


def normalise(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    over: Sequence[Dim],
    *,
    epsilon: float,
    moments: Sequence[Tensor] = (),
) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + ε) · scale + shift``, with the moments of x over some of its dims.

    Over all dims but that of the scale it is batch normalisation (Ioffe and Szegedy 2015), over that of the scale layer
    normalisation (Ba et al. 2016). moments: the mean and the variance of x, where they are computed already.
    """
    names = {dim.name for dim in over}
    is_last = {dim.name for dim in x.dims[len(x.dims) - len(over) :]} == names
    if is_last and not x.mesh.split(names) and not moments and {*scale.names, *shift.names} <= names:
        return _layer_norm(x, scale, shift, len(over), epsilon)
    if moments:
        centre, variance = moments
        lower = apply("subtract", x, centre)
    else:
        lower = apply("subtract", x, mean(x, over))
        variance = mean(apply("square", lower), over)
    inverse = apply("rsqrt", apply("add", variance, epsilon))
    found = apply("add", apply("multiply", apply("multiply", lower, inverse), scale), shift)
    return arrange(found, x.dims)


def _layer_norm(x: Tensor, scale: Tensor, shift: Tensor, count: int, epsilon: float) -> Tensor:
    dims = x.dims[len(x.dims) - count :]
    shape = tuple(map(x.mesh.part, dims))

    def compute(x: Any, scales: Any, shifts: Any) -> Any:
        scales, shifts = in_order(scales, scale, dims).expand(shape), in_order(shifts, shift, dims).expand(shape)
        return functional.layer_norm(x, shape, scales, shifts, epsilon)

    return local(compute, [x, scale, shift], x.dims)
