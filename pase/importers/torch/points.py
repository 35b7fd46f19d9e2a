"""Functions point by point, what works along dims (reductions, normalisations, softmax, sorts), and losses."""

from dataclasses import replace
from math import inf, prod

from pase.importers.ir import ops
from pase.importers.ir.call import Call, as_list, broadcast_shape, places, table
from pase.importers.ir.shared import FUNCTIONS, class_dim, glu, loss_of_classes, reduction, summed_over_classes
from pase.importers.ir.trace import Value


def pointwise(call: Call) -> None:
    """Write a function of all tensors, point by point."""
    if not call.tensors:
        return constant(call)
    order = -1 if call.name == "rsub" else 1
    call.add(_details(call), *call.tensors[::order], out=call.result)
    return None


def constant(call: Call) -> None:
    """Write values that no tensor's values reach: zeros of another's shape, a range, noise."""
    call.give(ops.Generic(is_index=not call.result.is_float))


def _details(call: Call) -> ops.Pointwise:
    """Return a function with what it takes beside its tensors, such as the number of 2 ** x, which comes first."""
    arguments, function = list(call.arguments.values()), call.name
    numbers = [a for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]
    number = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    is_first = number is not None and (function == "rsub" or not isinstance(arguments[0], Value))
    found = ops.Pointwise(functions=(FUNCTIONS[function],), constant=number, constant_first=is_first)
    match function:
        case "where":
            # One of the two that are chosen from may be a number, or both.
            return _chosen(found, call.get("self", call.get("input")), call.get("other"))
        case "add" | "sub" | "rsub" if call.get("alpha", 1) != 1:
            # The second operand is taken so many times.
            return replace(found, functions=(f"{found.functions[0]}_of_multiple",))
        case "gelu":
            return ops.Pointwise(functions=("gelu_tanh" if call.get("approximate") == "tanh" else "gelu",))
        case "div" if call.get("rounding_mode") == "floor":
            return replace(found, functions=("floor_divide",))
        case "hardsigmoid":
            return replace(found, numbers=(1 / 6, 0.5))
        case "hardtanh":
            bounds = float(call.get("min_val", -1.0)), float(call.get("max_val", 1.0))
            return replace(found, constant=None, constant_first=False, numbers=bounds)
        case "clamp" | "clamp_min" | "clamp_max":
            low, high = call.get("min", -inf), call.get("max", inf)
            is_of_numbers = not isinstance(low, Value) and not isinstance(high, Value)
            return ops.Pointwise(functions=("clip",), numbers=(float(low), float(high)) if is_of_numbers else ())
    return found


def _chosen(op: ops.Pointwise, *either: object) -> ops.Pointwise:
    numbers = [float(item) for item in either if isinstance(item, int | float)]
    if len(numbers) == 2:
        return replace(op, constant=None, constant_first=False, numbers=tuple(numbers))
    number = numbers[0] if numbers else None
    return replace(op, constant=number, constant_first=number is not None and not isinstance(either[0], Value))


def moved_along(call: Call) -> None:
    """Write the same elements in another order along some dims (a roll, a flip)."""
    rank = len(call.x.shape)
    dims = as_list(call.get("dims", call.get("dim", [])))
    call.point(call.name, call.x, mixes=tuple(sorted({d % rank for d in dims} or range(rank))), out=call.result)


def copy(call: Call) -> None:
    """Write what is written over a tensor, in its shape."""
    source = call.tensors[-1]
    if source.shape == call.result.shape:
        call.identity(source, out=call.result)
    else:
        call.broadcast(source, out=call.result)


# -- over dims


def reduce(call: Call) -> None:
    """Write a reduction over some dims, or all; where a maximum is from is not told."""
    if len(call.tensors) > 1:
        call.point(f"{call.name}imum", *call.tensors, out=call.result)
    else:
        _reduced(call, reduction(call.name), call.result)
        call.unread(call.results[1:])


def moments(call: Call) -> None:
    """Write the variance and the mean, or the smallest and the largest."""
    names = ("min", "max") if call.name == "aminmax" else ("variance", "mean")
    for name, value in zip(names, call.results, strict=True):
        _reduced(call, name, value)


def _reduced(call: Call, function: str, out: Value) -> None:
    over = places(call.get("dim") if call.get("dim") != [] else None, len(call.x.shape))
    call.reduce(function, call.x, over, keeps_dims=bool(call.get("keepdim", False)), out=out)


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


