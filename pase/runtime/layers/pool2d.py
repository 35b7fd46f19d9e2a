"""Pooling of shards: `max_pool2d`, `mean_pool2d`, `global_pool`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.runtime.compat import mtf, tf
from pase.runtime.layers.shardwise import Shardwise
from pase.runtime.layouts import WindowDim


def max_pool2d(x: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the maximum of each window of x, dims [b, c, rows, columns] delivered by `reshard` with fill -inf."""
    sizes = _sizes(x, rows, columns)

    def gradient(dy: Any) -> Any:
        def local(x: Any, y: Any, dy: Any) -> Any:
            images = [_last(tensor) for tensor in (x, y, dy)]
            dx = tf.raw_ops.MaxPoolGrad(
                orig_input=images[0], orig_output=images[1], grad=images[2], padding="VALID", **sizes
            )
            return _first(dx)

        return Shardwise(local, [x, y, dy], shape=x.shape, name="max_pool2d_gradient").outputs

    def forward(x: Any) -> Any:
        return _first(tf.raw_ops.MaxPool(input=_last(x), padding="VALID", **sizes))

    y = Shardwise(forward, [x], shape=list(out), name="max_pool2d", gradient=gradient).outputs[0]
    return y


def mean_pool2d(x: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any], *, count_padding: bool = False) -> Any:
    """Return the mean of each window of x, dims [b, c, rows, columns] delivered by `reshard`.

    count_padding: whether the padding's points count as well as those of the tensor.
    """
    sizes = _sizes(x, rows, columns)
    window_points = rows.kernel_extent * columns.kernel_extent
    x_shape = [dim.size // x.mesh.devices.size(dim.name) for dim in x.shape.dims]
    dtype = np.dtype(x.dtype.as_numpy_dtype)

    def weights() -> list[np.ndarray[Any, Any]]:
        # [h, w] of a part: window points / points that count.
        factors = []
        for point in x.mesh.devices.coordinates:
            counts = [_counts(dim, x.mesh.devices, point, count_padding) for dim in (rows, columns)]
            factors.append((window_points / np.outer(*counts)).astype(dtype)[:, :, np.newaxis])
        return factors

    def forward(weight: np.ndarray[Any, Any], x: Any) -> Any:
        return _first(tf.raw_ops.AvgPool(value=_last(x), padding="VALID", **sizes) * weight)

    def gradient(dy: Any) -> Any:
        def local(weight: np.ndarray[Any, Any], dy: Any) -> Any:
            batch, channels, height, width = x_shape
            dx = tf.raw_ops.AvgPoolGrad(
                orig_input_shape=[batch, height, width, channels], grad=_last(dy) * weight, padding="VALID", **sizes
            )
            return _first(dx)

        return Shardwise(local, [dy], shape=x.shape, name="mean_pool2d_gradient", per_position=weights).outputs

    operation = Shardwise(forward, [x], shape=list(out), name="mean_pool2d", per_position=weights, gradient=gradient)
    return operation.outputs[0]


def global_pool(x: Any, out: Sequence[Any]) -> Any:
    """Return the mean of x over the dims that `out` lacks."""
    total = mtf.reduce_sum(x, output_shape=list(out))
    return total * (total.size / x.size)


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


def _sizes(x: Any, rows: WindowDim, columns: WindowDim) -> dict[str, list[int]]:
    for dim in (rows, columns):
        if x.mesh.devices.size(dim.kernel) != 1 or dim.dilation != 1:
            raise RuntimeFailure(
                f"layer {x.mesh.layer!r} pools windows of {dim.kernel}, which cannot be split or dilated; "
                f"take {dim.kernel} out of the mesh's axes"
            )
    return {
        "ksize": [1, rows.kernel_extent, columns.kernel_extent, 1],
        "strides": [1, rows.stride, columns.stride, 1],
    }


def _last(x: Any) -> Any:
    """[b, c, h, w] -> [b, h, w, c], the only order that TensorFlow pools on CPUs."""
    return tf.transpose(x, [0, 2, 3, 1])


def _first(x: Any) -> Any:
    return tf.transpose(x, [0, 3, 1, 2])
