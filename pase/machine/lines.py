"""`field_lines`: in which line of a TOML text each field stands, which the parser of the standard library does not say.

The text is one that the parser has read, so that this scanner needs to recognise no error. What it finds is compared
with what the parser found, and nothing is returned where the two differ: no line is better than a wrong one.
"""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping

Path = tuple[str | int, ...]
"""Where a field stands: keys of tables and positions in arrays, ("levels", 0, "name")."""

_SPACE = re.compile(r"[ \t]*")
_SPACE_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# The longest alternatives first: a text in three quotes may end in two more.
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:""|")?|\'\'\'.*?\'\'\'(?:\'\'|\')?|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL
)
_OTHER_VALUE = re.compile(r"[^,\]}#\n]+")


def field_lines(text: str, document: Mapping[str, object]) -> dict[str, int]:
    """Return the line number, from 1, of every field of a TOML text, by its path "levels[0].name".

    document: what tomllib makes of the text. A table stands where its header or its key does; one that is only implied
    (a of [a.b]), where it is first implied. Paths that two fields have in common, by keys with dots in them, are left
    out; where the scanner did not find the very fields of the document, the result is empty.
    """
    try:
        starts = _Scanner(text).fields()
        if set(starts) != set(_paths(document)):
            return {}
    except (_UnexpectedText, tomllib.TOMLDecodeError, RecursionError):
        return {}
    line_ends = [match.start() for match in re.finditer("\n", text)]
    lines: dict[str, int] = {}
    ambiguous = {""}
    for path, start in starts.items():
        name = _name(path)
        if name in lines:
            ambiguous.add(name)
        lines[name] = bisect_right(line_ends, start) + 1
    return {name: line for name, line in lines.items() if name not in ambiguous}


def _paths(value: object, path: Path = ()) -> Iterator[Path]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key)
        yield from _paths(member, (*path, key))


def _name(path: Path) -> str:
    """Return a path as `Field` writes it."""
    name = ""
    for step in path:
        name = f"{name}[{step}]" if isinstance(step, int) else f"{name}.{step}" if name else step
    return name


class _UnexpectedText(Exception):  # noqa: N818
    """The scanner found what it knows no use for."""


class _Scanner:
    """Walks over a TOML text once; `fields` gives the offset of each field."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._starts: dict[Path, int] = {}
        self._explicit: set[Path] = set()
        self._num_tables: dict[Path, int] = {}

    def fields(self) -> dict[Path, int]:
        """Return the offset at which each field's key, header or element begins."""
        table: Path = ()
        self._skip(_SPACE_AND_COMMENTS)
        while self._at < len(self._text):
            if self._text.startswith("[[", self._at):
                table = self._header("[[", "]]")
            elif self._text.startswith("[", self._at):
                table = self._header("[", "]")
            else:
                self._assignment(table)
            self._skip(_SPACE_AND_COMMENTS)
        return self._starts

    def _header(self, opening: str, closing: str) -> Path:
        start = self._at
        self._expect(opening)
        *outer, last = self._dotted_key()
        self._expect(closing)
        path: Path = ()
        for key in outer:
            path = self._latest((*path, key))
            self._record(path, start)
        path = (*path, last)
        if opening == "[[":
            position = self._num_tables.get(path, 0)
            self._num_tables[path] = position + 1
            self._record(path, start)
            path = (*path, position)
        self._record(path, start, is_explicit=True)
        return path

    def _latest(self, path: Path) -> Path:
        """Return the table that a part of a header means: of an array of tables, the latest."""
        if path in self._num_tables:
            self._record(path, self._at)
            return (*path, self._num_tables[path] - 1)
        return path

    def _assignment(self, table: Path) -> None:
        start = self._at
        *outer, last = self._dotted_key()
        for key in outer:
            table = (*table, key)
            self._record(table, start)
        table = (*table, last)
        self._record(table, start, is_explicit=True)
        self._expect("=")
        self._skip(_SPACE)
        self._value(table)

    def _value(self, path: Path) -> None:
        if self._text.startswith("[", self._at):
            self._array(path)
        elif self._text.startswith("{", self._at):
            self._inline_table(path)
        elif self._text[self._at : self._at + 1] in ('"', "'"):
            self._match(_STRING)
        else:
            self._match(_OTHER_VALUE)

    def _array(self, path: Path) -> None:
        self._expect("[")
        position = 0
        self._skip(_SPACE_AND_COMMENTS)
        while not self._text.startswith("]", self._at):
            self._record((*path, position), self._at, is_explicit=True)
            self._value((*path, position))
            position += 1
            self._skip(_SPACE_AND_COMMENTS)
            if not self._text.startswith("]", self._at):
                self._expect(",")
                self._skip(_SPACE_AND_COMMENTS)
        self._expect("]")

    def _inline_table(self, path: Path) -> None:
        self._expect("{")
        self._skip(_SPACE_AND_COMMENTS)
        while not self._text.startswith("}", self._at):
            self._assignment(path)
            self._skip(_SPACE_AND_COMMENTS)
            if not self._text.startswith("}", self._at):
                self._expect(",")
                self._skip(_SPACE_AND_COMMENTS)
        self._expect("}")

    def _dotted_key(self) -> list[str]:
        keys = [self._key()]
        while self._text.startswith(".", self._at):
            self._expect(".")
            keys.append(self._key())
        return keys

    def _key(self) -> str:
        self._skip(_SPACE)
        if self._text[self._at : self._at + 1] in ('"', "'"):
            quoted = self._match(_STRING)
            (key,) = tomllib.loads(f"{quoted} = 0")
        else:
            key = self._match(_BARE_KEY)
        self._skip(_SPACE)
        return key

    def _record(self, path: Path, start: int, *, is_explicit: bool = False) -> None:
        """Keep where a field begins: the first place that implies it, unless another one names it."""
        if path not in self._starts or (is_explicit and path not in self._explicit):
            self._starts[path] = start
        if is_explicit:
            self._explicit.add(path)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if not found:
            raise _UnexpectedText
        self._at = found.end()
        return found[0]

    def _expect(self, literal: str) -> None:
        if not self._text.startswith(literal, self._at):
            raise _UnexpectedText
        self._at += len(literal)
