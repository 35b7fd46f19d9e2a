"""`conv2d`: a convolution of shards; any of its dims may be split."""

from collections.abc import Sequence
from math import prod
from typing import Any

from pase.errors import RuntimeFailure
from pase.runtime.compat import tf
from pase.runtime.layers.shardwise import Shardwise, names_of
from pase.runtime.layouts import WindowDim


def conv2d(x: Any, filters: Any, rows: WindowDim, columns: WindowDim, out: Sequence[Any]) -> Any:
    """Return the convolution of x, dims [b, c, rows, columns] as delivered by `reshard`, with filters [n, c, r, s].

    out: the result's dims, [b, n, h, w]. A group dim g may stand before c and n in all of them. Each device
    convolves the windows that it got, without padding; a split of c, r or s leaves partial sums.
    """
    batch, *channels = [dim for dim in out if dim.name not in (rows.out, columns.out)]
    if any(dim not in filters.shape.dims for dim in channels):
        raise RuntimeFailure(
            f"conv2d of layer {x.mesh.layer!r}: filters {filters.shape.to_string} do not produce "
            f"{', '.join(dim.name for dim in channels)}; give the same dims to both"
        )
    local = _Local(mesh=x.mesh, batch=batch, channels=channels, rows=rows, columns=columns, filters=filters, x=x)

    def gradient(dy: Any) -> list[Any]:
        dx = Shardwise(
            local.input_gradient,
            [filters, dy],
            shape=x.shape,
            name="conv2d_input_gradient",
            partial_over=names_of(dy) - names_of(x),
        )
        dw = Shardwise(
            local.filter_gradient,
            [x, dy],
            shape=filters.shape,
            name="conv2d_filter_gradient",
            partial_over=names_of(dy) - names_of(filters),
        )
        return [dx.outputs[0], dw.outputs[0]]

    reduced = names_of(filters) - {dim.name for dim in out}
    operation = Shardwise(
        local.forward, [x, filters], shape=list(out), name="conv2d", partial_over=reduced, gradient=gradient
    )
    return operation.outputs[0]


class _Local:
    """The convolution of one device: shapes of its shards, TensorFlow's layouts, groups and dilation."""

    def __init__(
        self,
        *,
        mesh: Any,
        batch: Any,
        channels: Sequence[Any],
        rows: WindowDim,
        columns: WindowDim,
        filters: Any,
        x: Any,
    ) -> None:
        devices = mesh.devices
        self._strides = (rows.stride, columns.stride)
        self._dilations = (rows.dilation, columns.dilation)
        self._kernels = (
            rows.kernel_extent // devices.size(rows.kernel),
            columns.kernel_extent // devices.size(columns.kernel),
        )
        self._out = (rows.out_extent // devices.size(rows.out), columns.out_extent // devices.size(columns.out))
        self._points = (rows.reach(devices), columns.reach(devices))
        self._batch = batch.size // devices.size(batch.name)

        def local(dims: Sequence[Any]) -> tuple[int, ...]:
            return tuple(dim.size // devices.size(dim.name) for dim in dims)

        *groups, _ = channels
        spatial = {rows.out, columns.out, rows.kernel, columns.kernel}
        self._groups = prod(local(groups))
        self._channels = prod(local(channels))
        self._x_shape = local(x.shape.dims)
        self._filter_shape = local(filters.shape.dims)
        self._y_shape = (self._batch, *local(channels), *self._out)
        self._inputs = prod(local([d for d in x.shape.dims if d.name not in spatial and d != batch]))

    def forward(self, x: Any, filters: Any) -> Any:
        x, filters = self._images(x), self._spread(self._hwio(filters))
        parts = [
            tf.nn.conv2d(a, w, strides=self._strides, padding="VALID")
            for a, w in zip(self._grouped(x), self._grouped(filters), strict=True)
        ]
        return tf.reshape(tf.transpose(_joined(parts), [0, 3, 1, 2]), self._y_shape)

    def input_gradient(self, filters: Any, dy: Any) -> Any:
        filters, dy = self._spread(self._hwio(filters)), self._results(dy)
        sizes = [self._batch, *self._points, self._inputs // self._groups]
        parts = [
            tf.nn.conv2d_backprop_input(sizes, w, d, strides=[1, *self._strides, 1], padding="VALID")
            for w, d in zip(self._grouped(filters), self._grouped(dy), strict=True)
        ]
        return tf.reshape(tf.transpose(_joined(parts), [0, 3, 1, 2]), self._x_shape)

    def filter_gradient(self, x: Any, dy: Any) -> Any:
        x, dy = self._images(x), self._results(dy)
        kernels = [(k - 1) * d + 1 for k, d in zip(self._kernels, self._dilations, strict=True)]
        sizes = [*kernels, self._inputs // self._groups, self._channels // self._groups]
        parts = [
            tf.nn.conv2d_backprop_filter(a, sizes, d, strides=[1, *self._strides, 1], padding="VALID")
            for a, d in zip(self._grouped(x), self._grouped(dy), strict=True)
        ]
        gradient = _joined(parts)[:: self._dilations[0], :: self._dilations[1]]
        return tf.reshape(tf.transpose(gradient, [3, 2, 0, 1]), self._filter_shape)

    def _images(self, x: Any) -> Any:
        return tf.transpose(tf.reshape(x, [self._batch, self._inputs, *self._points]), [0, 2, 3, 1])

    def _results(self, dy: Any) -> Any:
        return tf.transpose(tf.reshape(dy, [self._batch, self._channels, *self._out]), [0, 2, 3, 1])

    def _hwio(self, filters: Any) -> Any:
        shape = [self._channels, self._inputs // self._groups, *self._kernels]
        return tf.transpose(tf.reshape(filters, shape), [2, 3, 1, 0])

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
        return [x] if self._groups == 1 else tf.split(x, self._groups, axis=3)


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=3)
