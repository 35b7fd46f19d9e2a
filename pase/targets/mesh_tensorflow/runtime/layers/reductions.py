"""Functions over dims of a tensor, which may be split: sums, maxima, softmax, later keys left out, normalisations.

The mean and the variance of a normalisation are those of the whole tensor, not of a device's part (synchronised
normalisation), in two passes: squares of differences from the mean lose no digits where the mean is large.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import numbers
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, Slices, begins, names_of
from pase.targets.mesh_tensorflow.runtime.layers.points import apply, arrange


def total(x: Any, over: Sequence[Any]) -> Any:
    """Return the sum of a tensor over some of its dims."""
    kept, places = _reduced(x, over)
    names = [dim.name for dim in over]
    return Shardwise(
        lambda local: tf.reduce_sum(local, places), [x], shape=kept, name="sum", partial_over=names
    ).outputs[0]


def mean(x: Any, over: Sequence[Any]) -> Any:
    """Return the mean of a tensor over some of its dims."""
    return apply("multiply", total(x, over), 1 / prod(dim.size for dim in over))


def greatest(x: Any, over: Sequence[Any]) -> Any:
    """Return the maximum of a tensor over some of its dims; its gradient goes to all points that are as great."""
    return _Greatest(x, over).outputs[0]


def least(x: Any, over: Sequence[Any]) -> Any:
    """Return the minimum of a tensor over some of its dims."""
    return apply("negate", greatest(apply("negate", x), over))


def softmax(x: Any, over: Sequence[Any]) -> Any:
    """Return exponentials divided by their sum over some dims."""

    def gradient(dy: Any) -> list[Any]:
        inner = total(apply("multiply", y, dy), over)
        return [apply("multiply", y, apply("subtract", dy, inner)), None, None]

    y = _normalised(x, over, lambda x, top, sums: tf.exp(x - top) / sums, gradient, "softmax")
    return y


def log_softmax(x: Any, over: Sequence[Any]) -> Any:
    """Return the logarithm of the softmax over some dims."""

    def gradient(dy: Any) -> list[Any]:
        return [apply("subtract", dy, apply("multiply", apply("exp", y), total(dy, over))), None, None]

    y = _normalised(x, over, lambda x, top, sums: x - top - tf.log(sums), gradient, "log_softmax")
    return y


def _normalised(
    x: Any, over: Sequence[Any], function: Callable[..., Any], gradient: Callable[[Any], list[Any]], name: str
) -> Any:
    """Return a function of x, its maximum and its sum of exponentials, which keep no gradients of their own."""
    kept, places = _reduced(x, over)

    def spread(local: Any) -> Any:
        for place in places:
            local = tf.expand_dims(local, place)
        return local

    top = _Greatest(x, over, is_constant=True).outputs[0]
    sums = Shardwise(
        lambda x, top: tf.reduce_sum(tf.exp(x - spread(top)), places),
        [x, top],
        shape=kept,
        name=f"{name}_sum",
        partial_over=[dim.name for dim in over],
        is_constant=True,
    ).outputs[0]
    return Shardwise(
        lambda x, top, sums: function(x, spread(top), spread(sums)),
        [x, top, sums],
        shape=x.shape,
        name=name,
        gradient=gradient,
    ).outputs[0]


def without_later_keys(scores: Any, query: Any, key: Any) -> Any:
    """Return scores with -inf for keys later than the query, by their positions in the whole sequence."""
    names = scores.shape.dimension_names
    places = names.index(query.name), names.index(key.name)

    def compute(first: tuple[int, int], local: Any) -> Any:
        extents = local.shape.as_list()
        positions = []
        for place, begin in zip(places, first, strict=True):
            shape = [1] * len(extents)
            shape[place] = extents[place]
            positions.append(tf.reshape(tf.range(extents[place]) + begin, shape))
        return tf.where_v2(positions[1] > positions[0], tf.constant(float("-inf"), local.dtype), local)

    def first() -> list[tuple[int, int]]:
        return list(zip(begins(scores.mesh, query), begins(scores.mesh, key), strict=True))

    return Shardwise(compute, [scores], shape=scores.shape, name="causal", per_position=first, recompute=True).outputs[
        0
    ]


def _reduced(x: Any, over: Sequence[Any]) -> tuple[list[Any], list[int]]:
    names = {dim.name for dim in over}
    if not names <= set(x.shape.dimension_names):
        raise ProgramError(
            f"layer {x.mesh.layer!r} reduces {x.shape.to_string} over {', '.join(sorted(names))}, which it has not"
        )
    kept = [dim for dim in x.shape.dims if dim.name not in names]
    return kept, [i for i, dim in enumerate(x.shape.dims) if dim.name in names]


class _Greatest(mtf.Operation):
    """The maximum over dims, over the devices that they are split among too."""

    def __init__(self, x: Any, over: Sequence[Any], *, is_constant: bool = False) -> None:
        super().__init__([x], mesh=x.mesh, name="max")
        kept, self._places = _reduced(x, over)
        self._over = list(over)
        self._is_constant = is_constant
        self._outputs = [mtf.Tensor(self, mtf.Shape(kept), x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """Whether anything flows back."""
        return not self._is_constant

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the output's gradient where x is as great, in equal parts; in x's order of dims."""
        (x,) = self.inputs
        is_greatest = apply("equal", x, self.outputs[0])
        share = apply("divide", grad_ys[0], total(is_greatest, self._over))
        return [arrange(apply("multiply", is_greatest, share), x.shape.dims)]

    def lower(self, lowering: Any) -> None:
        """Take the maximum on each device, then among them."""
        local = Slices(lowering, self)
        found = local.each(lambda x: tf.reduce_max(x, self._places), local.inputs[0])
        found = local.reduced(found, self._over, "MAX")
        lowering.set_tensor_lowering(self.outputs[0], found)


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
        if not _is_of_weights(x):
            return [None, None, None, d_scale, d_shift]
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


def _is_of_weights(x: Any) -> bool:
    """Return whether a tensor is computed of any weight; data need no gradient, nor the sums that it takes."""
    waiting, known = [x.operation], set[Any]()
    while waiting:
        operation = waiting.pop()
        if isinstance(operation, mtf.Variable):
            return True
        if operation not in known:
            known.add(operation)
            waiting += [read.operation for read in operation.inputs]
    return False


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
