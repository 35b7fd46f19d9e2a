"""Pooling of shards: `max_pool1d`, `mean_pool1d`, the same of images and volumes, and `global_pool`."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise


def max_pool1d(x: Any, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the maximum of each window of x, dims [b, c, columns] delivered by `reshard` with fill -inf."""
    return _max_pool(x, [columns], out)


def max_pool2d(x: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the maximum of each window of x, dims [b, c, rows, columns] delivered by `reshard` with fill -inf."""
    return _max_pool(x, [rows, columns], out)


def max_pool3d(x: Any, planes: WindowDim, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the maximum of each window of x, dims [b, c, planes, rows, columns] delivered with fill -inf."""
    return _max_pool(x, [planes, rows, columns], out)


def mean_pool1d(x: Any, columns: WindowDim, out: Sequence[Any], *, count_padding: bool = False) -> Any:
    """Return the mean of each window of x, dims [b, c, columns] delivered by `reshard`; otherwise as `mean_pool2d`."""
    return _mean_pool(x, [columns], out, count_padding=count_padding)


def mean_pool2d(x: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any], *, count_padding: bool = False) -> Any:
    """Return the mean of each window of x, dims [b, c, rows, columns] delivered by `reshard`.

    count_padding: whether the padding's points count as well as those of the tensor.
    """
    return _mean_pool(x, [rows, columns], out, count_padding=count_padding)


def mean_pool3d(
    x: Any,
    planes: WindowDim,
    rows: WindowDim,
    columns: WindowDim,
    out: Sequence[Any],
    *,
    count_padding: bool = False,
) -> Any:
    """Return the mean of each window of x, dims [b, c, planes, rows, columns]; otherwise as `mean_pool2d`."""
    return _mean_pool(x, [planes, rows, columns], out, count_padding=count_padding)


def global_pool(x: Any, out: Sequence[Any]) -> Any:
    """Return the mean of x over the dims that `out` lacks."""
    total = mtf.reduce_sum(x, output_shape=list(out))
    return total * (total.size / x.size)


def _max_pool(x: Any, windows: Sequence[WindowDim], out: Sequence[Any]) -> Any:
    local = _Local(x, windows)
    name = f"max_pool{len(windows)}d"

    def gradient(dy: Any) -> Any:
        return Shardwise(local.max_gradient, [x, y, dy], shape=x.shape, name=f"{name}_gradient").outputs

    y = Shardwise(local.maximum, [x], shape=list(out), name=name, gradient=gradient).outputs[0]
    return y


def _mean_pool(x: Any, windows: Sequence[WindowDim], out: Sequence[Any], *, count_padding: bool) -> Any:
    local = _Local(x, windows)
    name = f"mean_pool{len(windows)}d"
    window_points = np.prod([window.kernel_extent for window in windows])
    dtype = np.dtype(x.dtype.as_numpy_dtype)

    def weights() -> list[np.ndarray[Any, Any]]:
        # Window points / points that count, of a part's windows.
        factors = []
        for point in x.mesh.devices.coordinates:
            counts = [_counts(dim, x.mesh.devices, point, count_padding) for dim in windows]
            factors.append((window_points / reduce(np.multiply.outer, counts)).astype(dtype))
        return factors

    def forward(weight: np.ndarray[Any, Any], x: Any) -> Any:
        return local.mean(x) * weight

    def gradient(dy: Any) -> Any:
        def backward(weight: np.ndarray[Any, Any], dy: Any) -> Any:
            return local.mean_gradient(dy * weight)

        return Shardwise(backward, [dy], shape=x.shape, name=f"{name}_gradient", per_position=weights).outputs

    operation = Shardwise(forward, [x], shape=list(out), name=name, per_position=weights, gradient=gradient)
    return operation.outputs[0]


def _counts(dim: WindowDim, devices: Any, point: dict[str, int], count_padding: bool) -> np.ndarray[Any, Any]:
    """Return [outputs of the part] how many points of each window count."""
    num_outs = dim.out_extent // devices.size(dim.out)
    first = (np.arange(num_outs) + point.get(dim.out, 0) * num_outs) * dim.stride - dim.pad
    if count_padding:
        return np.full(num_outs, float(dim.kernel_extent))
    points = first[:, np.newaxis] + np.arange(dim.kernel_extent) * dim.dilation
    inside = (points >= 0) & (points < dim.extent)
    counts: np.ndarray[Any, Any] = np.maximum(inside.sum(axis=1), 1)
    return counts


