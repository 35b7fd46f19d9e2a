"""Names of a package that are loaded when they are first asked for (PEP 562)."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def names_on_demand(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``; names: those that each of its modules gives.

    No name may be that of a module of the package: importing the module would put it in the name's place.
    """
    homes = {name: module for module, given in names.items() for name in given}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value: object = getattr(import_module(homes[name]), name)
        # The next time it is found without asking.
        setattr(sys.modules[package], name, value)
        return value

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, known


def method_of_plans(name: str) -> Callable[..., Any]:
    """Return the function that a method of `Plan` is: what it does stands above plans, which know nothing of it.

    The package itself says where, as it does of its public names; it is loaded before any of its modules.
    """
    module, function = sys.modules[__package__].METHODS_OF_PLANS[name]
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
