"""`normalise` and `batch_norm`: statistics over dims that may be split, the same for every strategy.

Mean and variance are those of the whole tensor, not of a rank's shard (synchronised normalisation). They are computed
in two passes, since squared differences from the mean lose no precision where the mean is large. Where a rank has all
points of the statistics, PyTorch's own kernels compute them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.sharding.traffic import Phase
from pase.targets.torch.layers.points import apply, arrange
from pase.targets.torch.tensor import (
    Differentiated,
    Dim,
    Tensor,
    as_low,
    called,
    in_float32,
    in_order,
    local,
    one_mesh,
    resolved,
    spread,
)


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

    Over all dims except that of the scale it is batch normalisation (Ioffe and Szegedy 2015), over that of the scale
    layer normalisation (Ba et al. 2016). moments: mean and variance of x, if they are computed already.
    """
    if {*scale.names}.isdisjoint(dim.name for dim in over):
        if x.mesh.split(dim.name for dim in over):
            return _like(_by_sums(in_float32(x), scale, shift, over, epsilon)[0], x)
    else:
        x = in_float32(x)
    if moments:
        return _by_moments(x, moments, scale, shift, epsilon)
    if x.mesh.split(dim.name for dim in over):
        return _by_sums(x, scale, shift, over, epsilon)[0]
    order = _Order(x, over)
    if order.is_last:
        return _by_last(x, scale, shift, over, epsilon)
    channels = order.channels
    if channels and {*scale.names, *shift.names} <= {dim.name for dim in channels}:
        return _by_channels(x, scale, shift, channels, epsilon)
    names = {dim.name for dim in over}
    behind = arrange(x, [*(dim for dim in x.dims if dim.name not in names), *over])
    return arrange(_by_last(behind, scale, shift, over, epsilon), x.dims)


