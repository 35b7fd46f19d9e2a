"""`OnnxCall`, an operator of an ONNX model; and the translations of all operators to the common vocabulary."""

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from pase.importers.ir import ops
from pase.importers.ir.call import Call, Shape, Translation, place, places, table, with_extent
from pase.importers.ir.shared import FUNCTIONS, concatenate, loss_of_classes, reduction, run, snake, window_pads
from pase.importers.ir.shared import pool as pool_windows
from pase.importers.ir.trace import Piece, Step, Use, Value


@dataclass(frozen=True, kw_only=True)
class OnnxCall(Call):
    """An operator of the model. Its arguments are its attributes: numbers, texts, tuples of them, stored tensors.

    Attributes:
        domain: Domain of the operator, "" for ONNX's own.
        node: Its name in the model.
        opset: Version of the domain.
        read: Results that are read.
    """

    domain: str
    node: str
    opset: int
    read: frozenset[str]

    @property
    def where(self) -> str:
        """The operator, for messages."""
        return f"operator {self.name} {self.node!r}" + (f" of domain {self.domain}" if self.domain else "")

    @property
    def result(self) -> Value:
        """First result; ValueError where it is omitted."""
        found = self.outputs[0] if self.outputs else None
        if found is None:
            raise ValueError(f"{self.name} has no first result")
        return found

    def further(self, position: int) -> Value | None:
        """Return a result; None where it is not read."""
        found = self.outputs[position] if position < len(self.outputs) else None
        return found if found is not None and found.name in self.read else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute; TypeError where its type differs from its default's."""
        found = self.arguments.get(name, default)
        expected = int | float if isinstance(default, float) else type(default)
        if default is not None and not isinstance(found, expected):
            what = {int: "a whole number", str: "a text"}.get(type(default), "a number")
            raise TypeError(f"attribute {name} is {found!r}; expected {what}")
        return found

    def wholes(self, name: str, position: int | None = None) -> tuple[int, ...] | None:
        """Return integers given as an attribute or as the constant input at a position; None if not given."""
        found = self.arguments.get(name)
        if found is None and position is not None:
            found = self.integers(position)
        if found is not None and (not isinstance(found, tuple) or not all(isinstance(value, int) for value in found)):
            raise TypeError(f"{name} is {found!r}; expected whole numbers")
        return found

    def axis(self, default: int) -> int:
        """Return the attribute axis, counted from 0."""
        return self.dim(default, "axis")


SOFTMAX_PER_DIM_SINCE = 13
"""The opset from which a softmax is over one dim; before, it was over all dims from its axis on."""


def identity(call: OnnxCall) -> None:
    """Append an identity of the first input."""
    call.identity(call.x, out=call.result)


def dropout(call: OnnxCall) -> None:
    """Append an identity of the first input; a mask that is read is constant."""
    identity(call)
    mask = call.further(1)
    if mask is not None:
        call.point("not_equal", call.x, out=mask)


def pointwise(call: OnnxCall) -> None:
    """Append a function of all inputs; known scalars such as bounds, and one of two operands, become numbers."""
    function = FUNCTIONS[snake(call.name)]
    if function == "gelu" and call.arguments.get("approximate") == "tanh":
        function = "gelu_tanh"
    if call.has(1) and not call.has(2) and call.name not in ("Clip", "PRelu"):
        _of_two(call, function)
    else:
        given = call.tensors[:1] if call.name == "Clip" else call.tensors
        call.point(function, *given, numbers=_numbers(call), out=call.result)


def _numbers(call: OnnxCall) -> tuple[float, ...]:
    """Return the numbers that a function takes in addition to its input; none where one of them is unknown."""
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
    """Append a function of an input with an optional bias."""
    x = call.point("add", call.x, *call.maybe(1)) if call.has(1) else call.x
    call.point("gelu_tanh" if call.name == "FastGelu" else "gelu", x, out=call.result)


# -- over dims


