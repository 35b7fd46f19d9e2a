"""`conv1d`, `conv2d`, `conv3d`: convolutions of shards; any of their dims may be split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pase.errors import RuntimeFailure
from pase.sharding.layouts import WindowDim
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise, names_of


def conv1d(x: Any, filters: Any, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the convolution of x, dims [b, c, columns], with filters [n, c, s]; otherwise as `conv2d`."""
    return _convolution(x, filters, [columns], out)


def conv2d(x: Any, filters: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the convolution of x, dims [b, c, rows, columns] as delivered by `reshard`, with filters [n, c, r, s].

    out: the result's dims, [b, n, h, w]. A group dim g may stand before c and n in all of them. Each device
    convolves the windows that it got, without padding; a split of c, r or s leaves partial sums.
    """
    return _convolution(x, filters, [rows, columns], out)


def conv3d(x: Any, filters: Any, planes: WindowDim, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the convolution of x, dims [b, c, planes, rows, columns], with filters [n, c, q, r, s]; as `conv2d`."""
    return _convolution(x, filters, [planes, rows, columns], out)


def _convolution(x: Any, filters: Any, windows: Sequence[WindowDim], out: Sequence[Any]) -> Any:
    name = f"conv{len(windows)}d"
    positions = {window.out for window in windows}
    batch, *channels = [dim for dim in out if dim.name not in positions]
    if any(dim not in filters.shape.dims for dim in channels):
        raise RuntimeFailure(
            f"{name} of layer {x.mesh.layer!r}: filters {filters.shape.to_string} do not produce "
            f"{', '.join(dim.name for dim in channels)}; give the same dims to both"
        )
    local = _Local(x=x, filters=filters, windows=windows, batch=batch, channels=channels)

    def gradient(dy: Any) -> list[Any]:
        dx = Shardwise(
            local.input_gradient,
            [filters, dy],
            shape=x.shape,
            name=f"{name}_input_gradient",
            partial_over=names_of(dy) - names_of(x),
        )
        dw = Shardwise(
            local.filter_gradient,
            [x, dy],
            shape=filters.shape,
            name=f"{name}_filter_gradient",
            partial_over=names_of(dy) - names_of(filters),
        )
        return [dx.outputs[0], dw.outputs[0]]

    reduced = names_of(filters) - {dim.name for dim in out}
    operation = Shardwise(
        local.forward, [x, filters], shape=list(out), name=name, partial_over=reduced, gradient=gradient
    )
    return operation.outputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Functions:
    """TensorFlow's convolution of that many spatial dims, channels last, and its two gradients."""

    forward: Any
    input_gradient: Any
    filter_gradient: Any


def _functions() -> Mapping[int, _Functions]:
    return {
        2: _Functions(
            forward=tf.raw_ops.Conv2D,
            input_gradient=tf.raw_ops.Conv2DBackpropInput,
            filter_gradient=tf.raw_ops.Conv2DBackpropFilter,
        ),
        3: _Functions(
            forward=tf.raw_ops.Conv3D,
            input_gradient=tf.raw_ops.Conv3DBackpropInputV2,
            filter_gradient=tf.raw_ops.Conv3DBackpropFilterV2,
        ),
    }


class _Local:
    """The convolution of one device: shapes of its shards, TensorFlow's layouts, groups and dilation.

    A line is convolved as an image of one row, because TensorFlow has no convolution of lines.
    """

    def __init__(
        self, *, x: Any, filters: Any, windows: Sequence[WindowDim], batch: Any, channels: Sequence[Any]
    ) -> None:
        devices = x.mesh.devices
        flat = [1] * (len(windows) == 1)
        self._rank = len(flat) + len(windows)
        self._functions = _functions()[self._rank]
        self._strides = [1, *flat, *(window.stride for window in windows), 1]
        self._dilations = [*flat, *(window.dilation for window in windows)]
        self._kernels = [*flat, *(window.kernel_extent // devices.size(window.kernel) for window in windows)]
        self._out = [*flat, *(window.out_extent // devices.size(window.out) for window in windows)]
        self._points = [*flat, *(window.reach(devices) for window in windows)]
        self._batch = batch.size // devices.size(batch.name)

        def local(dims: Sequence[Any]) -> list[int]:
            return [dim.size // devices.size(dim.name) for dim in dims]

        *groups, _ = channels
        spatial = {name for window in windows for name in (window.out, window.kernel)}
        self._groups = prod(local(groups))
        self._channels = prod(local(channels))
        self._x_shape = local(x.shape.dims)
        self._filter_shape = local(filters.shape.dims)
        self._y_shape = [self._batch, *local(channels), *self._out[len(flat) :]]
        self._inputs = prod(local([d for d in x.shape.dims if d.name not in spatial and d != batch]))

    def forward(self, x: Any, filters: Any) -> Any:
        x, filters = self._images(x), self._spread(self._channels_last(filters))
        parts = [
            self._functions.forward(input=a, filter=w, strides=self._strides, padding="VALID")
            for a, w in zip(self._grouped(x), self._grouped(filters), strict=True)
        ]
        return tf.reshape(self._channels_first(self._joined(parts)), self._y_shape)

    def input_gradient(self, filters: Any, dy: Any) -> Any:
        filters, dy = self._spread(self._channels_last(filters)), self._results(dy)
        sizes = [self._batch, *self._points, self._inputs // self._groups]
        parts = [
            self._functions.input_gradient(
                input_sizes=sizes, filter=w, out_backprop=d, strides=self._strides, padding="VALID"
            )
            for w, d in zip(self._grouped(filters), self._grouped(dy), strict=True)
        ]
        return tf.reshape(self._channels_first(self._joined(parts)), self._x_shape)

    def filter_gradient(self, x: Any, dy: Any) -> Any:
        x, dy = self._images(x), self._results(dy)
        kernels = [(k - 1) * d + 1 for k, d in zip(self._kernels, self._dilations, strict=True)]
        sizes = [*kernels, self._inputs // self._groups, self._channels // self._groups]
        parts = [
            self._functions.filter_gradient(
                input=a, filter_sizes=sizes, out_backprop=d, strides=self._strides, padding="VALID"
            )
            for a, d in zip(self._grouped(x), self._grouped(dy), strict=True)
        ]
        gradient = self._joined(parts)[tuple(slice(None, None, dilation) for dilation in self._dilations)]
        rank = self._rank
        return tf.reshape(tf.transpose(gradient, [rank + 1, rank, *range(rank)]), self._filter_shape)

    def _images(self, x: Any) -> Any:
        return self._moved_last(tf.reshape(x, [self._batch, self._inputs, *self._points]))

    def _results(self, dy: Any) -> Any:
        return self._moved_last(tf.reshape(dy, [self._batch, self._channels, *self._out]))

    def _moved_last(self, x: Any) -> Any:
        return tf.transpose(x, [0, *range(2, 2 + self._rank), 1])

    def _channels_first(self, x: Any) -> Any:
        return tf.transpose(x, [0, self._rank + 1, *range(1, self._rank + 1)])

    def _channels_last(self, filters: Any) -> Any:
        """Return filters [n, c, …] as […, c, n]."""
        shape = [self._channels, self._inputs // self._groups, *self._kernels]
        return tf.transpose(tf.reshape(filters, shape), [*range(2, 2 + self._rank), 1, 0])

    def _spread(self, filters: Any) -> Any:
        """Return filters with zeros between their points: TensorFlow's CPU gradients know no dilation."""
        for axis, dilation in enumerate(self._dilations):
            if dilation > 1:
                kernel = filters.shape.as_list()[axis]
                points = tf.unstack(filters, axis=axis)
                gap = tf.zeros_like(points[0])
                spread = [
                    points[i // dilation] if i % dilation == 0 else gap for i in range((kernel - 1) * dilation + 1)
                ]
                filters = tf.stack(spread, axis=axis)
        return filters

    def _grouped(self, x: Any) -> list[Any]:
        return [x] if self._groups == 1 else tf.split(x, self._groups, axis=-1)

    def _joined(self, parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=-1)
