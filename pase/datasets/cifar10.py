"""CIFAR-10 in its binary format (Krizhevsky 2009): records of a label and 32×32 pixels, red, then green, then blue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pase.datasets.cifar10_files import NAMES, read_files
from pase.datasets.dataset import Dataset, Part, check_labels, labelled_images
from pase.datasets.normalise import moments

Array = np.ndarray[Any, Any]

NUM_CLASSES = 10
IMAGE = (3, 32, 32)
"""Channels, height, width."""


def read(path: Path | None, part: Part) -> Dataset:
    """Return one part of CIFAR-10, from a folder or an archive: inputs [N, 3, 32, 32], normalised, and labels [N].

    Mean and deviation are those of the images to train on, one of each for the three colours, for both parts. Raises
    DatasetError where a file is missing, damaged, or of the Python version.
    """
    assert path is not None
    parts: tuple[Part, ...] = ("train", part)
    records = read_files(path, [name for name in NAMES if NAMES[name] in parts])
    for name, of_file in records.items():
        check_labels(of_file[:, 0], NUM_CLASSES, f"{name} of {path}")
    images = {of: np.concatenate([r[:, 1:] for r in _of_part(records, of)]) for of in parts}
    return labelled_images(
        "cifar10",
        part,
        images[part].reshape(-1, *IMAGE),
        np.concatenate([r[:, 0] for r in _of_part(records, part)]),
        num_classes=NUM_CLASSES,
        called=f"cifar10:{path}",
        by=moments(images["train"]),
    )


def _of_part(records: Mapping[str, Array], part: Part) -> list[Array]:
    return [of_file for name, of_file in records.items() if NAMES[name] == part]
