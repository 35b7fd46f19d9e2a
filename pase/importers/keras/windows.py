"""Convolutions and pooling over one to three dims, channels first or last."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pase.importers.ir import Convolve, Identity, Pool, Reduce, Value
from pase.importers.keras.call import KerasCall, Translation, UntranslatableError, each, of_all_ranks


def places(data_format: str, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the positions of the channels and of the spatial dims, of which there are so many."""
    first = data_format == "channels_first"
    return (1, tuple(range(2, rank + 2))) if first else (rank + 1, tuple(range(1, rank + 1)))


def _pads(
    padding: str, extents: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return zeros (before, after) each dim: "valid", "same" (the odd one after) or "causal" (all before)."""
    found = []
    for extent, k, s, d in zip(extents, kernel, stride, dilation, strict=True):
        reach = d * (k - 1)
        total = max(0, (-(-extent // s) - 1) * s + reach + 1 - extent)
        same = total // 2, total - total // 2
        found.append({"valid": (0, 0), "causal": (reach, 0)}.get(padding, same))
    return tuple(found)


def _convolve(x: Value, owner: Any, kernel: Sequence[int], **more: Any) -> Convolve:
    """Return a convolution with filters of a shape [spatial…, in-channels of one group, out-channels].

    x: the tensor whose extents "same" padding depends on. owner: a layer or an operation.
    """
    rank = len(x.shape) - 2
    channels, spatial = places(owner.data_format, rank)
    stride, dilation = each(owner.strides, rank), each(owner.dilation_rate, rank)
    return Convolve(
        channels=channels,
        spatial=spatial,
        filters=(rank + 1, rank, *range(rank)),
        stride=stride,
        dilation=dilation,
        pads=_pads(owner.padding, [x.shape[i] for i in spatial], kernel[:rank], stride, dilation),
        **more,
    )


def convolution(call: KerasCall) -> None:
    """Write a convolution."""
    layer = call.operation
    if getattr(layer, "lora_enabled", False):
        raise UntranslatableError
    op = _convolve(call.x, layer, layer._kernel.shape, groups=layer.groups, has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer._kernel, layer.bias))


def transposed(call: KerasCall) -> None:
    """Write the gradient of a convolution; filters are [spatial…, out-channels, in-channels]."""
    layer = call.operation
    op = _convolve(call.result, layer, layer.kernel.shape, is_transposed=True, has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer.kernel, layer.bias))


def depthwise(call: KerasCall) -> None:
    """Write a convolution of each channel alone; filters are [spatial…, channels, multiplier]."""
    layer = call.operation
    op, filters = _of_each_channel(call, layer, *call.parameters(layer.kernel))
    call.emit_activated(replace(op, has_bias=layer.use_bias), call.x, filters, *call.parameters(layer.bias))


def separable(call: KerasCall) -> None:
    """Write a convolution of each channel alone, then one across channels."""
    layer = call.operation
    first, filters = _of_each_channel(call, layer, *call.parameters(layer.depthwise_kernel))
    shape = list(call.result.shape)
    shape[first.channels] = filters.shape[-1]
    deep = call.part("depthwise").add(first, call.x, filters, shape=shape)
    rank = len(shape) - 2
    ones = {"stride": (1,) * rank, "dilation": (1,) * rank, "pads": ((0, 0),) * rank}
    second = replace(first, groups=1, has_bias=layer.use_bias, **ones)  # type: ignore[arg-type]
    call.emit_activated(second, deep, *call.parameters(layer.pointwise_kernel, layer.bias))


def convolution_operation(call: KerasCall) -> None:
    """Write a convolution that is called as an operation with filters of its own."""
    x, filters = call.tensors[:2]
    channels, _ = places(call.operation.data_format, len(x.shape) - 2)
    groups = x.shape[channels] // filters.shape[-2]
    call.give(_convolve(x, call.operation, filters.shape, groups=groups), x, filters)


def depthwise_operation(call: KerasCall) -> None:
    """Write a convolution of each channel alone that is called as an operation."""
    op, filters = _of_each_channel(call, call.operation, call.tensors[1])
    call.give(op, call.x, filters)


def _of_each_channel(call: KerasCall, owner: Any, filters: Value) -> tuple[Convolve, Value]:
    """Return a convolution with a group for each channel, and its filters as [spatial…, 1, channels · multiplier]."""
    *spatial, channels, multiplier = filters.shape
    flat = call.reshape(filters, (*spatial, 1, channels * multiplier))
    return _convolve(call.x, owner, flat.shape, groups=channels), flat


# -- pooling


def _function(call: KerasCall) -> Literal["max", "mean"]:
    return "max" if "Max" in call.kind else "mean"


def pool(call: KerasCall) -> None:
    """Write maximum or mean over windows; what lies outside does not count."""
    owner = call.operation
    rank = len(call.x.shape) - 2
    kernel = each(owner.pool_size, rank)
    stride = each(owner.strides if owner.strides is not None else kernel, rank)
    _pool(call, kernel, stride, owner.padding)


def _pool(call: KerasCall, kernel: Sequence[int], stride: Sequence[int], padding: str) -> None:
    ones = (1,) * len(kernel)
    _, spatial = places(call.operation.data_format, len(kernel))
    op = Pool(
        function=_function(call),
        spatial=spatial,
        kernel=tuple(kernel),
        stride=tuple(stride),
        dilation=ones,
        pads=_pads(padding, [call.x.shape[i] for i in spatial], kernel, stride, ones),
    )
    call.give(op, call.x)


def global_pool(call: KerasCall) -> None:
    """Write maximum or mean over all spatial dims."""
    _, spatial = places(call.operation.data_format, len(call.x.shape) - 2)
    keeps_dims = bool(getattr(call.operation, "keepdims", True))
    call.give(Reduce(function=_function(call), over=spatial, keeps_dims=keeps_dims), call.x)


def adaptive_pool(call: KerasCall) -> None:
    """Write pooling to a given size: nothing where it is that already, a reduction to one point, windows else."""
    _, spatial = places(call.operation.data_format, len(call.x.shape) - 2)
    before, after = ([value.shape[i] for i in spatial] for value in (call.x, call.result))
    if before == after:
        call.give(Identity(), call.x)
    elif all(extent == 1 for extent in after):
        global_pool(call)
    else:
        stride = [max(1, b // a) for b, a in zip(before, after, strict=True)]
        _pool(call, [b - (a - 1) * s for b, a, s in zip(before, after, stride, strict=True)], stride, "valid")


WINDOW_LAYERS: dict[str, Translation] = (
    of_all_ranks(convolution, "Conv{}D")
    | of_all_ranks(transposed, "Conv{}DTranspose")
    | of_all_ranks(depthwise, "DepthwiseConv{}D")
    | of_all_ranks(separable, "SeparableConv{}D")
    | of_all_ranks(pool, "MaxPooling{}D", "AveragePooling{}D")
    | of_all_ranks(global_pool, "GlobalMaxPooling{}D", "GlobalAveragePooling{}D")
    | of_all_ranks(adaptive_pool, "AdaptiveMaxPooling{}D", "AdaptiveAveragePooling{}D")
)
"""Layers."""

WINDOW_OPERATIONS: dict[str, Translation] = {
    "Conv": convolution_operation,
    "DepthwiseConv": depthwise_operation,
    **dict.fromkeys(("MaxPool", "AveragePool"), pool),
    **dict.fromkeys(("AdaptiveMaxPool", "AdaptiveAveragePool"), adaptive_pool),
}
"""Of `keras.ops`."""
