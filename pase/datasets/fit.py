"""Whether data are what a model reads: nothing is resized, cut or converted in silence."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from types import MappingProxyType

from pase.datasets.dataset import LABELS, Array, Dataset
from pase.errors import DatasetError
from pase.targets.mesh_tensorflow.runtime.data import DataInput


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
