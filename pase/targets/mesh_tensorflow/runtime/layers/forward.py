"""What programs of a forward pass are written with; dims are told by their names, whatever their order."""

from pase.targets.mesh_tensorflow.runtime.layers.contraction import lookup, pick, product
from pase.targets.mesh_tensorflow.runtime.layers.movement import concat, dims, padded, piece, window
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange, fn
from pase.targets.mesh_tensorflow.runtime.layers.reductions import (
    greatest,
    least,
    log_softmax,
    mean,
    softmax,
    total,
    without_later_keys,
)
from pase.targets.mesh_tensorflow.runtime.layers.windows import convolve, pool
from pase.targets.mesh_tensorflow.runtime.reshard import fan_out, reshard

__all__ = [
    "arrange", "concat", "convolve", "dims", "fan_out", "fn", "greatest", "least", "log_softmax", "lookup", "mean",
    "padded", "pick", "piece", "pool", "product", "reshard", "softmax", "total", "window", "without_later_keys",
]  # fmt: skip
