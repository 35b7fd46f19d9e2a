"""MNIST in its original format: four IDX files of handwritten digits (LeCun, Cortes and Burges)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.datasets.dataset import Dataset, Part, check_labels, labelled_images, moments
from pase.datasets.files import listed, read_idx
from pase.errors import DatasetError

Array = np.ndarray[Any, Any]

NUM_CLASSES = 10

_STEM: Mapping[Part, str] = MappingProxyType({"train": "train", "test": "t10k"})
_SPELLINGS = ("{}-idx{}-ubyte", "{}-idx{}-ubyte.gz", "{}.idx{}-ubyte", "{}.idx{}-ubyte.gz")
"""As on LeCun's site, unpacked by hand or not; with a dot, as some programs unpack them."""


def read(folder: Path | None, part: Part) -> Dataset:
    """Return one part of the MNIST files of a folder: inputs [N, 1, height, width], normalised, and labels [N].

    Mean and deviation are those of the images to train on, for both parts. Raises DatasetError where a file is missing
    or damaged, or where the files do not belong together.
    """
    assert folder is not None
    images, labels = _read_part(folder, part)
    to_train_on = images if part == "train" else _read(folder, "train", "images", num_dims=3)
    if images.shape[1:] != to_train_on.shape[1:]:
        raise DatasetError(
            f"mnist:{folder}: images to {part} with are {_size(images)}, those to train on {_size(to_train_on)}; "
            "expected one size: take all files from one data set"
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
    images = _read(folder, part, "images", num_dims=3)
    labels = _read(folder, part, "labels", num_dims=1)
    if len(images) != len(labels):
        raise DatasetError(
            f"mnist:{folder}: {len(images)} images to {part} with and {len(labels)} labels; expected one label for "
            "each image: take both files from one data set"
        )
    check_labels(labels, NUM_CLASSES, str(_found(folder, part, "labels", num_dims=1)))
    return images, labels


def _read(folder: Path, part: Part, what: str, *, num_dims: int) -> Array:
    return read_idx(_found(folder, part, what, num_dims=num_dims), num_dims=num_dims)


def _found(folder: Path, part: Part, what: str, *, num_dims: int) -> Path:
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


def _size(images: Array) -> str:
    return "×".join(map(str, images.shape[1:]))
