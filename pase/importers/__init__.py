"""Import of models: `load` accepts any supported source; `frameworks` lists the front ends."""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import PurePath

from pase._loading import names_on_demand
from pase.errors import ModelError
from pase.graph import Graph, Scalar, verify
from pase.importers.front_end import is_factory

# Searches of built-in networks do not need lowering.
__getattr__, __dir__ = names_on_demand(__name__, {"pase.importers.lower.vertices": ("OPERATORS",)})

__all__ = ["MODEL_SUFFIXES", "OPERATORS", "is_builtin", "load"]

MODEL_SUFFIXES = frozenset(
    {
        *(".onnx", ".keras", ".h5", ".hdf5", ".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".pb"),
        *(".tflite", ".safetensors"),
    }
)
"""Of files that hold models, whether they can be imported or are refused with a reason."""

_SUFFIXES = MODEL_SUFFIXES | {".py", ".npz", ".json"}


def load(
    source: object,
    *,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    is_strict: bool = False,
) -> Graph:
    """Return the verified graph of a model.

    Args:
        source: A `Graph`, returned unchanged; the name of a built-in network; ``"package.module:factory"``, a user's
            function, whose code is executed; a model file; or a framework's model.
        batch: Examples in one training step; default: the model's own.
        arguments: Arguments of the builder or the factory.
        is_strict: Whether to reject a model with unknown operators.

    Raises:
        ModelError: No front end accepts the source.
    """
    if isinstance(source, Graph):
        if batch is not None or arguments:
            raise ModelError(f"graph {source.name!r} is built already: a batch or arguments cannot change it any more")
        return verify(source)
    source = fspath(source) if isinstance(source, PathLike) else source
    if is_builtin(source):
        from pase.models import build

        return build(str(source), batch=batch, arguments=arguments or {})
    # Not before: with its tables of operators it takes longer to load than all the rest of PaSE.
    from pase.importers.frameworks import import_model

    return import_model(source, batch=batch, arguments=arguments, is_strict=is_strict).graph


def is_builtin(source: object) -> bool:
    """Return whether a source is the name of a built-in network (or of none at all): no path and no function."""
    if not isinstance(source, str) or is_factory(source):
        return False
    return not ("/" in source or "\\" in source or PurePath(source).suffix.lower() in _SUFFIXES)
