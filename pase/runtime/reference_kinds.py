"""What each kind of operator computes, in plain TensorFlow on whole tensors: written apart from the parallel layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pase.graph import Operator, Window
from pase.runtime.compat import tf

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
    """Return x padded as its windows need, [b, height, width, channels], with the windows and their kernels."""
    windows = [axis for axis in operator.reads[0].axes if isinstance(axis, Window)]
    kernels = [operator.extents[window.kernel] for window in windows]
    pads = [(0, 0)]
    crops = []
    for window, kernel, extent in zip(windows, kernels, operator.reads[0].shape[2:], strict=True):
        end = (operator.extents[window.out] - 1) * window.stride + (kernel - 1) * window.dilation + 1
        pads.append((window.pad, max(0, end - window.pad - extent)))
        crops.append(end)
    x = tf.transpose(x, [0, 2, 3, 1])
    x = tf.pad(x, [*pads, (0, 0)], constant_values=tf.constant(fill, x.dtype))
    return x[:, : crops[0], : crops[1]], windows, kernels


def _conv2d(operator: Operator, reads: Sequence[Any]) -> Any:
    x, windows, _ = _windows(operator, reads[0], 0.0)
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    filters = tf.transpose(reads[1], [2, 3, 1, 0])
    groups = operator.attribute("groups", 1)
    outputs = [
        tf.nn.convolution(a, w, strides=strides, dilation_rate=dilations, padding="VALID")
        if max(strides) == 1
        else tf.nn.conv2d(a, w, strides=strides, padding="VALID")
        for a, w in zip(tf.split(x, groups, axis=3), tf.split(filters, groups, axis=3), strict=True)
    ]
    y = tf.concat(outputs, axis=3)
    if len(reads) == 3:
        y = tf.nn.bias_add(y, reads[2])
    return _activated(operator, tf.transpose(y, [0, 3, 1, 2]))


def _pool2d(operator: Operator, reads: Sequence[Any]) -> Any:
    is_max = operator.attribute("reduction", "max") == "max"
    x, windows, kernels = _windows(operator, reads[0], float("-inf") if is_max else 0.0)
    strides = [window.stride for window in windows]
    if is_max:
        return tf.transpose(tf.nn.max_pool2d(x, kernels, strides, "VALID"), [0, 3, 1, 2])
    y = tf.nn.avg_pool2d(x, kernels, strides, "VALID")
    if not operator.attribute("count_padding", False):
        ones, _, _ = _windows(operator, tf.ones_like(reads[0]), 0.0)
        y = y / tf.nn.avg_pool2d(ones, kernels, strides, "VALID")
    return tf.transpose(y, [0, 3, 1, 2])


def _dense(operator: Operator, reads: Sequence[Any]) -> Any:
    x, w = reads[0], reads[1]
    num_reduced = sum(1 for axis in operator.reads[1].axes if axis in operator.reads[0].axes)
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


def _add_parameter(operator: Operator, reads: Sequence[Any]) -> Any:
    x, parameter = reads
    over = operator.reads[1].axes
    shape = [extent if axis in over else 1 for axis, extent in zip(operator.reads[0].axes, x.shape, strict=True)]
    return x + tf.reshape(parameter, shape)


def _global_pool(_: Operator, reads: Sequence[Any]) -> Any:
    return tf.reduce_mean(reads[0], axis=[2, 3])


def _concat(operator: Operator, reads: Sequence[Any]) -> Any:
    along = operator.attribute("along", "c")
    return tf.concat(reads, axis=operator.writes[0].axes.index(along))


_EPSILON = 1e-5


def _normalised(operator: Operator, reads: Sequence[Any], over: Sequence[int], shape: Sequence[int]) -> Any:
    x, scale, shift = reads
    mean, variance = tf.nn.moments(x, list(over), keepdims=True)
    # Weights of zero leave the normalised tensor as it is.
    weights = (tf.reshape(shift, shape), tf.reshape(scale, shape) + 1)
    return _activated(operator, tf.nn.batch_normalization(x, mean, variance, *weights, _EPSILON))


def _batch_norm(operator: Operator, reads: Sequence[Any]) -> Any:
    return _normalised(operator, reads, [0, 2, 3], [1, -1, 1, 1])


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
    "conv2d": _conv2d,
    "dense": _dense,
    "elementwise": _elementwise,
    "embedding": _embedding,
    "global_pool": _global_pool,
    "layer_norm": _layer_norm,
    "lstm": _lstm,
    "pool2d": _pool2d,
    "softmax_loss": _softmax_loss,
}
