"""Functions over dims of a tensor, which may be split: sums, means, maxima, softmax, and later keys left out."""

from collections.abc import Sequence
from math import prod
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.points import apply
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise, begins


def total(x: Any, over: Sequence[Any]) -> Any:
    """Return the sum of a tensor over some of its dims."""
    return _local_reduction(x, over, tf.reduce_sum, is_sum=True)


def mean(x: Any, over: Sequence[Any]) -> Any:
    """Return the mean of a tensor over some of its dims."""
    return apply("multiply", total(x, over), 1 / prod(dim.size for dim in over))


def greatest(x: Any, over: Sequence[Any]) -> Any:
    """Return the maximum of a tensor over some of its dims."""
    return _Greatest(x, over).outputs[0]


def least(x: Any, over: Sequence[Any]) -> Any:
    """Return the minimum of a tensor over some of its dims."""
    return apply("negate", greatest(apply("negate", x), over))


def softmax(x: Any, over: Sequence[Any]) -> Any:
    """Return exponentials divided by their sum over some dims."""
    powers = apply("exp", apply("subtract", x, greatest(x, over)))
    return apply("divide", powers, total(powers, over))


def log_softmax(x: Any, over: Sequence[Any]) -> Any:
    """Return the logarithm of the softmax over some dims."""
    centred = apply("subtract", x, greatest(x, over))
    return apply("subtract", centred, apply("log", total(apply("exp", centred), over)))


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

    return Shardwise(compute, [scores], shape=scores.shape, name="causal", per_position=first).outputs[0]


def _local_reduction(x: Any, over: Sequence[Any], function: Any, *, is_sum: bool) -> Any:
    kept, places = _reduced(x, over)
    names = [dim.name for dim in over]
    return Shardwise(
        lambda local: function(local, places), [x], shape=kept, name="sum", partial_over=names if is_sum else ()
    ).outputs[0]


def _reduced(x: Any, over: Sequence[Any]) -> tuple[list[Any], list[int]]:
    names = {dim.name for dim in over}
    if not names <= set(x.shape.dimension_names):
        raise RuntimeFailure(
            f"layer {x.mesh.layer!r} reduces {x.shape.to_string} over {', '.join(sorted(names))}, which it has not"
        )
    kept = [dim for dim in x.shape.dims if dim.name not in names]
    return kept, [i for i, dim in enumerate(x.shape.dims) if dim.name in names]


class _Greatest(mtf.Operation):
    """The maximum over dims, over the devices that they are split among too."""

    def __init__(self, x: Any, over: Sequence[Any]) -> None:
        super().__init__([x], mesh=x.mesh, name="max")
        kept, self._places = _reduced(x, over)
        self._over = {dim.name for dim in over}
        self._outputs = [mtf.Tensor(self, mtf.Shape(kept), x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """Nothing flows back."""
        return False

    def lower(self, lowering: Any) -> None:
        """Take the maximum on each device, then among them."""
        implementation = lowering.mesh_impl(self)
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        found = implementation.slicewise(lambda local: tf.reduce_max(local, self._places), x)
        axes = [i for i, axis in enumerate(implementation.shape.dims) if axis.name in self._over]
        if axes:
            found = implementation.allreduce(found, axes, "MAX")
        lowering.set_tensor_lowering(self.outputs[0], found)
