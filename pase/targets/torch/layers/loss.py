"""`softmax_loss`: the mean cross-entropy of a softmax with labels; the classes may be split."""

from math import prod
from typing import Any

from torch.nn import functional

from pase.errors import ProgramError
from pase.targets.torch.layers.contraction import pick
from pase.targets.torch.layers.points import apply
from pase.targets.torch.layers.reductions import log_softmax, total
from pase.targets.torch.tensor import Dim, Tensor, local, one_mesh, written


def softmax_loss(logits: Tensor, labels: Tensor, classes: Dim) -> Tensor:
    """Return the mean over all points of ``log Σ_n exp(x_n) - x_label``; dims [b, …, classes], of labels [b, …]."""
    mesh = one_mesh([logits, labels])
    if logits.dims != (*labels.dims, classes):
        raise ProgramError(
            f"layer {mesh.layer!r}: the logits have dims {written(logits.dims)}; expected "
            f"{written((*labels.dims, classes))}, those of the labels and then the classes"
        )
    if mesh.split((classes.name,)):
        found = pick(log_softmax(logits, [classes]), labels, classes)
        return apply("multiply", total(found, labels.dims), -1 / labels.size)
    shape = (prod(labels.shard), classes.size)

    def compute(x: Any, places: Any) -> Any:
        found = functional.cross_entropy(x.reshape(shape), places.reshape(-1).long(), reduction="sum")
        return found / labels.size

    return local(compute, [logits, labels], (), partial_over=[dim.name for dim in labels.dims])
