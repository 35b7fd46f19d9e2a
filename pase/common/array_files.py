"""Read NumPy files (.npz, .npy) from untrusted sources: numbers and text only, nothing is executed.

A header is checked against the size of the file before anything is allocated. Python objects, which are pickles, are
rejected without being read.
"""

import os
import warnings
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy

from pase.common.documents import open_regular
from pase.common.words import short
from pase.errors import PaseError

Array = np.ndarray[Any, Any]

_MAX_DIMS = 32
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Shape and type of an array, as its file's header states them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _UnreadableError(Exception):
    """Describes what is wrong with a file, or with an array in it."""


class ArrayArchive:
    """An open .npz file: headers and arrays by name."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {
            info.filename.removesuffix(".npy"): info for info in archive.infolist() if info.filename.endswith(".npy")
        }

    @property
    def names(self) -> Collection[str]:
        """Names of the arrays; members that are not arrays are ignored."""
        return self._members.keys()

    @property
    def claimed_bytes(self) -> int:
        """Size of the arrays according to the archive's directory; no more is read."""
        return sum(info.file_size for info in self._members.values())

    def header(self, name: str) -> Header:
        with self._opened(name) as stream:
            return _header(stream)

    def array(self, name: str) -> Array:
        header, claimed = self.header(name), self._members[name].file_size
        if header.size_bytes > claimed:
            raise _UnreadableError(
                f"the array {name!r} claims the shape {header.shape}, more than the {claimed} bytes in the file"
            )
        with self._opened(name) as stream:
            array: Array = npy.read_array(stream, allow_pickle=False)
            # Reading to the end compares the checksum.
            if stream.read(1):
                raise _UnreadableError(
                    f"has more bytes than the {header.size_bytes} that its shape {header.shape} needs"
                )
        return array

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        info = self._members[name]
        try:
            if info.compress_type not in _METHODS:
                raise _UnreadableError("is compressed in another way than numpy's")
            with self._archive.open(info) as stream:
                yield stream
        except (_UnreadableError, ValueError) as error:
            raise _UnreadableError(f"the array {name!r} {error}") from None


@contextmanager
def reading(error: type[PaseError], what: str, expected: str) -> Iterator[None]:
    """Convert every error about a file in this context into one line: what failed, why, and what was expected.

    A PaseError passes through unchanged.
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
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise _UnreadableError("it holds a single array")
        with zipfile.ZipFile(file) as archive:
            yield ArrayArchive(archive)


def mapped_array(path: Path) -> Array:
    """Memory-map the array of an .npy file; to be used within `reading`."""
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
    try:
        # NumPy warns of headers of Python 2, and Python of odd literals in them.
        with warnings.catch_warnings(action="ignore"):
            shape, is_fortran, dtype = _HEADERS[npy.read_magic(stream)](stream)
    # It is a literal of Python, whose parsers raise errors of many classes.
    except Exception as error:  # noqa: BLE001
        raise _UnreadableError(f"has no readable header: {error}") from None
    if dtype.kind not in "biufcSU":
        objects = ", Python objects: these are pickles, which are not read" if dtype.hasobject else ""
        raise _UnreadableError(f"has the type {dtype.str!r}{objects}; expected numbers or text")
    # NumPy counts elements and bytes in 64 bits; every extent must be within bounds, even where another one is 0.
    size = prod(max(extent, 1) for extent in shape) * max(dtype.itemsize, 1)
    if len(shape) > _MAX_DIMS or min(shape, default=0) < 0 or size >= 2**63:
        raise _UnreadableError(f"claims the shape {short(str(shape))}, which no array has")
    return Header(shape=shape, dtype=dtype, is_fortran=is_fortran)
