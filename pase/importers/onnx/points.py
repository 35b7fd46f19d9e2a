"""Functions of the elements at one point, what works along dims, and what moves elements alone."""

from math import inf, prod

from pase.importers.ir import ops
from pase.importers.ir.call import place, places, table, with_extent
from pase.importers.ir.shared import FUNCTIONS, concatenate, loss_of_classes, reduction, run, snake
from pase.importers.ir.trace import Value
from pase.importers.onnx.walk import OnnxCall

SOFTMAX_PER_DIM_SINCE = 13
"""The opset from which a softmax is over one dim; before, it was over all dims from its axis on."""


def identity(call: OnnxCall) -> None:
    """Write the first input as it is."""
    call.identity(call.x, out=call.result)


def dropout(call: OnnxCall) -> None:
    """Write the first input as it is; a mask that is read is one of constants."""
    identity(call)
    mask = call.further(1)
    if mask is not None:
        call.point("not_equal", call.x, out=mask)


def pointwise(call: OnnxCall) -> None:
    """Write a function of all inputs; bounds and the like, and one of two inputs, are numbers where they are known."""
    function = FUNCTIONS[snake(call.name)]
    if function == "gelu" and call.arguments.get("approximate") == "tanh":
        function = "gelu_tanh"
    if call.has(1) and not call.has(2) and call.name not in ("Clip", "PRelu"):
        _of_two(call, function)
    else:
        given = call.tensors[:1] if call.name == "Clip" else call.tensors
        call.point(function, *given, numbers=_numbers(call), out=call.result)


def _numbers(call: OnnxCall) -> tuple[float, ...]:
    """Return the numbers that a function takes besides its input; none where one of them is not known."""
    if call.name != "Clip":
        return tuple(float(call.get(name, default)) for name, default in _ATTRIBUTES.get(call.name, {}).items())
    found = []
    for position, name, default in ((1, "min", -inf), (2, "max", inf)):
        number = call.number(position)
        if call.has(position) and number is None:
            return ()
        found.append(float(call.get(name, default)) if number is None else number)
    return tuple(found)


def _of_two(call: OnnxCall, function: str) -> None:
    """Write a function of two inputs; of one and a number where the second, or either if they commute, is one."""
    x, y, out = call.value(0), call.value(1), call.result
    first, second = (call.number(i) if call.value(i).is_float else None for i in (0, 1))
    if second is not None and x.shape == out.shape:
        call.point(function, x, constant=second, out=out)
    elif first is None or y.shape != out.shape:
        call.point(function, x, y, out=out)
    elif function == "divide" and first == 1:
        call.point("reciprocal", y, out=out)
    else:
        call.point(function, y, constant=first, constant_first=function not in ("add", "multiply"), out=out)


def variadic(call: OnnxCall) -> None:
    """Write a function of any number of inputs, two by two."""
    count = len(call.tensors)
    if count == 1:
        call.identity(*call.tensors, out=call.result)
    elif count:
        call.point(_VARIADIC[call.name], *call.tensors, flop_per_point=count - 1, out=call.result)


def biased_gelu(call: OnnxCall) -> None:
    """Write a function of an input with a bias, which may be left out."""
    x = call.point("add", call.x, *call.maybe(1)) if call.has(1) else call.x
    call.point("gelu_tanh" if call.name == "FastGelu" else "gelu", x, out=call.result)


# -- over dims


def reduce(call: OnnxCall) -> None:
    """Write a reduction over some dims, or over all where none are told."""
    rank, is_place = len(call.x.shape), call.name.startswith("Arg")
    axes = (call.axis(0),) if is_place else call.wholes("axes", 1)
    if not axes and call.get("noop_with_empty_axes", 0):
        return identity(call)
    over, keeps = places(axes or None, rank), bool(call.get("keepdims", 1))
    call.reduce(reduction(call.name), call.x, over, keeps_dims=keeps, out=call.result)
    return None


def along_axis(call: OnnxCall) -> None:
    """Write what reads one dim as a whole and leaves the others alone: a sort, a sum of all that came before."""
    rank, given = len(call.x.shape), call.constant(1)
    if call.name == "CumSum" and given is None:
        return call.opaque(passes=())
    is_input = call.name == "CumSum" and given is not None
    axis = place(int(given.ravel()[0]), rank) if is_input and given is not None else call.axis(-1)
    return call.opaque(call.x, passes=[(i, i) for i in range(rank) if i != axis])


