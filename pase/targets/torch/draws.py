"""Operators that draw random numbers: equal on all ranks, different in each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pase.targets.training.counted import layer_key

_ATEN = torch.ops.aten


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return rate_of(node) is None and not _is_idle(node)


def rate_of(node: fx.Node) -> float | None:
    """Return the share of single points that a node drops; None for a node that drops none."""
    if node.target is not _ATEN.dropout.default:
        return None
    _, rate, trains = node.args
    return float(rate) if trains else 0.0


def _is_idle(node: fx.Node) -> bool:
    """Return whether an operator that may draw numbers draws none: attention and recurrent layers without dropout."""
    schema = node.target._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    rates = {name: value for name, value in (defaults | given).items() if name in ("dropout_p", "dropout")}
    trains = (defaults | given).get("train", True) if "dropout" in rates else True
    return bool(rates) and (not trains or not any(rates.values()))


def seeded(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return an operator that draws by a step's key, its first argument, and the operator's number in the graph.

    Ranks that call it with equal key, number and shapes draw equal numbers. The generators' states are restored.
    """
    own = [int(word) for word in layer_key(f"draw {number}")]

    def run(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, second = (int(word) ^ mine for word, mine in zip(key.tolist(), own, strict=True))
        devices = {x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        devices |= {x for x in kwargs.values() if isinstance(x, torch.device)}
        cards = [torch.cuda._get_device_index(device, optional=True) for device in devices if device.type == "cuda"]
        with torch.random.fork_rng(cards, device_type="cuda"):
            # Those of other devices are not put back.
            for generator in (torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)):
                generator.manual_seed((first << 31) ^ second)
            return function(*args, **kwargs)

    name = str(getattr(function, "__name__", "operator")).partition(".")[0]
    run.__name__ = run.__qualname__ = f"seeded_{name}"
    undisturbed: Callable[..., Any] = torch._disable_dynamo(run)
    return undisturbed
