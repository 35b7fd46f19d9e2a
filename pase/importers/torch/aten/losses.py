"""Losses: what `torch.export` leaves of them, in operations of their own: the target's column, masks, sums, a mean.

Masks and the counts of targets depend on whole numbers of the input alone, so that none of them becomes a vertex.
"""

from math import prod

from pase.importers.ir import Gather, Generic, Identity, Lookup, Pointwise, Reduce, Softmax, Step, Value
from pase.importers.torch.aten.call import Call, inner, reshaped, step_to, table

_NONE, _MEAN = 0, 1
"""Ways of reduction, as operators number them; the other one is the sum."""

_IGNORED = -100
"""The target that is left out where no other one is named."""


def nll(call: Call) -> list[Step]:
    """Return the negative log-likelihood of targets, whose logarithms of probabilities lie along one dim."""
    return _negative_log(call, call.tensors[0], smoothing=0.0)


def cross_entropy(call: Call) -> list[Step]:
    """Return the cross-entropy of a softmax with targets, which are classes or their probabilities."""
    x, target = call.tensors[:2]
    log = inner(call, "log", x.shape)
    first = step_to(Softmax(dim=_classes(x), is_log=True), log, x)
    smoothing = float(call.get("label_smoothing", 0.0))
    found = _of_probabilities if target.is_float else _negative_log
    return [first, *found(call, log, smoothing=smoothing)]


def _classes(x: Value) -> int:
    return 1 if len(x.shape) > 1 else 0


def _negative_log(call: Call, log: Value, *, smoothing: float) -> list[Step]:
    """Return the loss of classes: what the target's column holds, and a share of all columns where it is smoothed."""
    target = call.value("target")
    dim, rows = _classes(log), target.shape
    kept = inner(call, "kept", rows, "bool")
    ignored = float(call.get("ignore_index", _IGNORED))
    steps = [step_to(Pointwise(functions=("not_equal",), constant=ignored), kept, target)]
    more, places = reshaped(call, target, (*log.shape[:dim], 1, *log.shape[dim + 1 :]), "places")
    found = inner(call, "found", places.shape)
    steps += [*more, step_to(Gather(dim=dim), found, log, places)]
    more, picked = reshaped(call, found, rows, "picked")
    steps += more
    share: tuple[Value, ...] = ()
    for weight in call.maybe("weight"):
        share = (inner(call, "share", rows),)
        weighted = inner(call, "weighted", rows)
        steps += [
            step_to(Lookup(), share[0], weight, target),
            step_to(Pointwise(functions=("multiply",)), weighted, picked, *share),
        ]
        picked = weighted
    if smoothing:
        more, every = _summed_over_classes(call, log, call.maybe("weight"))
        one, other, both = (inner(call, name, rows) for name in ("one", "other", "both"))
        steps += [
            *more,
            step_to(Pointwise(functions=("multiply",), constant=1.0 - smoothing), one, picked),
            step_to(Pointwise(functions=("multiply",), constant=smoothing / log.shape[dim]), other, every),
            step_to(Pointwise(functions=("add",)), both, one, other),
        ]
        picked = both
    negative = inner(call, "negative", rows)
    steps.append(step_to(Pointwise(functions=("negate",)), negative, picked))
    if call.get("reduction", _MEAN) == _NONE:
        steps.append(step_to(Pointwise(functions=("where",), constant=0.0), call.result, kept, negative))
        return steps + [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]
    masked = inner(call, "masked", rows)
    steps.append(step_to(Pointwise(functions=("where",), constant=0.0), masked, kept, negative))
    if share:
        counted = inner(call, "counted", rows)
        steps.append(step_to(Pointwise(functions=("where",), constant=0.0), counted, kept, *share))
    else:
        counted = inner(call, "counted", rows)
        steps.append(step_to(Identity(), counted, kept))
    count = call.results[1] if len(call.results) > 1 else inner(call, "count", ())
    steps.append(_sum(count, counted))
    if call.get("reduction", _MEAN) != _MEAN:
        return [*steps, _sum(call.result, masked)]
    total = inner(call, "total", ())
    return [*steps, _sum(total, masked), step_to(Pointwise(functions=("divide",)), call.result, total, count)]