def global_pool(call: OnnxCall) -> None:
    """Write the maximum or mean over all dims but the batch and the channels."""
    function = {"GlobalMaxPool": "max", "GlobalAveragePool": "mean"}.get(call.name, "norm")
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
    }[call.name]
    call.normalise(
        kind,
        call.x,
        over,
        (1,),
        scale=[call.value(1)],
        shift=[call.value(2)],
        statistics=[call.value(3), call.value(4)] if kind == "batch" else (),
        groups=call.get("num_groups", 1) if kind == "group" else 1,
        epsilon=call.get("epsilon", 1e-5),
    )


def layer_normalisation(call: OnnxCall) -> None:
    """Write a normalisation over the last dims, by the deviation or by the root of the mean square."""
    _over_last_dims(call, call.x, scale=1, shift=2 if call.name == "LayerNormalization" else None)


def skip_normalisation(call: OnnxCall) -> None:
    """Write the normalisation of the sum of two tensors, perhaps with a bias; the sum may be read as well."""
    shift, bias = (None, 3) if "Simplified" in call.name else (3, 4)
    added = (call.x, call.value(1), *call.maybe(bias))
    total = call.point("add", *added, flop_per_point=len(added) - 1, out=call.further(3))
    _over_last_dims(call, total, scale=2, shift=shift)


def _over_last_dims(call: OnnxCall, x: Value, *, scale: int, shift: int | None) -> None:
    if any(call.further(i) is not None for i in (1, 2)):
        # A mean or deviation that is read as well makes it one not known.
        return call.opaque()
    rank = len(x.shape)
    over = range(place(call.get("axis", -1), rank), rank)
    kind, shifts = ("rms", ()) if shift is None else ("layer", call.maybe(shift))
    call.normalise(kind, x, over, over, scale=call.maybe(scale), shift=shifts, epsilon=call.get("epsilon", 1e-5))
    return None


def plain_normalisation(call: OnnxCall) -> None:
    """Write a normalisation without scale and shift."""
    over = places(call.wholes("axes") or (0, 2, 3), len(call.x.shape))
    call.normalise("layer", call.x, over, over)


def response_normalisation(call: OnnxCall) -> None:
    """Write a normalisation by neighbouring channels, which are read whole."""
    numbers = [float(call.get(name, default)) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))]
    size = call.get("size", 0)
    if size < 1:
        raise ValueError(f"size is {size}; expected a number of channels")
    call.normalise("response", call.x, (), (1,), response=(size, *numbers), mixes=(1,))


_IGNORED = -1
"""No class: what a target never is where none is left out."""


def class_loss(call: OnnxCall) -> None:
    """Write the cross-entropy of scores, or of logarithms of probabilities, with the classes that are targets."""
    log = call.x
    if call.name == "SoftmaxCrossEntropyLoss":
        log = call.softmax(log, 1, is_log=True, out=call.further(1))
    reduction = call.get("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; expected mean, sum or none")
    ignored = float(call.get("ignore_index", _IGNORED))
    loss_of_classes(call, log, call.value(1), weight=call.maybe(2), ignored=ignored, reduction=reduction)


def softmax(call: OnnxCall) -> None:
    """Write a softmax or its logarithm."""
    x, is_log, rank = call.x, call.name == "LogSoftmax", len(call.x.shape)
    if not rank:
        return identity(call)
    is_per_dim = call.opset >= SOFTMAX_PER_DIM_SINCE
    axis = call.axis(-1 if is_per_dim else 1) if rank > 1 else 0
    last = [i for i in range(axis, rank) if x.shape[i] > 1]
    if is_per_dim or len(last) <= 1:
        call.softmax(x, axis if is_per_dim or not last else last[0], is_log=is_log, out=call.result)
    else:
        flat = call.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))
        call.reshape(call.softmax(flat, 1, is_log=is_log), out=call.result)
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

_VARIADIC = {"Sum": "add", "Max": "maximum", "Min": "minimum", "Mean": "average"}
_POINTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu
    Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu
    Less LessOrEqual Log Mish Mod Mul Neg Not Or PRelu Pow QuickGelu Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin
    Sinh Softplus Softsign Sqrt Sub Swish Tan Tanh ThresholdedRelu Where Xor
