"""Kinds of operators that can be written: one module and one line here for each."""

from collections.abc import Mapping

from pase.emitter.kinds.attention import ATTENTION
from pase.emitter.kinds.concat import CONCAT
from pase.emitter.kinds.convolution import CONVOLUTION
from pase.emitter.kinds.dense import DENSE
from pase.emitter.kinds.dropout import DROPOUT
from pase.emitter.kinds.elementwise import ADD_PARAMETER, ELEMENTWISE
from pase.emitter.kinds.embedding import EMBEDDING
from pase.emitter.kinds.fan_out import FAN_OUT
from pase.emitter.kinds.kind import Block, Kind
from pase.emitter.kinds.lstm import LSTM
from pase.emitter.kinds.normalise import BATCH_NORM, LAYER_NORM
from pase.emitter.kinds.pooling import GLOBAL_POOL, POOLING
from pase.emitter.kinds.softmax_loss import SOFTMAX_LOSS

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
