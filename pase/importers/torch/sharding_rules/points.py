"""Elementwise operators, tensor factories, random numbers, and elementwise losses."""

from collections.abc import Iterable, Mapping, Sequence

from pase.importers.ir.call import table
from pase.importers.torch.sharding_rules.rule import (
    Call,
    Labels,
    Rule,
    ShardingRule,
    positions,
    relate,
)

LINEAR = {
    "add": ("self", "other"),
    "addcdiv": ("tensor1",),
    "addcmul": ("tensor1", "tensor2"),
    "alias": ("self",),
    "alias_copy": ("self",),
    "clone": ("self",),
    "contiguous": ("self",),
    "complex": ("real", "imag"),
    "conj": ("self",),
    "_conj": ("self",),
    "_conj_physical": ("self",),
    "conj_physical": ("self",),
    "copy": ("src",),
    "deg2rad": ("self",),
    "detach": ("self",),
    "detach_copy": ("self",),
    "div": ("self",),
    "divide": ("self",),
    "imag": ("self",),
    "lerp": ("self", "end"),
    "lift_fresh_copy": ("self",),
    "masked_fill": ("self", "value"),
    "mul": ("self", "other"),
    "multiply": ("self", "other"),
    "neg": ("self",),
    "negative": ("self",),
    "positive": ("self",),
    "rad2deg": ("self",),
    "real": ("self",),
    "resolve_conj": ("self",),
    "resolve_neg": ("self",),
    "rsub": ("self", "other"),
    "sub": ("self", "other"),
    "subtract": ("self", "other"),
    "_to_copy": ("self",),
    "to": ("self",),
    "true_divide": ("self",),
    "where": ("self", "other"),
}
"""Arguments in which a function of points is linear, as long as what else it adds is a tensor."""

_ADDED = {
    "add": ("self", "other"),
    "addcdiv": ("self",),
    "addcmul": ("self",),
    "complex": ("real", "imag"),
    "lerp": ("self", "end"),
    "masked_fill": ("self", "value"),
    "rsub": ("self", "other"),
    "sub": ("self", "other"),
    "subtract": ("self", "other"),
    "where": ("self", "other"),
}
"""Arguments that are added to the result of the others."""


def pointwise(call: Call) -> ShardingRule:
    """Relate tensors that are broadcast to the result's shape."""
    linear, added = _linear(call)
    return relate(
        call,
        [positions(len(shape)) for shape in call.operands],
        [positions(len(shape)) for shape in call.results],
        linear=linear,
        added=added,
    )


def _linear(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments in which a function of points is linear, and those that it adds."""
    linear, added = LINEAR.get(call.name, ()), _ADDED.get(call.name, ())
    adds_constant = any(name not in call.numbers and call.get(name, 0) != 0 for name in added)
    is_rounded = call.get("rounding_mode") is not None
    changes_type = not all(call.results_are_floating)
    if adds_constant or is_rounded or changes_type:
        return (), ()
    return linear, added


def whole_points(call: Call) -> ShardingRule:
    """Relate random numbers and the like: the dims correspond, but none may be split."""
    created = [positions(len(shape)) for shape in call.results]
    inputs = [positions(len(shape)) for shape in call.operands]
    try:
        return relate(call, inputs, created, whole={f for labels in (*inputs, *created) for f in labels if f})
    except ValueError:
        return relate(call)


def dropout(call: Call) -> ShardingRule:
    """Relate a function that is random only while it trains."""
    is_random = call.get("train", call.get("training", True)) and call.get("p", 0.5) != 0
    if call.name in ("rrelu", "rrelu_with_noise", "rrelu_with_noise_functional"):
        is_random = bool(call.get("training", False))
    return whole_points(call) if is_random else pointwise(call)


def prelu(call: Call) -> ShardingRule:
    """Relate a tensor and slopes, one or one for each channel."""
    x = positions(call.rank("self"))
    channel = x[1] if len(x) > 1 else None
    slopes = [channel] * call.rank("weight")
    return relate(call, {"self": x, "weight": slopes}, [x])


def created(call: Call) -> ShardingRule:
    """Relate a tensor of constants; operands give its type only."""
    labels = positions(len(call.results[0]))
    return relate(call, results=[labels], sizes={"size": labels})


def loss_of_points(call: Call) -> ShardingRule:
    """Relate a loss of each point, which may be reduced over all of them."""
    rank = max(len(shape) for shape in call.operands)
    return reduced(call, [positions(len(shape)) for shape in call.operands], positions(rank))


def reduced(
    call: Call,
    operands: Mapping[str, Labels] | Sequence[Labels | None],
    kept: Labels,
    *,
    whole: Iterable[str] = (),
    others: Sequence[Labels] = (),
    summed: Sequence[int] | None = None,
) -> ShardingRule:
    """Relate a loss that is returned unreduced, averaged or summed over some dims.

    Args:
        call: The call, with the argument `reduction`: 0 for none, 1 for the mean, 2 for the sum.
        operands: Names of the dims of the operands.
        kept: Those of the result if nothing is reduced.
        whole: Names of dims that the operator mixes otherwise.
        others: Names of the dims of further results.
        summed: Numbers of the results that are reduced; by default all.
    """
    reduction = call.get("reduction", 1)
    sums = [name for name in kept if isinstance(name, str)] if reduction else []
    results = [[] if reduction else kept, *others][: len(call.results)]
    is_mean = reduction == 1
    return relate(call, operands, results, sums=sums, summed=summed, is_mean=is_mean, whole=whole)


RULES: dict[str, Rule] = table(
    (pointwise, "abs absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh alias alias_copy"),
    (pointwise, "__and__ __or__ __xor__ clone _conj conj contiguous complex copy cpu data detach detach_copy"),
    (pointwise, "divide empty_like expand_as fill float_power floor_divide frexp full_like greater greater_equal"),
    (pointwise, "hardswish imag isclose isneginf isposinf isreal ldexp less less_equal lift lift_fresh"),
    (pointwise, "lift_fresh_copy log_sigmoid logical_and multiply mvlgamma nan_to_num negative not_equal ones_like"),
    (pointwise, "broadcast_tensors chalf log_sigmoid_forward masked_fill fix _prelu_kernel _neg_view _conj_copy"),
    (pointwise, "fake_quantize_per_tensor_affine _autocast_to_full_precision _autocast_to_reduced_precision"),
    (pointwise, "special_digamma special_erfc special_erfinv special_exp2 special_expm1 special_gammainc special_i0"),
    (pointwise, "special_gammaincc special_gammaln special_log1p special_logit special_multigammaln special_polygamma"),
    (pointwise, "special_psi special_round special_sinc special_xlogy"),
    (pointwise, "polar real resolve_conj resolve_neg rsub subtract to _to_copy true_divide type_as where"),
    (pointwise, "zero zeros_like convert_element_type special_bessel_j0 special_bessel_j1 special_bessel_y0"),
    (pointwise, "special_bessel_y1 special_entr special_erf special_erfcx special_expit special_i0e special_i1"),
    (pointwise, "special_i1e special_log_ndtr special_ndtr special_ndtri special_xlog1py special_zeta"),
    (created, "empty full ones zeros new_empty new_full new_ones new_zeros"),
    (dropout, "dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout"),
    (dropout, "rrelu rrelu_with_noise rrelu_with_noise_functional"),
    (loss_of_points, "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss poisson_nll_loss"),
    (loss_of_points, "binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss margin_ranking_loss"),
    (prelu, "prelu"),
)