class _Local:
    """The pooling of one device, in one or two poolings of images: TensorFlow pools no lines, no volumes in float64.

    A line is an image of one row. A volume is pooled plane by plane and then across its planes, which stand for the
    rows of an image whose other points are channels.
    """

    def __init__(self, x: Any, windows: Sequence[WindowDim]) -> None:
        devices = x.mesh.devices
        for window in windows:
            if devices.size(window.kernel) != 1 or window.dilation != 1:
                raise RuntimeFailure(
                    f"layer {x.mesh.layer!r} pools windows of {window.kernel}, which cannot be split or dilated; "
                    f"take {window.kernel} out of the mesh's axes"
                )
        batch, channels = (dim.size // devices.size(dim.name) for dim in x.shape.dims[:2])
        points = [window.reach(devices) for window in windows]
        outs = [window.out_extent // devices.size(window.out) for window in windows]
        kernels, strides = [w.kernel_extent for w in windows], [w.stride for w in windows]
        self._in_shape, self._out_shape = [batch, *points, channels], [batch, *outs, channels]
        self._images: list[tuple[list[int], list[int], dict[str, Any]]] = []
        if len(windows) == 1:
            self._add([batch, 1, points[0], channels], [batch, 1, outs[0], channels], (1, kernels[0]), (1, strides[0]))
            return
        *planes, height, width = points
        *_, rows, columns = outs
        flat = batch * (planes[0] if planes else 1)
        self._add([flat, height, width, channels], [flat, rows, columns, channels], kernels[-2:], strides[-2:])
        if planes:
            each = rows * columns * channels
            self._add([batch, planes[0], 1, each], [batch, outs[0], 1, each], (kernels[0], 1), (strides[0], 1))

    def _add(self, in_shape: list[int], out_shape: list[int], kernels: Sequence[int], strides: Sequence[int]) -> None:
        options = {"ksize": [1, *kernels, 1], "strides": [1, *strides, 1], "padding": "VALID"}
        self._images.append((in_shape, out_shape, options))

    def maximum(self, x: Any) -> Any:
        return self._first(self._maxima(x, len(self._images))[-1], self._out_shape)

    def _maxima(self, x: Any, count: int) -> list[Any]:
        """Return x and what each of the first poolings makes of it."""
        found = [self._last(x)]
        for shape, _, options in self._images[:count]:
            found.append(tf.raw_ops.MaxPool(input=tf.reshape(found[-1], shape), **options))
        return found

    def max_gradient(self, x: Any, y: Any, dy: Any) -> Any:
        found = [*self._maxima(x, len(self._images) - 1), self._last(y)]
        gradient = self._last(dy)
        for i, (in_shape, out_shape, options) in reversed(list(enumerate(self._images))):
            gradient = tf.raw_ops.MaxPoolGrad(
                orig_input=tf.reshape(found[i], in_shape),
                orig_output=tf.reshape(found[i + 1], out_shape),
                grad=tf.reshape(gradient, out_shape),
                **options,
            )
        return self._first(gradient, self._in_shape)

    def mean(self, x: Any) -> Any:
        y = self._last(x)
        for shape, _, options in self._images:
            y = tf.raw_ops.AvgPool(value=tf.reshape(y, shape), **options)
        return self._first(y, self._out_shape)

    def mean_gradient(self, dy: Any) -> Any:
        gradient = self._last(dy)
        for in_shape, out_shape, options in reversed(self._images):
            gradient = tf.raw_ops.AvgPoolGrad(
                orig_input_shape=in_shape, grad=tf.reshape(gradient, out_shape), **options
            )
        return self._first(gradient, self._in_shape)

    def _last(self, x: Any) -> Any:
        """[b, c, …] -> [b, …, c], the only order that TensorFlow pools on CPUs."""
        return tf.transpose(x, [0, *range(2, len(self._in_shape)), 1])

    def _first(self, x: Any, shape: list[int]) -> Any:
        last = len(shape) - 1
        return tf.transpose(tf.reshape(x, shape), [0, last, *range(1, last)])
