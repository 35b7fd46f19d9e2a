"""The formats that a plan is written in, by name: each lives in a module of its own, imported when it is used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from pase.common.documents import StrPath, write_atomically
from pase.errors import ExportError, unknown_name
from pase.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a plan is written; fold: whether a drawing shows blocks that repeat once, with their number."""

    fold: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in another format; notes: what the format could not say, one line each, for people."""

    text: str
    notes: tuple[str, ...] = ()

    def save(self, path: StrPath) -> None:
        """Write the text to a file, replacing an old one atomically; ExportError where it cannot be written."""
        try:
            write_atomically(Path(path), self.text)
        except OSError as error:
            raise ExportError(f"{path} cannot be written: {error.strerror or error}") from None


Writer = Callable[[Plan, ExportOptions], Exported]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: its name on the command line, one line for people, the usual suffix of its files, its writer."""

    name: str
    summary: str
    suffix: str
    write: Writer


def export(plan: Plan, name: str, options: ExportOptions | None = None) -> Exported:
    """Return a plan in the format of that name; ExportError where there is none, or it cannot say the plan at all.

    The text can be encoded as UTF-8 and ends in a newline.
    """
    if name not in FORMATS:
        raise ExportError(unknown_name("format", name, FORMATS))
    return FORMATS[name].write(plan, options or ExportOptions())


def _written_by(module: str) -> Writer:
    """Return the function `write` of a module, which is imported at its first call."""

    def write(plan: Plan, options: ExportOptions) -> Exported:
        found: Writer = import_module(module).write
        return found(plan, options)

    return write


def _formats(*rows: tuple[str, str, str, str]) -> Mapping[str, Format]:
    return MappingProxyType(
        {
            name: Format(name=name, summary=summary, suffix=suffix, write=_written_by(f"pase.views.exports.{module}"))
            for name, module, suffix, summary in rows
        }
    )


FORMATS: Mapping[str, Format] = _formats(
    ("csv", "csv", ".csv", "a table, one row for each layer"),
    ("dot", "dot", ".dot", "the graph, for Graphviz"),
    ("mermaid", "mermaid", ".mmd", "the graph, for Markdown"),
    ("svg", "svg", ".svg", "the graph, as a picture"),
    ("mesh-tensorflow-layout", "mesh_tensorflow_layout", ".toml", "layout rules and mesh shapes of Mesh-TensorFlow"),
    ("jax", "jax", ".py", "PartitionSpecs on a named mesh, for JAX"),
    ("torch", "torch", ".py", "DTensor placements on a named mesh, for PyTorch"),
)
