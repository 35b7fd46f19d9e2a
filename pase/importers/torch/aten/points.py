"""Functions point by point, and those that work along one dim."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from pase.importers.ir import Broadcast, Identity, Pointwise, Slice, Step, Value
from pase.importers.torch.aten.call import Call, as_list, constant, generic_along, identity, inner, step, step_to, table

_SAME_NAME = """
    abs acos acosh angle asin asinh atan atan2 atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor fmax
    fmin log log10 log1p log2 logit maximum minimum fmod remainder round rsqrt sign sin sinc sinh sqrt tan tanh
    trunc relu relu6 gelu silu elu celu selu mish softplus sigmoid hardswish hardtanh hardsigmoid leaky_relu
    rrelu log_sigmoid lerp addcmul addcdiv nan_to_num square reciprocal where masked_fill threshold softsign
    prelu frac xlogy clip digamma lgamma logaddexp logaddexp2 hypot copysign isnan isinf isfinite heaviside
    deg2rad rad2deg polar complex real imag i0 tril triu float_power signbit sgn polygamma isclose
"""
"""Functions that are called here what PyTorch calls them."""

POINTWISE: dict[str, str] = {name: name for name in _SAME_NAME.split()} | {
    "add": "add",
    "sub": "subtract",
    "subtract": "subtract",
    "rsub": "subtract",
    "mul": "multiply",
    "multiply": "multiply",
    "div": "divide",
    "divide": "divide",
    "floor_divide": "floor_divide",
    "true_divide": "divide",
    "pow": "power",
    "neg": "negate",
    "negative": "negate",
    "clamp": "clip",
    "clamp_min": "clip",
    "clamp_max": "clip",
    "hardshrink": "clip",
    "softshrink": "clip",
    "log_sigmoid_forward": "log_sigmoid",
    "logical_not": "not",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "bitwise_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "special_expit": "sigmoid",
    "special_erf": "erf",
}
"""Functions point by point, and their names here."""


def pointwise(call: Call) -> list[Step]:
    """Return a function of all tensors, point by point."""
    tensors = call.tensors
    if not tensors:
        return constant(call)
    if call.function == "rsub":
        tensors = tensors[::-1]
    return [step_to(_DETAILS.get(call.function, _plain)(call), call.result, *tensors)]


def _plain(call: Call) -> Pointwise:
    """Return a function with the number that it takes beside its only tensor, which may come first (2 ** x)."""
    arguments = list(call.arguments.values())
    numbers = [a for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]
    number = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    is_first = number is not None and (call.function == "rsub" or not isinstance(arguments[0], Value))
    return Pointwise(functions=(POINTWISE[call.function],), constant=number, constant_first=is_first)


def _scaled(call: Call) -> Pointwise:
    """Return a sum or difference; the second operand may be taken so many times."""
    found = _plain(call)
    if call.get("alpha", 1) == 1:
        return found
    return replace(found, functions=(f"{found.functions[0]}_of_multiple",))


def _gelu(call: Call) -> Pointwise:
    return Pointwise(functions=("gelu_tanh" if call.get("approximate") == "tanh" else "gelu",))


def _divided(call: Call) -> Pointwise:
    found = _plain(call)
    return replace(found, functions=("floor_divide",)) if call.get("rounding_mode") == "floor" else found


def _clipped(call: Call) -> Pointwise:
    low, high = call.get("min", -inf), call.get("max", inf)
    if isinstance(low, Value) or isinstance(high, Value):
        return Pointwise(functions=("clip",))
    return Pointwise(functions=("clip",), numbers=(float(low), float(high)))


def _hard_sigmoid(call: Call) -> Pointwise:
    return Pointwise(functions=("hard_sigmoid",), numbers=(1 / 6, 0.5))


_DETAILS: dict[str, Callable[[Call], Pointwise]] = {
    "add": _scaled,
    "sub": _scaled,
    "rsub": _scaled,
    "gelu": _gelu,
    "div": _divided,
    "clamp": _clipped,
    "clamp_min": _clipped,
    "clamp_max": _clipped,
    "hardsigmoid": _hard_sigmoid,
}
"""Functions that take more than their tensors and a number."""


def glu(call: Call) -> list[Step]:
    """Return one half of a tensor times the sigmoid of the other."""
    x, out = call.tensors[0], call.result
    rank = len(x.shape)
    dim = call.get("dim", -1) % rank
    halves = []
    steps: list[Step] = []
    for name, start in (("value", 0), ("gate", out.shape[dim])):
        half = inner(call, name, out.shape)
        starts = tuple(start if i == dim else 0 for i in range(rank))
        steps.append(step_to(Slice(starts=starts, steps=(1,) * rank), half, x))
        halves.append(half)
    gate = inner(call, "sigmoid", out.shape)
    steps.append(step_to(Pointwise(functions=("sigmoid",)), gate, halves[1]))
    return [*steps, *step(call, Pointwise(functions=("multiply",)), halves[0], gate)]


def moved_along(call: Call) -> list[Step]:
    """Return the same elements in another order along some dims (a roll, a flip)."""
    x = call.tensors[0]
    rank = len(x.shape)
    dims = as_list(call.get("dims", call.get("dim", [])))
    along = tuple(sorted({d % rank for d in dims})) if dims else tuple(range(rank))
    return step(call, Pointwise(functions=(call.function,), mixes=along), x)


def along(call: Call) -> list[Step]:
    """Return a function along one dim: a running sum, a sort, the largest ones, values at places."""
    return generic_along(call, as_list(call.get("dim", -1)))


def everywhere(call: Call) -> list[Step]:
    """Return a function of which any point may depend on any other in the last dim, or in all."""
    return generic_along(call, as_list(call.get("dim", list(range(len(call.tensors[0].shape))))))


def copy(call: Call) -> list[Step]:
    """Return what is written over a tensor, in its shape."""
    source, out = call.tensors[-1], call.result
    if source.shape == out.shape:
        return step(call, Identity(), source)
    offset = len(out.shape) - len(source.shape)
    return step(call, Broadcast(places=tuple(range(offset, len(out.shape)))), source)


def fill(call: Call) -> list[Step]:
    """Return one number everywhere."""
    return copy(call) if len(call.tensors) > 1 else constant(call)


_AS_IT_IS = """
    to _to_copy contiguous clone detach detach_copy alias alias_copy lift lift_fresh_copy lift_fresh dropout
    feature_dropout alpha_dropout feature_alpha_dropout type_as cpu float half bfloat16 double conj resolve_conj
    resolve_neg stop_gradient requires_grad data _conj _conj_physical conj_physical positive native_dropout rename
"""
_CONSTANT = """
    zeros ones full empty arange linspace logspace eye zeros_like ones_like full_like empty_like new_zeros new_ones
    new_full new_empty new_empty_strided empty_strided empty_permuted rand randn randint randperm rand_like randn_like
    randint_like bernoulli normal uniform exponential scalar_tensor tril_indices triu_indices zero hann_window
    hamming_window kaiser_window bartlett_window blackman_window random normal_functional
"""

TRANSLATIONS = dict.fromkeys(POINTWISE, pointwise) | table(
    (identity, _AS_IT_IS),
    (constant, _CONSTANT),
    (copy, "copy"),
    (fill, "fill"),
    (glu, "glu"),
    (moved_along, "roll flip fliplr flipud"),
    (along, "cumsum cumprod cummax cummin logcumsumexp sort argsort topk msort kthvalue median mode scatter"),
    (along, "scatter_add scatter_reduce index_add index_copy index_fill diff renorm bucketize"),
    (everywhere, "index_reduce masked_scatter multinomial nonzero_static searchsorted unique_consecutive histc"),
)
"""Of functions of points, by the operator's name."""