def reduce(call: OnnxCall) -> None:
    """Append a reduction over some dims, or over all by default."""
    rank, is_place = len(call.x.shape), call.name.startswith("Arg")
    axes = (call.axis(0),) if is_place else call.wholes("axes", 1)
    if not axes and call.get("noop_with_empty_axes", 0):
        return identity(call)
    over, keeps = places(axes or None, rank), bool(call.get("keepdims", 1))
    call.reduce(reduction(call.name), call.x, over, keeps_dims=keeps, out=call.result)
    return None


def along_axis(call: OnnxCall) -> None:
    """Append an operation that reads one dim completely, independently of the others: a sort, a cumulative sum."""
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
    """Append a normalisation by neighbouring channels, which are read completely."""
    numbers = [float(call.get(name, default)) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))]
    size = call.get("size", 0)
    if size < 1:
        raise ValueError(f"size is {size}; expected a number of channels")
    call.normalise("response", call.x, (), (1,), response=(size, *numbers), mixes=(1,))


_IGNORED = -1
"""Class index that never occurs, for losses that ignore none."""


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

# -- data movement: shapes, orders, slices, repetition, padding, look-ups


def transpose(call: OnnxCall) -> None:
    """Append a transposition, in reverse order by default."""
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
        raise ValueError(f"it makes {list(after)} of {list(before)}, which is not an integer multiple")
    else:
        call.repeat(call.x, [new // old for old, new in zip(before, after, strict=True)], out=call.result)


def slice_(call: OnnxCall) -> None:
    """Append a slice of a box; a reversed one only passes the other dims through."""
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
    """Append a padded or cropped tensor."""
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
    """Append a resized tensor; dims of unchanged extent pass through."""
    changed = sum(a != b for a, b in zip(call.x.shape, call.result.shape, strict=True))
    is_nearest = "nearest" in call.get("mode", "nearest")
    call.opaque(call.x, over=(), flop_per_point=1.0 if is_nearest else 2.0 ** (changed + 1))


# -- look-ups


def gather(call: OnnxCall) -> None:
    """Append a look-up of rows along a dim; known consecutive indices give a slice."""
    x, indices, found = call.value(0), call.value(1), call.constant(1)
    rank, axis, n = len(x.shape), call.axis(0), len(indices.shape)
    if found is not None and found.size and not -x.shape[axis] <= found.min() <= found.max() < x.shape[axis]:
        raise IndexError(f"an index is out of range for a dim of {x.shape[axis]}")
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
    """Append a look-up or update by indices along one dim; dims that the indices have completely pass through."""
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


# -- products


def fused_matmul(call: OnnxCall) -> None:
    """Write alpha · x · y with the last two dims of either perhaps transposed."""
    values = []
    for i, name in enumerate(("transA", "transB")):
        value = call.value(i)
        rank = len(value.shape)
        is_turned = bool(call.get(name, 0)) and rank > 1
        values.append(call.transpose(value, (*range(rank - 2), rank - 1, rank - 2)) if is_turned else value)
    alpha = call.get("alpha", 1.0)
    if alpha == 1:
        call.matmul(*values, out=call.result)
    else:
        call.point("multiply", call.matmul(*values), constant=alpha, out=call.result)


def gemm(call: OnnxCall) -> None:
    """Write alpha · x · y + beta · c, either of the factors perhaps transposed."""
    x, y, out = call.value(0), call.value(1), call.result
    operands = ("km" if call.get("transA", 0) else "mk", "nk" if call.get("transB", 0) else "kn")
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    c = call.value(2) if call.has(2) and beta != 0 else None
    if c is not None and beta != 1:
        c = call.point("multiply", c, constant=beta)
    if alpha == 1 and (c is None or c.shape in (out.shape[1:], (1, *out.shape[1:]))):
        bias = [] if c is None else [call.reshape(c, c.shape[-1:])]
        call.contract(x, y, operands, "mn", *bias, out=out)
        return
    if alpha == 1:
        made = call.contract(x, y, operands, "mn")
    else:
        plain = call.contract(x, y, operands, "mn")
        made = call.point("multiply", plain, constant=alpha, out=out if c is None else None)
    if c is not None:
        call.point("add", made, c, out=out)


def einsum(call: OnnxCall) -> None:
    """Write a sum of products of tensors, two at a time from the left."""
    if not call.einsum(call.get("equation", ""), call.tensors, out=call.result):
        call.opaque()


# -- windows


def convolution(call: OnnxCall) -> None:
    """Write a convolution over all dims but the batch and the channels."""
    x, w, is_transposed = call.value(0), call.value(1), call.name == "ConvTranspose"
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        return call.opaque()
    if len(w.shape) != len(x.shape):
        raise ValueError(f"filters have {len(w.shape)} dims; expected {len(x.shape)}")
    op = ops.Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=_each(call, "strides", rank),
        dilation=_each(call, "dilations", rank),
        pads=_pads_of_transposed(call, w.shape[2:]) if is_transposed else _pads(call, w.shape[2:]),
        groups=call.get("group", 1),
        is_transposed=is_transposed,
        has_bias=call.has(2),
    )
    call.add(op, x, w, *call.maybe(2), out=call.result)
    return None


def pool(call: OnnxCall) -> None:
    """Write the maximum or mean over windows; of indices of the maxima only the shape is known."""
    rank, kernel = len(call.x.shape) - 2, call.wholes("kernel_shape")
    if kernel is None or len(kernel) != rank:
        raise ValueError(f"kernel_shape is {kernel}; expected {rank} extents")
    if rank not in (1, 2, 3) or call.further(1) is not None:
        return call.opaque(passes=((0, 0), (1, 1)), flop_per_point=float(prod(kernel)))
    return pool_windows(
        call,
        range(2, 2 + rank),
        kernel,
        stride=_each(call, "strides", rank),
        dilation=_each(call, "dilations", rank),
        pads=_pads(call, kernel),
        counts_padding=bool(call.get("count_include_pad", 0)),
    )


def _each(call: OnnxCall, name: str, rank: int) -> Shape:
    """Return an attribute with one number for each spatial dim; default: ones."""
    found = call.wholes(name) or (1,) * rank
    if len(found) != rank or min(found) < 1:
        raise ValueError(f"{name} is {found}; expected {rank} positive whole numbers")
    return found


def _pads_of_transposed(call: OnnxCall, kernel: Shape) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each spatial dim; with a given output shape, the padding that produces it."""
    mode, rank = call.get("auto_pad", "NOTSET"), len(kernel)
    if mode not in ("SAME_UPPER", "SAME_LOWER") and call.wholes("output_shape") is None:
        return _pads(call, kernel)
    added = call.wholes("output_padding") or (0,) * rank
    steps = zip(_each(call, "strides", rank), _each(call, "dilations", rank), kernel, added, strict=True)
    found = []
    for i, (stride, dilation, extent, more) in enumerate(steps, 2):
        reached = (call.x.shape[i] - 1) * stride + (extent - 1) * dilation + 1
        total = max(0, reached + more - call.result.shape[i])
        less = total // 2
        found.append((less, total - less) if mode == "SAME_UPPER" else (total - less, less))
    return tuple(found)


def _pads(call: OnnxCall, kernel: Shape) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each spatial dim, including those of auto_pad."""
    mode, rank = call.get("auto_pad", "NOTSET"), len(kernel)
    if mode == "VALID":
        return ((0, 0),) * len(kernel)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        given = call.wholes("pads") or (0,) * (2 * rank)
        if len(given) != 2 * rank:
            raise ValueError(f"pads is {given}; expected {2 * rank} whole numbers")
        return tuple(zip(given[:rank], given[rank:], strict=True))
    ways = {"SAME_UPPER": "same", "SAME_LOWER": "lower"}
    return window_pads(
        ways[mode], call.x.shape[2:], kernel, _each(call, "strides", rank), _each(call, "dilations", rank)
    )


# -- attention, on [b, h, s, k]


def attention(call: OnnxCall) -> None:
    """Write scaled dot-product attention of [b, h, s, k], or of [b, s, h · k] that is seen so."""
    if call.further(3) is not None or len(call.x.shape) not in (3, 4):
        return call.opaque()
    values = []
    for i, name in enumerate(("q_num_heads", "kv_num_heads", "kv_num_heads")):
        value = call.value(i)
        values.append(value if len(value.shape) == 4 else _heads(call, value, call.get(name, 0)))
    for i in (1, 2):
        values[i] = _with_past(call, values[i], 3 + i, i)
    scale = call.arguments.get("scale")
    op = ops.Attention(is_causal=bool(call.get("is_causal", 0)), scale=None if scale is None else float(scale))
    if len(call.result.shape) == 4:
        call.add(op, *values, *call.maybe(3), out=call.result)
        return None
    return _attend(call, op, values, *call.maybe(3))


def multi_head_attention(call: OnnxCall) -> None:
    """Write attention of [b, s, h · k] without a past; of others it is not known."""
    is_plain = all(call.has(i) and len(call.value(i).shape) == 3 for i in range(3))
    if not is_plain or any(call.has(i) for i in (3, 6, 7)) or any(call.further(i) is not None for i in (1, 2)):
        return call.opaque()
    heads = call.get("num_heads", 0)
    return _attend(call, ops.Attention(), [_heads(call, call.value(i), heads) for i in range(3)])


def packed_attention(call: OnnxCall) -> None:
    """Write attention of queries, keys and values that one product of the input makes, without a past."""
    x, w, heads = call.x, call.value(1), call.get("num_heads", 0)
    sizes = call.wholes("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    if call.has(4) or call.further(1) is not None or sum(sizes) != w.shape[1] or len(x.shape) != 3:
        return call.opaque()
    whole = call.contract(x, w, ("abk", "kn"), "abn", *call.maybe(2))
    parts = [_heads(call, call.cut(whole, 2, sum(sizes[:i]), size), heads) for i, size in enumerate(sizes)]
    return _attend(call, ops.Attention(is_causal=bool(call.get("unidirectional", 0))), parts)


def _heads(call: OnnxCall, value: Value, count: int) -> Value:
    """Write [b, s, h · k] as [b, h, s, k]."""
    b, s, width = value.shape
    if count < 1 or width % count:
        raise ValueError(f"{width} cannot be divided into {count} heads")
    return call.transpose(call.reshape(value, (b, s, count, width // count)), (0, 2, 1, 3))


def _attend(call: OnnxCall, op: ops.Attention, values: list[Value], *masks: Value) -> None:
    """Append attention, and its result, [b, h, s, k], as [b, s, h · k]."""
    q, _, v = values
    made = call.add(op, *values, *masks, shape=(*q.shape[:3], v.shape[3]))
    call.reshape(call.transpose(made, (0, 2, 1, 3)), out=call.result)


def _with_past(call: OnnxCall, value: Value, past: int, position: int) -> Value:
    """Write keys or values behind those of the past, which are a result as well."""
    result = call.outputs[position] if position < len(call.outputs) else None
    if call.has(past) and call.value(past).shape[2]:
        before = call.value(past)
        shape = (*value.shape[:2], before.shape[2] + value.shape[2], value.shape[3])
        return call.add(ops.Concat(dim=2), before, value, shape=shape, out=result)
    if result is not None and call.further(position) is not None:
        call.reshape(value, out=result)
    return value


def recurrent(call: OnnxCall) -> None:
    """Write a recurrent layer over a sequence [s, b, d], or [b, s, d] where layout is 1."""
    x = call.x
    directions = 2 if call.get("direction", "forward") == "bidirectional" else 1
    is_batch_first = bool(call.get("layout", 0))
    units = call.get("hidden_size", call.value(2).shape[-1])
    first, *others = call.outputs
    states = [value for value in others if value is not None]
    shape, dtype = (*x.shape[:2], directions * units), call.results[0].dtype
    hidden = Value(name=f"{call.results[0].name}:sequence", shape=shape, dtype=dtype)
    equations, gates = _equations(call, x.shape[1 if is_batch_first else 0])
    op = ops.Recurrent(
        cell=call.name.lower(),  # type: ignore[arg-type]
        units=units,
        is_bidirectional=directions == 2,
        is_batch_first=is_batch_first,
        equations=equations,  # type: ignore[arg-type]
        gates=gates,
    )
    # The sequence lengths are integers, and not part of it. Where the equations are known, states are zeros.
    left_out = (4, 5, 6) if equations else (4,)
    uses = {i: Use(value=value.name) for i, value in enumerate(call.inputs) if value is not None and i not in left_out}
    inputs = list(uses.values())
    if equations and 3 in uses:
        # The biases of the input, then those of the hidden state.
        size = call.value(3).shape[1] // 2
        pieces = [replace(uses[3], piece=Piece(dim=1, start=start, size=size)) for start in (0, size)]
        inputs = [use for use in inputs if use is not uses[3]] + pieces
    call.steps.append(Step(op=op, inputs=tuple(inputs), outputs=(hidden, *states)))
    if first is not None:
        apart = call.reshape(hidden, (*x.shape[:2], directions, units))
        call.transpose(apart, (0, 1, 2, 3) if is_batch_first else (0, 2, 1, 3), out=first)


def _equations(call: OnnxCall, steps: int) -> tuple[str, tuple[int, ...]]:
    """Return PyTorch's name for the equations of a layer, and the positions of their gates in ONNX's order.

    It is ("", ()) where lengths differ, states are not zeros, cells have peepholes or other functions, or a GRU resets
    the hidden state before its product.
    """
    lengths = call.constant(4)
    is_whole = not call.has(4) or (lengths is not None and bool((lengths == steps).all()))
    states = [call.constant(i) for i in (5, 6) if call.has(i)]
    is_zero = all(state is not None and not state.any() for state in states)
    is_plain = not call.has(7) and not {"clip", "input_forget", "activation_alpha"} & set(call.arguments)
    if not (is_whole and is_zero and is_plain and call.get("direction", "forward") == "forward"):
        return "", ()
    functions = call.arguments.get("activations", _FUNCTIONS[call.name])
    if call.name == "RNN":
        return {("Tanh",): "rnn_tanh", ("Relu",): "rnn_relu"}.get(functions, ""), ()
    if functions != _FUNCTIONS[call.name] or (call.name == "GRU" and not call.get("linear_before_reset", 0)):
        return "", ()
    return call.name.lower(), {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}[call.name]


_FUNCTIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}

TRANSLATIONS: dict[str, Translation] = table(
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
    (lambda call: call.matmul(call.value(0), call.value(1), out=call.result), "MatMul"),
    (fused_matmul, "FusedMatMul TransposeMatMul"),
    (gemm, "Gemm"),
    (einsum, "Einsum"),
    (convolution, "Conv ConvTranspose"),
    (pool, "MaxPool AveragePool LpPool"),
    (attention, "Attention"),
    (multi_head_attention, "MultiHeadAttention"),
    (recurrent, " ".join(_FUNCTIONS)),
)
"""Of ONNX's own operators, by name."""

_AS_IN_ONNX = """
    BiasGelu FastGelu FusedMatMul Gelu LayerNormalization MultiHeadAttention QuickGelu RotaryEmbedding
    SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization TransposeMatMul Trilu
"""
RUNTIME: dict[str, Translation] = {name: TRANSLATIONS[name] for name in _AS_IN_ONNX.split()} | {
    "Attention": packed_attention,
    "EmbedLayerNormalization": embed_and_normalise,
}
"""Of the domain com.microsoft: what an optimiser of onnxruntime's puts together."""

DOMAINS = {"": TRANSLATIONS, "com.microsoft": RUNTIME}
"""By the operator's domain."""
