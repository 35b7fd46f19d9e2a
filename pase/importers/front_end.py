"""`FrontEnd`: what every front end offers, and what they have in common."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from pase.errors import missing_extra
from pase.graph import Scalar

if TYPE_CHECKING:
    # It is the start of `pase` that waits for what is imported here.
    from pase.importers.ir import Trace


class FrontEnd(Protocol):
    """A source of models: one module and one line in FRONT_ENDS for each.

    package: the framework that it needs, imported when a model is traced and not before. extra: of PaSE, installs it.
    """

    package: str
    extra: str

    def takes(self, source: object) -> bool:
        """Return whether a source is of this kind (not whether it can be imported)."""
        ...

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> "Trace":
        """Return the trace of a source that this front end takes; ModelError where it cannot be traced.

        batch: examples in a step, in place of those of the source. arguments: of the source's own, if it has any.
        """
        ...

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context in which the framework makes models without allocating their weights."""
        ...


def framework(package: str, extra: str) -> ModuleType:
    """Return a framework's module; MissingExtraError where it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise missing_extra(f"this model needs {package}, which is not installed", extra) from None


def first_line(error: BaseException) -> str:
    """Return the class of an error, and the first line of its message."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"
