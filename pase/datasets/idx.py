"""The IDX format of the MNIST database: two zero bytes, a type, a number of dims, their extents, the numbers.

Extents are big-endian and of 32 bits; of the types, 8, unsigned bytes, is the one that images and labels have.
"""

import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pase.datasets.files import Content, opened
from pase.errors import DatasetError

Array = np.ndarray[Any, Any]

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
