"""Layers of programs, into which body steps are translated; dims are identified by name, independent of their order."""

from pase.sharding.layouts import window
from pase.targets.torch.layers.attention import attention, masked_attention
from pase.targets.torch.layers.experts import grouped, routed
from pase.targets.torch.layers.movement import concat, cut, dims, end_to_end, padded, piece, select_rows, view
from pase.targets.torch.layers.normalisation import batch_norm, normalise
from pase.targets.torch.layers.points import arrange, cast, dropout, fn
from pase.targets.torch.layers.recurrent import GATES, last_state, lstm, recurrent
from pase.targets.torch.layers.reductions import (
    greatest,
    least,
    log_softmax,
    lookup,
    mean,
    pick,
    product,
    softmax,
    softmax_loss,
    total,
    without_later_keys,
)
from pase.targets.torch.layers.sources import source
from pase.targets.torch.layers.windows import convolve, convolve_transposed, pool
from pase.targets.torch.tensor import fan_out, reshard

__all__ = [
    "GATES",
    "arrange",
    "attention",
    "batch_norm",
    "cast",
    "concat",
    "convolve",
    "convolve_transposed",
    "cut",
    "dims",
    "dropout",
    "end_to_end",
    "fan_out",
    "fn",
    "greatest",
    "grouped",
    "last_state",
    "least",
    "log_softmax",
    "lookup",
    "lstm",
    "masked_attention",
    "mean",
    "normalise",
    "padded",
    "pick",
    "piece",
    "pool",
    "product",
    "recurrent",
    "reshard",
    "routed",
    "select_rows",
    "softmax",
    "softmax_loss",
    "source",
    "total",
    "view",
    "window",
    "without_later_keys",
]
