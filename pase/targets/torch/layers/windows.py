"""Convolutions and pooling of shards: sliding windows over one to three dims, for any order of a tensor's dims."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.sharding.layouts import WindowDim, check_filters, check_pooled, check_transposed, filter_dims, mean_weights
from pase.targets.torch.tensor import Dim, Tensor, local, shaped

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_MAX = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEAN = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def convolve(x: Tensor, filters: Tensor, windows: Sequence[WindowDim], out: Sequence[Dim]) -> Tensor:
    """Return a convolution of one to three spatial dims; x as returned by `reshard`, with a window for each.

    Dims are identified by name: groups are in all three tensors, channels of x also in the filters, those of the result
    in the filters and in out. A split of a channel of x or of a kernel leaves partial sums.
    """
    mesh = x.mesh
    check_filters(mesh.layer, x.names, filters.dims, windows, out)
    kernels, positions = [window.kernel for window in windows], [window.out for window in windows]
    sizes = {dim.name: mesh.part(dim) for dim in (*x.dims, *filters.dims, *out)}
    names = [dim.name for dim in out]
    own = filter_dims(x.names, filters.names, names, {*kernels, *positions})
    split_kernels = [name for name in kernels if name in x.names]
    points = [window.reach(mesh.devices, mesh.point) for window in windows]
    taps = [mesh.part(Dim(window.kernel, window.kernel_extent)) for window in windows]
    outs = [mesh.part(Dim(window.out, window.out_extent)) for window in windows]
    num_groups, num_inputs, num_outputs, num_batch = own.extents(sizes)
    # A split kernel is a dim of extent 1 here.
    order = [name for name in (*own.batch, *split_kernels, *own.groups, *own.inputs, *positions) if name in x.names]
    order += [name for name in x.names if name not in order]
    held = [*own.groups, *own.outputs, *own.inputs, *(k for k in kernels if k in filters.names)]
    function = _CONVOLUTIONS[len(windows) - 1]
    strides, dilations = [window.stride for window in windows], [window.dilation for window in windows]

    def compute(a: Any, w: Any) -> Any:
        seen = (num_batch, num_groups * num_inputs, *points)
        a = shaped(turned(a, x.names, order), [sizes[n] for n in order], seen)
        w = turned(w, filters.names, held)
        w = shaped(w, [sizes[n] for n in held], (num_groups * num_outputs, num_inputs, *taps))
        y = function(a, w, None, strides, 0, dilations, num_groups)
        y.node.meta["biased"] = [*own.groups, *own.outputs]
        made = [sizes[n] for n in (*own.batch, *own.groups, *own.outputs)]
        y = shaped(y, (num_batch, num_groups * num_outputs, *outs), (*made, *outs))
        return turned(y, [*own.batch, *own.groups, *own.outputs, *positions], names)

    reduced = {*filters.names} - {*names}
    return replace(local(compute, [x, filters], out, partial_over=reduced), is_product=True)


def convolve_transposed(
    x: Tensor,
    filters: Tensor,
    windows: Sequence[Sequence[Dim]],
    out: Sequence[Dim],
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    backwards: bool = False,
) -> Tensor:
    """Return the adjoint of a convolution: each point of x is spread over a window of the result.

    Dims are identified by name, as in `convolve`. A split of a channel of x that the result lacks leaves partial sums.

    Args:
        x: The input.
        filters: Multiplied with each point.
        windows: For each spatial dim: the positions of x, those of the result, the window's points.
        out: Dims of the result.
        strides: For each spatial dim, the distance of the windows of neighbouring points.
        dilations: Distance of the points of a window.
        pads: Number of points cropped at the start.
        backwards: Whether the last point of the filters is the first of a window.

    Raises:
        ProgramError: Positions or windows are split.
    """
    mesh = x.mesh
    check_transposed(mesh.layer, mesh.devices, windows)
    positions, written, kernels = ([one[i].name for one in windows] for i in range(3))
    every = (*x.dims, *filters.dims, *out, *(dim for one in windows for dim in one))
    sizes = {dim.name: mesh.part(dim) for dim in every}
    names = [dim.name for dim in out]
    own = filter_dims(x.names, filters.names, names, {*kernels, *written})
    num_groups, num_inputs, num_outputs, num_batch = own.extents(sizes)
    points, outs, taps = ([sizes[name] for name in part] for part in (positions, written, kernels))
    reached = [
        (n - 1) * stride + (k - 1) * dilation + 1
        for n, stride, k, dilation in zip(points, strides, taps, dilations, strict=True)
    ]
    pads = list(pads)
    # Points after the last window, which PyTorch's function adds as output padding.
    ends = [pad + out - extent for pad, out, extent in zip(pads, outs, reached, strict=True)]

    def compute(a: Any, w: Any) -> Any:
        a = turned(a, x.names, [*own.batch, *own.groups, *own.inputs, *positions])
        a = a.reshape((num_batch, num_groups * num_inputs, *points))
        w = turned(w, filters.names, [*own.groups, *own.inputs, *own.outputs, *kernels])
        w = w.reshape((num_groups * num_inputs, num_outputs, *taps))
        w = torch.flip(w, list(range(2, 2 + len(taps)))) if backwards else w
        y = _TRANSPOSED[len(taps) - 1](a, w, stride=list(strides), dilation=list(dilations), groups=num_groups)
        around = [n for pad, end in zip(reversed(pads), reversed(ends), strict=True) for n in (-pad, end)]
        y = functional.pad(y, around) if any(around) else y
        y = y.reshape([*(sizes[n] for n in (*own.batch, *own.groups, *own.outputs)), *outs])
        return turned(y, [*own.batch, *own.groups, *own.outputs, *written], names)

    return local(compute, [x, filters], out, partial_over=own.inputs)


def pool(
    x: Tensor, windows: Sequence[WindowDim], out: Sequence[Dim], *, function: str, count_padding: bool = False
) -> Tensor:
    """Return the maximum or the mean ("max", "mean") of each window of x, as delivered by `reshard`.

    Raises:
        ProgramError: a window's own dim is split.
    """
    mesh = x.mesh
    check_pooled(mesh.layer, mesh.devices, windows)
    names = [dim.name for dim in out]
    sizes = {dim.name: mesh.part(dim) for dim in out}
    positions = [one.out for one in windows]
    others = [name for name in names if name not in positions]
    present = [name for name in others if name in x.names]
    order = [*present, *positions]
    absent = [name for name in x.names if name not in order]
    points = [one.reach(mesh.devices, mesh.point) for one in windows]
    outs = [mesh.part(Dim(one.out, one.out_extent)) for one in windows]
    kernels, strides = [one.kernel_extent for one in windows], [one.stride for one in windows]
    dilations = [one.dilation for one in windows]
    lead = prod(sizes[name] for name in present)
    rank = len(windows) - 1

    def compute(shard: Any) -> Any:
        shard = shaped(turned(shard, x.names, [*absent, *order]), held, seen)
        if function == "max":
            found = _MAX[rank](shard, kernels, strides, 0, dilations)
        elif not is_mean_of_dilated:
            found = _MEAN[rank](shard, kernels, strides)
        else:
            found = _CONVOLUTIONS[rank](shard, share.to(shard), None, strides, 0, dilations)
        if weights is not None:
            found = found * weights.to(found)
        found = shaped(found, (*seen[:2], *outs), [*(sizes[n] if n in present else 1 for n in others), *outs])
        return turned(found, [*others, *positions], names)

    held = [*(1 for _ in absent), *(sizes[n] for n in present), *points]
    # Tensors with batch and channels keep their memory format.
    is_mean_of_dilated = function != "max" and set(dilations) != {1}
    is_plain = len(held) == 2 + len(points) and not is_mean_of_dilated
    seen = (*held[:2], *points) if is_plain else (lead, 1, *points)
    if is_mean_of_dilated:
        share = mesh.program.held(torch.full((1, 1, *kernels), 1 / prod(kernels), dtype=torch.float64), "share")
    weights = None
    if function != "max":
        counted = mean_weights(windows, mesh.devices, mesh.point, count_padding=count_padding)
        weights = None if (counted == 1).all() else mesh.program.held(torch.from_numpy(counted), "counted")
    return local(compute, [x], out)


def turned(x: Any, own: Sequence[str], order: Sequence[str]) -> Any:
    """Return a shard with its dims in another order."""
    return x if list(own) == list(order) else x.permute([list(own).index(name) for name in order])
