"""`attention`: scaled dot-product attention; batch, heads, queries, keys and features may all be split."""

from collections.abc import Sequence
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Slices, begins


class _Attention(mtf.Operation):
    """Inputs: queries, keys, values. Outputs: the result and the softmax [b, h, s, t], which the gradient needs."""

    def __init__(self, queries: Any, keys: Any, values: Any, *, scale: float, causal: bool) -> None:
        super().__init__([queries, keys, values], name="attention")
        self._names = _Names(queries, keys)
        self._scale, self._causal = scale, causal
        self._outputs = [
            mtf.Tensor(self, queries.shape, queries.dtype, index=0),
            mtf.Tensor(self, mtf.Shape(self._names.scores), queries.dtype, index=1),
        ]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of queries, keys and values."""
        return list(_AttentionGradient([*self.inputs, self.outputs[1], grad_ys[0]], self._names, self._scale).outputs)

    def lower(self, lowering: Any) -> None:
        """Reduce the scores over the features, then the maximum, the sum and the result over the keys."""
        local = Slices(lowering, self)
        queries, keys, values = local.inputs
        names = self._names
        factor = self._scale
        scores = local.summed(
            local.each(lambda q, k: tf.einsum("bshk,bthk->bhst", q, k) * factor, queries, keys), [names.feature]
        )
        if self._causal:
            first_query, first_key = (local.laid_out(begins(self.mesh, dim)) for dim in (names.query, names.key))
            scores = local.each(_masked, first_query, first_key, scores)
        # A device may hold only keys later than a query: its maximum is -inf, that of all devices is not.
        top = local.reduced(local.each(lambda x: tf.reduce_max(x, -1, keepdims=True), scores), [names.key], "MAX")
        powers = local.each(lambda x, m: tf.exp(x - m), scores, top)
        sums = local.summed(local.each(lambda x: tf.reduce_sum(x, -1, keepdims=True), powers), [names.key])
        softmax = local.each(lambda x, total: x / total, powers, sums)
        result = local.each(lambda a, v: tf.einsum("bhst,bthk->bshk", a, v), softmax, values)
        lowering.set_tensor_lowering(self.outputs[0], local.lazy(result, [names.key]))
        lowering.set_tensor_lowering(self.outputs[1], softmax)


class _AttentionGradient(mtf.Operation):
    """Inputs: queries, keys, values, softmax, gradient of the result. Outputs: gradients of the first three."""

    def __init__(self, inputs: Sequence[Any], names: "_Names", scale: float) -> None:
        super().__init__(list(inputs), name="attention_gradient")
        self._names, self._scale = names, scale
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(inputs[:3])]

    def lower(self, lowering: Any) -> None:
        """Reduce the softmax's gradient over the features, its product with the softmax over the keys."""
        local = Slices(lowering, self)
        queries, keys, values, softmax, dy = local.inputs
        names = self._names
        factor = self._scale
        d_values = local.each(lambda a, d: tf.einsum("bhst,bshk->bthk", a, d), softmax, dy)
        d_softmax = local.summed(
            local.each(lambda d, v: tf.einsum("bshk,bthk->bhst", d, v), dy, values), [names.feature]
        )
        inner = local.summed(
            local.each(lambda a, d: tf.reduce_sum(a * d, -1, keepdims=True), softmax, d_softmax), [names.key]
        )
        d_scores = local.each(lambda a, d, total: a * (d - total) * factor, softmax, d_softmax, inner)
        d_queries = local.each(lambda d, k: tf.einsum("bhst,bthk->bshk", d, k), d_scores, keys)
        d_keys = local.each(lambda d, q: tf.einsum("bhst,bshk->bthk", d, q), d_scores, queries)
        found = (d_queries, names.key), (d_keys, names.query), (d_values, names.query)
        for tensor, (value, dim) in zip(self.outputs, found, strict=True):
            lowering.set_tensor_lowering(tensor, local.lazy(value, [dim]))


class _Names:
    """The dims of an attention by what they are: queries [b, s, h, k], keys and values [b, t, h, k]."""

    def __init__(self, queries: Any, keys: Any) -> None:
        batch, self.query, heads, self.feature = queries.shape.dims
        self.key = keys.shape.dims[1]
        self.scores = [batch, heads, self.query, self.key]


def _masked(first_query: int, first_key: int, scores: Any) -> Any:
    """Return scores with -inf for keys later than the query, by their positions in the whole sequence."""
    num_queries, num_keys = scores.shape.as_list()[-2:]
    is_later = tf.range(num_keys) + first_key > tf.range(num_queries)[:, tf.newaxis] + first_query
    return tf.where_v2(is_later, tf.constant(float("-inf"), scores.dtype), scores)


def attention(queries: Any, keys: Any, values: Any, *, scale: float, causal: bool = False) -> Any:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] scale) v[b,t,h,k]`` (Vaswani et al. 2017).

    Dims in that order: queries [b, s, h, k], keys and values [b, t, h, k]. causal: no query attends to a later key.
    """
    return _Attention(queries, keys, values, scale=scale, causal=causal).outputs[0]
