"""What multiplies: linear layers, matrix products, einsum, convolutions and pooling, attention, recurrent networks."""

from collections.abc import Sequence
from math import prod
from typing import Literal

from pase.importers.ir import ops
from pase.importers.ir.call import Call, Shape, each, letters, table
from pase.importers.ir.shared import adaptive_pool, repeat_each, tensordot, window_pads
from pase.importers.ir.shared import pool as pool_windows
from pase.importers.ir.trace import Value

# -- products


def linear(call: Call) -> None:
    """Write x · wᵀ + bias."""
    x, w = call.value("input"), call.value("weight")
    lead, n = letters(len(x.shape) - 1, without="kn"), "n" if len(w.shape) > 1 else ""
    call.contract(x, w, (f"{lead}k", f"{n}k"), lead + n, *call.maybe("bias")[: len(n)], out=call.result)


def matmul(call: Call) -> None:
    """Write a product as NumPy's matmul has it; with a vector it is a pass over a tensor, and no matrix product."""
    x, y = call.tensors[:2]
    if len(y.shape) == 1:
        _weighted_sum(call, x, y, call.result)
    else:
        call.matmul(x, y, out=call.result)


def _weighted_sum(call: Call, x: Value, vector: Value, out: Value | None = None) -> Value:
    return call.reduce("sum", call.point("multiply", x, vector), (len(x.shape) - 1,), out=out)


def addmm(call: Call) -> None:
    """Write input + mat1 · mat2."""
    bias, x, w = call.value("input"), call.value("mat1"), call.value("mat2")
    if len(bias.shape) == 1 and bias.shape[0] == w.shape[1]:
        call.contract(x, w, ("mk", "kn"), "mn", bias, out=call.result)
    else:
        _added(call, x, w, ("mk", "kn"), "mn")


def _added(call: Call, x: Value, y: Value, operands: tuple[str, str], output: str) -> None:
    if call.get("beta", 1) == 0:
        call.contract(x, y, operands, output, out=call.result)
    else:
        call.point("add", call.contract(x, y, operands, output), call.value("input"), out=call.result)


def bilinear(call: Call) -> None:
    """Write x₁ · w · x₂ + bias as two products."""
    x, y, w = call.value("input1"), call.value("input2"), call.value("weight")
    lead = letters(len(x.shape) - 1, without="nxy")
    first = call.contract(x, w, (f"{lead}x", "nxy"), f"{lead}ny")
    call.contract(first, y, (f"{lead}ny", f"{lead}y"), f"{lead}n", *call.maybe("bias"), out=call.result)


def einsum(call: Call) -> None:
    """Write a sum of products of tensors, two at a time from the left."""
    if not call.einsum(str(call.get("equation", "")), call.tensors, out=call.result):
        call.opaque()


def grouped_mm(call: Call) -> None:
    """Write rows, each multiplied by the matrix of its own group: inputs [m, k], [groups, k, n], ends of the groups.

    Every group is taken to cost as much, as if it had as many rows; these are made more where they cannot be shared out
    evenly.
    """
    x, w = call.tensors[:2]
    if len(x.shape) != 2 or len(w.shape) != 3:
        return call.opaque()
    (rows, width), (groups, _, columns) = x.shape, w.shape
    size = -(-rows // groups)
    if size * groups != rows:
        x = call.add(ops.Pad(before=(0, 0)), x, shape=(size * groups, width))
    ends = call.maybe("offs")
    by_group = call.reshape(x, (groups, size, width))
    op = ops.Contract(operands=("gmk", "gkn"), output="gmn", has_ends=bool(ends))
    made = call.add(op, by_group, w, *ends, shape=(groups, size, columns))
    if size * groups == rows:
        call.reshape(made, out=call.result)
    else:
        call.cut(call.reshape(made, (size * groups, columns)), 0, 0, out=call.result)
    return None


# -- windows


def convolution(call: Call) -> None:
    """Write a convolution over the last dims; one example without a batch is a batch of one."""
    x, w, bias = call.value("input"), call.value("weight"), call.maybe("bias")
    rank = len(w.shape) - 2
    dilation = each(call.get("dilation", 1), rank)
    op = ops.Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=each(call.get("stride", 1), rank),
        dilation=dilation,
        pads=_pads(call, x.shape[-rank:], w.shape[2:], dilation),
        groups=call.get("groups", 1),
        is_transposed=bool(call.get("transposed", False)) or "transpose" in call.name,
        has_bias=bool(bias),
    )
    if len(x.shape) == rank + 2:
        call.add(op, x, w, *bias, out=call.result)
    else:
        batched = call.reshape(x, (1, *x.shape))
        call.reshape(call.add(op, batched, w, *bias, shape=(1, *call.result.shape)), out=call.result)


def _pads(call: Call, extents: Shape, kernel: Shape, dilation: Shape) -> tuple[tuple[int, int], ...]:
    padding = call.get("padding", 0)
    if isinstance(padding, str):
        return window_pads(padding, extents, kernel, (1,) * len(kernel), dilation)
    return tuple((p, p) for p in each(padding, len(kernel)))


def pool(call: Call) -> None:
    """Write pooling over the last dims; where the maxima are from is not told."""
    rank = _spatial_rank(call)
    kernel = each(call.get("kernel_size"), rank)
    pool_windows(
        call,
        _last(call, rank),
        kernel,
        stride=each(call.get("stride") or kernel, rank),
        dilation=each(call.get("dilation", 1), rank),
        pads=[(p, p) for p in each(call.get("padding", 0), rank)],
        counts_padding=bool(call.get("count_include_pad", True)) and "avg" in call.name,
    )


