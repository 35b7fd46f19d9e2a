"""The sources of data, by name: one line here for each; and the published sets of images among them.

Digits are the 8×8 ones of scikit-learn, enlarged three times and given a border of 2, which makes them 28×28, with
values from -1 to 1, and shuffled, always in the same way: 1440 to train on, 357 to test on. MNIST is four IDX files
(LeCun, Cortes and Burges). CIFAR-10 is records of a label and 32×32 pixels, red, then green, then blue (Krizhevsky
2009), in files of a folder or in the archive as it was downloaded, which is not unpacked. Both are read within the
sizes of the published files: an archive that unpacks to more is not read to its end.
"""

import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.datasets.dataset import (
    INPUTS,
    LABELS,
    PARTS,
    Array,
    Dataset,
    Part,
    Read,
    Source,
    check_labels,
    labelled_images,
    listed,
    moments,
    opened,
    read_idx,
    read_own_arrays,
)
from pase.errors import DatasetError, missing_extra, unknown_name

NUM_TRAIN = 1440
NUM_CLASSES = 10


def digits() -> dict[Part, dict[str, Array]]:
    """Return inputs, float32 [N, 1, 28, 28], and labels, int32 [N], of the two parts, train and test.

    Raises MissingExtraError where scikit-learn is not installed.
    """
    shipped = _shipped()
    order = np.random.default_rng(0).permutation(len(shipped.target))
    images = np.kron(shipped.images[order] / 8 - 1, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)), constant_values=-1)[:, np.newaxis].astype(np.float32)
    labels = shipped.target[order].astype(np.int32)
    return {
        "train": {INPUTS: images[:NUM_TRAIN], LABELS: labels[:NUM_TRAIN]},
        "test": {INPUTS: images[NUM_TRAIN:], LABELS: labels[NUM_TRAIN:]},
    }


def read_digits(path: Path | None, part: Part) -> Dataset:
    """Return one part of the digits, with values from -1 to 1; there is no path."""
    assert path is None
    arrays = digits()[part]
    return labelled_images(
        "digits", part, arrays[INPUTS], arrays[LABELS], num_classes=NUM_CLASSES, called="digits", by=None
    )


def _shipped() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sklearn":
            raise
        raise missing_extra("the digits come with scikit-learn, which is not installed", "data") from None
    return load_digits()


_STEM: Mapping[Part, str] = MappingProxyType({"train": "train", "test": "t10k"})
_SPELLINGS = ("{}-idx{}-ubyte", "{}-idx{}-ubyte.gz", "{}.idx{}-ubyte", "{}.idx{}-ubyte.gz")
"""As on LeCun's site, unpacked by hand or not; with a dot, as some programs unpack them."""


def read_mnist(folder: Path | None, part: Part) -> Dataset:
    """Return one part of the MNIST files of a folder: inputs [N, 1, height, width], normalised, and labels [N].

    Mean and deviation are those of the images to train on, for both parts. Raises DatasetError where a file is missing
    or damaged, or where the files do not belong together.
    """
    assert folder is not None
    images, labels = _read_part(folder, part)
    to_train_on = images if part == "train" else _read_idx(folder, "train", "images", num_dims=3)
    if images.shape[1:] != to_train_on.shape[1:]:
        raise DatasetError(
            f"mnist:{folder}: images to {part} with are {_image_size(images)}, those to train on "
            f"{_image_size(to_train_on)}; expected one size: take all files from one data set"
        )
    return labelled_images(
        "mnist",
        part,
        images[:, np.newaxis],
        labels,
        num_classes=NUM_CLASSES,
        called=f"mnist:{folder}",
        by=moments(to_train_on),
    )


def _read_part(folder: Path, part: Part) -> tuple[Array, Array]:
    """Return images [N, height, width] and labels [N], which are checked."""
    images = _read_idx(folder, part, "images", num_dims=3)
    labels = _read_idx(folder, part, "labels", num_dims=1)
    if len(images) != len(labels):
        raise DatasetError(
            f"mnist:{folder}: {len(images)} images to {part} with and {len(labels)} labels; expected one label for "
            "each image: take both files from one data set"
        )
    check_labels(labels, NUM_CLASSES, str(_idx_file(folder, part, "labels", num_dims=1)))
    return images, labels


