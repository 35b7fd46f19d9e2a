"""Messages between ranks: plain values as JSON, in tensors of bytes.

`torch.distributed`'s own collectives of objects unpickle received data, which can execute code of a stranger. Here
received data are never executed: they become numbers, text, containers, PyTorch's types, and frozen values of this
package, whose constructors validate them.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist

from pase.errors import ProgramError
from pase.targets.torch.devices import message_device
from pase.targets.torch.failures import naming_lost_ranks

_CONTAINERS: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def told_by_all(own: Any) -> list[Any]:
    """Return the values of all ranks, in their order (all-gather); all ranks call it."""
    return [decoded(raw) for raw in bytes_of_all(encoded(own))]


def told_by(rank: int, own: Any = None) -> Any:
    """Return the value of one rank (broadcast); all ranks call it, and the others' values are ignored."""
    raw = encoded(own) if dist.get_rank() == rank else b""
    device = message_device()
    with naming_lost_ranks():
        size = torch.tensor([len(raw)], dtype=torch.int64, device=device)
        dist.broadcast(size, src=rank)
        buffer = _tensor(raw, device) if raw else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(buffer, src=rank)
    return decoded(_bytes(buffer))


def bytes_of_all(raw: bytes) -> list[bytes]:
    """Return the bytes of every rank, in the order of ranks; all ranks call it."""
    device, world_size = message_device(), dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    with naming_lost_ranks():
        dist.all_gather(sizes, torch.tensor([len(raw)], dtype=torch.int64, device=device))
        lengths = [int(size) for size in sizes]
        padded = _tensor(raw.ljust(max(lengths), b"\0"), device)
        buffers = [torch.empty_like(padded) for _ in lengths]
        if padded.numel():
            dist.all_gather(buffers, padded)
    return [_bytes(buffer)[:length] for buffer, length in zip(buffers, lengths, strict=True)]


def _tensor(raw: bytes, device: torch.device) -> torch.Tensor:
    if not raw:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def _bytes(buffer: torch.Tensor) -> bytes:
    return bytes(buffer.cpu().numpy())


# -- values as JSON


def encoded(value: Any) -> bytes:
    """Return a value as JSON, what JSON has no form for as an object with its kind."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decoded(raw: bytes) -> Any:
    """Return the value that `encoded` wrote; ProgramError where the bytes are of something else."""
    try:
        return _value(json.loads(raw))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProgramError(f"another rank sent data that is not a message of this program: {error}") from None


def _plain(value: Any) -> Any:
    # A class of text or of numbers may be an enumeration.
    if isinstance(value, Enum):
        return {"enum": _name(type(value)), "of": value.name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [_plain(item) for item in value]}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    assert is_dataclass(value), f"{type(value).__name__} cannot be told to other ranks"
    return {"value": _name(type(value)), "of": [_plain(getattr(value, each.name)) for each in fields(value)]}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind, content = next(iter(plain.items()))
    read = _CONTAINERS.get(kind)
    if read is not None:
        return read(_value(item) for item in content)
    if kind == "dict":
        return {_value(key): _value(item) for key, item in content}
    if kind == "path":
        return Path(content)
    if kind == "dtype":
        found = getattr(torch, content)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{content!r} is not a type of PyTorch's")
        return found
    named = make = _class(content)
    if kind == "enum" and issubclass(named, Enum):
        return named[plain["of"]]
    if kind == "value" and is_dataclass(named):
        names = [each.name for each in fields(named)]
        return make(**dict(zip(names, (_value(item) for item in plain["of"]), strict=True)))
    raise ValueError(f"{kind!r} is not a kind of value")


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    """Return a class of this package by its name; nothing is imported."""
    module, _, own = name.partition(":")
    found = getattr(sys.modules[module], own) if module.startswith("pase.") else None
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{name!r} is not a class of this package")
    return found
