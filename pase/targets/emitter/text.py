"""Safe generation of program text and other formats: no external text becomes part of it without quoting.

`Grammar.write` fills in templates that are literals in PaSE's own source. Words are looked up (`word`), variable names
are generated (`Identifiers`), numbers are formatted as numbers, and all other text is quoted.
"""

import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from pase.errors import EmitError, unknown_name

WIDTH = 120

_LONGEST_NAME = 48
_LONGEST_LINE = 1000


class Text(str):
    """Text of a program or a format that is inserted into templates unchanged; only this module creates it.

    Anything derived from it by other means (slices, f-strings, `join`) is a plain `str` again, and is quoted.
    """

    __slots__ = ()


Part = Text | str | float | Sequence["Part"]
"""An argument of a template: text unchanged, other text quoted, a number, or a list of these."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that text is written in.

    Attributes:
        quoted: Returns any text as a literal of the language.
        between: Separator of the items of a list.
    """

    quoted: Callable[[str], str]
    between: str = ", "

    def write(self, template: str, *parts: Part) -> Text:
        """Fill the places {} of a template with parts; every call passes the template as a literal."""
        between = template.split("{}")
        assert len(between) == len(parts) + 1, f"{template!r} has {len(between) - 1} places for {len(parts)} parts"
        filled = (f"{self._written(part)}{after}" for part, after in zip(parts, between[1:], strict=True))
        return Text(between[0] + "".join(filled))

    def _written(self, part: Part) -> str:
        match part:
            case Text():
                return part
            case str():
                return self.quoted(part)
            case int():
                return str(part)
            case float():
                return repr(part) if isfinite(part) else f'float("{part}")'
            case _:
                return self.between.join(map(self._written, part))


def word(name: str, vocabulary: Iterable[str], what: str = "word") -> Text:
    """Return a name's word of a vocabulary, a literal of PaSE's source; EmitError where it has none."""
    known = tuple(vocabulary)
    if name not in known:
        raise EmitError(unknown_name(what, name, known))
    return Text(known[known.index(name)])


def identifier(name: str) -> Text:
    """Return a name that is a valid Python identifier already."""
    assert name.isidentifier(), f"{name!r} is not an identifier"
    return Text(name)


def figure(value: float, form: str) -> Text:
    """Return a number in a given format, such as ".2f"."""
    return Text(format(value, form))


def joined(lines: Iterable[Text], separator: str = "\n") -> Text:
    """Join lines of text."""
    found = tuple(lines)
    assert all(isinstance(line, Text) for line in found), "a line was not made by Grammar.write"
    return Text(separator.join(found))


class Identifiers:
    """Assigns a unique identifier to each name; never a keyword, a builtin or a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        # A lone l is easily mistaken for a 1.
        self._used = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "l", *reserved}

    def new(self, name: str, *, fallback: str = "layer") -> Text:
        """Return a new identifier that resembles the name."""
        plain = re.sub(r"[^0-9a-z_]", "_", name.lower())[:_LONGEST_NAME].strip("_")
        if not plain or plain[0].isdigit():
            plain = f"{fallback}_{plain}".rstrip("_")
        identifier, count = plain, 1
        while identifier in self._used:
            count += 1
            identifier = f"{plain}_{count}"
        self._used.add(identifier)
        return Text(identifier)


def quoted(text: str) -> str:
    """Return a Python string literal of any text, with special characters escaped."""
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
    """Return text for a comment or a docstring: one line, without quotes and backslashes, truncated."""
    shown = "".join(c if c.isprintable() and c not in {'"', "\\"} else "?" for c in text)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


code = Grammar(quoted).write
"""Returns Python text: a template with its places filled in."""

INDENT = code("    ")


def comment(text: str) -> Text:
    """Return a comment of Python, which ends with its line."""
    return Text(f"# {printable(text, _LONGEST_LINE)}")


def docstring(lines: Iterable[str]) -> list[Text]:
    """Return the lines of a Python docstring; `Text` lines are inserted unchanged."""
    first, *others = (line if isinstance(line, Text) else Text(printable(line, _LONGEST_LINE)) for line in lines)
    return [Text(f'"""{first}'), *others, Text('"""')]
