"""Common parts of several front ends' operators: names of functions, windows, orders of dims, repetition."""

import re
from collections.abc import Mapping, Sequence

from pase.importers.ir.call import Array, Call, Shape, letters
from pase.importers.ir.ops import Identity, Lookup, Pool, Reduce
from pase.importers.ir.trace import Value

_POINTWISE = """
    abs acos acosh add add_of_multiple addcdiv addcmul and angle asin asinh atan atan2 atanh average bernoulli
    bessel_i0e bessel_i1e cbrt ceil celu clip clz complex conj copysign cos cosh deg2rad digamma divide divide_no_nan
    elu equal erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac gelu greater
    greater_equal hard_shrink hard_sigmoid hard_swish hard_tanh heaviside hypot i0 igamma igammac imag isclose
    is_finite isinf isnan leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
    logit masked_fill maximum minimum mish multiply nan_to_num negate nextafter not not_equal ones_like or polar
    polygamma population_count power prelu quick_gelu rad2deg random_gamma_grad real reciprocal
    regularized_incomplete_beta relu relu6 remainder round rrelu rsqrt selu sgn shift shift_left
    shift_right_arithmetic shift_right_logical shrink sigmoid sign signbit silu sin sinc sinh soft_shrink softplus
    softsign sparse_plus sparse_sigmoid sqrt square squareplus subtract tan tanh tanh_shrink threshold
    thresholded_relu tril triu trunc where xlogy xor zeros_like zeta
"""
_OTHER_NAMES = """
    absolute:abs add_any:add arccos:acos arccosh:acosh arcsin:asin arcsinh:asinh arctan:atan arctan2:atan2
    arctanh:atanh bit_shift:shift bitwise_and:and bitwise_not:not bitwise_or:or bitwise_xor:xor __and__:and
    __or__:or __xor__:xor clamp:clip clamp_max:clip clamp_min:clip div:divide eq:equal erf_inv:erfinv ge:greater_equal
    greater_or_equal:greater_equal gt:greater hard_silu:hard_swish hardshrink:hard_shrink hardsigmoid:hard_sigmoid
    hardswish:hard_swish hardtanh:hard_tanh integer_pow:power is_inf:isinf is_na_n:isnan isfinite:is_finite
    le:less_equal less_or_equal:less_equal log_sigmoid_forward:log_sigmoid logical_and:and logical_not:not
    logical_or:or logical_xor:xor logistic:sigmoid lt:less max:maximum min:minimum mod:remainder mul:multiply
    ne:not_equal neg:negate negative:negate p_relu:prelu pow:power rem:fmod rsub:subtract softshrink:soft_shrink
    special_erf:erf special_expit:sigmoid sub:subtract swish:quick_gelu true_divide:divide
"""
FUNCTIONS: Mapping[str, str] = {name: name for name in _POINTWISE.split()} | {
    name: known for name, _, known in (pair.partition(":") for pair in _OTHER_NAMES.split())
}
"""Functions of points by the names that sources have for them, in lower case, and what bodies call them."""

_REDUCTIONS = {
    "amax": "max", "amin": "min", "and": "all", "arg_max": "argmax", "arg_min": "argmin", "count_nonzero": "count",
    "l1": "norm", "l2": "norm", "linalg_vector_norm": "norm", "log_sum": "logsum", "log_sum_exp": "logsumexp",
    "or": "any", "std": "deviation", "sum_square": "sum_of_squares", "var": "variance", "xor": "any",
}  # fmt: skip


def snake(name: str) -> str:
    """Return the usual name of a function whose own is in camel case."""
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


def reduction(name: str) -> str:
    """Return the name of a reduction in this representation, given that in its source."""
    name = snake(name).removeprefix("reduce_").removeprefix("nan")
    return _REDUCTIONS.get(name, name)


# -- windows


