"""Convolutions, pooling, and what changes the resolution of images."""

from math import prod

from pase.importers.ir import Broadcast, Convolve, Generic, Pool, Reduce, Reshape, Step, Transpose, Use
from pase.importers.torch.aten.call import (
    Call,
    each,
    generic,
    generic_along,
    identity,
    inner,
    reshaped,
    spatial_rank,
    step,
    step_to,
    table,
)


def convolution(call: Call) -> list[Step]:
    """Return a convolution over the last dims; one example without a batch is a batch of one."""
    x, w, bias = call.value("input"), call.value("weight"), call.maybe("bias")
    rank = len(w.shape) - 2
    stride, dilation = each(call.get("stride", 1), rank), each(call.get("dilation", 1), rank)
    op = Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=stride,
        dilation=dilation,
        pads=_pads(call, w.shape[2:], dilation),
        groups=call.get("groups", 1),
        is_transposed=bool(call.get("transposed", False)) or "transpose" in call.name,
        has_bias=bool(bias),
    )
    if len(x.shape) == rank + 2:
        return step(call, op, x, w, *bias)
    first, batched = reshaped(call, x, (1, *x.shape), "batched")
    made = inner(call, "convolved", (1, *call.result.shape))
    return [*first, step_to(op, made, batched, w, *bias), *step(call, Reshape(), made)]


def _pads(call: Call, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    padding = call.get("padding", 0)
    if not isinstance(padding, str):
        return tuple((p, p) for p in each(padding, len(kernel)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple((r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach)


def pool(call: Call) -> list[Step]:
    """Return pooling over the last dims; where the maxima are from is not told."""
    x = call.tensors[0]
    rank = spatial_rank(call.name)
    kernel = each(call.get("kernel_size"), rank)
    op = Pool(
        function="max" if "max" in call.name else "mean",
        spatial=tuple(range(len(x.shape) - rank, len(x.shape))),
        kernel=kernel,
        stride=each(call.get("stride") or kernel, rank),
        dilation=each(call.get("dilation", 1), rank),
        pads=tuple((p, p) for p in each(call.get("padding", 0), rank)),
        counts_padding=bool(call.get("count_include_pad", True)) and "avg" in call.name,
    )
    return [step_to(op, call.result, x), *_places(call)]


def adaptive_pool(call: Call) -> list[Step]:
    """Return pooling to a given size: nothing where it is that size already, a mean where it is one, windows else."""
    x, out = call.tensors[0], call.result.shape
    rank = spatial_rank(call.name)
    places = tuple(range(len(x.shape) - rank, len(x.shape)))
    before, after = [x.shape[i] for i in places], [out[i] for i in places]
    function = "max" if "max" in call.name else "mean"
    if before == after:
        return [*identity(_first(call)), *_places(call)]
    if all(extent == 1 for extent in after):
        return [step_to(Reduce(function=function, over=places, keeps_dims=True), call.result, x), *_places(call)]
    if any(b < a for b, a in zip(before, after, strict=True)):
        return generic_along(call, places)
    stride = tuple(max(1, b // a) for b, a in zip(before, after, strict=True))
    kernel = tuple(b - (a - 1) * s for b, a, s in zip(before, after, stride, strict=True))
    op = Pool(
        function=function,  # type: ignore[arg-type]
        spatial=places,
        kernel=kernel,
        stride=stride,
        dilation=(1,) * rank,
        pads=((0, 0),) * rank,
    )
    return [step_to(op, call.result, x), *_places(call)]


def _first(call: Call) -> Call:
    return Call(name=call.name, arguments=call.arguments, outputs=(call.result,))


def _places(call: Call) -> list[Step]:
    """Return the positions that a pool tells beside its maxima, from nothing: they carry no gradient."""
    return [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]


def upsample(call: Call) -> list[Step]:
    """Return images in another resolution: repeated pixels where that is a multiple, a function of rows and columns."""
    x, out = call.tensors[0], call.result.shape
    if "nearest" in call.name and all(b % a == 0 for a, b in zip(x.shape[2:], out[2:], strict=True)):
        times = [b // a for a, b in zip(x.shape[2:], out[2:], strict=True)]
        wide = tuple(e for a, t in zip(x.shape[2:], times, strict=True) for e in (a, t))
        made = inner(call, "repeated", (*x.shape[:2], *wide))
        places = (0, 1, *(2 + 2 * i for i in range(len(times))))
        return [step_to(Broadcast(places=places), made, x), *step(call, Reshape(), made)]
    taps = 2 ** (len(x.shape) - 2) if "linear" in call.name else 16 if "cubic" in call.name else 1
    return generic_along(call, range(2, len(x.shape)), flop_per_point=2.0 * taps)


def pixel_shuffle(call: Call) -> list[Step]:
    """Return channels as pixels."""
    x, out = call.tensors[0], call.result
    *lead, c, h, w = x.shape
    r = call.get("upscale_factor")
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return _shuffled(call, (*lead, c // r**2, r, r, h, w), order, out.shape)


def pixel_unshuffle(call: Call) -> list[Step]:
    """Return pixels as channels."""
    x, out = call.tensors[0], call.result
    *lead, c, h, w = x.shape
    r = call.get("downscale_factor")
    n = len(lead)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return _shuffled(call, (*lead, c, h // r, r, w // r, r), order, out.shape)


def channel_shuffle(call: Call) -> list[Step]:
    """Return channels of several groups in turn."""
    x, groups = call.tensors[0], call.get("groups")
    b, c, *rest = x.shape
    order = (0, 2, 1, *range(3, 3 + len(rest)))
    return _shuffled(call, (b, groups, c // groups, *rest), order, x.shape)


def _shuffled(call: Call, apart: tuple[int, ...], order: tuple[int, ...], out: tuple[int, ...]) -> list[Step]:
    assert prod(apart) == prod(out)
    first, seen = reshaped(call, call.tensors[0], apart, "apart")
    turned = inner(call, "turned", tuple(apart[i] for i in order))
    return [*first, step_to(Transpose(order=order), turned, seen), *step(call, Reshape(), turned)]


def unfold(call: Call) -> list[Step]:
    """Return windows side by side: the batch passes through, and the channels into the leading part of theirs."""
    return generic_along(call, range(1, len(call.tensors[0].shape)), flop_per_point=0.0)


def grid_sample(call: Call) -> list[Step]:
    """Return values between pixels: batch and channels pass through."""
    x = call.tensors[0]
    steps = generic_along(call, range(2, len(x.shape)), flop_per_point=8.0)
    (one,) = steps
    # The grid has no channels: along these it is read whole.
    return [Step(op=one.op, inputs=(Use(value=x.name), *one.inputs[1:]), outputs=one.outputs)]


_UPSAMPLE = "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"

TRANSLATIONS = table(
    (convolution, "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    (pool, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    (pool, "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"),
    (adaptive_pool, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    (adaptive_pool, "_adaptive_avg_pool2d _adaptive_avg_pool3d"),
    (adaptive_pool, "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    (upsample, f"{_UPSAMPLE} upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (upsample, "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"),
    (pixel_shuffle, "pixel_shuffle"),
    (pixel_unshuffle, "pixel_unshuffle"),
    (channel_shuffle, "channel_shuffle native_channel_shuffle"),
    (unfold, "im2col col2im"),
    (grid_sample, "grid_sampler grid_sampler_2d grid_sampler_3d"),
    (generic, "ctc_loss"),
)
"""Of windows, by the operator's name."""
