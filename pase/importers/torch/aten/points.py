"""Functions point by point, and what works along dims: reductions, normalisations, softmax, sorts, distances."""

from dataclasses import replace
from math import inf, prod

from pase.importers.ir import Normalise, Pointwise, Reduce, Softmax, Value
from pase.importers.ir.steps import broadcast_shape
from pase.importers.torch.aten import TorchCall, as_list, constant, identity, table

_SAME_NAME = """
    abs acos acosh angle asin asinh atan atan2 atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor fmax
    fmin log log10 log1p log2 logit maximum minimum fmod remainder round rsqrt sign sin sinc sinh sqrt tan tanh
    trunc relu relu6 gelu silu elu celu selu mish softplus sigmoid hardswish hardtanh hardsigmoid leaky_relu
    rrelu log_sigmoid lerp addcmul addcdiv nan_to_num square reciprocal where masked_fill threshold softsign
    prelu frac xlogy clip digamma lgamma logaddexp logaddexp2 hypot copysign isnan isinf isfinite heaviside
    deg2rad rad2deg polar complex real imag i0 tril triu float_power signbit sgn polygamma isclose
"""
"""Functions that are called here what PyTorch calls them."""

_RENAMED = """
    add:add sub:subtract subtract:subtract rsub:subtract mul:multiply multiply:multiply div:divide divide:divide
    floor_divide:floor_divide true_divide:divide pow:power neg:negate negative:negate clamp:clip clamp_min:clip
    clamp_max:clip hardshrink:clip softshrink:clip log_sigmoid_forward:log_sigmoid logical_not:not logical_and:and
    logical_or:or logical_xor:xor eq:equal ne:not_equal lt:less le:less_equal gt:greater ge:greater_equal
    bitwise_not:not bitwise_and:and bitwise_or:or bitwise_xor:xor __and__:and __or__:or __xor__:xor
    special_expit:sigmoid special_erf:erf
"""

POINTWISE: dict[str, str] = {name: name for name in _SAME_NAME.split()} | {
    before: after for before, _, after in (pair.partition(":") for pair in _RENAMED.split())
}
"""Functions point by point, and their names here."""


def pointwise(call: TorchCall) -> None:
    """Write a function of all tensors, point by point."""
    if not call.tensors:
        return constant(call)
    order = -1 if call.function == "rsub" else 1
    call.add(_details(call), *call.tensors[::order], out=call.result)
    return None


def _details(call: TorchCall) -> Pointwise:
    """Return a function with what it takes beside its tensors, such as the number of 2 ** x, which comes first."""
    arguments, function = list(call.arguments.values()), call.function
    numbers = [a for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]
    number = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    is_first = number is not None and (function == "rsub" or not isinstance(arguments[0], Value))
    found = Pointwise(functions=(POINTWISE[function],), constant=number, constant_first=is_first)
    match function:
        case "add" | "sub" | "rsub" if call.get("alpha", 1) != 1:
            # The second operand is taken so many times.
            return replace(found, functions=(f"{found.functions[0]}_of_multiple",))
        case "gelu":
            return Pointwise(functions=("gelu_tanh" if call.get("approximate") == "tanh" else "gelu",))
        case "div" if call.get("rounding_mode") == "floor":
            return replace(found, functions=("floor_divide",))
        case "hardsigmoid":
            return Pointwise(functions=("hard_sigmoid",), numbers=(1 / 6, 0.5))
        case "clamp" | "clamp_min" | "clamp_max":
            low, high = call.get("min", -inf), call.get("max", inf)
            is_of_numbers = not isinstance(low, Value) and not isinstance(high, Value)
            return Pointwise(functions=("clip",), numbers=(float(low), float(high)) if is_of_numbers else ())
    return found


def glu(call: TorchCall) -> None:
    """Write one half of a tensor times the sigmoid of the other."""
    dim = call.dim(-1)
    size = call.result.shape[dim]
    value, gate = (call.cut(call.x, dim, start, size) for start in (0, size))
    call.point("multiply", value, call.point("sigmoid", gate), out=call.result)


def moved_along(call: TorchCall) -> None:
    """Write the same elements in another order along some dims (a roll, a flip)."""
    rank = len(call.x.shape)
    dims = as_list(call.get("dims", call.get("dim", [])))
    call.point(call.function, call.x, mixes=tuple(sorted({d % rank for d in dims} or range(rank))), out=call.result)


def copy(call: TorchCall) -> None:
    """Write what is written over a tensor, in its shape."""
    source = call.tensors[-1]
    if source.shape == call.result.shape:
        call.identity(source, out=call.result)
    else:
        call.broadcast(source, out=call.result)


# -- over dims

_REDUCTIONS = {
    "amax": "max", "amin": "min", "var": "variance", "std": "deviation", "nansum": "sum", "nanmean": "mean",
    "linalg_vector_norm": "norm",
}  # fmt: skip


def reduce(call: TorchCall) -> None:
    """Write a reduction over some dims, or all; where a maximum is from is not told."""
    if len(call.tensors) > 1:
        call.point(f"{call.function}imum", *call.tensors, out=call.result)
    else:
        _reduced(call, _REDUCTIONS.get(call.function, call.function), call.result)
        call.unread(call.results[1:])


def moments(call: TorchCall) -> None:
    """Write the variance and the mean, or the smallest and the largest."""
    names = ("min", "max") if call.function == "aminmax" else ("variance", "mean")
    for name, value in zip(names, call.results, strict=True):
        _reduced(call, name, value)


