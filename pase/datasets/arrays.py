"""Arrays of the user's own: an ``.npz`` file, or a directory of ``.npy`` files, taken as they are."""

from pathlib import Path
from types import MappingProxyType

from pase.datasets.dataset import Dataset, Part, described
from pase.errors import DatasetError, RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.data import read_arrays


def read(path: Path | None, part: Part) -> Dataset:
    """Return the arrays of a path by name, whichever part they are; nothing is normalised.

    Raises DatasetError where they cannot be read.
    """
    assert path is not None
    try:
        arrays = read_arrays(path)
    except RuntimeFailure as error:
        raise DatasetError(str(error)) from None
    return Dataset(
        arrays=MappingProxyType(arrays),
        num_classes=None,
        called=str(path),
        description=MappingProxyType(described("arrays", part, arrays)),
    )
