"""Sums of products: over the dims that the result lacks, in attention, and of a table with the indices of its rows.

`softmax_loss` is the mean cross-entropy of a softmax with labels; the classes may be split.
"""

from collections.abc import Sequence
from typing import Any

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, Slices, begins, check_one_mesh
from pase.targets.mesh_tensorflow.runtime.layers.movement import layout_of_tensor
from pase.targets.mesh_tensorflow.runtime.layers.points import apply, arrange, written
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


class SoftmaxLoss(mtf.Operation):
    """Outputs: the loss, and for each point the logarithm of its sum of exponentials, which the gradient needs.

    num_points: of the batch. num_correct: once it is lowered, for each part of the points how many of them have a label
    whose logit no other one exceeds, on one of the devices that hold the part; to be added on the host, so that nothing
    moves between devices for it.
    """

    def __init__(self, logits: Any, labels: Any, classes: Any) -> None:
        super().__init__([logits, labels], name="softmax_loss")
        _check(logits, labels, classes)
        self._classes = classes
        self.num_points = labels.size
        self.num_correct: list[Any] = []
        self._outputs = [
            mtf.Tensor(self, mtf.Shape([]), logits.dtype, index=0),
            mtf.Tensor(self, labels.shape, logits.dtype, index=1),
        ]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return (softmax - one-hot label) / points, times the gradient of the loss; each device its own classes."""
        logits, labels = self.inputs
        num_classes = self._classes.size // self.mesh.devices.size(self._classes.name)
        num_points = labels.size

        def local(begin: int, logits: Any, labels: Any, log_sums: Any, dy: Any) -> Any:
            softmax = tf.exp(logits - log_sums[..., tf.newaxis])
            # A label of another device's classes gives no one.
            return (softmax - tf.one_hot(labels - begin, num_classes, dtype=logits.dtype)) * (dy / num_points)

        operation = Shardwise(
            local,
            [logits, labels, self.outputs[1], grad_ys[0]],
            shape=logits.shape,
            name="softmax_loss_gradient",
            per_position=lambda: begins(self.mesh, self._classes),
        )
        return [operation.outputs[0], None]

    def lower(self, lowering: Any) -> None:
        """Reduce the maximum, the sum and the label's logit over the classes, then the loss over the points."""
        local = Slices(lowering, self)
        logits, labels = local.inputs
        classes, points = [self._classes], self.inputs[1].shape.dims
        begin = local.laid_out(begins(self.mesh, self._classes))
        top = local.reduced(local.each(lambda x: tf.reduce_max(x, -1), logits), classes, "MAX")
        sums = local.each(lambda x, m: tf.reduce_sum(tf.exp(x - m[..., tf.newaxis]), -1), logits, top)
        log_sums = local.each(lambda s, m: tf.log(s) + m, local.summed(sums, classes), top)
        label_logits = local.summed(local.each(_label_logits, begin, logits, labels), classes)
        loss = local.each(lambda s, x: tf.reduce_sum(s - x) / self.num_points, log_sums, label_logits)
        lowering.set_tensor_lowering(self.outputs[0], local.lazy(loss, points))
        lowering.set_tensor_lowering(self.outputs[1], log_sums)
        # Exact: the one is the other plus zeros.
        correct = local.each(lambda x, m: tf.reduce_sum(tf.cast(tf.equal(x, m), x.dtype)), label_logits, top)
        parts = layout_of_tensor(self.inputs[1]).parts
        self.num_correct = [x for i, x in enumerate(correct.tensor_list) if parts.index(parts[i]) == i]


def _check(logits: Any, labels: Any, classes: Any) -> None:
    check_one_mesh("softmax_loss", [logits, labels])
    expected = [*labels.shape.dims, classes]
    if logits.shape.dims != expected:
        raise ProgramError(
            f"layer {logits.mesh.layer!r}: the logits have dims {written(logits.shape.dims)}; expected "
            f"{written(expected)}, those of the labels and then the classes"
        )


def _label_logits(begin: int, logits: Any, labels: Any) -> Any:
    """Return the logit of each point's label, zero where another device has it."""
    local = labels - begin
    num_classes = logits.shape.as_list()[-1]
    is_inside = (local >= 0) & (local < num_classes)
    index = tf.where(is_inside, local, tf.zeros_like(local))
    found = tf.gather(logits, index, batch_dims=len(logits.shape) - 1)
    return tf.where(is_inside, found, tf.zeros_like(found))


def softmax_loss(logits: Any, labels: Any, classes: Any) -> Any:
    """Return the mean over all points of ``log Σ_n exp(x_n) - x_label``; dims [b, …, classes], of labels [b, …]."""
    return SoftmaxLoss(logits, labels, classes).outputs[0]
