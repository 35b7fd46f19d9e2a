"""Layers of emitted programs: one module for each kind, one line here for each name that a program may use."""

from pase.runtime.fan_out import fan_out
from pase.runtime.layers.activations import gelu, relu, sigmoid, tanh
from pase.runtime.layers.attention import attention
from pase.runtime.layers.concatenate import concat
from pase.runtime.layers.convolution import conv1d, conv2d, conv3d
from pase.runtime.layers.dims import dims, window
from pase.runtime.layers.dropout import dropout
from pase.runtime.layers.embedding import embedding
from pase.runtime.layers.lstm import GATES, lstm
from pase.runtime.layers.normalise import batch_norm, layer_norm
from pase.runtime.layers.pooling import (
    global_pool,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    mean_pool1d,
    mean_pool2d,
    mean_pool3d,
)
from pase.runtime.layers.softmax_loss import softmax_loss
from pase.runtime.reshard import reshard

__all__ = [
    "GATES",
    "attention",
    "batch_norm",
    "concat",
    "conv1d",
    "conv2d",
    "conv3d",
    "dims",
    "dropout",
    "embedding",
    "fan_out",
    "gelu",
    "global_pool",
    "layer_norm",
    "lstm",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mean_pool1d",
    "mean_pool2d",
    "mean_pool3d",
    "relu",
    "reshard",
    "sigmoid",
    "softmax_loss",
    "tanh",
    "window",
]
