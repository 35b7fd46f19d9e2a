"""`Dataset`: arrays of examples by name; files of them, what a model reads of them, and their normalisation.

Files are arrays of the user, compressed files, the IDX format; they are read no further than asked.
"""

import gzip
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from pase.common.documents import open_regular
from pase.errors import DatasetError, ProgramError
from pase.targets.training.data import DataInput, read_arrays

Array = np.ndarray[Any, Any]

Part = Literal["train", "test"]
"""What is trained on, or what is kept back to test with."""

PARTS: tuple[Part, ...] = ("train", "test")

INPUTS = "inputs"
LABELS = "labels"


_PIECE = 1 << 16
"""Numbers that are worked on at a time, in float64: few enough for a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """mean and (population) standard deviation of a set of numbers, in their unit."""

    mean: float
    deviation: float


def moments(inputs: Array) -> Moments:
    """Return mean and deviation of all numbers of an array of any shape, one of each for all channels.

    Raises DatasetError where the numbers are all the same, or not finite: nothing can be scaled by their deviation.
    """
    flat = inputs.reshape(-1)
    if not flat.size:
        raise DatasetError("there are no inputs to normalise; expected at least one example")
    pieces = [flat[first : first + _PIECE] for first in range(0, flat.size, _PIECE)]
    mean = float(sum(piece.sum(dtype=np.float64) for piece in pieces)) / flat.size
    squares = 0.0
    for piece in pieces:
        # Differences from the mean: squares of the numbers themselves would lose digits where the mean is large.
        difference = piece - np.float64(mean)
        # No product of BLAS: its threads wait for one another, and the last digit depends on how many they are.
        squares += float(np.square(difference, out=difference).sum())
    deviation = float(np.sqrt(squares / flat.size))
    if not 0 < deviation < np.inf:
        found = f"all {flat[0]}" if deviation == 0 else "not all finite"
        raise DatasetError(
            f"the inputs to train on are {found}, so that they cannot be normalised; expected images that differ: "
            "check the files"
        )
    return Moments(mean=mean, deviation=deviation)


def normalised(inputs: Array, by: Moments) -> Array:
    """Return (X - mean) / deviation as float32, in the shape of X.

    With the moments of X itself, E(X) = 0 and σ(X) = 1 (You et al. 2017, Algorithm 1, line 1). What is tested with is
    normalised by the moments of what was trained on, or the network would see it on another scale.
    """
    result: Array = np.subtract(inputs, by.mean, dtype=np.float32)
    result /= np.float32(by.deviation)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One part of the examples of a source.

    arrays: [N, …] each, by name. Images are "inputs", float32 [N, channels, height, width], and "labels", int32 [N];
    both are read-only. num_classes: labels are less; None where only whoever wrote the arrays knows. called: what
    messages call it. description: what tells these examples from others, as JSON has it, wherever the files lie.
    """

    arrays: Mapping[str, Array]
    num_classes: int | None
    called: str
    description: Mapping[str, Any]


def described(source: str, part: Part, arrays: Mapping[str, Array], moments: Moments | None = None) -> dict[str, Any]:
    """Return a dataset's description; moments: those that its inputs were normalised with."""
    by = None if moments is None else {"mean": moments.mean, "deviation": moments.deviation}
    return {
        "source": source,
        "part": part,
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "normalisation": by,
    }


def labelled_images(
    source: str, part: Part, images: Array, labels: Array, *, num_classes: int, called: str, by: Moments | None
) -> Dataset:
    """Return images [N, channels, height, width] with their labels [N]; by: what to normalise them with, if at all."""
    inputs = images.astype(np.float32, copy=False) if by is None else normalised(images, by)
    arrays = {INPUTS: inputs, LABELS: labels.astype(np.int32)}
    for array in arrays.values():
        array.setflags(write=False)  # all workers of a process share them
    return Dataset(
        arrays=MappingProxyType(arrays),
        num_classes=num_classes,
        called=called,
        description=MappingProxyType(described(source, part, arrays, by)),
    )


def check_labels(labels: Array, num_classes: int, where: str) -> None:
    """Raise DatasetError where a label is no class. where: the file that it is from."""
    wrong = np.flatnonzero(labels >= num_classes)
    if wrong.size:
        raise DatasetError(
            f"{where} has label {labels[wrong[0]]} at example {wrong[0]}; expected labels from 0 to {num_classes - 1}: "
            "the file is damaged or holds other data; download it again"
        )


