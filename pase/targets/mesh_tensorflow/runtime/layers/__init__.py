"""Layers of emitted programs: what their steps are written as. Dims are told by their names, whatever their order."""

from pase.sharding.layouts import window
from pase.targets.mesh_tensorflow.runtime.layers.movement import (
    concat,
    dims,
    fan_out,
    padded,
    piece,
    reshard,
)
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange, dropout, fn
from pase.targets.mesh_tensorflow.runtime.layers.products import attention, lookup, pick, product, softmax_loss
from pase.targets.mesh_tensorflow.runtime.layers.recurrent import GATES, lstm
from pase.targets.mesh_tensorflow.runtime.layers.reductions import (
    greatest,
    least,
    log_softmax,
    mean,
    normalise,
    softmax,
    total,
    without_later_keys,
)
from pase.targets.mesh_tensorflow.runtime.layers.windows import convolve, convolve_transposed, pool

__all__ = [
    "GATES", "arrange", "attention", "concat", "convolve", "convolve_transposed", "dims", "dropout", "fan_out", "fn",
    "greatest", "least", "log_softmax", "lookup", "lstm", "mean", "normalise", "padded", "pick", "piece", "pool",
    "product", "reshard", "softmax", "softmax_loss", "total", "window", "without_later_keys",
]  # fmt: skip
