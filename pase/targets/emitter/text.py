"""The one way in which text of programs and of formats is made: nothing that comes from outside becomes part of it.

`Grammar.write` fills the places of a template that stands in PaSE's own source. Words are looked up (`word`), names of
variables are made (`Identifiers`), numbers are written as numbers, and all other text is quoted.
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
    """Text of a program or a format: what is written into more of it as it is. Only functions of this module make one.

    Whatever is made of it otherwise (slices, f-strings, `join`) is text from outside again, and is quoted.
    """

    __slots__ = ()


Part = Text | str | float | Sequence["Part"]
"""What is written into a template: text as it is, other text quoted, a number, or a list of these."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that text is written in.

    quoted: how any text stands in it, so that it is text and no more. between: what stands between the parts of a list.
    """

    quoted: Callable[[str], str]
    between: str = ", "

    def write(self, template: str, *parts: Part) -> Text:
        """Return a template with parts at its places, each marked {}; the template is a literal at every call."""
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
    """Return a name's word of a vocabulary, itself a literal of PaSE's source; EmitError where it has none."""
    known = tuple(vocabulary)
    if name not in known:
        raise EmitError(unknown_name(what, name, known))
    return Text(known[known.index(name)])


def identifier(name: str) -> Text:
    """Return a name that is an identifier of Python already."""
    assert name.isidentifier(), f"{name!r} is no identifier"
    return Text(name)


def figure(value: float, form: str) -> Text:
    """Return a number in a given form, ".2f"."""
    return Text(format(value, form))


def joined(lines: Iterable[Text], separator: str = "\n") -> Text:
    """Return lines of text as one."""
    found = tuple(lines)
    assert all(isinstance(line, Text) for line in found), "a line was not made by Grammar.write"
    return Text(separator.join(found))


class Identifiers:
    """Gives a different identifier to each name; never a keyword, a builtin or a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        # A lone l is taken for a 1.
        self._used = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "l", *reserved}

    def new(self, name: str, *, fallback: str = "layer") -> Text:
        """Return an identifier that reads like the name."""
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


code = Grammar(quoted).write
"""Returns text of Python: a template with parts at its places."""

INDENT = code("    ")


def comment(text: str) -> Text:
    """Return a comment of Python, which ends with its line."""
    return Text(f"# {printable(text, _LONGEST_LINE)}")


def docstring(lines: Iterable[str]) -> list[Text]:
    """Return the lines of a docstring of Python; those that are text already stand in it as they are."""
    first, *others = (line if isinstance(line, Text) else Text(printable(line, _LONGEST_LINE)) for line in lines)
    return [Text(f'"""{first}'), *others, Text('"""')]
