"""Exports of a plan in formats that other programs read; the module of each is imported when it is used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from pase.common.documents import StrPath, write_or_fail
from pase.errors import ExportError, unknown_name
from pase.planning.plan import Plan

__all__ = ["FORMATS", "ExportOptions", "Exported", "Format", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export; fold: whether a drawing shows repeated blocks once, with their number."""

    fold: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in another format; notes: what the format could not express, one line each."""

    text: str
    notes: tuple[str, ...] = ()

    def save(self, path: StrPath) -> None:
        """Write the text to a file, replacing an old one atomically; ExportError where it cannot be written."""
        write_or_fail(path, self.text, ExportError)


Writer = Callable[[Plan, ExportOptions], Exported]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: a one-line description, and its writer."""

    summary: str
    write: Writer


def export(plan: Plan, name: str, options: ExportOptions | None = None) -> Exported:
    """Return a plan in the format of that name; ExportError for an unknown one, or if it cannot express the plan.

    The text can be encoded as UTF-8 and ends in a newline.
    """
    if name not in FORMATS:
        raise ExportError(unknown_name("format", name, FORMATS))
    return FORMATS[name].write(plan, options or ExportOptions())


def _format(summary: str, module: str, function: str = "write") -> Format:
    """Return the format whose writer is a function of a module, imported at its first call."""

    def write(plan: Plan, options: ExportOptions) -> Exported:
        found: Writer = getattr(import_module(f"pase.views.exports.{module}"), function)
        return found(plan, options)

    return Format(summary=summary, write=write)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "csv": _format("a table, one row for each layer", "tables"),
        "dot": _format("the graph, for Graphviz", "graph_text", "write_dot"),
        "mermaid": _format("the graph, for Markdown", "graph_text", "write_mermaid"),
        "svg": _format("the graph, as a picture", "svg"),
        "mesh-tensorflow-layout": _format("layout rules and mesh shapes of Mesh-TensorFlow", "mesh_tensorflow_layout"),
        "jax": _format("PartitionSpecs on a named mesh, for JAX", "named_mesh", "write_jax"),
        "torch": _format("DTensor placements on a named mesh, for PyTorch", "named_mesh", "write_torch"),
    }
)