"""
_REDUCTIONS = """
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    ArgMax ArgMin
"""

# -- what moves elements and computes nothing: shapes, orders, pieces, repetition, padding, look-ups


def transpose(call: OnnxCall) -> None:
    """Write the dims in another order, backwards where none is told."""
    rank = len(call.x.shape)
    order = call.wholes("perm") or tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise ValueError(f"perm is {order}; expected an order of {rank} dims")
    call.transpose(call.x, order, out=call.result)


def tile(call: OnnxCall) -> None:
    """Write a tensor laid end to end with itself."""
    before, after = call.x.shape, call.result.shape
    if 0 in before:
        call.opaque(passes=())
    elif any(new % old for old, new in zip(before, after, strict=True)):
        raise ValueError(f"it makes {list(after)} of {list(before)}, which is no whole number of times")
    else:
        call.repeat(call.x, [new // old for old, new in zip(before, after, strict=True)], out=call.result)


def slice_(call: OnnxCall) -> None:
    """Write a box of a tensor; one that is read backwards passes the other dims alone."""
    x, rank = call.x, len(call.x.shape)
    starts, ends, axes, steps = (call.wholes(name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1))
    if starts is None or ends is None:
        return call.opaque(over=())
    axes = tuple(axis % rank for axis in (range(len(starts)) if axes is None else axes))
    steps = steps or (1,) * len(starts)
    if any(each < 0 for each in steps):
        return call.opaque(x, over=axes)
    first, by = [0] * rank, [1] * rank
    for start, end, axis, each in zip(starts, ends, axes, steps, strict=True):
        first[axis], _, by[axis] = slice(start, end, each).indices(x.shape[axis])
    call.add(ops.Slice(starts=tuple(first), steps=tuple(by)), x, out=call.result)
    return None


def split(call: OnnxCall) -> None:
    """Write pieces that make up a tensor."""
    axis, at = call.axis(0), 0
    for result in call.outputs:
        if result is None:
            raise ValueError("a piece of a split has no name, so that its extent is not known")
        call.cut(call.x, axis, at, out=result)
        at += result.shape[axis]


def pad(call: OnnxCall) -> None:
    """Write a tensor with values around it, or without some of its own."""
    rank, given, axes = len(call.x.shape), call.wholes("pads", 1), call.constant(3)
    if given is None:
        return call.opaque(over=())
    before = [0] * rank
    for i, dim in enumerate(range(rank) if axes is None else [int(axis) % rank for axis in axes.ravel()]):
        before[dim] = given[i]
    call.add(ops.Pad(before=tuple(before)), call.x, out=call.result)
    return None


def blocks(call: OnnxCall) -> None:
    """Write channels laid out as blocks of the spatial dims, or these as channels."""
    (b, c, h, w), size = call.x.shape, call.get("blocksize", 1)
    if call.name == "SpaceToDepth":
        call.rearrange(call.x, (b, c, h // size, size, w // size, size), (0, 3, 5, 1, 2, 4), out=call.result)
    elif call.get("mode", "DCR") == "DCR":
        call.rearrange(call.x, (b, size, size, c // size**2, h, w), (0, 3, 4, 1, 5, 2), out=call.result)
    else:
        call.rearrange(call.x, (b, c // size**2, size, size, h, w), (0, 1, 4, 2, 5, 3), out=call.result)


def resize(call: OnnxCall) -> None:
    """Write a tensor in other extents; the dims that keep theirs pass."""
    changed = sum(a != b for a, b in zip(call.x.shape, call.result.shape, strict=True))
    is_nearest = "nearest" in call.get("mode", "nearest")
    call.opaque(call.x, over=(), flop_per_point=1.0 if is_nearest else 2.0 ** (changed + 1))


# -- look-ups


def gather(call: OnnxCall) -> None:
    """Write rows of a table along a dim; those that constants tell and that lie side by side are a piece."""
    x, indices, found = call.value(0), call.value(1), call.constant(1)
    rank, axis, n = len(x.shape), call.axis(0), len(indices.shape)
    if found is not None and found.size and not -x.shape[axis] <= found.min() <= found.max() < x.shape[axis]:
        raise IndexError(f"an index lies outside of a dim of {x.shape[axis]}")
    piece = run(found, x.shape[axis])
    if piece is not None:
        is_alike = with_extent(x.shape, axis, piece[1]) == call.result.shape
        made = call.cut(x, axis, *piece, out=call.result if is_alike else None)
        if not is_alike:
            call.reshape(made, out=call.result)
    elif axis == 0:
        call.add(ops.Lookup(), x, indices, out=call.result)
    elif not x.is_float or found is not None:
        call.opaque(passes=[(i, i if i < axis else i + n - 1) for i in range(rank) if i != axis])
    else:
        front = call.transpose(x, (axis, *(i for i in range(rank) if i != axis)))
        rows = call.add(ops.Lookup(), front, indices, shape=(*indices.shape, *front.shape[1:]))
        call.transpose(rows, (*range(n, n + axis), *range(n), *range(n + axis, n + rank - 1)), out=call.result)


def by_elements(call: OnnxCall) -> None:
    """Write elements read, or put in, by indices along one dim; a dim that the indices have whole passes."""
    x, indices, axis = call.value(0), call.value(1), call.axis(0)
    passes = [(i, i) for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)) if i != axis and a == b]
    if call.name == "GatherElements" and len(passes) == len(x.shape) - 1 and x.is_float and not indices.is_float:
        call.add(ops.Gather(dim=axis), x, indices, out=call.result)
        return
    call.opaque(*([x, indices] if call.name == "GatherElements" else []), passes=passes)


def gather_nd(call: OnnxCall) -> None:
    """Write slices by indices; the batch dims pass, and so do those that no index is for."""
    x, indices = call.value(0), call.value(1)
    batch = call.get("batch_dims", 0)
    if not indices.shape:
        raise ValueError("GatherND needs indices of one dim or more")
    first = batch + indices.shape[-1]
    rest = [(i, len(indices.shape) - 1 + i - first) for i in range(first, len(x.shape))]
    call.opaque(x, indices, passes=[*((i, i) for i in range(batch)), *rest])


def scatter_nd(call: OnnxCall) -> None:
    """Write a tensor with slices put in by indices; the dims that no index is for pass."""
    depth = call.value(1).shape[-1]
    call.opaque(passes=[(i, i) for i in range(depth, len(call.x.shape))])


def embed_and_normalise(call: OnnxCall) -> None:
    """Write the normalised sum of the rows of words, positions and, where there are any, segments.

    Inputs: words, segments, the three tables, scale, shift. Positions are those from 0 on, unless they are given.
    """
    words, out = call.x, call.result
    added = [call.add(ops.Lookup(), call.value(2), words, shape=out.shape)]
    if call.has(8):
        added.append(call.add(ops.Lookup(), call.value(3), call.value(8), shape=out.shape))
    else:
        own = (words.shape[1], out.shape[2])
        added.append(call.add(ops.Slice(starts=(0, 0), steps=(1, 1)), call.value(3), shape=own))
    if call.has(1):
        added.append(call.add(ops.Lookup(), call.value(4), call.value(1), shape=out.shape))
    total = call.point("add", *added, flop_per_point=len(added) - 1, out=call.further(2))
    last = len(out.shape) - 1
    op = ops.Normalise(kind="layer", over=(last,), channels=(last,), epsilon=call.get("epsilon", 1e-12))
    call.add(op, total, call.value(5), call.value(6), out=out)
    mask = call.further(1)
    if mask is not None:
        call.write(ops.Generic(is_index=True), (words,), (mask,))


TRANSLATIONS = table(
    (identity, "Identity Cast CastLike"),
    (dropout, "Dropout"),
    (pointwise, _POINTWISE),
    (variadic, " ".join(_VARIADIC)),
    (lambda call: call.point("trilu", call.x, out=call.result), "Trilu"),
    # Sines and cosines are constants.
    (
        lambda call: call.point("rotary", call.x, flop_per_point=3, mixes=(len(call.x.shape) - 1,), out=call.result),
        "RotaryEmbedding",
    ),
    (biased_gelu, "FastGelu BiasGelu"),
    (reduce, _REDUCTIONS),
    (along_axis, "TopK CumSum CumProd Hardmax LpNormalization"),
    (global_pool, "GlobalMaxPool GlobalAveragePool GlobalLpPool"),
    (normalisation, "BatchNormalization InstanceNormalization GroupNormalization"),
    (layer_normalisation, "LayerNormalization RMSNormalization SimplifiedLayerNormalization"),
    (skip_normalisation, "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
    (plain_normalisation, "MeanVarianceNormalization"),
    (response_normalisation, "LRN"),
    (class_loss, "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"),
    (softmax, "Softmax LogSoftmax"),
    (lambda call: call.reshape(call.x, out=call.result), "Reshape Squeeze Unsqueeze Flatten"),
    (transpose, "Transpose"),
    (lambda call: call.broadcast(call.x, out=call.result), "Expand"),
    (tile, "Tile"),
    (slice_, "Slice"),
    (split, "Split"),
    (lambda call: concatenate(call, call.axis(1)), "Concat"),
    (pad, "Pad"),
    (blocks, "DepthToSpace SpaceToDepth"),
    (resize, "Resize Upsample"),
    (gather, "Gather"),
    (by_elements, "GatherElements Scatter ScatterElements"),
    (gather_nd, "GatherND"),
    (scatter_nd, "ScatterND"),
)
"""By the operator's name."""
