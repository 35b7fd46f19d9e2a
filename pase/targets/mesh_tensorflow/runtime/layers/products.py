"""Sums of products: over the dims that the result lacks, in attention, and of a table with the indices of its rows."""

from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, begins
from pase.targets.mesh_tensorflow.runtime.layers.points import apply, arrange
from pase.targets.mesh_tensorflow.runtime.layers.reductions import softmax, without_later_keys


def product(*operands: Any) -> Any:
    """Return the sum of products of tensors over the dims that the last operand, those of the result, lacks."""
    *tensors, out = operands
    return mtf.einsum(tensors, list(out))


def attention(queries: Any, keys: Any, values: Any, *, scale: float, causal: bool = False) -> Any:
    """Return ``y[b,s,h,k] = Σ_t softmax_t(q[b,s,h,·] · k[b,t,h,·] scale) v[b,t,h,k]`` (Vaswani et al. 2017).

    Dims in that order: queries [b, s, h, k], keys and values [b, t, h, k]. causal: no query attends to a later key.
    """
    batch, query, heads, feature = queries.shape.dims
    key = keys.shape.dims[1]
    scores = apply("multiply", product(queries, keys, [batch, heads, query, key]), scale)
    if causal:
        scores = without_later_keys(scores, query, key)
    return product(softmax(scores, [key]), values, [batch, query, heads, feature])


def lookup(table: Any, indices: Any, rows: Any, *columns: Any, frozen: int = -1) -> Any:
    """Return rows of a table by index: dims of the indices, then the columns'; frozen: a row that gets no gradient.

    A device looks up the indices that fall in its rows and leaves zeros for the others; a split of the rows leaves
    partial sums.
    """
    table = arrange(table, [rows, *columns])
    num_rows = rows.size // table.mesh.devices.size(rows.name)

    def looked_up(begin: int, table: Any, indices: Any) -> Any:
        if num_rows == rows.size:
            return trained(tf.gather(table, indices), indices)
        local = indices - begin
        is_inside = (local >= 0) & (local < num_rows)
        found = tf.gather(table, tf.where(is_inside, local, tf.zeros_like(local)))
        return trained(found * in_rows(tf.cast(is_inside, found.dtype)), indices)

    def trained(found: Any, indices: Any) -> Any:
        if frozen < 0:
            return found
        return tf.where_v2(in_rows(tf.equal(indices, frozen)), tf.stop_gradient(found), found)

    def in_rows(x: Any) -> Any:
        return x[(..., *(tf.newaxis for _ in columns))]

    return Shardwise(
        looked_up,
        [table, indices],
        shape=[*indices.shape.dims, *columns],
        name="lookup",
        partial_over=[rows.name],
        per_position=lambda: begins(table.mesh, rows),
        recompute=True,
    ).outputs[0]


def pick(x: Any, places: Any, along: Any) -> Any:
    """Return elements of x along a dim, at places that the other dims have each its own; places: dims [b, …].

    Where the places have a dim that x lacks, several elements are taken for each point of the others. A device takes
    those that fall in its part of the dim and leaves zeros for the others; a split of it leaves partial sums.
    """
    order = [*places.shape.dims, along]
    x = arrange(x, order)
    size = along.size // x.mesh.devices.size(along.name)

    def picked(begin: int, x: Any, places: Any) -> Any:
        # A one-hot row is zero throughout where the place is another device's.
        return tf.reduce_sum(x * tf.one_hot(places - begin, size, dtype=x.dtype), axis=-1)

    return Shardwise(
        picked,
        [x, places],
        shape=places.shape,
        name="pick",
        partial_over=[along.name],
        per_position=lambda: begins(x.mesh, along),
        recompute=True,
    ).outputs[0]
