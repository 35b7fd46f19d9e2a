"""Names in emitted programs: identifiers, strings and comments made of names that come from outside."""

import builtins
import keyword
import re
from collections.abc import Iterable

_LONGEST = 48


class Identifiers:
    """Gives a different identifier to each name; never a keyword, a builtin or a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        # A lone l is taken for a 1.
        self._used = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "l", *reserved}

    def new(self, name: str, *, fallback: str = "layer") -> str:
        """Return an identifier that reads like the name."""
        plain = re.sub(r"[^0-9a-z_]", "_", name.lower())[:_LONGEST].strip("_")
        if not plain or plain[0].isdigit():
            plain = f"{fallback}_{plain}".rstrip("_")
        identifier, count = plain, 1
        while identifier in self._used:
            count += 1
            identifier = f"{plain}_{count}"
        self._used.add(identifier)
        return identifier


def quoted(text: str) -> str:
    """Return a string literal of any text: it ends where it seems to end, and shows what it holds."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in {'"', "\\"}:
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def printable(text: str, longest: int = 60) -> str:
    """Return text for a comment or a docstring: one line, without quotes and backslashes, cut to a length."""
    shown = "".join(c if c.isprintable() and c not in {'"', "\\"} else "?" for c in text)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
