"""`import_model`: a model of a framework, by the first front end that takes it."""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import PurePath

from pase.errors import ModelError
from pase.graph import Graph, Scalar
from pase.importers.factory import call_factory, is_factory
from pase.importers.front_end import FrontEnd
from pase.importers.jax.function import JaxFrontEnd
from pase.importers.keras.model import KerasFrontEnd
from pase.importers.model import ImportedModel, imported
from pase.importers.onnx.file import OnnxFrontEnd
from pase.importers.torch.export import TorchFrontEnd

FRONT_ENDS: tuple[FrontEnd, ...] = (KerasFrontEnd(), TorchFrontEnd(), OnnxFrontEnd(), JaxFrontEnd())
"""By what they take: the first one wins."""


def import_model(
    source: object,
    *,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    is_strict: bool = False,
) -> ImportedModel:
    """Return a model of a framework with its graph and what every pass left of it.

    is_strict: refuse operators that nothing is known of. Raises ModelError as `load` does, MissingExtraError where the
    framework is not installed.
    """
    given = dict(arguments or {})
    source = fspath(source) if isinstance(source, PathLike) else source
    recorded: dict[str, Scalar] = {} if batch is None else {"batch": batch}
    recorded |= given
    if isinstance(source, str) and is_factory(source):
        made, took_batch = call_factory(source, batch=batch, arguments=given, front_ends=FRONT_ENDS)
        source, given, batch = made, {}, None if took_batch else batch
        if isinstance(source, str | PathLike):
            raise ModelError(f"the factory returned {source!r}; expected a model of a framework")
        if isinstance(source, Graph):
            raise ModelError(
                f"the factory returned the Graph {source.name!r}; graphs made with Builder are searched from Python: "
                "pase.search(graph, devices=8)"
            )
    for front_end in FRONT_ENDS:
        if front_end.takes(source):
            return imported(
                front_end.trace(source, batch=batch, arguments=given), arguments=recorded, is_strict=is_strict
            )
    raise ModelError(_refused(source))


def _refused(source: object) -> str:
    if not isinstance(source, str):
        return (
            f"a model of type {type(source).__name__} cannot be imported; give the name of a built-in network, a "
            "Graph, a torch module with example inputs, a Keras model or a JAX function with abstract arguments"
        )
    suffix = PurePath(source).suffix.lower()
    if suffix in _PICKLES:
        return (
            f"{source!r} is a pickle, and reading one runs the code in it: it is refused; write a function that makes "
            "the module and returns it with example inputs and name that, package.module:function, or export it to ONNX"
        )
    return (
        f"{source!r} looks like a file of a kind that PaSE does not read; it reads .onnx and .keras files, built-in "
        "networks ('pase models') and functions given as package.module:function"
    )


_PICKLES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib"})
