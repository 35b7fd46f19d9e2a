"""Functions of the elements at one point, and what works along dims: reductions, normalisations, softmax."""

from math import inf, prod

from pase.importers.ir import Normalise, Softmax, Value
from pase.importers.onnx.operators import OnnxCall, identity, place, table

SOFTMAX_PER_DIM_SINCE = 13
"""The opset from which a softmax is over one dim; before, it was over all dims from its axis on."""


def dropout(call: OnnxCall) -> None:
    """Write the first input as it is; a mask that is read is one of constants."""
    identity(call)
    mask = call.further(1)
    if mask is not None:
        call.point("not_equal", call.x, out=mask)


def unary(call: OnnxCall) -> None:
    """Write a function of the first input; bounds and the like are numbers of it, where they are known."""
    is_tanh = call.operator == "Gelu" and call.attributes.get("approximate") == "tanh"
    function = "gelu_tanh" if is_tanh else _UNARY[call.operator]
    call.point(function, call.x, numbers=_numbers(call), out=call.result)


def _numbers(call: OnnxCall) -> tuple[float, ...]:
    """Return the numbers that a function takes besides its input; none where one of them is not known."""
    if call.operator != "Clip":
        return tuple(call.number(name, default) for name, default in _ATTRIBUTES.get(call.operator, {}).items())
    found = []
    for position, name, default in ((1, "min", -inf), (2, "max", inf)):
        array = call.constant(position)
        if call.has(position) and (array is None or array.size != 1):
            return ()
        found.append(call.number(name, default) if array is None else float(array.ravel()[0]))
    return tuple(found)


def binary(call: OnnxCall) -> None:
    """Write a function of two inputs; of one and a number where the second, or either if they commute, is one."""
    function, out = _BINARY[call.operator], call.result
    x, y = call.value(0), call.value(1)
    first, second = (_number(call, i) for i in (0, 1))
    if second is not None and x.shape == out.shape:
        call.point(function, x, constant=second, out=out)
    elif first is None or y.shape != out.shape:
        call.point(function, x, y, out=out)
    elif function == "divide" and first == 1:
        call.point("reciprocal", y, out=out)
    else:
        call.point(function, y, constant=first, constant_first=function not in ("add", "multiply"), out=out)


def _number(call: OnnxCall, position: int) -> float | None:
    """Return the one number that an input is, if it is known."""
    array = call.constant(position)
    is_float = call.value(position).is_float
    if array is None or array.size != 1 or not is_float or array.dtype.kind not in "fiu":
        return None
    return float(array.ravel()[0])


def variadic(call: OnnxCall) -> None:
    """Write a function of any number of inputs, two by two."""
    count = len(call.tensors)
    if count == 1:
        call.identity(*call.tensors, out=call.result)
    elif count:
        call.point(_VARIADIC[call.operator], *call.tensors, flop_per_point=count - 1, out=call.result)


def all_inputs(call: OnnxCall) -> None:
    """Write a function of the inputs that it must have."""
    function, count = _OF_INPUTS[call.operator]
    call.point(function, *(call.value(i) for i in range(count)), out=call.result)


def biased_gelu(call: OnnxCall) -> None:
    """Write a function of an input with a bias, which may be left out."""
    x = call.point("add", call.x, *call.maybe(1)) if call.has(1) else call.x
    call.point("gelu_tanh" if call.operator == "FastGelu" else "gelu", x, out=call.result)


# -- over dims


def reduce(call: OnnxCall) -> None:
    """Write a reduction over some dims, or over all where none are told."""
    rank, is_place = len(call.x.shape), call.operator.startswith("Arg")
    axes = (call.axis(0),) if is_place else call.wholes("axes", 1)
    if not axes and call.whole("noop_with_empty_axes", 0):
        return identity(call)
    over = {place(axis, rank) for axis in axes} if axes else range(rank)
    function, keeps = _REDUCTIONS[call.operator], bool(call.whole("keepdims", 1))
    call.reduce(function, call.x, over, keeps_dims=keeps, out=call.result)
    return None


