"""The public names of a module as a page: for each one a directive that mkdocstrings fills in from its docstring."""

from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction
from types import ModuleType

PUBLIC = "pase"
"""The package whose names have a page of their own; other pages do not repeat them."""

PUBLIC_PAGE = "python.md"


def names_page(module_name: str) -> str:
    """Return a section for each public name of a module; what `pase` itself offers is told on its page alone."""
    module, public = import_module(module_name), import_module(PUBLIC)
    names = [name for name in _names(module) if not name.startswith("_")]
    repeated = [name for name in names if module is not public and name in public.__all__]
    lines = [line for name in names if name not in repeated for line in _directive(module, name)]
    if repeated:
        links = ", ".join(f"[`{name}`]({PUBLIC_PAGE}#{PUBLIC}.{name})" for name in repeated)
        lines = [f"Among the public names of `{PUBLIC}`: {links}.", "", *lines]
    return "\n".join(lines)


def _names(module: ModuleType) -> list[str]:
    """Return the names that a module offers: those that it lists, or all classes and functions of its own."""
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def _directive(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the lines of one name, under the name by which it is imported, from where it is defined."""
    shown = f"{module.__name__}.{name}"
    yield f'<a id="{shown}"></a>'
    yield ""
    yield f"::: {_home(module, name)}"
    yield "    options:"
    yield f'      heading: "{shown}"'
    yield f'      toc_label: "{name}"'
    yield ""


def _home(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if isclass(value) or isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{module.__name__}.{name}"
