"""Files of shards: a rank's boxes of tensors, in the safetensors format, and the record of each box's location.

A record is checked against the files before anything of its stated size is allocated, and each shard against its
SHA-256 before anything is loaded.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from msgspec import structs

from pase.common.documents import DocumentSource
from pase.common.structs import Document, Whole, choice
from pase.errors import ProgramError
from pase.sharding.boxes import Box, extents, intersection, num_points

Piece = tuple[Box, torch.Tensor]
"""A box of a tensor, and a view of the rank's memory in the box's shape."""

_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8
_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""What safetensors calls each type."""
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Location of one box of a tensor.

    Attributes:
        box: Box of the tensor.
        file: Name of the file in the checkpoint's folder.
        offset: Offset of its first byte in the file.
        num_bytes: Number of bytes in the file.
        sha256: Checksum of these, in hexadecimal digits; "" in a format that has another one.
    """

    box: Box
    file: str
    offset: int
    num_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of a checkpoint.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Element type.
        shards: Boxes that cover it.
        read: Returns a shard's tensor, without allocating more; ValueError or OSError where it is damaged.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    read: Callable[["Saved", Shard], torch.Tensor]


# -- writing


def named_type(name: str, dtype: torch.dtype) -> str:
    """Return the name of a tensor type in records; ProgramError for unsupported types."""
    if dtype not in _TYPES:
        raise ProgramError(f"{name!r} is of {dtype}, which checkpoints do not hold; convert it to another type")
    return str(dtype).removeprefix("torch.")


def write_shards(path: Path, pieces: Sequence[tuple[str, Box, torch.Tensor]]) -> list[Shard]:
    """Write boxes of tensors into a file, have it on disk, and return where each of them is.

    Args:
        path: Of the file, which is made.
        pieces: Name of the tensor, box, and the box's elements; they are copied to the CPU one by one.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, box, x in pieces:
        begin, end = end, end + x.numel() * x.element_size()
        named = f"{name}[{', '.join(f'{low}:{high}' for low, high in box)}]"
        header[named] = {"dtype": _TYPES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    shards = []
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, box, x in pieces:
            offset = stream.tell()
            raw = _raw(x)
            stream.write(raw)
            digest = hashlib.sha256(raw).hexdigest()
            shards.append(Shard(box=box, file=path.name, offset=offset, num_bytes=len(raw), sha256=digest))
        stream.flush()
        os.fsync(stream.fileno())
    return shards


def _raw(x: torch.Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


# -- the record of tensors


def tensors_document(tensors: Mapping[str, tuple[str, Sequence[int], Sequence[Shard]]]) -> dict[str, Any]:
    """Return the record of tensors, by name: type, shape and shards of each."""
    return {
        name: {
            "dtype": dtype,
            "shape": list(shape),
            "shards": [
                {"file": own.file, "offset": own.offset, "box": [list(run) for run in own.box], "sha256": own.sha256}
                for own in shards
            ],
        }
        for name, (dtype, shape, shards) in tensors.items()
    }


class _ShardDocument(Document):
    file: str
    offset: Whole
    box: tuple[tuple[Whole, Whole], ...]
    sha256: str


class TensorDocument(Document):
    """A tensor, and the shards that cover it."""

    dtype: Annotated[str, choice(_BY_NAME)]
    shape: tuple[Whole, ...]
    shards: tuple[_ShardDocument, ...]


def read_tensors(folder: Path, tensors: Mapping[str, TensorDocument], source: DocumentSource) -> dict[str, Saved]:
    """Return the tensors in a record; the source's error where the files do not contain them."""
    sizes: dict[str, int] = {}
    found = {}
    for name, tensor in tensors.items():
        dtype, path = _BY_NAME[tensor.dtype], f"tensors.{name}"
        shards = []
        for number, shard in enumerate(tensor.shards):
            where = f"{path}.shards[{number}]"
            check_box(source, f"{where}.box", shard.box, tensor.shape)
            num_bytes = num_points(shard.box) * dtype.itemsize
            shards.append(Shard(**structs.asdict(shard), num_bytes=num_bytes))
            check_in_file(source, where, folder, shards[-1], sizes)
        check_covered(source, path, tensor.shape, shards)
        found[name] = Saved(shape=tensor.shape, dtype=dtype, shards=tuple(shards), read=_reader(folder))
    return found


def check_box(source: DocumentSource, path: str, box: Box, shape: Sequence[int]) -> None:
    """Raise the source's error where a box is not within a tensor of a shape."""
    inside = len(box) == len(shape)
    if not inside or any(not low <= high <= extent for (low, high), extent in zip(box, shape, strict=True)):
        raise source.fail(path, f"is not a box of a tensor of shape {list(shape)}")


def check_covered(source: DocumentSource, path: str, shape: Sequence[int], shards: Sequence[Shard]) -> None:
    """Raise the source's error where the shards of a tensor have more or fewer elements than it."""
    elements = sum(num_points(own.box) for own in shards)
    if elements != prod(shape):
        raise source.fail(path, f"has {elements} elements in its shards; its shape {list(shape)} has {prod(shape)}")


def check_in_file(source: DocumentSource, path: str, folder: Path, shard: Shard, sizes: dict[str, int]) -> None:
    """Raise the source's error where a file lacks these bytes; sizes: cache of file sizes."""
    if shard.file not in sizes:
        if Path(shard.file).name != shard.file:
            raise source.fail(path, f"is in {shard.file!r}; expected the name of a file in the record's folder")
        try:
            status = (folder / shard.file).stat()
        except (OSError, ValueError) as error:
            raise source.fail(path, f"is in a file that cannot be read: {error}") from None
        sizes[shard.file] = status.st_size if stat.S_ISREG(status.st_mode) else 0
    end = shard.offset + shard.num_bytes
    if end > sizes[shard.file]:
        raise source.fail(path, f"is in {shard.file}, which has {sizes[shard.file]} bytes; expected {end} or more")


# -- reading


def _reader(folder: Path) -> Callable[[Saved, Shard], torch.Tensor]:
    def read(saved: Saved, shard: Shard) -> torch.Tensor:
        shape = extents(shard.box)
        if not shard.num_bytes:
            return torch.empty(shape, dtype=saved.dtype)
        raw = bytearray(shard.num_bytes)
        digest = hashlib.sha256()
        with (folder / shard.file).open("rb") as stream:
            stream.seek(shard.offset)
            done = 0
            while done < len(raw):
                count = stream.readinto(memoryview(raw)[done : done + _PIECE_BYTES])
                if not count:
                    raise ValueError(f"{shard.file} ends within it")
                digest.update(memoryview(raw)[done : done + count])
                done += count
        if digest.hexdigest() != shard.sha256:
            raise ValueError(f"its bytes in {shard.file} are not those that were written (SHA-256)")
        return torch.frombuffer(raw, dtype=saved.dtype).reshape(shape)

    return read


def fill(pieces: Sequence[Piece], name: str, saved: Saved) -> None:
    """Copy a checkpoint's tensor into a rank's boxes of it.

    Raises:
        ValueError: A shard is damaged, or the shards lack elements of a box.
        OSError: A file cannot be read.
    """
    missing = [target.numel() for _, target in pieces]
    for shard in saved.shards:
        source: torch.Tensor | None = None
        for number, (box, target) in enumerate(pieces):
            common = intersection(box, shard.box)
            if common is None:
                continue
            if source is None:
                source = saved.read(saved, shard)
            target[_within(common, box)].copy_(source[_within(common, shard.box)])
            missing[number] -= num_points(common)
    if any(missing):
        raise ValueError(f"{name!r} lacks {sum(missing)} elements of this rank's part")


def damage(tensors: Mapping[str, Saved], rank: int = 0, world_size: int = 1) -> str | None:
    """Describe the first damaged shard in this rank's share of all shards; None if there is none.

    Each shard is read by one rank, the largest first.
    """
    every = [(name, saved, shard) for name, saved in tensors.items() for shard in saved.shards]
    every.sort(key=lambda item: -item[2].num_bytes)
    for name, saved, shard in every[rank::world_size]:
        try:
            saved.read(saved, shard)
        except (OSError, ValueError) as error:
            return f"{name!r}: {error}"
    return None


def _within(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(box, origin, strict=True))
