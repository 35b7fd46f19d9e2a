"""Normalisations and softmax."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from pase.importers.ir import Identity, Normalise, Pointwise, Reshape, Softmax, Step, Value
from pase.importers.onnx.operators.call import Call, Translation, generic, inner, node, place, step

SOFTMAX_PER_DIM_SINCE = 13
"""The opset from which a softmax is over one dim; before, it was over all dims from its axis on."""


def batch_normalisation(call: Call) -> list[Step]:
    """Return a batch normalisation with its running mean and variance."""
    x = call.x
    over = (0, *range(2, len(x.shape)))
    op = Normalise(kind="batch", over=over, channels=(1,), num_statistics=2, epsilon=call.number("epsilon", 1e-5))
    return step(call, op, *(call.value(i) for i in range(5)))


def instance_normalisation(call: Call) -> list[Step]:
    """Return a normalisation of each channel of each example."""
    over = tuple(range(2, len(call.x.shape)))
    op = Normalise(kind="instance", over=over, channels=(1,), epsilon=call.number("epsilon", 1e-5))
    return step(call, op, *(call.value(i) for i in range(3)))


def group_normalisation(call: Call) -> list[Step]:
    """Return a normalisation of groups of channels; scale and shift of each group, as they once were, are repeated."""
    x = call.x
    groups = call.whole("num_groups", 1)
    op = Normalise(
        kind="group",
        over=tuple(range(1, len(x.shape))),
        channels=(1,),
        groups=groups,
        epsilon=call.number("epsilon", 1e-5),
    )
    return step(call, op, *(call.value(i) for i in range(3)))


def layer_normalisation(call: Call) -> list[Step]:
    """Return a normalisation over the last dims; a mean or deviation that is read as well makes it one not known."""
    return _over_last_dims(call, call.x, call.out, scale=1, shift=2)


def rms_normalisation(call: Call) -> list[Step]:
    """Return a normalisation over the last dims by the root of the mean square."""
    return _over_last_dims(call, call.x, call.out, scale=1, shift=None)


def skip_normalisation(call: Call) -> list[Step]:
    """Return the normalisation of the sum of two tensors, perhaps with a bias; the sum may be read as well."""
    is_rms = "Simplified" in call.operator
    shift, bias = (None, 3) if is_rms else (3, 4)
    total = call.result(3) or inner(call, "sum", call.x.shape)
    added = [call.x, call.value(1), *([call.value(bias)] if call.has(bias) else [])]
    first = node(Pointwise(functions=("add",), flop_per_point=len(added) - 1), tuple(added), total)
    return [first, *_over_last_dims(call, total, call.out, scale=2, shift=shift)]


def _over_last_dims(call: Call, x: Value, out: Value, *, scale: int, shift: int | None) -> list[Step]:
    if any(call.result(i) is not None for i in (1, 2)):
        return generic(call)
    rank = len(x.shape)
    over = tuple(range(place(call.whole("axis", -1), rank), rank))
    affine = [call.value(i) for i in (scale, shift) if i is not None and call.has(i)]
    op = Normalise(
        kind="rms" if shift is None else "layer",
        over=over,
        channels=over,
        has_scale=call.has(scale),
        has_shift=shift is not None and call.has(shift),
        epsilon=call.number("epsilon", 1e-5),
    )
    return [node(op, (x, *affine), out)]


def response_normalisation(call: Call) -> list[Step]:
    """Return a normalisation by neighbouring channels."""
    op = Normalise(kind="response", over=(1,), channels=(1,), has_scale=False, has_shift=False)
    return step(call, op, call.x)


def mean_variance_normalisation(call: Call) -> list[Step]:
    """Return a normalisation over given dims, without scale and shift."""
    rank = len(call.x.shape)
    over = tuple(sorted(place(axis, rank) for axis in call.wholes("axes") or (0, 2, 3)))
    op = Normalise(kind="layer", over=over, channels=over, has_scale=False, has_shift=False)
    return step(call, op, call.x)


def softmax(call: Call) -> list[Step]:
    """Return a softmax or its logarithm."""
    x = call.x
    is_log = call.operator == "LogSoftmax"
    rank = len(x.shape)
    if not rank:
        return step(call, Identity(), x)
    is_per_dim = call.opset >= SOFTMAX_PER_DIM_SINCE
    axis = call.axis(-1 if is_per_dim else 1) if rank > 1 else 0
    last = [i for i in range(axis, rank) if x.shape[i] > 1]
    if is_per_dim or len(last) <= 1:
        dim = axis if is_per_dim or not last else last[0]
        return step(call, Softmax(dim=dim, is_log=is_log), x)
    flat = (prod(x.shape[:axis]), prod(x.shape[axis:]))
    before, after = inner(call, "flat", flat), inner(call, "normal", flat)
    return [
        node(Reshape(), (x,), before),
        node(Softmax(dim=1, is_log=is_log), (before,), after),
        *step(call, Reshape(), after),
    ]


NORMALISATIONS: Mapping[str, Translation] = MappingProxyType(
    {
        "BatchNormalization": batch_normalisation,
        "InstanceNormalization": instance_normalisation,
        "GroupNormalization": group_normalisation,
        "LayerNormalization": layer_normalisation,
        **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization"), rms_normalisation),
        **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), skip_normalisation),
        "LRN": response_normalisation,
        "MeanVarianceNormalization": mean_variance_normalisation,
        **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    }
)
"""By the operator's name."""