def _read_idx(folder: Path, part: Part, what: str, *, num_dims: int) -> Array:
    return read_idx(_idx_file(folder, part, what, num_dims=num_dims), num_dims=num_dims)


def _idx_file(folder: Path, part: Part, what: str, *, num_dims: int) -> Path:
    """Return the file of images or labels, in the first of its spellings that there is."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise DatasetError(f"{folder} {found}; expected the folder of the MNIST files: give mnist:FOLDER")
    names = [spelling.format(f"{_STEM[part]}-{what}", num_dims) for spelling in _SPELLINGS]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DatasetError(
        f"{folder} has no {' or '.join(names)}; {listed(folder)}: expected the four MNIST files, under those names"
    )


def _image_size(images: Array) -> str:
    return "×".join(map(str, images.shape[1:]))


RECORD_BYTES = 1 + 3 * 32 * 32
MAX_RECORDS = 10_000
"""In one file, as published."""

CIFAR10_FILES: Mapping[str, Part] = MappingProxyType(
    {**{f"data_batch_{i}.bin": "train" for i in range(1, 6)}, "test_batch.bin": "test"}
)
"""The files, in the order of their examples, and the part that each belongs to."""

_FOLDER = "cifar-10-batches-bin"
_MAX_ARCHIVE_BYTES = len(CIFAR10_FILES) * RECORD_BYTES * MAX_RECORDS + (1 << 20)
"""Of an unpacked archive: six files, and room for headers and the pages that come with them."""
_MAX_MEMBERS = 100
"""An empty file costs its archive next to nothing, once compressed."""
_MAX_EMPTY_READS = 8
"""At the end of an archive: what looks for its end needs one or two."""

_BINARY = "the binary version, cifar-10-binary.tar.gz"
_PICKLED = (
    "holds CIFAR-10's Python version, which is pickles; reading a pickle executes what is in it, so PaSE reads none: "
    f"download {_BINARY}, from the same page"
)


def read_cifar10_files(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Return the records [N, 3073] of some of the files, by name, in that order.

    path: a folder that has them, the folder around that, or the archive. Raises DatasetError where one is missing,
    holds no whole number of records or more than were published, or where the archive is damaged.
    """
    if path.is_dir():
        return _read_folder(path, names)
    if not path.is_file():
        found = "is no plain file" if path.exists() else "does not exist"
        raise DatasetError(f"{path} {found}; expected a folder of CIFAR-10, or {_BINARY}: give cifar10:PATH")
    return _read_archive(path, names)


def _read_folder(path: Path, names: Sequence[str]) -> dict[str, Array]:
    inner = path / _FOLDER
    folder = inner if inner.is_dir() and not any((path / name).exists() for name in CIFAR10_FILES) else path
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        _refuse_pickles(path, (item.name for item in folder.iterdir()))
        raise DatasetError(
            f"{folder} has no {', '.join(missing)}; {listed(folder)}: expected the files of {_BINARY}, unpacked"
        )
    records = {}
    for name in names:
        with (folder / name).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            _check_size(size_bytes, f"{folder / name}")
            records[name] = _records(file.read(size_bytes), size_bytes, f"{folder / name}")
    return records


