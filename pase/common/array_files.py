"""Reading NumPy's files (.npz, .npy) that a stranger may have written: numbers and text alone, nothing is executed.

A header is believed after it was held against the bytes that are there, so that no claim allocates anything; Python
objects, which are pickles, are refused unread.
"""

import os
import re
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from pase.common.documents import open_regular
from pase.errors import PaseError

Array = np.ndarray[Any, Any]

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
_MAX_DIMS = 32
_ITEM = re.compile(
    r"""\s*(['"])(?P<key>descr|fortran_order|shape)\1\s*:\s*"""
    r"""(?:(['"])(?P<text>[^'"\\]{1,20})\3|(?P<flag>True|False)|\((?P<extents>[0-9L,\s]*)\))\s*(?:,\s*|(?=\}))"""
)
_KEYS = (("descr", "text"), ("fortran_order", "flag"), ("shape", "extents"))
_DTYPE = re.compile(r"[<>|=]?(?:b1|\?|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU]\d{1,9})")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an array's file says of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _UnreadableError(Exception):
    """What is wrong with a file, or an array in it."""


class ArrayArchive:
    """An open .npz file: headers and arrays by name."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {
            info.filename.removesuffix(".npy"): info for info in archive.infolist() if info.filename.endswith(".npy")
        }

    @property
    def names(self) -> Collection[str]:
        """Of the arrays; members that are none are passed over."""
        return self._members.keys()

    @property
    def claimed_bytes(self) -> int:
        """What the arrays take, as the archive has it: no more is read."""
        return sum(info.file_size for info in self._members.values())

    def header(self, name: str) -> Header:
        with self._opened(name) as stream:
            return _header(stream)

    def array(self, name: str) -> Array:
        with self._opened(name) as stream:
            header = _header(stream)
            claimed = self._members[name].file_size
            if header.size_bytes > claimed:
                raise _UnreadableError(f"claims the shape {header.shape}, more than the {claimed} bytes in the file")
            raw = np.empty(header.size_bytes, np.uint8)
            filled = 0
            while filled < len(raw):
                piece = stream.read(min(_PIECE_BYTES, len(raw) - filled))
                if not piece:
                    raise _UnreadableError(f"ends after {filled} of {len(raw)} bytes")
                raw[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
                filled += len(piece)
            # The checksum is compared at the end.
            if stream.read(1):
                raise _UnreadableError(f"has more bytes than the {len(raw)} that its shape {header.shape} needs")
        return np.ndarray(header.shape, header.dtype, raw.data, order="F" if header.is_fortran else "C")

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        info = self._members[name]
        try:
            if info.compress_type not in _METHODS:
                raise _UnreadableError("is compressed in another way than numpy's")
            with self._archive.open(info) as stream:
                yield stream
        except _UnreadableError as error:
            raise _UnreadableError(f"the array {name!r} {error}") from None


@contextmanager
def reading(error: type[PaseError], what: str, expected: str) -> Iterator[None]:
    """Turn whatever goes wrong with a file in this context into one line: what, why, expected.

    What is raised as a PaseError goes through as it is.
    """
    try:
        yield
    except PaseError:
        raise
    except MemoryError:
        raise error(f"{what}: it does not fit in memory; {expected}") from None
    except OSError as found:
        raise error(f"{what}: {found.strerror or found}; {expected}") from None
    # zipfile, zlib and struct raise errors of many classes for damaged archives.
    except Exception as found:  # noqa: BLE001
        raise error(f"{what}: {found}; {expected}") from None


@contextmanager
def opened_archive(path: Path) -> Iterator[ArrayArchive]:
    """Open an .npz file; to be used within `reading`."""
    with open_regular(path) as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            raise _UnreadableError("it holds a single array")
        with zipfile.ZipFile(file) as archive:
            yield ArrayArchive(archive)


def mapped_array(path: Path) -> Array:
    """Return the array of an .npy file, left on disk; to be used within `reading`."""
    with open_regular(path) as file:
        header = _header(file)
        start, size_bytes = file.tell(), os.fstat(file.fileno()).st_size
        if size_bytes - start != header.size_bytes:
            raise _UnreadableError(
                f"has {size_bytes - start} bytes; its shape {header.shape} of {header.dtype} needs {header.size_bytes}"
            )
        if not header.size_bytes:
            return np.zeros(header.shape, header.dtype)
    order: Literal["C", "F"] = "F" if header.is_fortran else "C"
    return np.memmap(path, header.dtype, "r", start, header.shape, order)


def _header(stream: IO[bytes]) -> Header:
    start = stream.read(8)
    if start[:6] != _MAGIC or start[6:] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise _UnreadableError("has no readable header: it does not begin as numpy's do")
    length = int.from_bytes(stream.read(2 if start[6] == 1 else 4), "little")
    if length > _MAX_HEADER_BYTES:
        raise _UnreadableError(f"has no readable header: it has {length} bytes")
    text = stream.read(length).decode("latin-1")
    found: dict[str, re.Match[str]] = {}
    at = text.find("{") + 1
    while item := _ITEM.match(text, at):
        found[item["key"]] = item
        at = item.end()
    is_whole = text[at:].strip() == "}" and not text[: text.find("{")].strip()
    parts = [found[key][kind] if key in found else None for key, kind in _KEYS]
    if not is_whole or None in parts:
        objects = "; Python objects are pickles, which are not read" if "|O" in text else ""
        raise _UnreadableError(f"has no readable header: {text.strip()!r}{objects}")
    name, flag, listed = map(str, parts)
    extents = [part.strip().removesuffix("L") for part in listed.split(",")]
    if extents[-1] == "":
        extents.pop()
    if not _DTYPE.fullmatch(name):
        objects = ", Python objects: these are pickles, which are not read" if "O" in name else ""
        raise _UnreadableError(f"has the type {name!r}{objects}; expected numbers or text")
    dtype = np.dtype(name)
    if len(extents) > _MAX_DIMS or not all(re.fullmatch(r"[0-9]{1,18}", extent) for extent in extents):
        raise _UnreadableError(f"claims the shape ({listed}), which no array has")
    shape = tuple(map(int, extents))
    # NumPy counts elements, and bytes, in 64 bits; none of the extents may be out of bounds beside one of 0.
    if prod(max(extent, 1) for extent in shape) * max(dtype.itemsize, 1) >= 2**63:
        raise _UnreadableError(f"claims the shape {shape}, more than the memory of any machine")
    return Header(shape=shape, dtype=dtype, is_fortran=flag == "True")
