"""Checkpoints that versions up to 0.10 wrote by torch.distributed.checkpoint, read without executing their contents.

Their metadata are pickles, and so is the description of each tensor in its archive. A pickle is a program that names
functions and calls them. No unpickler runs here: `read_pickle` interprets the operations itself, only supports those
that build text, numbers and containers, and replaces any function or class by a plain record, `Named`. The result is
then validated like any document. Checksums (CRC-32) of the archives' members are verified.
"""

import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pase.common.documents import DocumentSource, read_limited
from pase.common.structs import Document, Whole, read
from pase.errors import ProgramError
from pase.sharding.boxes import extents
from pase.targets.torch.shard_files import Saved, Shard, check_box, check_covered, check_in_file

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 28
_MAX_PICKLE_BYTES = 1 << 16
_MAX_MEMBERS = 32
"""PyTorch writes seven."""
_STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
    }
)


_SLOTS: Mapping[str, str] = MappingProxyType({"first_moment": "exp_avg", "second_moment": "exp_avg_sq"})
"""Adam's slots as named by programs up to 0.11, and as named by PyTorch."""


def with_slots_of_pytorch(saved: Mapping[str, Saved], optimiser: Mapping[str, Any]) -> dict[str, Saved]:
    """Return the tensors of a program's checkpoint with optimizer slots renamed as in PyTorch.

    Args:
        saved: The tensors, by name.
        optimiser: Record of the update rule.
    """
    renamed = _SLOTS if optimiser.get("name") in ("adam", "adamw") else {}
    found = {}
    for name, tensor in saved.items():
        parameter, _, slot = name.rpartition(".")
        is_slot = name.startswith("optimizer.") and slot in renamed
        found[f"{parameter}.{renamed[slot]}" if is_slot else name] = tensor
    return found


# -- pickles as data


class Named:
    """An object that a pickle names or constructs, as a plain record.

    Attributes:
        name: Name of the function or class, with its module.
        arguments: Arguments of its call.
        state: Values of its attributes.
    """

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments, self.state = name, arguments, None


def read_pickle(raw: bytes) -> Any:
    """Return the contents of a pickle, with `Named` for all objects that it names; ValueError for other operations."""
    stack = list[Any]()
    marks = list[int]()
    memo = dict[int, Any]()
    try:
        for operation, argument, _ in pickletools.genops(raw):
            if operation.name == "STOP":
                return stack.pop()
            _apply(operation.name, argument, stack, marks, memo)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a pickle of plain values ({error})") from None
    raise ValueError("it is a pickle without an end")


