"""`batch_norm` and `layer_norm`: statistics over dims that may be split, the same for every strategy.

The mean and the variance are those of the whole tensor, not of a device's part (synchronised normalisation), in two
passes: squares of differences from the mean lose no digits where the mean is large.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, names_of

EPSILON = 1e-5
"""Added to the variance: in both papers' common implementations of batch normalisation, and here for both kinds."""


def batch_norm(x: Any, scale: Any, shift: Any) -> Any:
    """Return batch normalisation of x, dims [b, c, …]: statistics over all dims but c (Ioffe and Szegedy 2015).

    scale: dims [c], counted from 1, so that weights of zero leave the normalised tensor as it is; shift: [c].
    """
    (channel,) = scale.shape.dims
    return _normalised(x, scale, shift, [dim for dim in x.shape.dims if dim == channel])


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    """Return layer normalisation of x, dims [b, …, d]: statistics over d for each point (Ba et al. 2016).

    scale: dims [d], counted from 1; shift: [d].
    """
    (feature,) = scale.shape.dims
    return _normalised(x, scale, shift, [dim for dim in x.shape.dims if dim != feature])


def _normalised(x: Any, scale: Any, shift: Any, kept: Sequence[Any]) -> Any:
    """Return ``(x - mean) / sqrt(variance + ε) · (1 + scale) + shift``; kept: the dims that statistics have."""
    over = names_of(x) - {dim.name for dim in kept}
    reduced = [i for i, dim in enumerate(x.shape.dims) if dim.name in over]
    num_points = prod(x.shape.dims[i].size for i in reduced)
    local = _Local(x, kept, scale, reduced, num_points)
    mean = Shardwise(local.mean, [x], shape=list(kept), name="mean", partial_over=over).outputs[0]
    variance = Shardwise(local.variance, [x, mean], shape=list(kept), name="variance", partial_over=over).outputs[0]

    def gradient(dy: Any) -> list[Any]:
        statistics = [x, mean, variance]
        lacking = names_of(x) - names_of(scale)
        d_scale, d_shift = (
            Shardwise(each, inputs, shape=scale.shape, name=f"{name}_gradient", partial_over=lacking).outputs[0]
            for name, each, inputs in (
                ("scale", local.scale_gradient, [*statistics, dy]),
                ("shift", local.shift_gradient, [dy]),
            )
        )
        function: Callable[..., Any] = local.input_gradient
        if lacking == over:
            # The two sums over all points of a channel are those of its scale and its shift.
            sums, function = [d_scale, d_shift], local.input_gradient_from_weights
        else:
            sums = [
                Shardwise(each, inputs, shape=list(kept), name="gradient_sum", partial_over=over).outputs[0]
                for each, inputs in (
                    (local.sum_with_normalised, [*statistics, scale, dy]),
                    (local.plain_sum, [scale, dy]),
                )
            ]
        dx = Shardwise(function, [*statistics, scale, dy, *sums], shape=x.shape, name="normalise_gradient")
        return [dx.outputs[0], None, None, d_scale, d_shift]

    # The gradient of x is the whole one: nothing flows back through the statistics.
    operation = Shardwise(
        local.forward, [x, mean, variance, scale, shift], shape=x.shape, name="normalise", gradient=gradient
    )
    return operation.outputs[0]


class _Local:
    """One device's part: shapes that let statistics and weights meet its shard of x."""

    def __init__(self, x: Any, kept: Sequence[Any], scale: Any, reduced: list[int], num_points: int) -> None:
        devices = x.mesh.devices
        local = {dim.name: dim.size // devices.size(dim.name) for dim in x.shape.dims}
        names = [dim.name for dim in x.shape.dims]
        held, weighted = {dim.name for dim in kept}, names_of(scale)
        self._statistic_shape = [local[name] if name in held else 1 for name in names]
        self._weight_shape = [local[name] if name in weighted else 1 for name in names]
        self._reduced = reduced
        self._unweighted = [i for i, name in enumerate(names) if name not in weighted]
        self._num_points = num_points

    def mean(self, x: Any) -> Any:
        return tf.reduce_sum(x, self._reduced) / self._num_points

    def variance(self, x: Any, mean: Any) -> Any:
        return tf.reduce_sum(tf.square(x - self._statistic(mean)), self._reduced) / self._num_points

    def forward(self, x: Any, mean: Any, variance: Any, scale: Any, shift: Any) -> Any:
        return self._normal(x, mean, variance) * self._weight(1 + scale) + self._weight(shift)

    def scale_gradient(self, x: Any, mean: Any, variance: Any, dy: Any) -> Any:
        return tf.reduce_sum(dy * self._normal(x, mean, variance), self._unweighted)

    def shift_gradient(self, dy: Any) -> Any:
        return tf.reduce_sum(dy, self._unweighted)

    def sum_with_normalised(self, x: Any, mean: Any, variance: Any, scale: Any, dy: Any) -> Any:
        return tf.reduce_sum(dy * self._weight(1 + scale) * self._normal(x, mean, variance), self._reduced)

    def plain_sum(self, scale: Any, dy: Any) -> Any:
        return tf.reduce_sum(dy * self._weight(1 + scale), self._reduced)

    def input_gradient(
        self, x: Any, mean: Any, variance: Any, scale: Any, dy: Any, with_normalised: Any, plain: Any
    ) -> Any:
        """``(g - Σ g / n - x̂ Σ g x̂ / n) / sqrt(variance + ε)``, g the gradient of the normalised tensor x̂."""
        means = (self._statistic(plain) + self._normal(x, mean, variance) * self._statistic(with_normalised)) * (
            1 / self._num_points
        )
        return (dy * self._weight(1 + scale) - means) * self._inverse_deviation(variance)

    def input_gradient_from_weights(
        self, x: Any, mean: Any, variance: Any, scale: Any, dy: Any, d_scale: Any, d_shift: Any
    ) -> Any:
        means = (self._weight(d_shift) + self._normal(x, mean, variance) * self._weight(d_scale)) / self._num_points
        return (dy - means) * self._weight(1 + scale) * self._inverse_deviation(variance)

    def _normal(self, x: Any, mean: Any, variance: Any) -> Any:
        return (x - self._statistic(mean)) * self._inverse_deviation(variance)

    def _inverse_deviation(self, variance: Any) -> Any:
        return self._statistic(tf.rsqrt(variance + EPSILON))

    def _statistic(self, value: Any) -> Any:
        return tf.reshape(value, self._statistic_shape)

    def _weight(self, value: Any) -> Any:
        return tf.reshape(value, self._weight_shape)
