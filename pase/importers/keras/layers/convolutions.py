"""Convolutions: plain, grouped, depthwise, separable and transposed, over one to three dims, channels first or last."""

from collections.abc import Sequence
from typing import Any

from pase.importers.ir import Convolve, Value
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, each, for_all


def places(data_format: str, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the positions of the channels and of the spatial dims, of which there are so many."""
    first = data_format == "channels_first"
    return (1, tuple(range(2, rank + 2))) if first else (rank + 1, tuple(range(1, rank + 1)))


def pads(
    padding: str, extents: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return zeros (before, after) each dim: "valid", "same" (the odd one after) or "causal" (all before)."""
    found = []
    for extent, k, s, d in zip(extents, kernel, stride, dilation, strict=True):
        reach = d * (k - 1)
        if padding == "valid":
            found.append((0, 0))
        elif padding == "causal":
            found.append((reach, 0))
        else:
            total = max(0, (-(-extent // s) - 1) * s + reach + 1 - extent)
            found.append((total // 2, total - total // 2))
    return tuple(found)


def convolution(call: Call) -> None:
    """Write a convolution; filters are [spatial…, in-channels of one group, out-channels]."""
    layer = call.operation
    if getattr(layer, "lora_enabled", False):
        raise UntranslatableError
    op = _convolve(call.x, layer, tuple(layer._kernel.shape), groups=layer.groups, has_bias=layer.bias is not None)
    inputs = call.parameters(layer._kernel, layer.bias)
    call.emit_activated(op, call.x, *inputs, activation=layer.activation)


def transposed(call: Call) -> None:
    """Write the gradient of a convolution; filters are [spatial…, out-channels, in-channels]."""
    layer = call.operation
    rank = len(call.x.shape) - 2
    channels, spatial = places(layer.data_format, rank)
    kernel = tuple(layer.kernel.shape)
    stride, dilation = each(layer.strides, rank), each(layer.dilation_rate, rank)
    extents = [call.result.shape[i] for i in spatial]
    op = Convolve(
        channels=channels,
        spatial=spatial,
        filters=(rank + 1, rank, *range(rank)),
        stride=stride,
        dilation=dilation,
        pads=pads(layer.padding, extents, kernel[:rank], stride, dilation),
        is_transposed=True,
        has_bias=layer.bias is not None,
    )
    call.emit_activated(op, call.x, *call.parameters(layer.kernel, layer.bias), activation=layer.activation)


def depthwise(call: Call) -> None:
    """Write a convolution of each channel alone; filters are [spatial…, channels, multiplier]."""
    layer = call.operation
    op = _convolve(call.x, layer, _flat(layer.kernel.shape), groups=layer.kernel.shape[-2], has_bias=layer.use_bias)
    filters = _flattened(call, call.parameter(layer.kernel))
    call.emit_activated(op, call.x, filters, *call.parameters(layer.bias), activation=layer.activation)


def separable(call: Call) -> None:
    """Write a convolution of each channel alone, then one across channels."""
    layer = call.operation
    kernel = layer.depthwise_kernel
    rank = len(call.x.shape) - 2
    channels, _ = places(layer.data_format, rank)
    first = _convolve(call.x, layer, _flat(kernel.shape), groups=kernel.shape[-2], has_bias=False)
    shape = [kernel.shape[-2] * kernel.shape[-1] if i == channels else e for i, e in enumerate(call.result.shape)]
    deep = call.then(first, call.x, _flattened(call, call.parameter(kernel)), shape=shape, part="depthwise")
    second = Convolve(
        channels=first.channels,
        spatial=first.spatial,
        filters=first.filters,
        stride=(1,) * rank,
        dilation=(1,) * rank,
        pads=((0, 0),) * rank,
        has_bias=layer.use_bias,
    )
    inputs = call.parameters(layer.pointwise_kernel, layer.bias)
    call.emit_activated(second, deep, *inputs, activation=layer.activation)


def convolution_operation(call: Call) -> None:
    """Write a convolution that is called as an operation with filters of its own."""
    x, filters = call.tensors[:2]
    rank = len(x.shape) - 2
    channels, _ = places(call.operation.data_format, rank)
    call.emit(
        _convolve(x, call.operation, filters.shape, groups=x.shape[channels] // filters.shape[-2], has_bias=False),
        x,
        filters,
    )


def depthwise_operation(call: Call) -> None:
    """Write a convolution of each channel alone that is called as an operation."""
    x, filters = call.tensors[:2]
    op = _convolve(x, call.operation, _flat(filters.shape), groups=filters.shape[-2], has_bias=False)
    call.emit(op, x, _flattened(call, filters))


def _convolve(x: Value, owner: Any, kernel: tuple[int, ...], *, groups: int, has_bias: bool) -> Convolve:
    rank = len(x.shape) - 2
    channels, spatial = places(owner.data_format, rank)
    stride, dilation = each(owner.strides, rank), each(owner.dilation_rate, rank)
    return Convolve(
        channels=channels,
        spatial=spatial,
        filters=(rank + 1, rank, *range(rank)),
        stride=stride,
        dilation=dilation,
        pads=pads(owner.padding, [x.shape[i] for i in spatial], kernel[:rank], stride, dilation),
        groups=groups,
        has_bias=has_bias,
    )


def _flat(shape: Sequence[int]) -> tuple[int, ...]:
    """Return [spatial…, 1, channels · multiplier]: the filters of a convolution with a group for each channel."""
    return (*shape[:-2], 1, shape[-2] * shape[-1])


def _flattened(call: Call, filters: Value) -> Value:
    return call.reshaped(filters, _flat(filters.shape))


CONVOLUTIONS: dict[str, Translation] = (
    for_all(convolution, "Conv1D", "Conv2D", "Conv3D")
    | for_all(transposed, "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
    | for_all(depthwise, "DepthwiseConv1D", "DepthwiseConv2D")
    | for_all(separable, "SeparableConv1D", "SeparableConv2D")
)
"""Layers."""
