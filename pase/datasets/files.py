"""Files of data: arrays of the user, compressed files, the IDX format; read no further than asked."""

import gzip
import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.datasets.dataset import Dataset, Part, described
from pase.errors import DatasetError, ProgramError
from pase.targets.mesh_tensorflow.runtime.data import read_arrays

Array = np.ndarray[Any, Any]

_GZIP = b"\x1f\x8b"
_DEFLATE_RATIO = 1032
"""The most that a compressed byte can stand for: four matches of 258 bytes, at two bits each."""

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds, decompressed. most_bytes: no file of its size holds more."""

    path: Path
    stream: io.BufferedIOBase
    most_bytes: int

    def take(self, num_bytes: int) -> Array:
        """Return the next bytes [num_bytes]; fewer where the file ends. num_bytes: at most most_bytes."""
        assert num_bytes <= self.most_bytes
        taken = np.empty(num_bytes, np.uint8)
        filled = 0
        while filled < num_bytes:
            piece = self.stream.read(min(_PIECE_BYTES, num_bytes - filled))
            if not piece:
                break
            taken[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
        return taken[:filled]


@contextmanager
def opened(path: Path) -> Iterator[Content]:
    """Open a file, decompressed where it is a gzip file by its first bytes, whatever it is called.

    Raises DatasetError where it cannot be opened, and, within the context, where it turns out to be damaged.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            is_packed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            if is_packed:
                with gzip.GzipFile(fileobj=file) as stream:
                    yield Content(path=path, stream=stream, most_bytes=size_bytes * _DEFLATE_RATIO)
            else:
                yield Content(path=path, stream=file, most_bytes=size_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(f"{path} is damaged: {error}; expected a whole gzip file: download it again") from None
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror or error}; expected a file that can be read") from None


def listed(folder: Path) -> str:
    """Return what a folder holds, for a message: the first few names."""
    names = sorted(item.name for item in folder.iterdir())
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"the folder holds {', '.join(names[:6])}{more}" if names else "the folder is empty"


def read(path: Path | None, part: Part) -> Dataset:
    """Return the arrays of a path by name, whichever part they are; nothing is normalised.

    Raises DatasetError where they cannot be read.
    """
    assert path is not None
    try:
        arrays = read_arrays(path)
    except ProgramError as error:
        raise DatasetError(str(error)) from None
    return Dataset(
        arrays=MappingProxyType(arrays),
        num_classes=None,
        called=str(path),
        description=MappingProxyType(described("arrays", part, arrays)),
    )


_UNSIGNED_BYTES = 8


def read_idx(path: Path, *, num_dims: int) -> Array:
    """Return the bytes of an IDX file, plain or gzip, as uint8 in the shape that its header gives.

    Raises DatasetError where the header is not that of unsigned bytes in num_dims dims, or the file is shorter or
    longer than its header says. No more is read or allocated than a file of its size can hold.
    """
    with opened(path) as content:
        shape = _shape(content, num_dims)
        num_bytes = prod(shape)
        says = f"its header says {'×'.join(map(str, shape))}, {num_bytes} bytes,"
        again = "the file is incomplete or damaged: download it again"
        if num_bytes > content.most_bytes:
            raise DatasetError(
                f"{path}: {says} but a file of its size holds no more than {content.most_bytes}; {again}"
            )
        values = content.take(num_bytes)
        if len(values) < num_bytes:
            raise DatasetError(f"{path}: {says} but only {len(values)} follow; {again}")
        # Also reads a gzip file to its end, where its checksum is.
        if content.stream.read(1):
            raise DatasetError(f"{path}: {says} but more bytes follow; expected the end of the file: download it again")
    return values.reshape(shape)


def _shape(content: Content, num_dims: int) -> tuple[int, ...]:
    expected = bytes((0, 0, _UNSIGNED_BYTES, num_dims))
    magic = content.stream.read(4)
    if magic != expected:
        raise DatasetError(
            f"{content.path} begins with bytes {magic.hex(' ') or '(none)'}; expected {expected.hex(' ')}, an IDX file "
            f"of unsigned bytes in {num_dims} dim{'s' if num_dims > 1 else ''}: check which file it is"
        )
    header = content.stream.read(4 * num_dims)
    if len(header) < 4 * num_dims:
        raise DatasetError(
            f"{content.path} ends within its header, after {4 + len(header)} bytes; expected {4 + 4 * num_dims} and "
            "the numbers: download it again"
        )
    shape: tuple[int, ...] = struct.unpack(f">{num_dims}I", header)
    if 0 in shape:
        raise DatasetError(
            f"{content.path} holds nothing: its header says {'×'.join(map(str, shape))}; expected at least one example"
        )
    return shape