_SMALLEST_STEP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""From 1 to the next number of a type: what `rms_norm` adds to a mean of squares where it is not told."""


def normalisation(call: Call) -> None:
    """Write a normalisation; the statistics that it may tell besides are not."""
    rank = len(call.x.shape)
    last = tuple(range(rank - len(call.get("normalized_shape", [])), rank))
    spatial = tuple(range(2, rank))
    kind = _KINDS[call.name]
    over = {"group": (1, *spatial), "instance": spatial, "batch": (0, *spatial)}.get(kind, last)
    kept = call.maybe("running_mean", "running_var") if kind == "batch" else ()
    kept = kept if len(kept) == 2 and not call.get("training", call.get("train", False)) else ()
    call.normalise(
        kind,
        call.x,
        over,
        last if kind in ("layer", "rms") else (1,),
        scale=call.maybe("weight"),
        shift=call.maybe("bias"),
        statistics=kept,
        groups=int(call.get("num_groups", call.get("group", 1))) if kind == "group" else 1,
        epsilon=float(call.get("eps", _SMALLEST_STEP.get(call.x.dtype, 1e-5) if kind == "rms" else 1e-5)),
        momentum=float(call.get("momentum", 0.0) or 0.0) if kept else 0.0,
        is_unbiased=bool(kept),
    )
    call.unread(call.results[1:])


def distance(call: Call) -> None:
    """Write the cosines of angles between vectors along a dim, or the lengths of differences of them in the last."""
    is_cosine = call.name == "cosine_similarity"
    x, y = call.tensors[:2]
    rank = len(broadcast_shape((x, y)))
    dim = (call.get("dim", 1) if is_cosine else -1) % rank
    made = call.point("multiply" if is_cosine else "subtract", x, y, flop_per_point=3)
    call.reduce("sum", made, (dim,), keeps_dims=len(call.result.shape) == rank, out=call.result)


def transformed(call: Call) -> None:
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

# -- what is left of losses: the target's column, masks, sums, a mean; masks and counts of targets become no vertices


_NONE, _MEAN = 0, 1
_REDUCTIONS = ("none", "mean", "sum")
"""Ways of reduction, as operators number them."""

_IGNORED = -100
"""The target that is left out where no other one is named."""


def cross_entropy(call: Call) -> None:
    """Write the cross-entropy of a softmax with targets, which are classes or their probabilities."""
    x, target = call.tensors[:2]
    log = call.softmax(x, class_dim(x), is_log=True)
    (_of_probabilities if target.is_float else _of_classes)(call, log, smoothing=float(call.get("label_smoothing", 0)))


def _of_classes(call: Call, log: Value, *, smoothing: float = 0.0) -> None:
    """Write the loss of classes."""
    loss_of_classes(
        call,
        log,
        call.value("target"),
        weight=call.maybe("weight"),
        ignored=float(call.get("ignore_index", _IGNORED)),
        reduction=_REDUCTIONS[call.get("reduction", _MEAN)],
        smoothing=smoothing,
        count=call.results[1] if len(call.results) > 1 else None,
    )


def _of_probabilities(call: Call, log: Value, *, smoothing: float) -> None:
    """Write the loss of probabilities of all classes."""
    target = call.value("target")
    if smoothing:
        less = call.point("multiply", target, constant=1.0 - smoothing)
        target = call.point("add", less, constant=smoothing / log.shape[class_dim(log)])
    rows = summed_over_classes(call, call.point("multiply", log, target), call.maybe("weight"))
    reduction = call.get("reduction", _MEAN)
    if reduction == _NONE:
        call.point("negate", rows, out=call.result)
        return
    negative = call.point("negate", rows)
    if reduction == _MEAN:
        call.point("divide", call.total(negative), constant=float(max(1, prod(rows.shape))), out=call.result)
    else:
        call.total(negative, out=call.result)


def multilabel_margin(call: Call) -> None:
    """Write the sum, over pairs of a target's class and another one, of by how much it is not one larger."""
    x, target = call.tensors[:2]
    lead, classes = x.shape[:-1], x.shape[-1]
    pairs = (*lead, target.shape[-1], classes)
    # Classes up to the first that is negative, with those that are not among them.
    counted = call.add(ops.Generic(is_index=True), shape=pairs, dtype="bool", name="counted")
    own = call.reshape(call.gather(x, target, len(lead)), (*lead, target.shape[-1], 1))
    difference = call.point("subtract", call.reshape(x, (*lead, 1, classes)), own)
    short = call.point("relu", call.point("add", difference, constant=1.0))
    masked = call.point("where", counted, short, constant=0.0)
    reduction = call.get("reduction", _MEAN)
    scaled = call.point("divide", masked, constant=float(classes * (prod(lead) if reduction == _MEAN else 1)))
    over = range(len(pairs))[-2 if reduction == _NONE else 0 :]
    call.reduce("sum", scaled, over, out=call.result)
    call.unread(call.results[1:])


def ctc(call: Call) -> None:
    """Write the losses of examples whose targets may lie anywhere in time: of it is known what it costs.

    At each step each of the targets, with a blank before, between and behind them, sums three states of the last step.
    """
    (steps, examples, _), targets = call.x.shape, call.value("targets").shape
    states = 2 * (targets[1] if len(targets) == 2 else targets[0] // max(1, examples)) + 1
    call.opaque(passes=[(1, 0)], flop_per_point=10.0 * steps * states)


TRANSLATIONS = dict.fromkeys(FUNCTIONS, pointwise) | table(
    (lambda call: call.give(ops.Identity(rate=float(call.get("rate", 0.0))), *call.tensors[:1]), _AS_IT_IS),
    (constant, _CONSTANT),
    (copy, "copy"),
    (lambda call: (copy if len(call.tensors) > 1 else constant)(call), "fill"),
    (lambda call: glu(call, call.dim(-1)), "glu"),
    (moved_along, "roll flip fliplr flipud"),
    (lambda call: call.opaque(over=as_list(call.get("dim", -1))), _ALONG_ONE),
    (lambda call: call.opaque(over=as_list(call.get("dim", list(range(len(call.x.shape)))))), _ALONG_ALL),
    (reduce, "sum mean max min amax amin var std prod any all argmax argmin logsumexp norm linalg_vector_norm"),
    (reduce, "nansum nanmean count_nonzero"),
    (moments, "var_mean std_mean aminmax"),
    (normalisation, " ".join(_KINDS)),
    (lambda call: call.softmax(call.x, call.dim(), is_log="log" in call.name, out=call.result), _SOFTMAX),
    (distance, "cosine_similarity pairwise_distance"),
    (transformed, _FOURIER),
    (
        lambda call: _of_classes(call, call.x),
        "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward",
    ),
    (cross_entropy, "cross_entropy_loss"),
    (multilabel_margin, "multilabel_margin_loss multilabel_margin_loss_forward"),
    (ctc, "ctc_loss"),
)
"""Of losses, by the operator's name."""
