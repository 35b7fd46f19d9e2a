"""Writes the 8×8 digits that scikit-learn ships as data for LeNet-5: ``python -m scripts.digits DIR``.

An image is enlarged three times and given a border of 2, which makes it 28×28, with values from -1 to 1. The examples
are shuffled, always in the same way: 1440 to train on, 357 to test on.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

NUM_TRAIN = 1440


def digits() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Return inputs [N, 1, 28, 28] and labels [N] of the two sets, train and test."""
    from sklearn.datasets import load_digits

    shipped = load_digits()
    order = np.random.default_rng(0).permutation(len(shipped.target))
    images = np.kron(shipped.images[order] / 8 - 1, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)), constant_values=-1)[:, np.newaxis].astype(np.float32)
    labels = shipped.target[order].astype(np.int32)
    return {
        "train": {"inputs": images[:NUM_TRAIN], "labels": labels[:NUM_TRAIN]},
        "test": {"inputs": images[NUM_TRAIN:], "labels": labels[NUM_TRAIN:]},
    }


def write(folder: Path) -> list[Path]:
    """Write ``train.npz`` and ``test.npz`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, arrays in digits().items():
        paths.append(folder / f"{name}.npz")
        np.savez_compressed(paths[-1], **arrays)  # type: ignore[arg-type]
    return paths


def main() -> None:
    """Write the files to the folder that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m scripts.digits DIR")
    for path in write(Path(sys.argv[1])):
        print(path)


if __name__ == "__main__":
    main()
