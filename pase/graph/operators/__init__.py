"""Operator kinds: one module and one line here for each."""

from pase.graph.operators.attention import attention
from pase.graph.operators.concat import concat
from pase.graph.operators.convolution import conv1d, conv2d, conv3d
from pase.graph.operators.dense import dense
from pase.graph.operators.dropout import dropout
from pase.graph.operators.elementwise import add_parameter, elementwise
from pase.graph.operators.embedding import embedding
from pase.graph.operators.fan_out import fan_out, with_fan_outs
from pase.graph.operators.lstm import lstm
from pase.graph.operators.normalisation import batch_norm, layer_norm
from pase.graph.operators.pooling import global_pool, pool1d, pool2d, pool3d
from pase.graph.operators.softmax import softmax_loss

__all__ = [
    "add_parameter",
    "attention",
    "batch_norm",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "dense",
    "dropout",
    "elementwise",
    "embedding",
    "fan_out",
    "global_pool",
    "layer_norm",
    "lstm",
    "pool1d",
    "pool2d",
    "pool3d",
    "softmax_loss",
    "with_fan_outs",
]
