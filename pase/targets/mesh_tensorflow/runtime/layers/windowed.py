"""Convolutions and pooling of tensors whose dims stand in any order, for the forward pass of imported models."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise, names_of


def convolve(x: Any, filters: Any, windows: Sequence[WindowDim], out: Sequence[Any]) -> Any:
    """Return a convolution of one to three spatial dims; x as delivered by `reshard`, with a window for each.

    Dims are told by their names: groups are in all three tensors, channels of x in the filters too, those of the result
    in the filters and in out. A split of a channel of x or of a kernel leaves partial sums.
    """
    local = _Convolution(x, filters, windows, out)
    reduced = names_of(filters) - {dim.name for dim in out}
    return Shardwise(
        local.compute, [x, filters], shape=list(out), name=f"conv{len(windows)}d", partial_over=reduced
    ).outputs[0]


class _Convolution:
    """The convolution of one device, as TensorFlow has it: [batch, spatial…, groups · channels]."""

    def __init__(self, x: Any, filters: Any, windows: Sequence[WindowDim], out: Sequence[Any]) -> None:
        devices = x.mesh.devices
        self._sizes = {d.name: d.size // devices.size(d.name) for d in (*x.shape.dims, *filters.shape.dims, *out)}
        kernels = [window.kernel for window in windows]
        positions = [window.out for window in windows]
        spatial = {*kernels, *positions}
        self._windows = windows
        self._x, self._w, self._y = ([d.name for d in dims] for dims in (x.shape.dims, filters.shape.dims, out))
        self._groups = [n for n in self._w if n in self._x and n in self._y and n not in spatial]
        # A channel of one point may be left out of any of the three.
        self._inputs = [n for n in self._w if n not in self._y and n not in spatial]
        self._outputs = [n for n in self._w if n in self._y and n not in self._x and n not in spatial]
        self._batch = [n for n in self._y if n not in self._w and n not in spatial]
        self._kernels, self._positions = kernels, positions
        self._points = [window.reach(devices) for window in windows]
        self._extents = [window.kernel_extent // devices.size(window.kernel) for window in windows]
        self._outs = [window.out_extent // devices.size(window.out) for window in windows]

    def compute(self, x: Any, filters: Any) -> Any:
        split_kernels = [n for n in self._kernels if n in self._x]
        # A kernel that is split stands as a dim of one point.
        order = [*self._batch, *split_kernels, *self._positions, *self._groups, *self._inputs]
        order = [n for n in order if n in self._x]
        order += [n for n in self._x if n not in order]
        x = tf.transpose(x, [self._x.index(n) for n in order])
        groups, inputs, outputs = (self._count(names) for names in (self._groups, self._inputs, self._outputs))
        batch = self._count(self._batch)
        x = tf.reshape(x, [batch, *self._points, groups * inputs])
        order = [*self._kernels, *self._groups, *self._inputs, *self._outputs]
        filters = tf.transpose(filters, [self._w.index(n) for n in order])
        strides = [window.stride for window in self._windows]
        dilations = [window.dilation for window in self._windows]
        y = self._convolved(x, filters, strides, dilations, (groups, inputs, outputs))
        y = tf.reshape(
            y,
            [self._sizes[n] for n in self._batch]
            + self._outs
            + [self._sizes[n] for n in (*self._groups, *self._outputs)],
        )
        order = [*self._batch, *self._positions, *self._groups, *self._outputs]
        return tf.transpose(y, [order.index(n) for n in self._y])

    def _convolved(
        self, x: Any, filters: Any, strides: list[int], dilations: list[int], counts: tuple[int, int, int]
    ) -> Any:
        groups, inputs, outputs = counts
        is_even = len(set(strides)) == 1 and (set(strides) == {1} or set(dilations) == {1})
        if groups > 1 and inputs == 1 and len(strides) == 2 and is_even:
            filters = tf.reshape(filters, [*self._extents, groups, outputs])
            return tf.nn.depthwise_conv2d(x, filters, [1, *strides, 1], "VALID", dilations=dilations)
        filters = tf.reshape(filters, [*self._extents, groups, inputs, outputs])
        if len(strides) == 1:
            # A line is an image of one row.
            x, filters = x[:, tf.newaxis], filters[tf.newaxis]
            strides, dilations = [1, *strides], [1, *dilations]
        filters = _spread(filters, dilations)
        parts = zip(tf.split(x, groups, -1), tf.unstack(filters, axis=len(strides)), strict=True)
        function = tf.nn.conv2d if len(strides) == 2 else tf.nn.conv3d
        found = [function(a, w, [1, *strides, 1], "VALID") for a, w in parts]
        return found[0] if len(found) == 1 else tf.concat(found, -1)

    def _count(self, names: Sequence[str]) -> int:
        return prod(self._sizes[n] for n in names)


def _spread(filters: Any, dilations: Sequence[int]) -> Any:
    """Return filters with zeros between their points, for convolutions that know no dilation on every device."""
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
    """Return the maximum or the mean ("max", "mean") of each window of x, as delivered by `reshard`."""
    devices = x.mesh.devices
    names, written = [d.name for d in x.shape.dims], [d.name for d in out]
    positions = [window.out for window in windows]
    if any(devices.size(window.kernel) != 1 for window in windows):
        raise RuntimeFailure(f"layer {x.mesh.layer!r} pools windows that are split; leave their dims out of the mesh")
    others = [n for n in written if n not in positions]
    outs = [window.out_extent // devices.size(window.out) for window in windows]

    def compute(divisor: Any, local: Any) -> Any:
        found = local
        for window, count in zip(windows, outs, strict=True):
            # One dim after the other: a maximum of maxima, a sum of sums.
            place = names.index(window.out)
            reach = (count - 1) * window.stride + 1
            slices = []
            for k in range(window.kernel_extent):
                index = [slice(None)] * len(names)
                index[place] = slice(k * window.dilation, k * window.dilation + reach, window.stride)
                slices.append(found[tuple(index)])
            found = slices[0]
            for other in slices[1:]:
                found = tf.maximum(found, other) if function == "max" else found + other
        found = tf.transpose(found, [names.index(n) for n in (*others, *positions)])
        if function == "mean":
            found = found / tf.constant(divisor, local.dtype)
        order = [*others, *positions]
        return tf.transpose(found, [order.index(n) for n in written])

    def divisors() -> list[Any]:
        return [_num_points(windows, devices, point, count_padding) for point in devices.coordinates]

    return Shardwise(compute, [x], shape=list(out), name=f"{function}_pool", per_position=divisors).outputs[0]


def _num_points(windows: Sequence[WindowDim], devices: Any, point: Any, count_padding: bool) -> Any:
    """Return [outputs of the part…] how many points of each window count."""
    counts = []
    for dim in windows:
        num_outs = dim.out_extent // devices.size(dim.out)
        first = (np.arange(num_outs) + point.get(dim.out, 0) * num_outs) * dim.stride - dim.pad
        points = first[:, np.newaxis] + np.arange(dim.kernel_extent) * dim.dilation
        inside = (points >= 0) & (points < dim.extent)
        counts.append(np.full(num_outs, dim.kernel_extent) if count_padding else np.maximum(inside.sum(axis=1), 1))
    found: Any = np.ones(())
    for count in counts:
        found = np.multiply.outer(found, count)
    return found