Read = Callable[[Path | None, Part], Dataset]
"""Reads one part from a path, which is None for a source that has none; DatasetError where it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One way to name data.

    form: what a user types. needs_path: a path follows the name. has_parts: the same name stands for examples to
    train on and for others to test with.
    """

    name: str
    form: str
    description: str
    needs_path: bool
    has_parts: bool
    read: Read


def fit_to(dataset: Dataset, inputs: Iterable[DataInput]) -> Dataset:
    """Return a dataset as a model reads it, checked against its inputs.

    Images are laid out as rows [N, channels · height · width], in this order, for a model that reads rows of as many
    numbers. Nothing else is changed. Raises DatasetError where an array is missing, its examples are of another shape,
    there are fewer of them than a batch has, or they have more classes than the model. Numbers are not looked at.
    """
    arrays = dict(dataset.arrays)
    for item in inputs:
        arrays[item.name] = _fitted(dataset, item)
    return replace(dataset, arrays=MappingProxyType(arrays))


def _fitted(dataset: Dataset, item: DataInput) -> Array:
    row = item.shape[1:]
    if item.name not in dataset.arrays:
        raise DatasetError(
            f"{dataset.called} has no array {item.name!r}; it has {', '.join(sorted(dataset.arrays)) or 'none'}; "
            f"the model reads {item.name!r}, {_text(row)}: name the array so"
        )
    array = dataset.arrays[item.name]
    if array.ndim == 4 and len(row) == 1 and prod(array.shape[1:]) == row[0]:
        array = array.reshape(len(array), -1)
    if array.ndim == 0 or array.shape[1:] != row:
        raise DatasetError(_other_shape(dataset, item, array))
    if len(array) < item.shape[0]:
        raise DatasetError(
            f"{dataset.called} has {len(array)} examples; expected at least {item.shape[0]}, one batch: "
            "give a smaller --batch"
        )
    if item.name == LABELS and dataset.num_classes is not None and item.below < dataset.num_classes:
        raise DatasetError(
            f"{dataset.called} has {dataset.num_classes} classes; the model tells {item.below} apart: give it as many, "
            f"where it takes them with --arg classes={dataset.num_classes}"
        )
    return array


def _other_shape(dataset: Dataset, item: DataInput, array: Array) -> str:
    found, expected = array.shape[1:], item.shape[1:]
    message = f"examples of {item.name!r} of {dataset.called} are {_text(found)}; the model reads {_text(expected)}: "
    if len(found) != 3 or len(expected) != 3:
        return f"{message}train another model on them, or write arrays of that shape to an .npz file"
    differ = "channels" if found[0] != expected[0] else "size"
    argument = f", where it takes that with --arg image={found[1]}" if differ == "size" and found[1] == found[2] else ""
    return (
        f"{message}images (channels×height×width) of another {'number of ' if differ == 'channels' else ''}{differ}. "
        f"Choose a model for these{argument}, or write converted images to an .npz file; nothing is resized unasked"
    )


def _text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "single numbers"


_GZIP = b"\x1f\x8b"
_DEFLATE_RATIO = 1032
"""The most that a compressed byte can stand for: four matches of 258 bytes, at two bits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds, decompressed. most_bytes: no file of its size holds more."""

    path: Path
    stream: io.BufferedIOBase
    most_bytes: int


@contextmanager
def opened(path: Path) -> Iterator[Content]:
    """Open a file, decompressed where it is a gzip file by its first bytes, whatever it is called.

    Raises DatasetError where it cannot be opened, and, within the context, where it turns out to be damaged.
    """
    try:
        with open_regular(path) as file:
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


def read_own_arrays(path: Path | None, part: Part) -> Dataset:
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

MAX_IDX_BYTES = 250_000 * 28 * 28
"""Of one file: EMNIST's digits are 240,000 images. Programs read them as float32, four bytes for each of these."""


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
        if num_bytes > MAX_IDX_BYTES:
            raise DatasetError(
                f"{path}: {says} more than the {MAX_IDX_BYTES} of the largest file that is read: give larger data sets "
                "as arrays (.npz)"
            )
        values = np.frombuffer(content.stream.read(num_bytes), np.uint8)
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