def _reduced(call: TorchCall, function: str, out: Value) -> None:
    rank, dims = len(call.x.shape), call.get("dim")
    over = {d % max(1, rank) for d in as_list(dims)} if dims is not None and dims != [] else range(rank)
    keeps = bool(call.get("keepdim", False))
    op = Reduce(function=function, over=tuple(sorted(over)) if rank else (), keeps_dims=keeps)
    call.add(op, call.x, out=out)


_KINDS: dict[str, str] = {
    name: kind
    for kind, names in (
        ("layer", "layer_norm native_layer_norm"),
        ("rms", "rms_norm _fused_rms_norm"),
        ("group", "group_norm native_group_norm"),
        ("instance", "instance_norm"),
        ("batch", "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"),
        ("batch", "_native_batch_norm_legit_functional _batch_norm_no_update _batch_norm_with_update"),
        ("batch", "_batch_norm_with_update_functional cudnn_batch_norm miopen_batch_norm"),
    )
    for name in names.split()
}
"""Normalisations by the operator's name."""


def normalisation(call: TorchCall) -> None:
    """Write a normalisation; the statistics that it may tell besides are not."""
    rank = len(call.x.shape)
    last = tuple(range(rank - len(call.get("normalized_shape", [])), rank))
    spatial = tuple(range(2, rank))
    kind = _KINDS[call.function]
    over = {"group": (1, *spatial), "instance": spatial, "batch": (0, *spatial)}.get(kind, last)
    kept = call.maybe("running_mean", "running_var") if kind == "batch" else ()
    kept = kept if len(kept) == 2 and not call.get("training", call.get("train", False)) else ()
    op = Normalise(
        kind=kind,  # type: ignore[arg-type]
        over=over,
        channels=last if kind in ("layer", "rms") else (1,),
        groups=int(call.get("num_groups", call.get("group", 1))) if kind == "group" else 1,
        has_scale=bool(call.maybe("weight")),
        has_shift=bool(call.maybe("bias")),
        num_statistics=len(kept),
        epsilon=float(call.get("eps", 1e-5) or 1e-5),
    )
    call.add(op, call.x, *call.maybe("weight", "bias"), *kept, out=call.result)
    call.unread(call.results[1:])


def distance(call: TorchCall) -> None:
    """Write the cosines of angles between vectors along a dim, or the lengths of differences of them in the last."""
    is_cosine = call.function == "cosine_similarity"
    x, y = call.tensors[:2]
    rank = len(broadcast_shape((x, y)))
    dim = (call.get("dim", 1) if is_cosine else -1) % rank
    made = call.point("multiply" if is_cosine else "subtract", x, y, flop_per_point=3)
    call.reduce("sum", made, (dim,), keeps_dims=len(call.result.shape) == rank, out=call.result)


def transformed(call: TorchCall) -> None:
    """Write a Fourier transform, along the dims that it names, by default the last one."""
    dims = as_list(call.get("dim", [-1])) or list(range(len(call.x.shape)))
    extent = prod(call.x.shape[dim] for dim in dims)
    # 5 n log2 n of the usual algorithm.
    call.opaque(over=dims, flop_per_point=5.0 * max(1, extent.bit_length() - 1))


_AS_IT_IS = """
    to _to_copy contiguous clone detach detach_copy alias alias_copy lift lift_fresh_copy lift_fresh dropout
    feature_dropout alpha_dropout feature_alpha_dropout type_as cpu float half bfloat16 double conj resolve_conj
    resolve_neg stop_gradient requires_grad data _conj _conj_physical conj_physical positive native_dropout rename
    view_dtype
"""
_CONSTANT = """
    zeros ones full empty arange linspace logspace eye zeros_like ones_like full_like empty_like new_zeros new_ones
    new_full new_empty new_empty_strided empty_strided empty_permuted rand randn randint randperm rand_like randn_like
    randint_like bernoulli normal uniform exponential scalar_tensor tril_indices triu_indices zero hann_window
    hamming_window kaiser_window bartlett_window blackman_window random normal_functional
"""
_FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    fft_hfft fft_ihfft _fft_r2c _fft_c2c _fft_c2r
"""
_ALONG_ONE = """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk msort kthvalue median mode scatter scatter_add
    scatter_reduce index_add index_copy index_fill diff renorm bucketize
"""
_ALONG_ALL = "index_reduce masked_scatter multinomial nonzero_static searchsorted unique_consecutive histc"
"""Functions of which any point may depend on any other in one dim, by default the last; in all by default."""

_SOFTMAX = "softmax log_softmax _softmax _log_softmax _safe_softmax special_log_softmax special_softmax"

TRANSLATIONS = dict.fromkeys(POINTWISE, pointwise) | table(
    (identity, _AS_IT_IS),
    (constant, _CONSTANT),
    (copy, "copy"),
    (lambda call: (copy if len(call.tensors) > 1 else constant)(call), "fill"),
    (glu, "glu"),
    (moved_along, "roll flip fliplr flipud"),
    (lambda call: call.opaque(over=as_list(call.get("dim", -1))), _ALONG_ONE),
    (lambda call: call.opaque(over=as_list(call.get("dim", list(range(len(call.x.shape)))))), _ALONG_ALL),
    (reduce, "sum mean max min amax amin var std prod any all argmax argmin logsumexp norm linalg_vector_norm"),
    (reduce, "nansum nanmean count_nonzero"),
    (moments, "var_mean std_mean aminmax"),
    (normalisation, " ".join(_KINDS)),
    (lambda call: call.give(Softmax(dim=call.dim(), is_log="log" in call.name), call.x), _SOFTMAX),
    (distance, "cosine_similarity pairwise_distance"),
    (transformed, _FOURIER),
)
"""Of functions of points and along dims, by the operator's name."""
