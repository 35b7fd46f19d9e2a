"""`softmax_loss`: the mean cross-entropy of a softmax with labels; the classes may be split."""

from collections.abc import Callable, Sequence
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise, begins
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
        implementation = lowering.mesh_impl(self)
        logits, labels = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        axes = [axis.name for axis in implementation.shape.dims]
        class_axes = [i for i, name in enumerate(axes) if name == self._classes.name]
        point_names = self.inputs[1].shape.dimension_names
        point_axes = [i for i, name in enumerate(axes) if name in point_names]

        def reduced(x: Any, over: list[int], how: str) -> Any:
            return implementation.allreduce(x, over, how) if over else x

        def each(function: Callable[..., Any], *columns: Any) -> Any:
            return implementation.slicewise(function, *columns)

        begin = implementation.LaidOutTensor(begins(self.mesh, self._classes))
        top = reduced(each(lambda x: tf.reduce_max(x, -1), logits), class_axes, "MAX")
        sums = each(lambda x, m: tf.reduce_sum(tf.exp(x - m[..., tf.newaxis]), -1), logits, top)
        log_sums = each(lambda s, m: tf.log(s) + m, reduced(sums, class_axes, "SUM"), top)
        label_logits = reduced(each(_label_logits, begin, logits, labels), class_axes, "SUM")
        loss = each(lambda s, x: tf.reduce_sum(s - x) / self.num_points, log_sums, label_logits)
        if point_axes:
            loss = mtf.ops.LazyAllreduceSum(implementation, loss, point_axes)
        lowering.set_tensor_lowering(self.outputs[0], loss)
        lowering.set_tensor_lowering(self.outputs[1], log_sums)
        # Exact: the one is the other plus zeros.
        correct = each(lambda x, m: tf.reduce_sum(tf.cast(tf.equal(x, m), x.dtype)), label_logits, top)
        parts = layout_of_tensor(self.inputs[1]).parts
        self.num_correct = [x for i, x in enumerate(correct.tensor_list) if parts.index(parts[i]) == i]


def _check(logits: Any, labels: Any, classes: Any) -> None:
    if labels.mesh is not logits.mesh:
        raise RuntimeFailure(
            f"softmax_loss reads tensors of two meshes, those of layers {logits.mesh.layer!r} and "
            f"{labels.mesh.layer!r}; reshard one of them"
        )
    if logits.shape.dims != [*labels.shape.dims, classes]:
        found = ", ".join(map(_written, logits.shape.dims))
        expected = ", ".join(map(_written, [*labels.shape.dims, classes]))
        raise RuntimeFailure(
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