def _read_archive(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Read an archive from its beginning to its end, once; what is in it is neither written nor executed."""
    found: dict[str, Array] = {}
    others: list[str] = []
    with opened(path) as content:
        bounded = _Bounded(content.stream, _MAX_ARCHIVE_BYTES, path)
        try:
            with tarfile.open(fileobj=bounded, mode="r|", bufsize=1 << 20) as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = _own_name(member.name)
                    if name is None:
                        others.append(member.name)
                        if len(others) > _MAX_MEMBERS:
                            raise DatasetError(f"{path} holds more than {_MAX_MEMBERS} other files; expected {_BINARY}")
                        continue
                    where = f"{member.name} in {path}"
                    _check_member(member, where, is_first=name not in found)
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = _records(file.read(member.size), member.size, where)
        # A chain of headers that announce headers has no end but Python's stack.
        except (tarfile.TarError, ValueError, RecursionError) as error:
            if _begins_as_pickle(path):
                raise DatasetError(f"{path} {_PICKLED}") from None
            raise DatasetError(
                f"{path} cannot be read as an archive: {error}; expected {_BINARY}, whole: download it again"
            ) from None
        # A tar file has no checksum of what is in it: gzip's, at the very end, is the only one.
        while bounded.read(1 << 20):
            pass
    missing = [name for name in names if name not in found]
    if missing:
        _refuse_pickles(path, (part for other in others for part in PurePosixPath(other).parts))
        holds = ", ".join([*found, *others][:6]) or "nothing"
        raise DatasetError(f"{path} has no {', '.join(missing)}; it holds {holds}: expected {_BINARY}, whole")
    return {name: found[name] for name in names}


class _Bounded:
    """A stream that is not read beyond what an archive of CIFAR-10 holds: few bytes can unpack to very many."""

    def __init__(self, stream: Any, most_bytes: int, path: Path) -> None:
        self._stream = stream
        self._left_bytes = most_bytes
        self._path = path
        self._num_empty = 0

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, at most num_bytes."""
        data: bytes = self._stream.read(num_bytes)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise DatasetError(
                f"{self._path} unpacks to more than {_MAX_ARCHIVE_BYTES} bytes, more than CIFAR-10 has; "
                f"expected {_BINARY}"
            )
        # A header may announce 2^80 bytes, which tarfile passes over a piece at a time whether or not there are any.
        self._num_empty += not data
        if self._num_empty > _MAX_EMPTY_READS:
            raise DatasetError(f"{self._path} ends within a file; expected {_BINARY}, whole: download it again")
        return data


def _own_name(name: str) -> str | None:
    """Return which of the files a member of the archive is, if any: at the top, or in the folder that it came in."""
    path = PurePosixPath(name)
    return path.name if path.name in CIFAR10_FILES and str(path.parent) in {".", _FOLDER} else None


def _check_member(member: tarfile.TarInfo, where: str, *, is_first: bool) -> None:
    if not member.isreg() or member.issparse():
        raise DatasetError(f"{where} is a link or no plain file; expected a file of records: download {_BINARY}")
    if not is_first:
        raise DatasetError(f"{where} is there a second time; expected each file once: download {_BINARY}")
    _check_size(member.size, where)


def _check_size(size_bytes: int, where: str) -> None:
    num_records, rest = divmod(size_bytes, RECORD_BYTES)
    if rest or not 1 <= num_records <= MAX_RECORDS:
        raise DatasetError(
            f"{where} has {size_bytes} bytes; expected 1 to {MAX_RECORDS} records of {RECORD_BYTES} bytes each: "
            "the file is incomplete or damaged, or holds other data; download it again"
        )


def _records(data: bytes, size_bytes: int, where: str) -> Array:
    if len(data) != size_bytes:
        raise DatasetError(f"{where} ends after {len(data)} of {size_bytes} bytes: download it again")
    return np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)


def _refuse_pickles(path: Path, names: Iterable[str]) -> None:
    pickled = {"cifar-10-batches-py", *(name.removesuffix(".bin") for name in CIFAR10_FILES)}
    if pickled.intersection(names):
        raise DatasetError(f"{path} {_PICKLED}")


def _begins_as_pickle(path: Path) -> bool:
    """Return whether a file's first bytes say that it is a pickle of version 2 or later."""
    with path.open("rb") as file:
        first = file.read(2)
    return len(first) == 2 and first[0] == 0x80 and 2 <= first[1] <= 5


_CIFAR10_IMAGE = (3, 32, 32)
"""Channels, height, width."""


