"""Losses: what `torch.export` leaves of them, in operations of their own: the target's column, masks, sums, a mean.

Masks and the counts of targets depend on whole numbers of the input alone, so that none of them becomes a vertex.
"""

from math import prod

from pase.importers.ir import Generic, Identity, Lookup, Softmax, Value
from pase.importers.torch.aten import TorchCall, table

_NONE, _MEAN = 0, 1
"""Ways of reduction, as operators number them; the other one is the sum."""

_IGNORED = -100
"""The target that is left out where no other one is named."""


def cross_entropy(call: TorchCall) -> None:
    """Write the cross-entropy of a softmax with targets, which are classes or their probabilities."""
    x, target = call.tensors[:2]
    log = call.add(Softmax(dim=_classes(x), is_log=True), x, shape=x.shape)
    (_of_probabilities if target.is_float else _of_classes)(call, log, smoothing=float(call.get("label_smoothing", 0)))


def _classes(x: Value) -> int:
    return 1 if len(x.shape) > 1 else 0


def _of_classes(call: TorchCall, log: Value, *, smoothing: float) -> None:
    """Write the loss of classes: what the target's column holds, and a share of all columns where it is smoothed."""
    target, dim, weight = call.value("target"), _classes(log), call.maybe("weight")
    ignored = float(call.get("ignore_index", _IGNORED))
    kept = call.point("not_equal", target, constant=ignored, dtype="bool", name="kept")
    places = call.reshape(target, (*log.shape[:dim], 1, *log.shape[dim + 1 :]), name="places")
    picked = call.reshape(call.gather(log, places, dim), target.shape)
    share = [call.add(Lookup(), weights, target, shape=target.shape) for weights in weight]
    if share:
        picked = call.point("multiply", picked, *share)
    if smoothing:
        every = _summed_over_classes(call, log, weight)
        one = call.point("multiply", picked, constant=1.0 - smoothing)
        other = call.point("multiply", every, constant=smoothing / log.shape[dim])
        picked = call.point("add", one, other)
    negative, reduction = call.point("negate", picked), call.get("reduction", _MEAN)
    if reduction == _NONE:
        call.point("where", kept, negative, constant=0.0, out=call.result)
        return call.unread(call.results[1:])
    masked = call.point("where", kept, negative, constant=0.0)
    if share:
        counted = call.point("where", kept, *share, constant=0.0, name="counted")
    else:
        counted = call.add(Identity(), kept, shape=kept.shape, dtype=log.dtype, name="counted")
    count = call.total(counted, out=call.results[1] if len(call.results) > 1 else None, name="count")
    if reduction == _MEAN:
        call.point("divide", call.total(masked), count, out=call.result)
    else:
        call.total(masked, out=call.result)
    return None


def _of_probabilities(call: TorchCall, log: Value, *, smoothing: float) -> None:
    """Write the loss of probabilities of all classes."""
    target = call.value("target")
    if smoothing:
        less = call.point("multiply", target, constant=1.0 - smoothing)
        target = call.point("add", less, constant=smoothing / log.shape[_classes(log)])
    rows = _summed_over_classes(call, call.point("multiply", log, target), call.maybe("weight"))
    reduction = call.get("reduction", _MEAN)
    if reduction == _NONE:
        call.point("negate", rows, out=call.result)
        return
    negative = call.point("negate", rows)
    if reduction == _MEAN:
        call.point("divide", call.total(negative), constant=float(max(1, prod(rows.shape))), out=call.result)
    else:
        call.total(negative, out=call.result)


def _summed_over_classes(call: TorchCall, x: Value, weight: tuple[Value, ...]) -> Value:
    """Write the sum over the classes, each times its weight where it has one."""
    dim = _classes(x)
    for found in weight:
        along = call.reshape(found, (x.shape[dim], *(1,) * (len(x.shape) - dim - 1)))
        x = call.point("multiply", x, along)
    return call.reduce("sum", x, (dim,))


def multilabel_margin(call: TorchCall) -> None:
    """Write the sum, over pairs of a target's class and another one, of by how much it is not one larger."""
    x, target = call.tensors[:2]
    lead, classes = x.shape[:-1], x.shape[-1]
    pairs = (*lead, target.shape[-1], classes)
    # Classes up to the first that is negative, with those that are not among them.
    counted = call.add(Generic(is_index=True), shape=pairs, dtype="bool", name="counted")
    own = call.reshape(call.gather(x, target, len(lead)), (*lead, target.shape[-1], 1))
    difference = call.point("subtract", call.reshape(x, (*lead, 1, classes)), own)
    short = call.point("relu", call.point("add", difference, constant=1.0))
    masked = call.point("where", counted, short, constant=0.0)
    reduction = call.get("reduction", _MEAN)
    scaled = call.point("divide", masked, constant=float(classes * (prod(lead) if reduction == _MEAN else 1)))
    over = range(len(pairs))[-2 if reduction == _NONE else 0 :]
    call.reduce("sum", scaled, over, out=call.result)
    call.unread(call.results[1:])


def ctc(call: TorchCall) -> None:
    """Write the losses of examples whose targets may lie anywhere in time: of it is known what it costs.

    At each step each of the targets, with a blank before, between and behind them, sums three states of the last step.
    """
    (steps, examples, _), targets = call.x.shape, call.value("targets").shape
    states = 2 * (targets[1] if len(targets) == 2 else targets[0] // max(1, examples)) + 1
    call.opaque(passes=[(1, 0)], flop_per_point=10.0 * steps * states)


TRANSLATIONS = table(
    (
        lambda call: _of_classes(call, call.x, smoothing=0.0),
        "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
    ),
    (cross_entropy, "cross_entropy_loss"),
    (multilabel_margin, "multilabel_margin_loss multilabel_margin_loss_forward"),
    (ctc, "ctc_loss"),
)
"""Of losses, by the operator's name."""
