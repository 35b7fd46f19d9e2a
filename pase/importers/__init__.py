"""Where models come from: `load` takes whatever the user has; `frameworks` knows the front ends."""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import PurePath

from pase._loading import names_on_demand
from pase.errors import ModelError
from pase.graph import Graph, Scalar, verify
from pase.importers.front_end import is_factory

# Searches of built-in networks lower nothing.
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

    source: a `Graph` as it is; the name of a built-in network; ``"package.module:factory"``, a function of the user's,
    whose code is then executed; a model file; a model of a framework. batch: examples in one training step, the model's
    own default where it is None. arguments: of the builder or the factory. is_strict: refuse a model with operators
    that nothing is known of. Raises ModelError where nothing takes it.
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
