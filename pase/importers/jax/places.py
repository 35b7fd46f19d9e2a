"""Where an equation comes from: the scope that names its vertex, and the line of the user's source."""

import re
from typing import Any

from pase.importers.ir import Origin

_WRAPPED = re.compile(r"^(?:jit|pjit|vmap|remat|checkpoint|rematted_computation|jvp|transpose|custom_\w+)\((.*)\)$")

_SCOPE = re.compile(r"[^\W_][\w.\-\[\]]*")
"""A name that somebody gave: not the equation of an einsum, nor a function without a name."""


class Places:
    """Names equations in the order in which they are read.

    A named scope (a flax module) is the scope. Without one, it is the path of the weight that is read, or else the
    user's function, beside the weight that was read last. entry: the user's outermost function, which tells nothing.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._last = ""

    def origin(self, equation: Any, operator: str, outer: tuple[str, ...], weight: str) -> Origin:
        """Return where an equation comes from.

        outer: scopes of the equations that it is within; "@f" is a function that is inlined, "#2" a turn of a loop.
        weight: path of the one that it reads, "" for none.
        """
        own = scopes(equation)
        plain = tuple(name for name in outer if name[0] not in "@#")
        # In a loop's body a module tells the whole of its path again.
        stack = (*outer, *(own[len(plain) :] if plain and own[: len(plain)] == plain else own))
        if weight:
            self._last = _layer(weight)
        function = _function(equation)
        named = [name.removeprefix("#") for name in stack if not name.startswith("@")]
        inlined = [name.removeprefix("@") for name in stack if name.startswith("@")]
        if any(name[0] not in "@#" for name in stack):
            scope = ".".join((*named, *inlined[-1:]))
        elif weight:
            scope = self._last
        else:
            told = inlined[-1] if inlined else function if function not in ("", self._entry) else operator
            beside = self._last.rpartition(".")[0]
            scope = f"{beside}.{told}" if beside else told
        return Origin(operator=operator, scope=scope, line=line(equation))


def scopes(equation: Any) -> tuple[str, ...]:
    """Return the named scopes of an equation, the outermost first, without those of transformations."""
    found = []
    for part in str(equation.source_info.name_stack).split("/"):
        wrapped = _WRAPPED.match(part)
        while wrapped is not None:
            part = wrapped.group(1)
            wrapped = _WRAPPED.match(part)
        if _SCOPE.fullmatch(part) and part not in _TRANSFORMED and not part.startswith(_OF_CLASSES):
            found.append(part)
    return tuple(found)


def _layer(weight: str) -> str:
    """Return the layer that a weight's path names: without a last part that says only which of its weights it is."""
    parts = weight.split(".")
    while len(parts) > 1 and _is_weight(parts[-1].lower()):
        parts.pop()
    return ".".join(parts)


def _is_weight(part: str) -> bool:
    return part in _LETTERS or part.startswith(_WEIGHTS)


def inlined(equation: Any) -> tuple[str, ...]:
    """Return the scope of a function that is inlined, marked as such: a name that tells what it computes, or none."""
    name = str(equation.params.get("name", ""))
    return () if not name or name.startswith(("<", "_")) else (f"@{name}",)


def line(equation: Any) -> str:
    """Return "file.py:12" of the user's source; "" where it is not known."""
    frame = _frame(equation)
    return "" if frame is None else f"{frame.file_name.rpartition('/')[2]}:{frame.start_line}"


def where(equation: Any) -> str:
    """Return " (file.py:12, in function)" for a message; "" where it is not known."""
    found, function = line(equation), _function(equation)
    return f" ({found}, in {function})" if found and function else f" ({found})" if found else ""


def _function(equation: Any) -> str:
    frame = _frame(equation)
    name = "" if frame is None else frame.function_name.rpartition(".")[2]
    return "" if name.startswith(("<", "__")) else name


def _frame(equation: Any) -> Any:
    """Return the innermost frame of the user's code."""
    from jax._src import source_info_util

    return source_info_util.user_frame(equation.source_info.traceback)


_TRANSFORMED = frozenset(
    {"jit", "pjit", "vmap", "remat", "checkpoint", "rematted_computation", "while", "body", "cond"}
)
"""Parts of a name stack that tell how the program is run, not what it is."""

_OF_CLASSES = ("eqx.", "equinox.")
"""Scopes that name a module's class alone; the paths of weights say which one it is."""

_WEIGHTS = ("weight", "bias", "kernel", "scale", "offset", "gamma", "beta", "embedding", "value")
"""How the last part of a path begins that says which weight of its layer it is."""

_LETTERS = frozenset("wbg")
"""The same, where it is one letter."""
