"""Operator factories: functions that create an operator from its name, the shapes of its inputs and its options."""

from pase.graph.operators.movement import concat, embedding, fan_out, gather, opaque, padded, reorder, with_fan_outs
from pase.graph.operators.normalisation import batch_norm, layer_norm
from pase.graph.operators.pointwise import (
    add_parameter,
    dropout,
    elementwise,
    pointwise,
    reduction,
    softmax,
    softmax_loss,
)
from pase.graph.operators.products import attention, contract, dense
from pase.graph.operators.recurrent import lstm, recurrent
from pase.graph.operators.windows import (
    conv1d,
    conv2d,
    conv3d,
    global_pool,
    pool1d,
    pool2d,
    pool3d,
    transposed_convolution,
)

__all__ = [
    "add_parameter",
    "attention",
    "batch_norm",
    "concat",
    "contract",
    "conv1d",
    "conv2d",
    "conv3d",
    "dense",
    "dropout",
    "elementwise",
    "embedding",
    "fan_out",
    "gather",
    "global_pool",
    "layer_norm",
    "lstm",
    "opaque",
    "padded",
    "pointwise",
    "pool1d",
    "pool2d",
    "pool3d",
    "recurrent",
    "reduction",
    "reorder",
    "softmax",
    "softmax_loss",
    "transposed_convolution",
    "with_fan_outs",
]
