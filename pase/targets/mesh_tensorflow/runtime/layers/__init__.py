"""Layers of emitted programs: one module for each kind, one line here for each name that a program may use."""

from pase.targets.mesh_tensorflow.runtime.layers.attention import attention
from pase.targets.mesh_tensorflow.runtime.layers.contraction import embedding
from pase.targets.mesh_tensorflow.runtime.layers.loss import softmax_loss
from pase.targets.mesh_tensorflow.runtime.layers.movement import concat, dims, window
from pase.targets.mesh_tensorflow.runtime.layers.normalisation import batch_norm, layer_norm
from pase.targets.mesh_tensorflow.runtime.layers.points import dropout, gelu, relu, sigmoid, tanh
from pase.targets.mesh_tensorflow.runtime.layers.recurrent import GATES, lstm
from pase.targets.mesh_tensorflow.runtime.layers.reductions import global_pool
from pase.targets.mesh_tensorflow.runtime.layers.windows import (
    conv1d,
    conv2d,
    conv3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
    mean_pool1d,
    mean_pool2d,
    mean_pool3d,
)
from pase.targets.mesh_tensorflow.runtime.reshard import fan_out, reshard

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