def read_cifar10(path: Path | None, part: Part) -> Dataset:
    """Return one part of CIFAR-10, from a folder or an archive: inputs [N, 3, 32, 32], normalised, and labels [N].

    Mean and deviation are those of the images to train on, one of each for the three colours, for both parts. Raises
    DatasetError where a file is missing, damaged, or of the Python version.
    """
    assert path is not None
    parts: tuple[Part, ...] = ("train", part)
    records = read_cifar10_files(path, [name for name in CIFAR10_FILES if CIFAR10_FILES[name] in parts])
    for name, of_file in records.items():
        check_labels(of_file[:, 0], NUM_CLASSES, f"{name} of {path}")
    images = {of: np.concatenate([r[:, 1:] for r in _of_part(records, of)]) for of in parts}
    return labelled_images(
        "cifar10",
        part,
        images[part].reshape(-1, *_CIFAR10_IMAGE),
        np.concatenate([r[:, 0] for r in _of_part(records, part)]),
        num_classes=NUM_CLASSES,
        called=f"cifar10:{path}",
        by=moments(images["train"]),
    )


def _of_part(records: Mapping[str, Array], part: Part) -> list[Array]:
    return [of_file for name, of_file in records.items() if CIFAR10_FILES[name] == part]


def _entries(*rows: tuple[str, str, str, Read, bool]) -> Mapping[str, Source]:
    return MappingProxyType(
        {
            name: Source(
                name=name,
                form=f"{name}:{path}" if path else name,
                description=description,
                needs_path=bool(path),
                has_parts=has_parts,
                read=read,
            )
            for name, path, description, read, has_parts in rows
        }
    )


SOURCES: Mapping[str, Source] = _entries(
    ("digits", "", "8×8 digits that scikit-learn ships, enlarged to 1×28×28", read_digits, True),
    ("mnist", "FOLDER", "MNIST, 1×28×28: the four IDX files, plain or .gz", read_mnist, True),
    ("cifar10", "PATH", "CIFAR-10, 3×32×32: folder of the binary version, or its .tar.gz", read_cifar10, True),
    ("arrays", "PATH", "arrays of your own: an .npz file, or a folder of .npy files", read_own_arrays, False),
)


def load_dataset(text: str, *, part: Part = "train") -> Dataset:
    """Return one part of the data that a user names: ``digits``, ``mnist:FOLDER``, ``cifar10:PATH`` or a path.

    A plain path is that of arrays, which are one part, whichever is asked for. Images and labels are as Dataset says;
    those of MNIST and CIFAR-10 have E(X) = 0 and σ(X) = 1 over the images to train on (You et al. 2017, Algorithm 1,
    line 1). Raises DatasetError where there are no such data, or they are damaged; MissingExtraError.
    """
    if part not in PARTS:
        raise DatasetError(unknown_name("part", part, PARTS))
    source, path = _named(text)
    try:
        return source.read(path, part)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"cannot read {text}: {reason}; expected files that can be read") from None
    except MemoryError:
        raise DatasetError(f"{text} does not fit in memory; train on fewer examples, or where there is more") from None


def has_parts(text: str) -> bool:
    """Return whether a text names examples to test with beside those to train on; DatasetError for no data at all."""
    return _named(text)[0].has_parts


def _named(text: str) -> tuple[Source, Path | None]:
    """Return the source that a text names and the path in it: a name of the registry comes before a file's."""
    name, _, rest = text.partition(":")
    source = SOURCES.get(name)
    if source is None:
        return SOURCES["arrays"], _own_path(text)
    if source.needs_path != bool(rest):
        problem = "needs a path" if source.needs_path else "takes no path"
        raise DatasetError(
            f"data {text!r}: {name} {problem}; expected {source.form} (for a file of that name: ./{text})"
        )
    return source, _path(rest) if rest else None


def _own_path(text: str) -> Path:
    path = _path(text)
    try:
        if text and path.exists():
            return path
    except (OSError, ValueError):
        pass  # no name of a file: one that is too long, for example
    forms = ", ".join(source.form for source in SOURCES.values())
    raise DatasetError(
        f"there are no data {text!r}; expected {forms}, or the path of an .npz file or a folder of .npy files"
    )


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()  # the shell expands no ~ behind a colon
    except RuntimeError as error:
        raise DatasetError(f"path {text!r}: {error}; write it out") from None
