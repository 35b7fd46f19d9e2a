"""Calls of PyTorch's own operators in "source" steps: which operators a program may call, and with which arguments."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pase.common.words import short
from pase.errors import GraphError

_NAMES = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone
    complex conj copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac imag isclose isfinite isinf isnan le leaky_relu lerp less less_equal lgamma log
    log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal polar polygamma
    positive pow prelu rad2deg real reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu
    sin sinc sinh softplus softshrink special_erf special_expit special_xlog1py sqrt square sub subtract tan tanh
    threshold to tril triu true_divide trunc type_as where xlogy _to_copy __and__ __or__ __xor__

    broadcast_to cat channel_shuffle chunk concat concatenate constant_pad_nd diag diag_embed diagonal expand expand_as
    flatten flip fliplr flipud full_like index index_add index_copy index_fill index_put index_select moveaxis movedim
    narrow ones_like pad permute pixel_shuffle pixel_unshuffle ravel reflection_pad1d reflection_pad2d reflection_pad3d
    repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as roll rot90 select
    select_scatter slice slice_scatter split split_with_sizes squeeze stack swapaxes swapdims t take_along_dim
    tensor_split tile transpose unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real zeros_like

    embedding gather histc isin masked_scatter one_hot scatter scatter_add scatter_reduce bucketize searchsorted
    argsort kthvalue median mode msort sort topk cummax cummin cumprod cumsum diff logcumsumexp renorm

    all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean min nanmean nansum norm
    prod std std_mean sum var var_mean log_softmax softmax _log_softmax _safe_softmax _softmax special_log_softmax
    special_softmax group_norm instance_norm layer_norm native_group_norm native_layer_norm rms_norm
    _weight_norm_interface cosine_similarity pairwise_distance

    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
    fft_rfft2 fft_rfftn

    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
    huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
    nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss

    addbmm addmm addmv addr baddbmm bilinear bmm cdist cross dot einsum ger inner kron linalg_cross linalg_matmul
    linalg_inv linalg_solve linear matmul mm mv outer tensordot trace vdot

    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d col2im conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution grid_sampler grid_sampler_2d grid_sampler_3d im2col max_pool1d max_pool1d_with_indices
    max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d

    gru lstm rnn_relu rnn_tanh scaled_dot_product_attention
"""
SOURCE_OPERATORS = frozenset(_NAMES.split())
"""Operators of PyTorch's 'aten', without their overloads, that imports write into plans and programs call.

All are pure functions that check their operands. Excluded are operators that view memory by strides (as_strided,
_reshape_alias), trust the results of another operator (backward ones), return uninitialised memory (empty_like), write
into operands, or read files or random numbers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCall:
    """An operator call in a "source" step.

    Attributes:
        operator: Qualified name, such as "aten.topk.default".
        arguments: (positional, keywords); in them {"operand": i} represents an operand, {"dtype": name} a type,
            {"number": "inf"} numbers that JSON does not have, {"device": ""} the device of the operands.
        layouts: For each operand, then for the result, the dims of the body that make up each of its dims, row-major,
            in the operator's order.
        number: Number of the result, of several.
    """

    operator: str
    arguments: tuple[list[Any], dict[str, Any]]
    layouts: tuple[tuple[tuple[str, ...], ...], ...]
    number: int


_OPERATOR = re.compile(r"aten\.(\w*[a-zA-Z0-9]|__\w+__)\.(\w*[a-zA-Z0-9])", re.ASCII)
"""Qualified names of operators, except those whose name shows that they write into their operands."""

_LONGEST_ARGUMENTS = 1 << 16

_MOST_RESULTS = 1 << 16

_LARGEST = (1 << 31) - 1
"""Largest integer argument: PyTorch computes with extents without overflow checks, and `replication_pad2d` by 2^63 - 1
reads out of bounds."""


def is_source_operator(operator: str) -> bool:
    """Return whether programs may call the operator of this qualified name."""
    name = _OPERATOR.fullmatch(operator)
    return name is not None and name[1] in SOURCE_OPERATORS


def source_call(options: Mapping[str, Any], operands: Sequence[object], where: str) -> SourceCall:
    """Return the operator call of a "source" step.

    Args:
        options: The step's options.
        operands: The step's operands: names of tensors, or numbers.
        where: The layer, for messages.

    Raises:
        GraphError: Programs may not make this call, or its arguments cannot be parsed.
    """
    operator = str(options.get("operator", ""))
    if not is_source_operator(operator):
        raise GraphError(
            f"{where} calls {short(operator)!r}; expected an operator of PyTorch's 'aten', with its overload, that "
            "imports write into plans; search the model again"
        )
    try:
        texts = [str(options[name]) for name in ("arguments", "layouts")]
        if max(map(len, texts)) > _LONGEST_ARGUMENTS:
            raise ValueError("they are too long")
        arguments, layouts = map(json.loads, texts)
        positional, keywords = arguments
        if not isinstance(positional, list) or not isinstance(keywords, dict):
            raise ValueError("expected an array and an object")
        if any(not isinstance(dim, str) for layout in layouts for axis in layout for dim in axis):
            raise ValueError("dims are names")
        _check_arguments([*positional, *keywords.values()], len(operands))
        parsed = tuple(tuple(tuple(axis) for axis in layout) for layout in layouts)
        if len(parsed) != len(operands) + 1 or any(not isinstance(operand, str) for operand in operands):
            raise ValueError("expected dims of each operand, a tensor, and of the result")
        number = options.get("number", 0)
        if not isinstance(number, int) or not 0 <= number < _MOST_RESULTS:
            raise ValueError(f"there is no result {number}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise GraphError(
            f"{where} calls {operator!r} with arguments that cannot be read: {short(str(error))}"
        ) from None
    return SourceCall(operator=operator, arguments=(positional, keywords), layouts=parsed, number=number)


def _check_arguments(items: Sequence[Any], num_operands: int) -> None:
    for item in items:
        match item:
            case list():
                _check_arguments(item, num_operands)
            case {"operand": int(place)} if len(item) == 1 and 0 <= place < num_operands:
                pass
            case {"dtype": str(name)} if len(item) == 1 and name in ARGUMENT_TYPES:
                pass
            case {"number": "inf" | "-inf" | "nan"} | {"device": ""} if len(item) == 1:
                pass
            case int() if abs(item) > _LARGEST:
                raise ValueError(f"a number of {item.bit_length()} bits is not a valid argument")
            case None | bool() | int() | float() | str():
                pass
            case _:
                raise ValueError(f"{item!r} is not a valid argument")


TYPES = ("float16", "bfloat16", "float32", "float64")
"""Number types that a source may compute in."""

ARGUMENT_TYPES = (*TYPES, "bool", "uint8", "int8", "int16", "int32", "int64", "complex64", "complex128")
"""Types that an argument may be."""
