"""Built-in networks, by name."""

from collections.abc import Mapping
from pathlib import PurePath

from pase.graph import Graph, Scalar
from pase.importers.factory import is_factory


def takes(source: str) -> bool:
    """Return whether a source is a name: everything is that is no path and no function."""
    return not is_factory(source) and not _looks_like_file(source)


def load(source: str, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Graph:
    """Return a built-in network; ModelError for an unknown name or parameter."""
    from pase.models import build

    return build(source, batch=batch, arguments=arguments)


MODEL_SUFFIXES = frozenset(
    {
        *(".onnx", ".keras", ".h5", ".hdf5", ".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".pb"),
        *(".tflite", ".safetensors"),
    }
)
"""Of files that hold models, whether they can be imported or are refused with a reason."""

_SUFFIXES = MODEL_SUFFIXES | {".py", ".npz", ".json"}


def _looks_like_file(source: str) -> bool:
    return "/" in source or "\\" in source or PurePath(source).suffix.lower() in _SUFFIXES
