"""Files that may be compressed, read no further than asked: what a header claims allocates nothing on its own."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import DatasetError

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
