"""`FrontEnd`: the interface of all front ends; and factories, user functions that make a model.

Naming a factory, ``package.module:function``, permits its code to run.
"""

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from pase.errors import ModelError, missing_extra
from pase.graph import Scalar

if TYPE_CHECKING:
    # Imports here delay the start of `pase`.
    from pase.importers.ir.trace import Trace


class FrontEnd(Protocol):
    """A front end for a source of models; each has one module and one entry in FRONT_ENDS.

    Attributes:
        package: Framework that it needs, imported only when a model is traced.
        extra: Extra of PaSE that installs it.
    """

    package: str
    extra: str

    def takes(self, source: object) -> bool:
        """Return whether a source is of this kind (not whether it can be imported)."""
        ...

    def trace(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> "Trace":
        """Return the trace of a source that this front end accepts; ModelError where it cannot be traced.

        Args:
            source: The source.
            batch: Examples in a step, replacing those of the source.
            arguments: Arguments of the source, if it takes any.
        """
        ...

    def without_weights(self) -> AbstractContextManager[object]:
        """Return a context in which models are created without allocating weights, if the framework can do that."""
        return nullcontext()


def framework(package: str, extra: str) -> ModuleType:
    """Return a framework's module; MissingExtraError where it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        raise missing_extra(f"this model needs {package}, which is not installed", extra) from None


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"


# -- factories


_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_factory(source: str) -> bool:
    """Return whether a source names a function of a module."""
    return _NAME.fullmatch(source) is not None


def call_factory(
    source: str, *, batch: int | None, arguments: Mapping[str, Scalar], front_ends: Sequence[FrontEnd]
) -> tuple[object, bool]:
    """Return the result of a factory, and whether it took the batch; models are created without weights.

    The current folder is searched for the module first.

    Raises:
        ModelError: The function does not exist, rejects an argument, or raises; its traceback is then on stderr.
        MissingExtraError: The module or the function imports a front end's framework that is not installed.
    """
    module_name, _, path = source.partition(":")
    extras = {front_end.package.partition(".")[0]: front_end.extra for front_end in front_ends}
    with _importing_from(Path.cwd()):
        function = _function(module_name, path, source, extras)
        given: dict[str, Scalar] = dict(arguments)
        parameters = _parameters(function)
        takes_batch = batch is not None and parameters is not None and "batch" in parameters and "batch" not in given
        if takes_batch and batch is not None:
            given["batch"] = batch
        _check_arguments(source, parameters, given)
        given = {name: _typed(parameters, name, value) for name, value in given.items()}
        with ExitStack() as stack:
            for front_end in front_ends:
                if _may_use(function, front_end.package.partition(".")[0]):
                    stack.enter_context(front_end.without_weights())
            try:
                return function(**given), takes_batch
            except Exception as error:
                _check_installed(error, source, extras)
                _show(error)
                raise ModelError(f"factory {source!r} failed: {first_line(error)}") from error


def _may_use(function: Callable[..., object], package: str) -> bool:
    """Whether a framework is loaded, or the function's own code names it and it can be: it may be imported there."""
    if package in sys.modules:
        return True
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return any(name.partition(".")[0] == package for name in names) and find_spec(package) is not None


def _check_installed(error: Exception, source: str, extras: Mapping[str, str]) -> None:
    """Raise MissingExtraError for a framework that could not be imported; extras: of PaSE, by package."""
    package = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if package in extras and find_spec(package) is None:
        raise missing_extra(f"{source!r} imports {package}, which is not installed", extras[package]) from None


def _function(module_name: str, path: str, source: str, extras: Mapping[str, str]) -> Callable[..., object]:
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            _check_installed(error, source, extras)
            _show(error)
            raise ModelError(f"module {module_name!r} of {source!r} cannot be imported: {error}") from error
        raise ModelError(
            f"there is no module {module_name!r} for factory {source!r}; it is looked for in the current folder and "
            "among the installed packages"
        ) from None
    except Exception as error:
        _show(error)
        raise ModelError(f"module {module_name!r} of {source!r} cannot be imported: {first_line(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ModelError(f"module {module_name!r} has no {path!r}; a factory is given as package.module:function")
        found = getattr(found, name)
    if not callable(found):
        raise ModelError(
            f"{source!r} is not a function but a {type(found).__name__}; name a function that returns the model"
        )
    return found


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters that can be given by name; None where any can, or where they are unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _check_arguments(
    source: str, parameters: Mapping[str, inspect.Parameter] | None, given: Mapping[str, Scalar]
) -> None:
    if parameters is None:
        return
    by_name = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    known = [name for name, parameter in parameters.items() if parameter.kind in by_name]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in given if name not in known]
    if unknown and not takes_any:
        takes = f"its parameters are {', '.join(known)}" if known else "it takes none"
        raise ModelError(f"factory {source!r} takes no argument {unknown[0]!r}; {takes}")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind in by_name and name not in given
    ]
    if missing:
        raise ModelError(f"factory {source!r} needs an argument {missing[0]!r}; give it as --arg {missing[0]}=VALUE")


def _typed(parameters: Mapping[str, inspect.Parameter] | None, name: str, value: Scalar) -> Scalar:
    """Convert a command-line value: it stays text only where the parameter's default or type is text."""
    if not isinstance(value, str):
        return value
    parameter = (parameters or {}).get(name)
    if parameter is not None and (isinstance(parameter.default, str) or parameter.annotation in (str, "str")):
        return value
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _show(error: BaseException) -> None:
    """Print the user's part of a traceback."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).resolve() == Path(__file__).resolve():
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