def along_axis(call: OnnxCall) -> None:
    """Write what reads one dim as a whole and leaves the others alone: a sort, a sum of all that came before."""
    rank, given = len(call.x.shape), call.constant(1)
    if call.operator == "CumSum" and given is None:
        return call.opaque(passes=())
    is_input = call.operator == "CumSum" and given is not None
    axis = place(int(given.ravel()[0]), rank) if is_input and given is not None else call.axis(-1)
    return call.opaque(call.x, passes=[(i, i) for i in range(rank) if i != axis])


def global_pool(call: OnnxCall) -> None:
    """Write the maximum or mean over all dims but the batch and the channels."""
    function = {"GlobalMaxPool": "max", "GlobalAveragePool": "mean"}.get(call.operator, "norm")
    call.reduce(function, call.x, range(2, len(call.x.shape)), keeps_dims=True, out=call.result)


def normalisation(call: OnnxCall) -> None:
    """Write a normalisation over the batch, the spatial dims, or groups of channels.

    Scale and shift of each group, as they once were, are repeated.
    """
    spatial = tuple(range(2, len(call.x.shape)))
    kind, over = {
        "BatchNormalization": ("batch", (0, *spatial)),
        "InstanceNormalization": ("instance", spatial),
        "GroupNormalization": ("group", (1, *spatial)),
    }[call.operator]
    op = Normalise(
        kind=kind,  # type: ignore[arg-type]
        over=over,
        channels=(1,),
        groups=call.whole("num_groups", 1) if kind == "group" else 1,
        num_statistics=2 if kind == "batch" else 0,
        epsilon=call.number("epsilon", 1e-5),
    )
    call.add(op, *(call.value(i) for i in range(5 if kind == "batch" else 3)), out=call.result)


def layer_normalisation(call: OnnxCall) -> None:
    """Write a normalisation over the last dims, by the deviation or by the root of the mean square."""
    _over_last_dims(call, call.x, scale=1, shift=2 if call.operator == "LayerNormalization" else None)


def skip_normalisation(call: OnnxCall) -> None:
    """Write the normalisation of the sum of two tensors, perhaps with a bias; the sum may be read as well."""
    shift, bias = (None, 3) if "Simplified" in call.operator else (3, 4)
    added = (call.x, call.value(1), *call.maybe(bias))
    total = call.point("add", *added, flop_per_point=len(added) - 1, out=call.further(3))
    _over_last_dims(call, total, scale=2, shift=shift)


def _over_last_dims(call: OnnxCall, x: Value, *, scale: int, shift: int | None) -> None:
    if any(call.further(i) is not None for i in (1, 2)):
        # A mean or deviation that is read as well makes it one not known.
        return call.opaque()
    rank = len(x.shape)
    over = tuple(range(place(call.whole("axis", -1), rank), rank))
    op = Normalise(
        kind="rms" if shift is None else "layer",
        over=over,
        channels=over,
        has_scale=call.has(scale),
        has_shift=shift is not None and call.has(shift),
        epsilon=call.number("epsilon", 1e-5),
    )
    call.add(op, x, *call.maybe(scale, *([] if shift is None else [shift])), out=call.result)
    return None


def plain_normalisation(call: OnnxCall) -> None:
    """Write a normalisation without scale and shift: over given dims, or by neighbouring channels."""
    is_response, rank = call.operator == "LRN", len(call.x.shape)
    over = (1,) if is_response else tuple(sorted(place(axis, rank) for axis in call.wholes("axes") or (0, 2, 3)))
    kind = "response" if is_response else "layer"
    op = Normalise(kind=kind, over=over, channels=over, has_scale=False, has_shift=False)  # type: ignore[arg-type]
    call.add(op, call.x, out=call.result)