def batch_norm(
    program: Any,
    x: Tensor,
    scale: Tensor | float,
    shift: Tensor | float,
    over: Sequence[Dim],
    *,
    kept: Sequence[Tensor],
    epsilon: float,
    momentum: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """Return batch normalisation, by the batch's statistics in training, otherwise by the running ones.

    Args:
        program: Stores the running statistics.
        x: The input.
        scale: Multiplied with the normalised input.
        shift: Added to that.
        over: Dims of the statistics.
        kept: Running mean and variance.
        epsilon: Added to the variance.
        momentum: Weight of the batch's statistics in the update of the running ones, 0 for no update.
        factor: Factor of the batch's variance in the update: n / (n - 1) for an unbiased one.
    """
    channels = _Order(x, over).channels
    if not program.trains:
        if not channels:
            return _by_moments(x, kept, scale, shift, epsilon)
        return _by_channels(x, scale, shift, channels, epsilon, kept=kept)
    if channels and not x.mesh.split(dim.name for dim in over):
        # PyTorch's function updates statistics in place: from zeros this gives those of the batch.
        number = prod(dim.size for dim in over)
        new = tuple(_blank(moment, channels) if momentum else None for moment in kept)
        found = _by_channels(x, scale, shift, channels, epsilon, new=new)
        ratio = factor * (number - 1) / number
        moments = [(x, 1.0 if abs(share - 1) < 1e-12 else share) for x, share in zip(new, (1.0, ratio), strict=True)]
    else:
        found, *own = _by_sums(in_float32(x), scale, shift, over, epsilon)
        found = _like(found, x)
        moments = list(zip(own, (1.0, factor), strict=True))
    for statistic, (moment, share) in zip(kept, moments, strict=True) if momentum else ():
        assert moment is not None
        value = apply("multiply", moment, share) if share != 1 else moment
        program.keep(statistic, arrange(value, statistic.dims), momentum=momentum)
    return found


def _blank(moment: Tensor, channels: Sequence[Dim]) -> Tensor:
    """Return zeros that the moments of a batch are put in place of."""
    zeros = local(torch.zeros_like, [moment], moment.dims)
    # Outside of any layer, as those may be recomputed after the running statistics have changed.
    zeros.value.node.meta["layer"] = ""
    return local(torch.clone, [arrange(zeros, channels)], channels)


def _like(y: Tensor, x: Tensor) -> Tensor:
    """Return what was computed in float32 in the type of a tensor, where the program has products in a low one."""
    return local(lambda a, b: called(as_low, a, b), [y, x], y.dims) if x.mesh.program.low else y


class _Order:
    """Positions of the dims of the statistics in a tensor.

    Attributes:
        is_last: Whether they are the last ones.
        channels: The other dims, if they are adjacent, otherwise none.
    """

    def __init__(self, x: Tensor, over: Sequence[Dim]) -> None:
        names = {dim.name for dim in over}
        places = [i for i, dim in enumerate(x.dims) if dim.name not in names]
        self.is_last = places == list(range(len(places)))
        are_neighbours = bool(places) and places == list(range(places[0], places[-1] + 1))
        self.channels = x.dims[places[0] : places[-1] + 1] if are_neighbours else ()


def _by_moments(
    x: Tensor, moments: Sequence[Tensor], scale: Tensor | float, shift: Tensor | float, epsilon: float
) -> Tensor:
    centre, variance = moments
    inverse = apply("rsqrt", apply("add", variance, epsilon))
    return _scaled(apply("multiply", apply("subtract", x, centre), inverse), scale, shift, x.dims)


def _scaled(x: Tensor, scale: Tensor | float, shift: Tensor | float, dims: Sequence[Dim]) -> Tensor:
    x = x if scale == 1 else apply("multiply", x, scale)
    return arrange(x if shift == 0 else apply("add", x, shift), dims)


# -- PyTorch's kernels


def _by_last(x: Tensor, scale: Tensor, shift: Tensor, over: Sequence[Dim], epsilon: float) -> Tensor:
    """Return layer normalisation, or group normalisation where the scale has dims before those that moments are of."""
    count = len(over)
    lead, last = x.dims[: len(x.dims) - count], x.dims[len(x.dims) - count :]
    shape = tuple(map(x.mesh.part, last))
    if {*scale.names, *shift.names} <= {dim.name for dim in last}:

        def of_layer(x: Any, scales: Any, shifts: Any) -> Any:
            return functional.layer_norm(x, shape, _whole(scales, scale, last), _whole(shifts, shift, last), epsilon)

        return local(of_layer, [x, scale, shift], x.dims)
    groups = tuple(dim for dim in lead if dim.name in scale.names)
    channels = last[: len(scale.dims) - len(groups)]
    if scale.dims == shift.dims == groups + channels and groups == lead[len(lead) - len(groups) :]:
        batch, of_group = (prod(map(x.mesh.part, dims)) for dims in (lead[: len(lead) - len(groups)], groups))
        flat = prod(scale.shard)

        def of_groups(shard: Any, scales: Any, shifts: Any) -> Any:
            y = shard.reshape((batch, flat, prod(x.shard) // (batch * flat)))
            y = functional.group_norm(y, of_group, scales.reshape(-1), shifts.reshape(-1), epsilon)
            return y.reshape(x.shard)

        return local(of_groups, [x, scale, shift], x.dims)
    return _scaled(
        local(lambda x: functional.layer_norm(x, shape, None, None, epsilon), [x], x.dims), scale, shift, x.dims
    )


def _whole(shard: Any, x: Tensor, dims: Sequence[Dim]) -> Any:
    shard = in_order(shard, x, dims)
    return shard if x.dims == tuple(dims) else shard.expand(tuple(map(x.mesh.part, dims)))


def _by_channels(
    x: Tensor,
    scale: Tensor | float,
    shift: Tensor | float,
    channels: Sequence[Dim],
    epsilon: float,
    *,
    kept: Sequence[Tensor] = (),
    new: Sequence[Tensor | None] = (None, None),
) -> Tensor:
    """Return batch normalisation with adjacent channel dims, by running statistics `kept`, or into `new`."""
    first = x.dims.index(channels[0])
    sizes = tuple(map(x.mesh.part, channels))
    before, after = (prod(map(x.mesh.part, dims)) for dims in (x.dims[:first], x.dims[first + len(channels) :]))
    shape = (before, prod(sizes), after) if after > 1 or len(x.dims) > 2 else (before, prod(sizes))
    # Tensors with batch and channels first keep their memory format.
    is_plain = first == len(channels) == 1
    weights = [w if isinstance(w, Tensor) and w.dims else None for w in (scale, shift)]
    operands = [w for w in weights if w is not None]
    moments = [arrange(moment, channels) for moment in kept] or [moment for moment in new if moment is not None]

    def compute(shard: Any, *values: Any) -> Any:
        rest = iter(values)
        own = [None if w is None else _whole(next(rest), w, channels).reshape(-1) for w in weights]
        running = [moment.reshape(-1) for moment in rest] or [None, None]
        y = shard if is_plain else shard.reshape(shape)
        y = torch.batch_norm(y, *own, *running, not kept, 1.0, epsilon, torch.backends.cudnn.enabled)
        return y if is_plain else y.reshape(x.shard)

    y = local(compute, [x, *operands, *moments], x.dims)
    return _scaled(y, 1 if weights[0] is not None else scale, 0 if weights[1] is not None else shift, x.dims)


# -- sums over ranks


def _by_sums(
    x: Tensor, scale: Tensor | float, shift: Tensor | float, over: Sequence[Dim], epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensor normalised by statistics that ranks reduce, and the mean and the variance."""
    mesh, names = x.mesh, {dim.name for dim in over}
    x = resolved(x)
    places = tuple(i for i, dim in enumerate(x.dims) if dim.name in names)
    kept = tuple(dim for dim in x.dims if dim.name not in names)
    weights = [resolved(w) if isinstance(w, Tensor) else None for w in (scale, shift)]
    one_mesh([x, *(w for w in weights if w is not None)])
    # Sums over all but the dims of scale and shift are the two that the gradient of x needs, too.
    wide = {dim.name for dim in kept if dim.size > 1}
    are_sums = all(w is not None and {dim.name for dim in w.dims if dim.size > 1} == wide for w in weights)
    brought = mesh.split(x.names)
    if not are_sums:
        weights = [w if w is None else spread(w, brought - {*w.names}) for w in weights]
    # In the order of x.
    weights = [None if w is None else arrange(w, [dim for dim in x.dims if dim.name in w.names]) for w in weights]
    shapes = tuple(
        None if w is None else tuple(mesh.part(dim) if dim.name in w.names else 1 for dim in x.dims) for w in weights
    )
    program = mesh.program
    summed = brought - {dim.name for dim in kept}
    module = Differentiated(
        _Normalise,
        places=places,
        num_points=prod(dim.size for dim in over),
        epsilon=epsilon,
        shapes=shapes,
        over=program.adder(mesh, names),
        of_weights=program.adder(mesh, summed, [w for w in weights if w is not None]) if are_sums else None,
    )
    found = program.run(module, x.value, "normalise", *(None if w is None else w.value for w in weights))
    y = Tensor(value=found[0], mesh=mesh, dims=x.dims)
    moments = [Tensor(value=found[i].reshape(tuple(map(mesh.part, kept))), mesh=mesh, dims=kept) for i in (1, 2)]
    y = _scaled(y, 1 if weights[0] is not None else scale, 0 if weights[1] is not None else shift, x.dims)
    return y, moments[0], moments[1]


class _Normalise(torch.autograd.Function):
    """Normalises by statistics that several ranks reduce; also returns these, without a gradient.

    Arguments of `forward`:
        places: Positions of the statistics' dims.
        num_points: Number of points of the statistics, on all ranks.
        shapes: Shapes in which scale and shift are broadcast to x, None where missing.
        over: All-reduces the statistics.
        of_weights: All-reduces the gradients of scale and shift, where these are the sums that the gradient of x needs;
            other gradients remain partial, and are reduced later.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, shift: Any, module: Differentiated) -> Any:
        summed, places, count = module.over.summed, module.places, module.num_points
        centre = summed(x.sum(places, keepdim=True), Phase.FORWARD) / count
        variance = summed((x - centre).square().sum(places, keepdim=True), Phase.FORWARD) / count
        inverse = torch.rsqrt(variance + module.epsilon)
        factor, added = (
            None if w is None else w.reshape(shape) for w, shape in zip((scale, shift), module.shapes, strict=True)
        )
        ctx.module, ctx.shapes = module, [None if w is None else w.shape for w in (scale, shift)]
        ctx.save_for_backward(x, centre, inverse, factor)
        ctx.mark_non_differentiable(centre, variance)
        y = (x - centre) * inverse
        y = y if factor is None else y * factor
        return y if added is None else y + added, centre, variance

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        """Return, for x, ``(g - Σ g / n - x̂ Σ g x̂ / n) / sqrt(variance + ε)``, with g the gradient of x̂."""
        module = ctx.module
        x, centre, inverse, factor = ctx.saved_tensors
        needs_x, needs_scale, needs_shift, _ = ctx.needs_input_grad
        normal = (x - centre) * inverse
        of_weights = module.of_weights
        # The gradient of x needs both where they are its sums, too.
        is_needed = needs_x and of_weights is not None
        d_scale = _part_of(module.shapes[0], dy * normal) if needs_scale or is_needed else None
        d_shift = _part_of(module.shapes[1], dy) if needs_shift or is_needed else None
        dx = None
        if of_weights is not None:
            if needs_scale == needs_shift:
                d_scale, d_shift = of_weights.summed(
                    torch.stack([d_scale, d_shift]), of_weights.phase if needs_scale else Phase.FORWARD
                )
            else:
                # That of a frozen one is an exchange within the layer's computation.
                d_scale, d_shift = (
                    d if d is None else of_weights.summed(d, of_weights.phase if is_trained else Phase.FORWARD)
                    for d, is_trained in ((d_scale, needs_scale), (d_shift, needs_shift))
                )
            if needs_x:
                dx = (dy - (d_shift + normal * d_scale) / module.num_points) * (factor * inverse)
        elif needs_x:
            g = dy if factor is None else dy * factor
            parts = [part.sum(module.places, keepdim=True) for part in (g, g * normal)]
            # Exchanges within a layer's computation count as forward, in either pass.
            plain, with_normal = module.over.summed(torch.stack(parts), Phase.FORWARD)
            dx = (g - (plain + normal * with_normal) / module.num_points) * inverse
        found = (
            d.reshape(shape) if is_trained and d is not None else None
            for d, shape, is_trained in zip((d_scale, d_shift), ctx.shapes, (needs_scale, needs_shift), strict=True)
        )
        return dx, *found, None


def _part_of(shape: Sequence[int], dy: Any) -> Any:
    """Return the partial gradient of a weight from some points; shape: in which the weight is broadcast to these."""
    # A sum over no dims would be one over all of them.
    places = [i for i, extent in enumerate(shape) if extent < dy.shape[i]]
    return dy.sum(places, keepdim=True) if places else dy
