"""Writes the 8×8 digits that scikit-learn ships as data for LeNet-5: ``python -m scripts.digits DIR``."""

import sys
from pathlib import Path

import numpy as np

from pase.datasets.registry import digits
from pase.errors import MissingExtraError


def write(folder: Path) -> list[Path]:
    """Write ``train.npz`` and ``test.npz`` and return their paths."""
    arrays_of_parts = digits()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, arrays in arrays_of_parts.items():
        paths.append(folder / f"{name}.npz")
        np.savez_compressed(paths[-1], **arrays)  # type: ignore[arg-type]
    return paths


def main() -> None:
    """Write the files to the folder that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m scripts.digits DIR")
    try:
        paths = write(Path(sys.argv[1]))
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
