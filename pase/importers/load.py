"""`load`: from what the user names to a graph, by the first importer that takes it."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Protocol

from pase.errors import ModelError
from pase.graph import Graph, Scalar, verify
from pase.importers.builtin import BuiltinImporter


class Importer(Protocol):
    """One front end: one module and one line in IMPORTERS for each."""

    def takes(self, source: object) -> bool:
        """Return whether the source is of this importer's kind (not whether it can be imported)."""
        ...

    def load(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Graph:
        """Return the graph of a source that this importer takes; ModelError where it cannot be imported."""
        ...


IMPORTERS: tuple[Importer, ...] = (BuiltinImporter(),)


def load(source: object, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None) -> Graph:
    """Return the verified graph of a model: a `Graph` as it is, or the name of a built-in network.

    batch: examples in one training step, the model's own default where it is None. arguments: parameters of
    the builder. Raises ModelError where nothing takes the source.
    """
    if isinstance(source, Graph):
        if batch is not None or arguments:
            raise ModelError(f"graph {source.name!r} is built already: a batch or arguments cannot change it any more")
        return verify(source)
    source = fspath(source) if isinstance(source, PathLike) else source
    for importer in IMPORTERS:
        if importer.takes(source):
            return importer.load(source, batch=batch, arguments=arguments or {})
    if isinstance(source, str):
        raise ModelError(
            f"{source!r} looks like a file; this version of PaSE searches built-in networks ('pase models') and graphs "
            "written with pase.graph.Builder, but reads no model files yet"
        )
    raise ModelError(
        f"a model of type {type(source).__name__} cannot be imported; give the name of a built-in network or a Graph"
    )