def _of_probabilities(call: Call, log: Value, *, smoothing: float) -> list[Step]:
    """Return the loss of probabilities of all classes."""
    target = call.value("target")
    dim, steps = _classes(log), list[Step]()
    if smoothing:
        less, smooth = inner(call, "less", target.shape), inner(call, "smooth", target.shape)
        steps += [
            step_to(Pointwise(functions=("multiply",), constant=1.0 - smoothing), less, target),
            step_to(Pointwise(functions=("add",), constant=smoothing / log.shape[dim]), smooth, less),
        ]
        target = smooth
    weighted = inner(call, "weighted", log.shape)
    steps.append(step_to(Pointwise(functions=("multiply",)), weighted, log, target))
    more, rows = _summed_over_classes(call, weighted, call.maybe("weight"))
    steps += more
    if call.get("reduction", _MEAN) == _NONE:
        return [*steps, step_to(Pointwise(functions=("negate",)), call.result, rows)]
    negative = inner(call, "negative", rows.shape)
    steps.append(step_to(Pointwise(functions=("negate",)), negative, rows))
    if call.get("reduction", _MEAN) != _MEAN:
        return [*steps, _sum(call.result, negative)]
    total = inner(call, "total", ())
    count = float(max(1, prod(rows.shape)))
    return [
        *steps,
        _sum(total, negative),
        step_to(Pointwise(functions=("divide",), constant=count), call.result, total),
    ]


def _summed_over_classes(call: Call, x: Value, weight: tuple[Value, ...]) -> tuple[list[Step], Value]:
    """Return the sum over the classes, each times its weight where it has one."""
    dim, steps = _classes(x), list[Step]()
    for found in weight:
        more, along = reshaped(call, found, (x.shape[dim], *(1,) * (len(x.shape) - dim - 1)), "weight of classes")
        scaled = inner(call, "scaled", x.shape)
        steps += [*more, step_to(Pointwise(functions=("multiply",)), scaled, x, along)]
        x = scaled
    every = inner(call, "every", (*x.shape[:dim], *x.shape[dim + 1 :]))
    return [*steps, step_to(Reduce(function="sum", over=(dim,)), every, x)], every


def _sum(out: Value, x: Value) -> Step:
    if not x.shape:
        return step_to(Identity(), out, x)
    return step_to(Reduce(function="sum", over=tuple(range(len(x.shape)))), out, x)


def multilabel_margin(call: Call) -> list[Step]:
    """Return the sum, over pairs of a target's class and another one, of by how much it is not one larger."""
    x, target = call.tensors[:2]
    lead, classes = x.shape[:-1], x.shape[-1]
    found = inner(call, "found", target.shape)
    pairs = (*lead, target.shape[-1], classes)
    counted = inner(call, "counted", pairs, "bool")
    steps = [
        # Classes up to the first that is negative, with those that are not among them.
        Step(op=Generic(is_index=True), inputs=(), outputs=(counted,)),
        step_to(Gather(dim=len(lead)), found, x, target),
    ]
    more, own = reshaped(call, found, (*lead, target.shape[-1], 1), "own")
    steps += more
    more, others = reshaped(call, x, (*lead, 1, classes), "others")
    steps += more
    names = ("difference", "margin", "short", "masked", "scaled")
    difference, margin, short, masked, scaled = (inner(call, name, pairs) for name in names)
    steps += [
        step_to(Pointwise(functions=("subtract",)), difference, others, own),
        step_to(Pointwise(functions=("add",), constant=1.0), margin, difference),
        step_to(Pointwise(functions=("relu",)), short, margin),
        step_to(Pointwise(functions=("where",), constant=0.0), masked, counted, short),
    ]
    reduction, rows = call.get("reduction", _MEAN), prod(lead)
    divisor = float(classes * (rows if reduction == _MEAN else 1))
    steps.append(step_to(Pointwise(functions=("divide",), constant=divisor), scaled, masked))
    over = tuple(range(len(pairs)))[-2 if reduction == _NONE else 0 :]
    steps.append(step_to(Reduce(function="sum", over=over), call.result, scaled))
    return steps + [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]


TRANSLATIONS = table(
    (nll, "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward"),
    (cross_entropy, "cross_entropy_loss"),
    (multilabel_margin, "multilabel_margin_loss multilabel_margin_loss_forward"),
)
"""Of losses, by the operator's name."""