def _apply(name: str, argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    """Carry out one operation of a pickle on its stack."""
    match name:
        case "PROTO" | "FRAME":
            pass
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE":
            stack.append(argument)
        case "MARK":
            marks.append(len(stack))
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_TUPLE":
            stack.append(())
        case "TUPLE":
            stack.append(tuple(_since(stack, marks.pop())))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_since(stack, len(stack) - int(name[-1]))))
        case "SETITEM" | "SETITEMS":
            items = _since(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        case "APPEND" | "APPENDS":
            items = _since(stack, marks.pop() if name == "APPENDS" else len(stack) - 1)
            stack[-1].extend(items)
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            stack.append(Named(argument.replace(" ", ".")))
        case "STACK_GLOBAL":
            module, own = _since(stack, len(stack) - 2)
            stack.append(Named(f"{module}.{own}"))
        case "REDUCE" | "NEWOBJ":
            called, arguments = _since(stack, len(stack) - 2)
            stack.append(Named(called.name, arguments))
        case "BUILD":
            (state,) = _since(stack, len(stack) - 1)
            stack[-1].state = state
        case "BINPERSID":
            stack.append(Named("storage", stack.pop()))
        case _:
            raise ValueError(f"it has the operation {name}")


def _since(stack: list[Any], start: int) -> list[Any]:
    """Pop all items of a stack from a position on."""
    if not 0 <= start <= len(stack):
        raise IndexError("its stack is empty")
    taken = stack[start:]
    del stack[start:]
    return taken


# -- metadata


def read_metadata(folder: Path, source: str) -> dict[str, Saved]:
    """Return the tensors of a checkpoint of torch.distributed.checkpoint; ProgramError where it is damaged.

    Args:
        folder: Folder of the checkpoint.
        source: What messages call it.
    """
    of = DocumentSource(ProgramError, source)
    raw = read_limited(folder / METADATA, _MAX_METADATA_BYTES)
    try:
        document = read(_MetadataDocument, _plain(read_pickle(raw)), of)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProgramError(f"{source}: {METADATA}: {error}") from None
    places = {(place.fqn, place.offset): (number, place) for number, place in enumerate(document.storage_data)}
    sizes: dict[str, int] = {}
    found = {}
    for name, tensor in document.state_dict_metadata.items():
        if tensor is None:
            continue
        path, shape = f"state_dict_metadata.{name}", tensor.size
        dtype = getattr(torch, tensor.dtype.removeprefix("torch."), None)
        if dtype not in _STORAGES.values():
            raise of.fail(f"{path}.dtype", "is not a type that checkpoints of this version have")
        shards = []
        for chunk_number, chunk in enumerate(tensor.chunks):
            where = f"{path}.chunks[{chunk_number}]"
            if len(chunk.offsets) != len(chunk.sizes) or (name, chunk.offsets) not in places:
                raise of.fail(where, "is in no file")
            number, place = places[name, chunk.offsets]
            box = tuple((low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
            check_box(of, where, box, shape)
            shards.append(Shard(box=box, file=place.relative_path, offset=place.place, num_bytes=place.length))
            check_in_file(of, f"storage_data[{number}]", folder, shards[-1], sizes)
        check_covered(of, path, shape, shards)
        found[name] = Saved(shape=shape, dtype=dtype, shards=tuple(shards), read=_reader(folder))
    return found


class _ChunkDocument(Document):
    offsets: tuple[Whole, ...]
    sizes: tuple[Whole, ...]


class _OldTensorDocument(Document):
    size: tuple[Whole, ...]
    dtype: str
    chunks: tuple[_ChunkDocument, ...]


class _PlaceDocument(Document):
    fqn: str
    offset: tuple[Whole, ...]
    relative_path: str
    place: Whole
    length: Whole


class _MetadataDocument(Document):
    state_dict_metadata: dict[str, _OldTensorDocument | None]
    storage_data: tuple[_PlaceDocument, ...]


def _plain(metadata: Any) -> dict[str, Any]:
    """Return metadata as a document: what of it is read, with containers in place of classes."""
    tensors = dict[str, Any]()
    places = list[Any]()
    for name, own in _members(metadata, "state_dict_metadata").items():
        if not isinstance(own, Named) or not own.name.endswith(".TensorStorageMetadata"):
            tensors[name] = None
            continue
        properties = _attributes(own)["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        chunks = [
            {key: _extents(_attributes(chunk)[key]) for key in ("offsets", "sizes")}
            for chunk in _attributes(own)["chunks"]
        ]
        tensors[name] = {
            "size": _extents(_attributes(own)["size"]),
            "dtype": dtype.name if isinstance(dtype, Named) else None,
            "chunks": chunks,
        }
    for index, own in _members(metadata, "storage_data").items():
        offset = _attributes(index).get("offset")
        places.append(
            {
                "fqn": _attributes(index)["fqn"],
                "offset": [] if offset is None else _extents(offset),
                "relative_path": _attributes(own)["relative_path"],
                "place": _attributes(own)["offset"],
                "length": _attributes(own)["length"],
            }
        )
    return {"state_dict_metadata": tensors, "storage_data": places}


def _attributes(value: Any) -> dict[str, Any]:
    state = value.state if isinstance(value, Named) else None
    if not isinstance(state, dict):
        raise ValueError("it describes no tensors")
    return _Attributes(state)


class _Attributes(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"it lacks {name}")


def _members(metadata: Any, name: str) -> dict[Any, Any]:
    found = _attributes(metadata)[name]
    if not isinstance(found, dict):
        raise ValueError(f"its {name} are not a dict")
    return found


def _extents(value: Any) -> Any:
    """Return the numbers of a torch.Size."""
    numbers = value.arguments[0] if isinstance(value, Named) and value.arguments else value
    return list(numbers) if isinstance(numbers, tuple) else numbers


# -- tensors


def _reader(folder: Path) -> Callable[[Saved, Shard], torch.Tensor]:
    def read(saved: Saved, shard: Shard) -> torch.Tensor:
        with (folder / shard.file).open("rb") as stream:
            stream.seek(shard.offset)
            raw = stream.read(shard.num_bytes)
        try:
            return _tensor(raw, saved.dtype, extents(shard.box))
        # zipfile raises errors of many classes for damaged archives.
        except Exception as error:  # noqa: BLE001
            raise ValueError(f"its archive in {shard.file} is damaged: {error}") from None

    return read


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor in a file of torch.save; ValueError where its type or shape differs."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(members) > _MAX_MEMBERS:
            raise ValueError(f"it has {len(members)} members")
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise ValueError("it is compressed")
        for info in members.values():
            # The checksum is compared at the end of each member.
            archive.read(info)
        if members["data.pkl"].file_size > _MAX_PICKLE_BYTES:
            raise ValueError("its description is too long")
        described = read_pickle(archive.read(members["data.pkl"]))
        storage, start, size, strides, *_ = described.arguments
        kind, number = storage.arguments[1].name.rpartition(".")[2], storage.arguments[2]
        content = bytearray(archive.read(members[f"data/{number}"]))
    if _STORAGES.get(kind) != dtype or tuple(size) != shape:
        raise ValueError(f"it holds {list(size)} of {kind}; expected {list(shape)} of {dtype}")
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    last = start + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    if min(start, *strides, 0) < 0 or (last + 1) * dtype.itemsize > len(content):
        raise ValueError("it exceeds its storage")
    return torch.frombuffer(content, dtype=dtype).as_strided(size, strides, start)
