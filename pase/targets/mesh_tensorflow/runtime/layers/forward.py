"""What programs of a forward pass are written with; dims are told by their names, whatever their order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import mtf
from pase.targets.mesh_tensorflow.runtime.fan_out import fan_out
from pase.targets.mesh_tensorflow.runtime.layers.concatenate import concat
from pase.targets.mesh_tensorflow.runtime.layers.dims import dims, window
from pase.targets.mesh_tensorflow.runtime.layers.embedding import embedding
from pase.targets.mesh_tensorflow.runtime.layers.moved import padded, piece
from pase.targets.mesh_tensorflow.runtime.layers.over_dims import (
    greatest,
    least,
    log_softmax,
    mean,
    softmax,
    total,
    without_later_keys,
)
from pase.targets.mesh_tensorflow.runtime.layers.points import apply, arrange
from pase.targets.mesh_tensorflow.runtime.layers.windowed import convolve, pool
from pase.targets.mesh_tensorflow.runtime.reshard import reshard


class _Functions:
    """Functions of points, by name: ``fn.add(x, y)``."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(apply, name)


fn = _Functions()


def product(x: Any, y: Any, out: Sequence[Any]) -> Any:
    """Return the sum of products of two tensors over the dims that `out` lacks."""
    return mtf.einsum([x, y], list(out))


def lookup(table: Any, indices: Any, rows: Any, columns: Any) -> Any:
    """Return rows of a table by index: dims of the indices, then the columns'."""
    return embedding(arrange(table, [rows, columns]), indices, [*indices.shape.dims, columns])


__all__ = [
    "arrange", "concat", "convolve", "dims", "fan_out", "fn", "greatest", "least", "log_softmax", "lookup", "mean",
    "padded", "piece", "pool", "product", "reshard", "softmax", "total", "window", "without_later_keys",
]  # fmt: skip