def softmax(call: OnnxCall) -> None:
    """Write a softmax or its logarithm."""
    x, is_log, rank = call.x, call.operator == "LogSoftmax", len(call.x.shape)
    if not rank:
        return identity(call)
    is_per_dim = call.opset >= SOFTMAX_PER_DIM_SINCE
    axis = call.axis(-1 if is_per_dim else 1) if rank > 1 else 0
    last = [i for i in range(axis, rank) if x.shape[i] > 1]
    if is_per_dim or len(last) <= 1:
        call.add(Softmax(dim=axis if is_per_dim or not last else last[0], is_log=is_log), x, out=call.result)
    else:
        flat = call.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))
        call.reshape(call.add(Softmax(dim=1, is_log=is_log), flat, shape=flat.shape), out=call.result)
    return None


_ATTRIBUTES: dict[str, dict[str, float]] = {
    "Celu": {"alpha": 1.0},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "ThresholdedRelu": {"alpha": 1.0},
    "QuickGelu": {"alpha": 1.702},
    "Swish": {"alpha": 1.0},
}
"""Numbers of a function, and their defaults in ONNX."""

_SAME_NAME = """
    Abs Acos Acosh Asin Asinh Atan Atanh Bernoulli Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu IsInf IsNaN Log Mish
    Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh
"""
_UNARY = {name: name.lower() for name in _SAME_NAME.split()} | {
    "BitwiseNot": "not", "HardSigmoid": "hard_sigmoid", "HardSwish": "hard_swish", "LeakyRelu": "leaky_relu",
    "Neg": "negate", "QuickGelu": "quick_gelu", "Swish": "quick_gelu", "ThresholdedRelu": "thresholded_relu",
}  # fmt: skip
_BINARY = {name: name.lower() for name in ("And", "Equal", "Greater", "Less", "Or", "Xor")} | {
    "Add": "add", "BitShift": "shift", "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor", "Div": "divide",
    "GreaterOrEqual": "greater_equal", "LessOrEqual": "less_equal", "Mod": "remainder", "Mul": "multiply",
    "Pow": "power", "Sub": "subtract",
}  # fmt: skip
_VARIADIC = {"Sum": "add", "Max": "maximum", "Min": "minimum", "Mean": "average"}
_OF_INPUTS = {"PRelu": ("prelu", 2), "Where": ("where", 3), "Trilu": ("trilu", 1)}
_REDUCTIONS = {
    "ReduceL1": "norm", "ReduceL2": "norm", "ReduceLogSum": "logsum", "ReduceLogSumExp": "logsumexp",
    "ReduceMax": "max", "ReduceMean": "mean", "ReduceMin": "min", "ReduceProd": "prod", "ReduceSum": "sum",
    "ReduceSumSquare": "sum_of_squares", "ArgMax": "argmax", "ArgMin": "argmin",
}  # fmt: skip

TRANSLATIONS = table(
    (identity, "Identity Cast CastLike"),
    (dropout, "Dropout"),
    (unary, " ".join(_UNARY)),
    (binary, " ".join(_BINARY)),
    (variadic, " ".join(_VARIADIC)),
    (all_inputs, " ".join(_OF_INPUTS)),
    # Sines and cosines are constants.
    (
        lambda call: call.point("rotary", call.x, flop_per_point=3, mixes=(len(call.x.shape) - 1,), out=call.result),
        "RotaryEmbedding",
    ),
    (biased_gelu, "FastGelu BiasGelu"),
    (reduce, " ".join(_REDUCTIONS)),
    (along_axis, "TopK CumSum CumProd Hardmax LpNormalization"),
    (global_pool, "GlobalMaxPool GlobalAveragePool GlobalLpPool"),
    (normalisation, "BatchNormalization InstanceNormalization GroupNormalization"),
    (layer_normalisation, "LayerNormalization RMSNormalization SimplifiedLayerNormalization"),
    (skip_normalisation, "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
    (plain_normalisation, "LRN MeanVarianceNormalization"),
    (softmax, "Softmax LogSoftmax"),
)
"""By the operator's name."""
