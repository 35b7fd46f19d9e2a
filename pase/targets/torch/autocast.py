"""In which types a program computes: `torch.autocast` for products, float32 for what would lose too much in a low one.

`torch.autocast` does both on a GPU, and the first alone on a CPU; here both are done on either, so that what ranks send
has the types that the plan says (`pase.graph.precision`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_LOW = (torch.bfloat16, torch.float16)


def computing_in(low: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a program whose products are in a low type; "" for none."""
    return torch.autocast(device.type, getattr(torch, low)) if low else nullcontext()


def widened(x: Any) -> Any:
    """Return a tensor of a low type in float32, another one as it is."""
    return x.float() if x.dtype in _LOW else x


def as_low(x: Any, like: Any) -> Any:
    """Return a tensor in the type of another one where that is low, else as it is."""
    return x.to(like.dtype) if like.dtype in _LOW else x


def called(function: Any, *shards: Any) -> Any:
    """Return what a function makes of shards, as one call in the graph of a program."""
    return shards[0].tracer.create_proxy("call_function", function, shards, {})
