"""`normalise`: statistics over dims that may be split, the same for every strategy.

The mean and the variance are those of the whole tensor, not of a device's part (synchronised normalisation), in two
passes: squares of differences from the mean lose no digits where the mean is large.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import numbers
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, names_of


def normalise(
    x: Any, scale: Any, shift: Any, over: Sequence[Any], *, epsilon: float, moments: Sequence[Any] = ()
) -> Any:
    """Return ``(x - mean) / sqrt(variance + ε) · scale + shift``, with the moments of x over some of its dims.

    Over all dims but that of the scale it is batch normalisation (Ioffe and Szegedy 2015), over that of the scale layer
    normalisation (Ba et al. 2016). moments: the mean and the variance of x, where they are computed already.
    """
    names = {dim.name for dim in over}
    # Statistics keep a place for each dim of x, so that they meet it as they are.
    kept = [mtf.Dimension(f"one {dim.name}", 1) if dim.name in names else dim for dim in x.shape.dims]
    local = _Local(x, names, scale, epsilon)
    if moments:
        mean, variance = (
            Shardwise(local.in_place, [moment], shape=kept, name="moment").outputs[0] for moment in moments
        )
    else:
        mean = Shardwise(local.mean, [x], shape=kept, name="mean", partial_over=names).outputs[0]
        variance = Shardwise(local.variance, [x, mean], shape=kept, name="variance", partial_over=names).outputs[0]
    inverse = Shardwise(local.inverse_deviation, [variance], shape=kept, name="inverse_deviation").outputs[0]

    def gradient(dy: Any) -> list[Any]:
        statistics = [x, mean, inverse]
        lacking = names_of(x) - names_of(scale)
        points = {dim.name for dim in x.shape.dims if dim.size > 1}
        d_scale, d_shift = (
            Shardwise(each, inputs, shape=scale.shape, name=f"{name}_gradient", partial_over=lacking).outputs[0]
            for name, each, inputs in (
                ("scale", local.scale_gradient, [*statistics, dy]),
                ("shift", local.shift_gradient, [dy]),
            )
        )
        function: Callable[..., Any] = local.input_gradient
        if lacking & points == names & points:
            # The two sums over all points of a channel are those of its scale and its shift.
            sums, function = [d_scale, d_shift], local.input_gradient_from_weights
        else:
            sums = [
                Shardwise(each, inputs, shape=kept, name="gradient_sum", partial_over=names).outputs[0]
                for each, inputs in (
                    (local.sum_with_normalised, [*statistics, scale, dy]),
                    (local.plain_sum, [scale, dy]),
                )
            ]
        dx = Shardwise(function, [*statistics, scale, dy, *sums], shape=x.shape, name="normalise_gradient")
        return [dx.outputs[0], None, None, d_scale, d_shift]

    # The gradient of x is the whole one: nothing flows back through the statistics.
    operation = Shardwise(
        local.forward, [x, mean, inverse, scale, shift], shape=x.shape, name="normalise", gradient=gradient
    )
    return operation.outputs[0]


class _Local:
    """One device's part: shapes that let weights meet its shard of x. inverse: that of the standard deviation."""

    def __init__(self, x: Any, over: set[str], scale: Any, epsilon: float) -> None:
        devices = x.mesh.devices
        dims, weighted = x.shape.dims, names_of(scale)
        shape = [dim.size // devices.size(dim.name) if dim.name in weighted else 1 for dim in dims]
        # What stands last needs no places before it.
        last = [dim.name for dim in dims[len(dims) - len(weighted) :]]
        self._weight_shape = None if last == scale.shape.dimension_names else shape
        self._moment_shape = [1 if dim.name in over else dim.size // devices.size(dim.name) for dim in dims]
        self._reduced = [i for i, dim in enumerate(dims) if dim.name in over]
        self._unweighted = [i for i, dim in enumerate(dims) if dim.name not in weighted]
        self._num_points = prod(dims[i].size for i in self._reduced)
        self._epsilon = epsilon

    def in_place(self, moment: Any) -> Any:
        return tf.reshape(moment, numbers(self._moment_shape))

    def mean(self, x: Any) -> Any:
        return self._sum(x) / self._num_points

    def variance(self, x: Any, mean: Any) -> Any:
        return self._sum(tf.square(x - mean)) / self._num_points

    def inverse_deviation(self, variance: Any) -> Any:
        return tf.rsqrt(variance + self._epsilon)

    def forward(self, x: Any, mean: Any, inverse: Any, scale: Any, shift: Any) -> Any:
        return (x - mean) * inverse * self._weight(scale) + self._weight(shift)

    def scale_gradient(self, x: Any, mean: Any, inverse: Any, dy: Any) -> Any:
        return tf.reduce_sum(dy * ((x - mean) * inverse), numbers(self._unweighted))

    def shift_gradient(self, dy: Any) -> Any:
        return tf.reduce_sum(dy, numbers(self._unweighted))

    def sum_with_normalised(self, x: Any, mean: Any, inverse: Any, scale: Any, dy: Any) -> Any:
        return self._sum(dy * self._weight(scale) * ((x - mean) * inverse))

    def plain_sum(self, scale: Any, dy: Any) -> Any:
        return self._sum(dy * self._weight(scale))

    def input_gradient(
        self, x: Any, mean: Any, inverse: Any, scale: Any, dy: Any, with_normalised: Any, plain: Any
    ) -> Any:
        """``(g - Σ g / n - x̂ Σ g x̂ / n) / sqrt(variance + ε)``, g the gradient of the normalised tensor x̂."""
        means = (plain + (x - mean) * inverse * with_normalised) * (1 / self._num_points)
        return (dy * self._weight(scale) - means) * inverse

    def input_gradient_from_weights(
        self, x: Any, mean: Any, inverse: Any, scale: Any, dy: Any, d_scale: Any, d_shift: Any
    ) -> Any:
        means = (self._weight(d_shift) + (x - mean) * inverse * self._weight(d_scale)) / self._num_points
        return (dy - means) * self._weight(scale) * inverse

    def _sum(self, x: Any) -> Any:
        return tf.reduce_sum(x, numbers(self._reduced), keepdims=True)

    def _weight(self, value: Any) -> Any:
        return value if self._weight_shape is None else tf.reshape(value, numbers(self._weight_shape))
