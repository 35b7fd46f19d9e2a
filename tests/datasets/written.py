"""Small files in the published formats, written from the formats' descriptions, and a plain reader of them."""

import io
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pase.errors import DatasetError

T = TypeVar("T")
Array = np.ndarray[Any, Any]


def idx(array: Array) -> bytes:
    """An IDX file of unsigned bytes."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">i", extent) for extent in array.shape)
    return header + bytes(array.ravel().tolist())


def plain_idx(data: bytes) -> list[Any]:
    """What an IDX file holds as nested lists, a number at a time."""
    _, kind, num_dims = struct.unpack_from(">HBB", data)
    assert kind == 8
    shape = [struct.unpack_from(">i", data, 4 + 4 * i)[0] for i in range(num_dims)]
    numbers = iter(data[4 + 4 * num_dims :])

    def nested(extents: list[int]) -> Any:
        return [nested(extents[1:]) for _ in range(extents[0])] if extents else next(numbers)

    result: list[Any] = nested(shape)
    assert next(numbers, None) is None
    return result


def digits_of(num: int, seed: int, size: tuple[int, int] = (28, 28)) -> tuple[Array, Array]:
    """Images [num, height, width] and labels [num]."""
    numbers = np.random.default_rng(seed)
    return numbers.integers(0, 256, (num, *size), np.uint8), numbers.integers(0, 10, num, np.uint8)


def mnist_files(num_train: int = 7, num_test: int = 3, size: tuple[int, int] = (28, 28)) -> dict[str, bytes]:
    """The four files by name."""
    files = {}
    for stem, num, seed in (("train", num_train, 1), ("t10k", num_test, 2)):
        images, labels = digits_of(num, seed, size)
        files[f"{stem}-images-idx3-ubyte"] = idx(images)
        files[f"{stem}-labels-idx1-ubyte"] = idx(labels)
    return files


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a folder, which is made, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def cifar_files(num: int = 2) -> dict[str, bytes]:
    """The six files by name: in record i of file k, the label is (i + k) % 10."""
    names = [f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]
    pixels = np.random.default_rng(3).integers(0, 256, (len(names), num, 3072), np.uint8)
    return {
        name: b"".join(bytes([(i + k) % 10]) + pixels[k, i].tobytes() for i in range(num))
        for k, name in enumerate(names)
    }


def tar(files: Mapping[str, bytes], mode: str = "w:gz", extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    """An archive of files, and of members that have no content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            # Not by addfile, which has wanted the content from Python 3.13 on.
            header = member.tobuf(archive.format, archive.encoding, archive.errors)
            archive.fileobj.write(header)
            archive.offset += len(header)
    return out.getvalue()


def outcome(read: Callable[[], T]) -> T | DatasetError:
    """What reading gives, or how it is refused; any other error is raised."""
    try:
        return read()
    except DatasetError as error:
        return error