def _last(call: Call, rank: int) -> range:
    return range(len(call.x.shape) - rank, len(call.x.shape))


def _spatial_rank(call: Call) -> int:
    """Return the number of spatial dims that an operator's name tells ("max_pool2d")."""
    return int(next(c for c in call.name if c.isdigit()))


def upsample(call: Call) -> None:
    """Write images in another resolution: repeated pixels where that is a multiple, a function of rows and columns."""
    x, rank = call.x, len(call.x.shape)
    before, after = x.shape[2:], call.result.shape[2:]
    if "nearest" in call.name and all(b % a == 0 for a, b in zip(before, after, strict=True)):
        repeat_each(call, x, {i: b // a for i, (a, b) in enumerate(zip(before, after, strict=True), start=2)})
    else:
        taps = 2 ** (rank - 2) if "linear" in call.name else 16 if "cubic" in call.name else 1
        call.opaque(over=range(2, rank), flop_per_point=2.0 * taps)


# -- sequences


def attention(call: Call) -> None:
    """Write scaled dot-product attention; queries may have more heads than keys and values.

    Tensors of three dims, or more than four, have their leading dims put together.
    """
    given = [call.value(name) for name in ("query", "key", "value")]
    op = ops.Attention(is_causal=bool(call.get("is_causal", False)), is_fused=True, scale=call.get("scale"))
    masks = call.maybe("attn_mask", "attn_bias")
    if all(len(value.shape) == 4 for value in given):
        call.add(op, *given, *masks, out=call.result)
    else:
        flat = [call.reshape(value, _of_four(value.shape)) for value in given]
        made = call.add(op, *flat, *masks, shape=(*flat[0].shape[:3], given[2].shape[-1]))
        call.reshape(made, out=call.result)
    call.unread(call.results[1:])


def _of_four(shape: Sequence[int]) -> Shape:
    lead = shape[:-2]
    return (prod(lead[:-1]), lead[-1] if lead else 1, *shape[-2:])


def flexible_attention(call: Call) -> None:
    """Write attention whose scores pass through a function of the source's: that is taken to cost nothing."""
    if len(call.tensors) < 3 or any(len(value.shape) != 4 for value in call.tensors[:3]):
        return call.opaque()
    call.add(ops.Attention(is_fused=True), *call.tensors[:3], out=call.result)
    return call.unread(call.results[1:])


_CELLS: dict[str, Literal["lstm", "gru", "rnn"]] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


def recurrent(call: Call) -> None:
    """Write a recurrent network over a sequence: inputs are the tensor, the weights, then the first states."""
    x = call.value("input")
    if len(x.shape) != 3:
        return call.opaque()
    directions = 2 if call.get("bidirectional") else 1
    op = ops.Recurrent(
        cell=_CELLS[call.name],
        units=call.result.shape[-1] // directions,
        layers=int(call.get("num_layers", 1)),
        is_bidirectional=directions == 2,
        is_batch_first=bool(call.get("batch_first", False)),
        equations=call.name,  # type: ignore[arg-type]
        rate=float(call.get("dropout", 0.0)),
    )
    states = call.get("hx", [])
    given = [*call.get("params", []), *(states if isinstance(states, list) else [states])]
    return call.give(op, x, *(value for value in given if isinstance(value, Value)))


_UPSAMPLE = "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"

TRANSLATIONS = table(
    (linear, "linear"),
    (matmul, "matmul mm bmm mv dot vdot __matmul__ linalg_matmul"),
    (addmm, "addmm _addmm_activation"),
    (lambda call: _added(call, call.value("batch1"), call.value("batch2"), ("amk", "akn"), "amn"), "baddbmm"),
    (
        lambda call: call.point("add", _weighted_sum(call, *call.tensors[1:]), call.tensors[0], out=call.result),
        "addmv",
    ),
    (
        lambda call: call.point("multiply", call.reshape(call.x, (*call.x.shape, 1)), call.tensors[1], out=call.result),
        "outer ger",
    ),
    (bilinear, "bilinear"),
    (einsum, "einsum"),
    (lambda call: tensordot(call, call.get("dims_self", []), call.get("dims_other", [])), "tensordot"),
    (lambda call: tensordot(call, [-1], [-1]), "inner"),
    (grouped_mm, "_grouped_mm grouped_mm grouped_mm_fallback"),
    (convolution, "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (pool, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    (pool, "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"),
    (
        lambda call: adaptive_pool(call, _last(call, _spatial_rank(call))),
        """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        """,
    ),
    (upsample, f"{_UPSAMPLE} upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (upsample, "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"),
    # Of windows side by side the batch passes; of values between pixels the channels too.
    (lambda call: call.opaque(over=range(1, len(call.x.shape)), flop_per_point=0.0), "im2col col2im"),
    (
        lambda call: call.opaque(over=range(2, len(call.x.shape)), flop_per_point=8.0),
        "grid_sampler grid_sampler_2d grid_sampler_3d",
    ),
    (attention, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
    (attention, "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"),
    (attention, "_scaled_dot_product_attention_math_for_mps"),
    (flexible_attention, "flex_attention"),
    # Of a whole layer of attention that is one operator only the batch passes.
    (
        lambda call: call.give(ops.Generic(passes=((0, 0),)), *call.tensors),
        "_native_multi_head_attention _transformer_encoder_layer_fwd",
    ),
    (recurrent, " ".join(_CELLS)),
)
"""Of what multiplies, by the operator's name."""
