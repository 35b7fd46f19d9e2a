"""Functions over dims of a tensor, which may be split: sums, means, maxima, softmax, and later keys left out."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, Slices, begins
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
