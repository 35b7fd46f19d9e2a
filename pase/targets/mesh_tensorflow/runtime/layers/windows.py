"""Convolutions and pooling of shards: sliding windows over one to three dims, whatever the order of a tensor's dims."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from pase.sharding.layouts import WindowDim, check_filters, check_pooled, check_transposed, filter_dims, mean_weights
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import numbers
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, names_of

_NumPy = np.ndarray[Any, Any]


def convolve(x: Any, filters: Any, windows: Sequence[WindowDim], out: Sequence[Any]) -> Any:
    """Return a convolution of one to three spatial dims; x as delivered by `reshard`, with a window for each.

    Dims are told by their names: groups are in all three tensors, channels of x in the filters too, those of the result
    in the filters and in out. A split of a channel of x or of a kernel leaves partial sums.
    """
    check_filters(x.mesh.layer, names_of(x), filters.shape.dims, windows, out)
    devices = x.mesh.devices
    sizes = {d.name: d.size // devices.size(d.name) for d in (*x.shape.dims, *filters.shape.dims, *out)}
    own, names, result = ([d.name for d in dims] for dims in (x.shape.dims, filters.shape.dims, out))
    kernels, positions = [window.kernel for window in windows], [window.out for window in windows]
    dims = filter_dims(own, names, result, {*kernels, *positions})
    # A kernel that is split stands as a dim of one point.
    split = [n for n in kernels if n in own]
    order = [n for n in (*dims.batch, *split, *positions, *dims.groups, *dims.inputs) if n in own]
    order += [n for n in own if n not in order]
    groups, inputs, outputs, batch = dims.extents(sizes)
    shape = [batch, *(window.reach(devices, {}) for window in windows), groups * inputs]
    extents = [window.kernel_extent // devices.size(window.kernel) for window in windows]
    outs = [window.out_extent // devices.size(window.out) for window in windows]

    def compute(x: Any, filters: Any) -> Any:
        filters = _turned(filters, names, [*kernels, *dims.groups, *dims.inputs, *dims.outputs])
        filters = _shaped(filters, [*extents, *([groups] if groups > 1 else []), inputs, outputs])
        y = convolved(_shaped(_turned(x, own, order), shape), filters, windows, groups)
        written = [sizes[n] for n in dims.batch] + outs + [sizes[n] for n in (*dims.groups, *dims.outputs)]
        return _turned(_shaped(y, written), [*dims.batch, *positions, *dims.groups, *dims.outputs], result)

    reduced, name = names_of(filters) - {dim.name for dim in out}, f"conv{len(windows)}d"
    return Shardwise(compute, [x, filters], shape=list(out), name=name, partial_over=reduced, recompute=True).outputs[0]


def convolved(x: Any, filters: Any, windows: Sequence[WindowDim], groups: int = 1) -> Any:
    """Return the convolution of x, [batch, spatial…, groups · inputs], without padding.

    Strides and dilations are those of the windows. filters: [kernel…, inputs, outputs], where there are groups
    [kernel…, groups, inputs, outputs].
    """
    strides, dilations = [window.stride for window in windows], [window.dilation for window in windows]
    *extents, inputs, outputs = filters.shape.as_list()
    if groups > 1 and inputs == 1 and len(strides) == 2 and len(set(strides)) == 1:
        filters = _spread(_shaped(filters, [*extents, outputs]), dilations)
        return tf.nn.depthwise_conv2d(x, filters, [1, *strides, 1], "VALID")
    # A line is an image of one row: TensorFlow has no convolution of lines.
    flat = [1] * (len(strides) == 1)
    batch, *points, channels = x.shape.as_list()
    x = _shaped(x, [batch, *flat, *points, channels])
    strides, dilations = [1, *flat, *strides, 1], [*flat, *dilations]
    filters = _spread(_shaped(filters, [*flat, *extents, inputs, outputs]), dilations)
    function = tf.nn.conv2d if len(dilations) == 2 else tf.nn.conv3d
    if groups == 1:
        return function(x, filters, strides, "VALID")
    parts = zip(tf.split(x, groups, -1), tf.unstack(filters, axis=len(dilations)), strict=True)
    return tf.concat([function(a, w, strides, "VALID") for a, w in parts], -1)


def convolve_transposed(
    x: Any,
    filters: Any,
    windows: Sequence[Sequence[Any]],
    out: Sequence[Any],
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    backwards: bool = False,
) -> Any:
    """Return the adjoint of a convolution: each point of x is spread over a window of the result.

    Dims are told by their names, as those of `convolve`. A split of a channel of x that the result lacks leaves partial
    sums.

    Args:
        x: read at positions.
        filters: what each point is multiplied with.
        windows: for each spatial dim: the positions of x, those of the result, the window's points.
        out: the dims of the result.
        strides: for each spatial dim, how far apart the windows of neighbouring points are.
        dilations: how far apart the points of a window are.
        pads: how many points before the first one are left out.
        backwards: whether the last point of the filters is the first of a window.

    Raises:
        ProgramError: positions or windows are split.
    """
    devices = x.mesh.devices
    check_transposed(x.mesh.layer, devices, windows)
    positions, written, kernels = ([window[i].name for window in windows] for i in range(3))
    every = (*x.shape.dims, *filters.shape.dims, *out, *(dim for window in windows for dim in window))
    sizes = {d.name: d.size // devices.size(d.name) for d in every}
    own, names, result = ([d.name for d in dims] for dims in (x.shape.dims, filters.shape.dims, out))
    dims = filter_dims(own, names, result, {*kernels, *written})
    num_groups, num_inputs, num_outputs, num_batch = dims.extents(sizes)
    points, outs, extents = ([sizes[n] for n in part] for part in (positions, written, kernels))

    def compute(x: Any, filters: Any) -> Any:
        x = _turned(x, own, [*dims.groups, *dims.batch, *positions, *dims.inputs])
        x = _shaped(x, [num_groups, num_batch, *points, num_inputs])
        filters = _turned(filters, names, [*dims.groups, *kernels, *dims.outputs, *dims.inputs])
        filters = _shaped(filters, [num_groups, *extents, num_outputs, num_inputs])
        filters = tf.reverse(filters, range(1, 1 + len(extents))) if backwards else filters
        parts = zip(tf.unstack(x), tf.unstack(filters), strict=True)
        y = tf.stack([_spread_over(a, w, outs, strides, dilations, pads) for a, w in parts])
        y = _shaped(y, [sizes[n] for n in (*dims.groups, *dims.batch, *written, *dims.outputs)])
        return _turned(y, [*dims.groups, *dims.batch, *written, *dims.outputs], result)

    name = f"conv{len(windows)}d_transposed"
    return Shardwise(
        compute, [x, filters], shape=list(out), name=name, partial_over=dims.inputs, recompute=True
    ).outputs[0]


def _spread_over(
    x: Any, filters: Any, outs: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int]
) -> Any:
    """Return x, [batch, spatial…, inputs], spread over `outs` positions; filters: [kernel…, outputs, inputs]."""
    # A line is an image of one row: TensorFlow has no convolution of lines.
    flat = [1] * (len(strides) == 1)
    batch, *points, channels = x.shape.as_list()
    *extents, num_outputs, _ = filters.shape.as_list()
    x = _shaped(x, [batch, *flat, *points, channels])
    filters = _spread(_shaped(filters, [*flat, *extents, num_outputs, channels]), [*flat, *dilations])
    strides, pads, outs = [*flat, *strides], [0] * len(flat) + list(pads), [*flat, *outs]
    reached = [
        (point - 1) * stride + extent
        for point, stride, extent in zip(x.shape.as_list()[1:-1], strides, filters.shape.as_list()[:-2], strict=True)
    ]
    function = tf.nn.conv2d_transpose if len(strides) == 2 else tf.nn.conv3d_transpose
    y = function(x, filters, [batch, *reached, num_outputs], strides=[1, *strides, 1], padding="VALID")
    beyond = [max(0, pad + out - extent) for pad, out, extent in zip(pads, outs, reached, strict=True)]
    y = tf.pad(y, [(0, 0), *((0, extent) for extent in beyond), (0, 0)]) if any(beyond) else y
    y = y[(slice(None), *(slice(pad, pad + out) for pad, out in zip(pads, outs, strict=True)))]
    return _shaped(y, [batch, *outs[len(flat) :], num_outputs])


def _spread(filters: Any, dilations: Sequence[int]) -> Any:
    """Return filters with zeros between their points: TensorFlow's gradients on CPUs know no dilation."""
    for axis, dilation in enumerate(dilations):
        if dilation > 1:
            points = tf.unstack(filters, axis=axis)
            gap = tf.zeros_like(points[0])
            count = (len(points) - 1) * dilation + 1
            filters = tf.stack([points[i // dilation] if i % dilation == 0 else gap for i in range(count)], axis=axis)
    return filters


def pool(
    x: Any, windows: Sequence[WindowDim], out: Sequence[Any], *, function: str, count_padding: bool = False
) -> Any:
    """Return the maximum or the mean ("max", "mean") of each window of x, as delivered by `reshard`.

    Raises:
        ProgramError: a window's own dim is split.
    """
    devices = x.mesh.devices
    check_pooled(x.mesh.layer, devices, windows)
    names, written = [d.name for d in x.shape.dims], [d.name for d in out]
    sizes = [d.size // devices.size(d.name) for d in x.shape.dims]
    positions = [window.out for window in windows]
    others = [n for n in written if n not in positions]
    order = [*others[:1], *positions, *others[1:]]
    extents = {d.name: d.size // devices.size(d.name) for d in out}
    # One point for dims that the tensor lacks, and for none that the result lacks.
    present = [n for n in order if n in names]
    absent = [n for n in names if n not in present]
    lead, rest = (prod(sizes[names.index(n)] for n in part if n in names) for part in (others[:1], others[1:]))
    shape = [lead, *(window.reach(devices, {}) for window in windows), rest]
    outs = [window.out_extent // devices.size(window.out) for window in windows]

    def compute(weight: _NumPy | None, local: Any) -> Any:
        local = _shaped(_turned(local, names, [*present, *absent]), shape)
        found = pooled(local, windows, outs, function)
        if weight is not None:
            found = found * weight.astype(local.dtype.as_numpy_dtype)[..., np.newaxis]
        return _turned(_shaped(found, [extents[n] for n in order]), order, written)

    def weights() -> list[_NumPy | None]:
        if function == "max":
            return [None] * len(devices.coordinates)
        return [mean_weights(windows, devices, at, count_padding=count_padding) for at in devices.coordinates]

    name = f"{function}_pool{len(windows)}d"
    return Shardwise(compute, [x], shape=list(out), name=name, per_position=weights, recompute=True).outputs[0]


def pooled(x: Any, windows: Sequence[WindowDim], outs: Sequence[int], function: str) -> Any:
    """Return windows of [batch, spatial…, channels] by poolings of images: TensorFlow pools no lines.

    A volume is pooled plane by plane and then across its planes, which stand for the rows of an image whose other
    points are channels; TensorFlow pools no volumes in float64.
    """
    pooling = tf.nn.max_pool2d if function == "max" else tf.nn.avg_pool2d
    batch, *points, channels = x.shape.as_list()
    kernels, strides = [window.kernel_extent for window in windows], [window.stride for window in windows]
    for axis, window in enumerate(windows):
        if window.dilation > 1:
            x = _gathered(x, axis + 1, window, outs[axis])
            points[axis], strides[axis] = outs[axis] * window.kernel_extent, window.kernel_extent
    if len(points) == 1:
        y = pooling(_shaped(x, [batch, 1, *points, channels]), [1, *kernels], [1, *strides], "VALID")
        return _shaped(y, [batch, *outs, channels])
    planes = points[0] if len(points) == 3 else 1
    y = pooling(_shaped(x, [batch * planes, *points[-2:], channels]), kernels[-2:], strides[-2:], "VALID")
    if len(points) == 3:
        each = outs[1] * outs[2] * channels
        y = pooling(_shaped(y, [batch, planes, 1, each]), [kernels[0], 1], [strides[0], 1], "VALID")
    return _shaped(y, [batch, *outs, channels])


def _gathered(x: Any, axis: int, window: WindowDim, num_outs: int) -> Any:
    """Return the points of each window along a dim end to end: TensorFlow pools no points that lie apart."""
    starts = np.arange(num_outs)[:, np.newaxis] * window.stride
    return tf.gather(x, (starts + np.arange(window.kernel_extent) * window.dilation).reshape(-1), axis=axis)


def _turned(x: Any, own: Sequence[str], order: Sequence[str]) -> Any:
    """Return a slice with its dims in another order."""
    return x if list(own) == list(order) else tf.transpose(x, numbers([own.index(name) for name in order]))


def _shaped(x: Any, shape: Sequence[int]) -> Any:
    return x if x.shape.as_list() == list(shape) else tf.reshape(x, numbers(shape))
