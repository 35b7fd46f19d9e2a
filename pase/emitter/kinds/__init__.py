"""Kinds of operators that can be written: one module and one line here for each."""

from collections.abc import Mapping

from pase.emitter.kinds.attention import ATTENTION
from pase.emitter.kinds.concat import CONCAT
from pase.emitter.kinds.conv2d import CONV2D
from pase.emitter.kinds.dense import DENSE
from pase.emitter.kinds.elementwise import ADD_PARAMETER, ELEMENTWISE
from pase.emitter.kinds.embedding import EMBEDDING
from pase.emitter.kinds.kind import Block, Kind
from pase.emitter.kinds.lstm import LSTM
from pase.emitter.kinds.normalise import BATCH_NORM, LAYER_NORM
from pase.emitter.kinds.pool2d import GLOBAL_POOL, POOL2D
from pase.emitter.kinds.softmax_loss import SOFTMAX_LOSS

KINDS: Mapping[str, Kind] = {
    "add_parameter": ADD_PARAMETER,
    "attention": ATTENTION,
    "batch_norm": BATCH_NORM,
    "concat": CONCAT,
    "conv2d": CONV2D,
    "dense": DENSE,
    "elementwise": ELEMENTWISE,
    "embedding": EMBEDDING,
    "global_pool": GLOBAL_POOL,
    "layer_norm": LAYER_NORM,
    "lstm": LSTM,
    "pool2d": POOL2D,
    "softmax_loss": SOFTMAX_LOSS,
}

__all__ = ["KINDS", "Block", "Kind"]
