"""`field_lines`: in which line of a TOML text each field stands, which the parser of the standard library does not say.

The text is one that the parser has read, so that this scanner needs to recognise no error. What it finds is compared
with what the parser found, and nothing is returned where the two differ: no line is better than a wrong one.
"""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import count

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
        self._skip()
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._assignment(table)
            self._skip()
        return self._starts

    def _header(self) -> Path:
        start, is_array = self._at, self._takes("[[")
        if not is_array:
            self._expect("[")
        path = self._dotted_key((), start)
        self._expect("]]" if is_array else "]")
        if is_array:
            number = self._num_tables[path] = self._num_tables.get(path, -1) + 1
            self._record(path, start)
            path = (*path, number)
        self._record(path, start, is_explicit=True)
        return path

    def _assignment(self, table: Path) -> None:
        start = self._at
        path = self._dotted_key(table, start)
        self._record(path, start, is_explicit=True)
        self._expect("=")
        self._match(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        def element(number: int) -> None:
            self._record((*path, number), self._at, is_explicit=True)
            self._value((*path, number))

        if self._takes("["):
            self._members("]", element)
        elif self._takes("{"):
            self._members("}", lambda _: self._assignment(path))
        else:
            self._match(_STRING if self._text.startswith(('"', "'"), self._at) else _OTHER_VALUE)

    def _members(self, closing: str, member: Callable[[int], None]) -> None:
        """Walk over what stands between brackets, with commas between."""
        self._skip()
        for number in count():
            if self._takes(closing):
                return
            if number:
                self._expect(",")
                self._skip()
                if self._takes(closing):
                    return
            member(number)
            self._skip()

    def _dotted_key(self, path: Path, start: int) -> Path:
        """Return where a key with dots leads from a table; the tables that it implies begin at `start`."""
        path = (*path, self._key())
        while self._takes("."):
            # Of an array of tables, the latest.
            path = (*path, self._num_tables[path]) if path in self._num_tables else path
            self._record(path, start)
            path = (*path, self._key())
        return path

    def _key(self) -> str:
        self._match(_SPACE)
        if self._text.startswith(('"', "'"), self._at):
            (key,) = tomllib.loads(f"{self._match(_STRING)} = 0")
        else:
            key = self._match(_BARE_KEY)
        self._match(_SPACE)
        return key

    def _record(self, path: Path, start: int, *, is_explicit: bool = False) -> None:
        """Keep where a field begins: the first place that implies it, unless another one names it."""
        if path not in self._starts or (is_explicit and path not in self._explicit):
            self._starts[path] = start
        if is_explicit:
            self._explicit.add(path)

    def _skip(self) -> None:
        self._match(_SPACE_AND_COMMENTS)

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if not found:
            raise _UnexpectedText
        self._at = found.end()
        return found[0]

    def _takes(self, literal: str) -> bool:
        """Return whether the text goes on like this; if it does, go beyond it."""
        is_there = self._text.startswith(literal, self._at)
        self._at += len(literal) * is_there
        return is_there

    def _expect(self, literal: str) -> None:
        if not self._takes(literal):
            raise _UnexpectedText
