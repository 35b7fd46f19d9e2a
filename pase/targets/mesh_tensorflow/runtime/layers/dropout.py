"""`dropout`: random points set to zero; each device draws the mask of its own part, whatever the strategy."""

from math import prod
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise
from pase.targets.mesh_tensorflow.runtime.masks import ROUND, WORD, layer_key, threshold

Ranges = tuple[tuple[int, int], ...]
"""Where a part begins and ends along each dim."""


def dropout(x: Any, key: Any, *, rate: float) -> Any:
    """Return ``x / (1 - rate)`` where a point is kept and 0 where it is dropped, the same points in the gradient.

    key: the step's, `Program.mask_key`. Points are dropped by it, the name of x's layer and their number in the whole
    tensor; with the key `masks.NOTHING_DROPPED` the result is x.
    """
    if not 0 <= rate < 1:
        raise RuntimeFailure(f"layer {x.mesh.layer!r} drops a fraction of {rate}; give a rate from 0 to below 1")
    shape = tuple(x.shape.to_integer_list)
    name = x.mesh.layer
    scale = 1 / (1 - rate)

    def masked(part: Ranges, x: Any) -> Any:
        drawn = _drawn(part, shape, tf.bitwise.bitwise_xor(key, tf.constant(layer_key(name))))
        is_evaluated = key[0] < 0
        factor = tf.where_v2(is_evaluated, tf.ones([], x.dtype), tf.constant(scale, x.dtype))
        is_kept = (drawn >= threshold(rate)) | is_evaluated
        return tf.where_v2(is_kept, x * factor, tf.zeros_like(x))

    def parts() -> list[Ranges]:
        return [_part(x, point) for point in x.mesh.devices.coordinates]

    def applied(x: Any, label: str, gradient: Any) -> Any:
        return Shardwise(masked, [x], shape=x.shape, name=label, per_position=parts, gradient=gradient).outputs[0]

    return applied(x, "dropout", lambda dy: [applied(dy, "dropout_gradient", None)])


def _part(x: Any, point: dict[str, int]) -> Ranges:
    sizes = [(dim.name, dim.size // x.mesh.devices.size(dim.name)) for dim in x.shape.dims]
    return tuple((point.get(name, 0) * size, (point.get(name, 0) + 1) * size) for name, size in sizes)


def _drawn(part: Ranges, shape: tuple[int, ...], key: Any) -> Any:
    """Return a word of 32 bits for each point of a part of a tensor, in 64 bits."""
    number = tf.zeros([1] * len(shape), tf.int64)
    for i, (begin, end) in enumerate(part):
        along = tf.range(begin, end, dtype=tf.int64) * prod(shape[i + 1 :])
        number += tf.reshape(along, [-1 if j == i else 1 for j in range(len(shape))])
    low = tf.bitwise.bitwise_and(number, np.int64(WORD - 1))
    words = tf.bitwise.bitwise_xor(_mixed(tf.bitwise.bitwise_xor(low, key[0])), key[1])
    if prod(shape) > WORD:
        high = _mixed(tf.bitwise.right_shift(number, np.int64(32)))
        words = tf.bitwise.bitwise_xor(words, high)
    return _mixed(words)


def _mixed(words: Any) -> Any:
    for shift, factor in ROUND:
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, np.int64(shift)))
        if factor != 1:
            words = tf.bitwise.bitwise_and(words * factor, np.int64(WORD - 1))
    return words
