"""The 8×8 digits that scikit-learn ships, as data for LeNet-5.

An image is enlarged three times and given a border of 2, which makes it 28×28, with values from -1 to 1. The examples
are shuffled, always in the same way: 1440 to train on, 357 to test on.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pase.datasets.dataset import INPUTS, LABELS, Dataset, Part, labelled_images
from pase.errors import missing_extra

Array = np.ndarray[Any, Any]

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


def read(path: Path | None, part: Part) -> Dataset:
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
