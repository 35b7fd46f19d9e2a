"""What each kind of operator computes, in plain TensorFlow on whole tensors: written apart from the parallel layers."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any

from pase.graph import Operator, Window
from pase.targets.mesh_tensorflow.primitives.compat import tf

Compute = Callable[[Operator, Sequence[Any]], Any]
"""Takes an operator and its reads in order, weights included; returns what it writes."""


def _activated(operator: Operator, y: Any) -> Any:
    functions: dict[str, Callable[[Any], Any]] = {
        "": tf.identity,
        "relu": tf.nn.relu,
        "tanh": tf.math.tanh,
        "gelu": lambda x: 0.5 * x * (1 + tf.math.erf(x / 2**0.5)),
        "sigmoid": tf.math.sigmoid,
    }
    return functions[operator.attribute("activation", "")](y)


def _windows(operator: Operator, x: Any, fill: float) -> tuple[Any, list[Window], list[int]]:
    """Return x padded as its windows need, [b, c, …], with the windows and their kernels."""
    windows = _sliding(operator)
    kernels = [operator.extents[window.kernel] for window in windows]
    pads = [(0, 0), (0, 0)]
    crops = [slice(None), slice(None)]
    for window, kernel, extent in zip(windows, kernels, operator.reads[0].shape[2:], strict=True):
        end = (operator.extents[window.out] - 1) * window.stride + (kernel - 1) * window.dilation + 1
        pads.append((window.pad, max(0, end - window.pad - extent)))
        crops.append(slice(0, end))
    x = tf.pad(x, pads, constant_values=tf.constant(fill, x.dtype))
    return x[tuple(crops)], windows, kernels


def _convolution(operator: Operator, reads: Sequence[Any]) -> Any:
    x, windows, _ = _windows(operator, reads[0], 0.0)
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    rank = len(windows)
    # [b, c, …] and [n, c, …] with channels last.
    x = tf.transpose(x, [0, *range(2, rank + 2), 1])
    filters = tf.transpose(reads[1], [*range(2, rank + 2), 1, 0])
    if max(strides) > 1 and max(dilations) > 1:
        # TensorFlow has either, not both: what it computes with dilation alone, at every stride.
        strides, steps = [1] * rank, strides
    else:
        steps = [1] * rank
    groups = operator.attribute("groups", 1)
    outputs = [
        tf.nn.convolution(a, w, strides=strides, dilation_rate=dilations, padding="VALID")
        for a, w in zip(tf.split(x, groups, axis=-1), tf.split(filters, groups, axis=-1), strict=True)
    ]
    y = tf.concat(outputs, axis=-1)[(slice(None), *(slice(None, None, step) for step in steps))]
    if len(reads) == 3:
        y = y + reads[2]
    return _activated(operator, tf.transpose(y, [0, rank + 1, *range(1, rank + 1)]))


def _pooling(operator: Operator, reads: Sequence[Any]) -> Any:
    if operator.attribute("reduction", "max") == "max":
        # Of equal values the first counts, as in TensorFlow's own pooling of images: maximum's gradient goes there.
        return reduce(tf.maximum, _window_points(operator, reads[0], float("-inf")))
    total = tf.add_n(_window_points(operator, reads[0], 0.0))
    points = tf.ones_like(reads[0])
    if operator.attribute("count_padding", False):
        return total / prod(operator.extents[axis.kernel] for axis in _sliding(operator))
    return total / tf.add_n(_window_points(operator, points, 0.0))


def _window_points(operator: Operator, x: Any, fill: float) -> list[Any]:
    """Return [kernel points] that point of every window, row-major."""
    x, windows, kernels = _windows(operator, x, fill)
    outs = [operator.extents[window.out] for window in windows]
    points = []
    for offsets in product(*map(range, kernels)):
        cut = (
            slice(offset, offset + (out - 1) * window.stride + 1, window.stride)
            for offset, out, window in zip(offsets, outs, windows, strict=True)
        )
        points.append(x[(slice(None), slice(None), *cut)])
    return points


def _sliding(operator: Operator) -> list[Window]:
    return [axis for axis in operator.reads[0].index_map if isinstance(axis, Window)]


def _dense(operator: Operator, reads: Sequence[Any]) -> Any:
    x, w = reads[0], reads[1]
    num_reduced = sum(1 for axis in operator.reads[1].index_map if axis in operator.reads[0].index_map)
    y = tf.tensordot(x, w, axes=num_reduced)
    if len(reads) == 3:
        y = y + reads[2]
    return _activated(operator, y)


def _embedding(_: Operator, reads: Sequence[Any]) -> Any:
    return tf.nn.embedding_lookup(reads[1], reads[0])


def _softmax_loss(_: Operator, reads: Sequence[Any]) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=reads[0], labels=reads[1]))


def _elementwise(operator: Operator, reads: Sequence[Any]) -> Any:
    functions: dict[str, Callable[..., Any]] = {
        "add": lambda *xs: tf.add_n(xs),
        "multiply": lambda *xs: tf.reduce_prod(tf.stack(xs), axis=0),
        "relu": tf.nn.relu,
        "tanh": tf.math.tanh,
        "gelu": lambda x: 0.5 * x * (1 + tf.math.erf(x / 2**0.5)),
    }
    return _activated(operator, functions[operator.attribute("function", "add")](*reads))


def _dropout(_: Operator, reads: Sequence[Any]) -> Any:
    # The last of what it reads is zero for a point that is dropped, and the scale of what is kept.
    x, factor = reads
    return x * factor


def _add_parameter(operator: Operator, reads: Sequence[Any]) -> Any:
    x, parameter = reads
    over = operator.reads[1].index_map
    shape = [extent if axis in over else 1 for axis, extent in zip(operator.reads[0].index_map, x.shape, strict=True)]
    return x + tf.reshape(parameter, shape)


def _global_pool(_: Operator, reads: Sequence[Any]) -> Any:
    return tf.reduce_mean(reads[0], axis=list(range(2, len(reads[0].shape))))


def _concat(operator: Operator, reads: Sequence[Any]) -> Any:
    along = operator.attribute("along", "c")
    return tf.concat(reads, axis=operator.writes[0].index_map.index(along))


_EPSILON = 1e-5


def _normalised(operator: Operator, reads: Sequence[Any], over: Sequence[int], shape: Sequence[int]) -> Any:
    x, scale, shift = reads
    mean, variance = tf.nn.moments(x, list(over), keepdims=True)
    # Weights of zero leave the normalised tensor as it is.
    weights = (tf.reshape(shift, shape), tf.reshape(scale, shape) + 1)
    return _activated(operator, tf.nn.batch_normalization(x, mean, variance, *weights, _EPSILON))


def _batch_norm(operator: Operator, reads: Sequence[Any]) -> Any:
    positions = range(2, len(reads[0].shape))
    return _normalised(operator, reads, [0, *positions], [1, -1, *(1 for _ in positions)])


def _layer_norm(operator: Operator, reads: Sequence[Any]) -> Any:
    return _normalised(operator, reads, [-1], [-1])


def _attention(operator: Operator, reads: Sequence[Any]) -> Any:
    # [b, h, s or t, k]
    q, k, v = (tf.transpose(x, [0, 2, 1, 3]) for x in reads)
    scores = tf.matmul(q, k, transpose_b=True) / operator.extents["k"] ** 0.5
    if operator.attribute("causal", False):
        seen = tf.linalg.band_part(tf.ones(scores.shape[-2:], scores.dtype), -1, 0)
        # Far below any score, and finite: its exponential is zero.
        scores = scores * seen - 1e9 * (1 - seen)
    return tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])


def _lstm(operator: Operator, reads: Sequence[Any]) -> Any:
    x, w, u, bias = reads
    hidden_units, sequence = operator.extents["e"], x[0]
    for layer in range(operator.extents["l"]):
        hidden = cell = tf.zeros_like(sequence[:, 0])
        outputs = []
        for step in range(operator.extents["s"]):
            gates = tf.einsum("bd,dge->bge", sequence[:, step], w[layer]) + tf.einsum("bd,dge->bge", hidden, u[layer])
            into, forget, out, candidate = tf.unstack(gates + bias[layer], 4, axis=1)
            cell = tf.sigmoid(forget) * cell + tf.sigmoid(into) * tf.tanh(candidate)
            hidden = tf.sigmoid(out) * tf.tanh(cell)
            outputs.append(hidden)
        sequence = tf.stack(outputs, axis=1)
    return tf.reshape(sequence, [1, -1, operator.extents["s"], hidden_units])


COMPUTE: Mapping[str, Compute] = {
    "add_parameter": _add_parameter,
    "attention": _attention,
    "batch_norm": _batch_norm,
    "concat": _concat,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "dense": _dense,
    "dropout": _dropout,
    "elementwise": _elementwise,
    "embedding": _embedding,
    "fan_out": lambda _, values: values[0],
    "global_pool": _global_pool,
    "layer_norm": _layer_norm,
    "lstm": _lstm,
    "pool1d": _pooling,
    "pool2d": _pooling,
    "pool3d": _pooling,
    "softmax_loss": _softmax_loss,
}
