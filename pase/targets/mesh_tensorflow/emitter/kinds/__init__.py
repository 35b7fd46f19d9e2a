"""Kinds of operators that can be written: one module and one line here for each."""

from collections.abc import Mapping

from pase.targets.mesh_tensorflow.emitter.kinds.attention import ATTENTION
from pase.targets.mesh_tensorflow.emitter.kinds.concat import CONCAT
from pase.targets.mesh_tensorflow.emitter.kinds.convolution import CONVOLUTION
from pase.targets.mesh_tensorflow.emitter.kinds.dense import DENSE
from pase.targets.mesh_tensorflow.emitter.kinds.dropout import DROPOUT
from pase.targets.mesh_tensorflow.emitter.kinds.elementwise import ADD_PARAMETER, ELEMENTWISE
from pase.targets.mesh_tensorflow.emitter.kinds.embedding import EMBEDDING
from pase.targets.mesh_tensorflow.emitter.kinds.fan_out import FAN_OUT
from pase.targets.mesh_tensorflow.emitter.kinds.kind import Block, Kind
from pase.targets.mesh_tensorflow.emitter.kinds.lstm import LSTM
from pase.targets.mesh_tensorflow.emitter.kinds.normalise import BATCH_NORM, LAYER_NORM
from pase.targets.mesh_tensorflow.emitter.kinds.pooling import GLOBAL_POOL, POOLING
from pase.targets.mesh_tensorflow.emitter.kinds.softmax_loss import SOFTMAX_LOSS

KINDS: Mapping[str, Kind] = {
    "add_parameter": ADD_PARAMETER,
    "attention": ATTENTION,
    "batch_norm": BATCH_NORM,
    "concat": CONCAT,
    "conv1d": CONVOLUTION,
    "conv2d": CONVOLUTION,
    "conv3d": CONVOLUTION,
    "dense": DENSE,
    "dropout": DROPOUT,
    "elementwise": ELEMENTWISE,
    "embedding": EMBEDDING,
    "fan_out": FAN_OUT,
    "global_pool": GLOBAL_POOL,
    "layer_norm": LAYER_NORM,
    "lstm": LSTM,
    "pool1d": POOLING,
    "pool2d": POOLING,
    "pool3d": POOLING,
    "softmax_loss": SOFTMAX_LOSS,
}

__all__ = ["KINDS", "Block", "Kind"]