def window_pads(
    mode: str, extents: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return zeros (before, after) each dim: "valid", "causal" (all before), "same" (the odd one after) or "lower"."""
    found = []
    for extent, k, s, d in zip(extents, kernel, stride, dilation, strict=True):
        reach = d * (k - 1)
        total = max(0, (-(-extent // s) - 1) * s + reach + 1 - extent)
        less, more = total // 2, total - total // 2
        found.append({"valid": (0, 0), "causal": (reach, 0), "lower": (more, less)}.get(mode, (less, more)))
    return tuple(found)


def pool(
    call: Call,
    spatial: Sequence[int],
    kernel: Sequence[int],
    *,
    stride: Sequence[int] = (),
    dilation: Sequence[int] = (),
    pads: Sequence[tuple[int, int]] = (),
    counts_padding: bool = False,
) -> None:
    """Write pooling of the first tensor, by its operator's name the maximum or the mean; other results are unread.

    stride, dilation, pads: of each window; by default the window's own extent, 1 and none.
    """
    op = Pool(
        function="max" if "max" in call.name.lower() else "mean",
        spatial=tuple(spatial),
        kernel=tuple(kernel),
        stride=tuple(stride or kernel),
        dilation=tuple(dilation) or (1,) * len(kernel),
        pads=tuple(pads) or ((0, 0),) * len(kernel),
        counts_padding=counts_padding,
    )
    call.add(op, call.x, out=call.result)
    call.unread(call.results[1:])


def pool_whole(call: Call, spatial: Sequence[int], *, keeps_dims: bool = True) -> None:
    """Append the maximum or the mean over entire dims."""
    function = "max" if "max" in call.name.lower() else "mean"
    call.add(Reduce(function=function, over=tuple(spatial), keeps_dims=keeps_dims), call.x, out=call.result)


def adaptive_pool(call: Call, spatial: Sequence[int]) -> None:
    """Append pooling to a given size: nothing if unchanged, a reduction to one point, otherwise windows.

    Windows of varying sizes, or with uneven overlap, are opaque.
    """
    before, after = ([value.shape[i] for i in spatial] for value in (call.x, call.result))
    if before != after and any(a != 1 for a in after):
        if any(b % a for b, a in zip(before, after, strict=True)):
            return call.opaque(over=spatial)
        return pool(call, spatial, [b // a for b, a in zip(before, after, strict=True)])
    if before == after:
        call.identity(call.x, out=call.result)
    else:
        pool_whole(call, spatial)
    return call.unread(call.results[1:])


# -- dims


def run(places: Array | None, extent: int) -> tuple[int, int] | None:
    """Return (first, number) of consecutive ascending indices in a dim; None for others, or where they are unknown."""
    found = [] if places is None else [place + extent if place < 0 else place for place in places.ravel().tolist()]
    if not found or found != list(range(found[0], found[0] + len(found))) or not 0 <= found[0] <= found[-1] < extent:
        return None
    return found[0], len(found)


def swapped(rank: int, first: int, second: int) -> Shape:
    """Return the order of dims with two of them swapped."""
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def moved(rank: int, source: Sequence[int], target: Sequence[int]) -> Shape:
    """Return the order of dims with some of them at other places."""
    first, last = ([dim % rank for dim in dims] for dims in (source, target))
    order = [dim for dim in range(rank) if dim not in first]
    for at, dim in sorted(zip(last, first, strict=True)):
        order.insert(at, dim)
    return tuple(order)


def repeat_each(call: Call, x: Value, times: Mapping[int, int]) -> None:
    """Append the repetition of each element of some dims, several times in a row."""
    wide, places = list[int](), list[int]()
    for dim, extent in enumerate(x.shape):
        places.append(len(wide))
        wide += [extent, times[dim]] if dim in times else [extent]
    call.reshape(call.broadcast(x, wide, places), out=call.result)


def glu(call: Call, dim: int) -> None:
    """Write the first half of a dim, times the sigmoid of the second."""
    size = call.result.shape[dim]
    value, gate = (call.cut(call.x, dim, start, size) for start in (0, size))
    call.point("multiply", value, call.point("sigmoid", gate), out=call.result)


def concatenate(call: Call, dim: int) -> None:
    """Append a concatenation; tensors without elements are omitted."""
    full = [value for value in call.tensors if len(value.shape) == len(call.result.shape) and 0 not in value.shape]
    call.concat(full or call.tensors[:1], dim, out=call.result)


def tensordot(call: Call, first: Sequence[int], second: Sequence[int], *, batch: bool = False) -> None:
    """Append the product of two tensors over some dims of each; other dims of the first precede those of the second.

    batch: whether the first dim is a common batch dim.
    """
    x, y = call.tensors[:2]
    names = letters(len(x.shape) + len(y.shape))
    left, others = names[: len(x.shape)], iter(names[len(x.shape) :])
    summed = {d % len(y.shape): left[c % len(x.shape)] for c, d in zip(first, second, strict=True)}
    shared = {0: left[0]} | summed if batch else summed
    right = "".join(shared.get(i) or next(others) for i in range(len(y.shape)))
    output = "".join(dict.fromkeys(c for c in left + right if c not in summed.values()))
    made = call.product(
        (x, y), (left, right), output, out=None if len(output) != len(call.result.shape) else call.result
    )
    if made is not call.result:
        call.reshape(made, out=call.result)


# -- losses


def class_dim(x: Value) -> int:
    """Return the dim of the classes: the second one, of a single example the only one."""
    return 1 if len(x.shape) > 1 else 0


def loss_of_classes(
    call: Call,
    log: Value,
    target: Value,
    *,
    weight: Sequence[Value] = (),
    ignored: float,
    reduction: str = "mean",
    smoothing: float = 0.0,
    count: Value | None = None,
) -> None:
    """Append a classification loss: the target's column, and a share of all columns with label smoothing.

    Args:
        call: The call whose first result is the loss.
        log: Log-probabilities of the classes.
        target: The class of each point.
        weight: Weight of each class, if any.
        ignored: Target of points that are ignored.
        reduction: "none", "mean" or "sum".
        smoothing: Share of all columns.
        count: A result: number of points that count, or the sum of their weights.
    """
    dim = class_dim(log)
    kept = call.point("not_equal", target, constant=ignored, dtype="bool", name="kept")
    places = call.reshape(target, (*log.shape[:dim], 1, *log.shape[dim + 1 :]), name="places")
    picked = call.reshape(call.gather(log, places, dim), target.shape)
    share = [call.add(Lookup(), weights, target, shape=target.shape) for weights in weight]
    if share:
        picked = call.point("multiply", picked, *share)
    if smoothing:
        every = summed_over_classes(call, log, weight)
        one = call.point("multiply", picked, constant=1.0 - smoothing)
        other = call.point("multiply", every, constant=smoothing / log.shape[dim])
        picked = call.point("add", one, other)
    negative = call.point("negate", picked)
    if reduction == "none":
        call.point("where", kept, negative, constant=0.0, out=call.result)
        return call.unread([] if count is None else [count])
    masked = call.point("where", kept, negative, constant=0.0)
    if share:
        counted = call.point("where", kept, *share, constant=0.0, name="counted")
    else:
        counted = call.add(Identity(), kept, shape=kept.shape, dtype=log.dtype, name="counted")
    count = call.total(counted, out=count, name="count")
    if reduction == "mean":
        call.point("divide", call.total(masked), count, out=call.result)
    else:
        call.total(masked, out=call.result)
    return None


def summed_over_classes(call: Call, x: Value, weight: Sequence[Value]) -> Value:
    """Append the sum over the classes, each times its weight if there are weights."""
    dim = class_dim(x)
    for found in weight:
        along = call.reshape(found, (x.shape[dim], *(1,) * (len(x.shape) - dim - 1)))
        x = call.point("multiply", x, along)
    return call.reduce("sum", x, (dim,))
