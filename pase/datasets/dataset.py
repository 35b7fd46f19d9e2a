"""`Dataset`: arrays of examples by the names under which programs read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from pase.datasets.normalise import Moments, normalised
from pase.errors import DatasetError

Array = np.ndarray[Any, Any]

Part = Literal["train", "test"]
"""What is trained on, or what is kept back to test with."""

PARTS: tuple[Part, ...] = ("train", "test")

INPUTS = "inputs"
LABELS = "labels"


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
