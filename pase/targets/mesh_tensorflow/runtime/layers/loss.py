"""`softmax_loss`: the mean cross-entropy of a softmax with labels; the classes may be split."""

from collections.abc import Sequence
from typing import Any

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, Slices, begins
from pase.targets.mesh_tensorflow.runtime.reshard import layout_of_tensor


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
    if labels.mesh is not logits.mesh:
        raise ProgramError(
            f"softmax_loss reads tensors of two meshes, those of layers {logits.mesh.layer!r} and "
            f"{labels.mesh.layer!r}; reshard one of them"
        )
    if logits.shape.dims != [*labels.shape.dims, classes]:
        found = ", ".join(map(_written, logits.shape.dims))
        expected = ", ".join(map(_written, [*labels.shape.dims, classes]))
        raise ProgramError(
            f"layer {logits.mesh.layer!r}: the logits have dims {found}; expected {expected}, those of the labels and "
            "then the classes"
        )


def _written(dim: Any) -> str:
    return f"{dim.name}={dim.size}"


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
