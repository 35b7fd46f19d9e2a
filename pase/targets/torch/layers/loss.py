"""`softmax_loss`: the mean cross-entropy of a softmax with labels; the classes may be split."""

from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pase.errors import ProgramError
from pase.sharding.named_dims import named
from pase.sharding.traffic import Phase
from pase.targets.torch.collectives import Adder
from pase.targets.torch.tensor import Dim, Tensor, in_float32, local, one_mesh, resolved, shaped


def softmax_loss(logits: Tensor, labels: Tensor, classes: Dim) -> Tensor:
    """Return the mean over all points of ``log Σ_n exp(x_n) - x_label``; dims [b, …, classes], of labels [b, …]."""
    mesh, logits = one_mesh([logits, labels]), in_float32(logits)
    if logits.dims != (*labels.dims, classes):
        raise ProgramError(
            f"layer {mesh.layer!r}: the logits have dims {named(logits.dims)}; expected "
            f"{named((*labels.dims, classes))}, those of the labels and then the classes"
        )
    if mesh.split((classes.name,)):
        module = SplitSoftmaxLoss(
            begin=mesh.begin(classes), num_points=labels.size, over=mesh.program.adder(mesh, [classes.name])
        )
        found = mesh.program.run(module, resolved(logits).value, "softmax_loss", labels.value)
        loss = Tensor(value=found[0], mesh=mesh, dims=(), partial=mesh.split(labels.names))
        mesh.program.count_correct(loss, labels, lambda: found[1])
        return loss
    shape = (prod(labels.shard), classes.size)

    read: list[Any] = []

    def compute(x: Any, places: Any) -> Any:
        points = shaped(places, labels.shard, shape[:1]).long()
        x = shaped(x, logits.shard, shape)
        read[:] = x, points
        return functional.cross_entropy(x, points, reduction="sum") / labels.size

    def correct() -> Any:
        # Of what the loss reads: one more reader of what it is made of would be one more sum of its gradient.
        x, points = (value.detach() for value in read)
        return (x.gather(-1, points.unsqueeze(-1)) == x.amax(-1, keepdim=True)).sum()

    loss = local(compute, [logits, labels], (), partial_over=[dim.name for dim in labels.dims])
    mesh.program.count_correct(loss, labels, correct)
    return loss


class SplitSoftmaxLoss(nn.Module):
    """The loss of this rank's points, of whose classes it has some.

    begin: the first of these. num_points: of all ranks. over: brings together what ranks have of the same points.
    """

    def __init__(self, *, begin: int, num_points: int, over: Adder) -> None:
        super().__init__()
        self.begin, self.num_points, self.over = begin, num_points, over

    def forward(self, logits: Any, labels: Any) -> Any:
        """Return the sum over the points, divided by how many all ranks have; and how many have the greatest logit."""
        return _SoftmaxLoss.apply(logits, labels, self)


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, module: SplitSoftmaxLoss) -> Any:
        places = (labels.long() - module.begin).unsqueeze(-1)
        is_inside = (places >= 0) & (places < logits.shape[-1])
        places = places.clamp(0, logits.shape[-1] - 1)
        top = module.over.greatest(logits.amax(-1, keepdim=True), Phase.FORWARD)
        of_label = (logits - top).gather(-1, places) * is_inside
        # The logarithm of the sum and the label's logit, both without the greatest one.
        sums, of_label = module.over.summed(
            torch.stack([(logits - top).exp().sum(-1, keepdim=True), of_label]), Phase.FORWARD
        )
        log_sums = sums.log()
        ctx.module = module
        ctx.save_for_backward(logits, top + log_sums, places, is_inside)
        # Exact: the label's logit is the greatest one, or it is not.
        correct = (of_label == 0).sum()
        ctx.mark_non_differentiable(correct)
        return (log_sums - of_label).sum() / module.num_points, correct

    @staticmethod
    def backward(ctx: Any, dy: Any, _: Any) -> Any:
        """Return ``(softmax - one at the label) / points``, times the gradient of the loss."""
        logits, log_sums, places, is_inside = ctx.saved_tensors
        softmax = (logits - log_sums).exp()
        share = dy / ctx.module.num_points
        return (softmax * share).scatter_add_(-1, places, -(is_inside * share)), None, None
