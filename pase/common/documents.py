"""Reading documents (JSON, TOML) that come from outside, with the lines of fields, and replacing files atomically.

Every value is asked for by type; what is not as expected raises the caller's PaseError with the field's path.
"""

import errno
import glob
import os
import re
import stat
import tempfile
import time
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from io import BufferedReader
from itertools import count
from math import inf, isfinite
from operator import attrgetter
from pathlib import Path
from sys import float_info
from typing import Any

from pase.common.words import short
from pase.errors import PaseError

StrPath = str | os.PathLike[str]
"""A path, as text or as a `pathlib.Path`."""

LARGEST_INTEGER = 2**63 - 1
"""What NumPy's integers hold."""

_LONGEST_SHOWN_BITS = 128
"""Longer integers are not written out: Python declines to from 4,300 digits on."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a document.

    path: where it stands, "levels[1].name". error: what to raise. source: what messages call the file. lines: line
    numbers by path, as far as they are known.
    """

    value: object
    path: str
    error: type[PaseError]
    source: str
    lines: Mapping[str, int] = field(default_factory=dict)

    def fail(self, problem: str) -> PaseError:
        """Return the error that says what is wrong with this field, and in which line if that is known."""
        line = self.lines.get(self.path)
        where = f"{self.source}, line {line}" if line else self.source
        return self.error(f"{where}: {self.path or 'the document'} {problem}")

    def __getitem__(self, key: str) -> "Field":
        """Return a member of an object."""
        found = self.get(key)
        if found is None:
            # What is missing stands in no line: the message names that of the table which should hold it.
            path, line = self._child(key, None).path, self.lines.get(self.path)
            raise Field(None, path, self.error, self.source, {path: line} if line else {}).fail("is missing")
        return found

    def get(self, key: str) -> "Field | None":
        """Return a member of an object, None if it is absent."""
        if not isinstance(self.value, dict):
            raise self.fail(f"is {_shown(self.value)}; expected an object")
        return self._child(key, self.value[key]) if key in self.value else None

    def members(self) -> Iterator[tuple[str, "Field"]]:
        """Yield the members of an object in order."""
        if not isinstance(self.value, dict):
            raise self.fail(f"is {_shown(self.value)}; expected an object")
        for key, value in self.value.items():
            yield str(key), self._child(str(key), value)

    def items(self) -> tuple["Field", ...]:
        """Return the elements of an array."""
        if not isinstance(self.value, list):
            raise self.fail(f"is {_shown(self.value)}; expected an array")
        return tuple(
            Field(v, f"{self.path}[{i}]", self.error, self.source, self.lines) for i, v in enumerate(self.value)
        )

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail(f"is {_shown(self.value)}; expected text")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail(f"is {_shown(self.value)}; expected true or false")
        return self.value

    def integer(self, minimum: int = 0) -> int:
        """Return a whole number that is not below the minimum."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < minimum:
            raise self.fail(f"is {_shown(self.value)}; expected a whole number of {minimum} or more")
        if self.value > LARGEST_INTEGER:
            raise self.fail(f"is {_shown(self.value)}; expected a whole number of at most {LARGEST_INTEGER}")
        return self.value

    def integers(self, minimum: int = 0) -> tuple[int, ...]:
        """Return an array of whole numbers that are not below the minimum."""
        # Long arrays, nearly always right, are looked at as a whole; what is wrong is then looked for by element.
        if isinstance(self.value, list) and set(map(type, self.value)) <= {int}:
            values: list[int] = self.value
            if not values or minimum <= min(values) <= max(values) <= LARGEST_INTEGER:
                return tuple(values)
        return tuple(item.integer(minimum) for item in self.items())

    def number(self, *, above: float = -inf) -> float:
        """Return a finite number of 0 or more, or one greater than `above`."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value <= float_info.max and value > above:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        raise self.fail(f"is {_shown(value)}; expected a number {'above 0' if above == 0 else 'of 0 or more'}")

    def scalar(self) -> str | int | float | bool:
        """Return text, a finite number, or true or false."""
        value = self.value
        if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not isfinite(value)):
            raise self.fail(f"is {_shown(value)}; expected text, a number, or true or false")
        return value

    def _child(self, key: str, value: object) -> "Field":
        return Field(value, f"{self.path}.{key}" if self.path else key, self.error, self.source, self.lines)


def attributes(value: object, names: str) -> dict[str, Any]:
    """Return attributes of a value as members of a JSON object; names: "kind machine.name member=other.attribute"."""
    pairs = (name.rpartition("=") for name in names.split())
    found = {member or path.rpartition(".")[2]: attrgetter(path)(value) for member, _, path in pairs}
    return {name: list(member) if isinstance(member, tuple) else member for name, member in found.items()}


def _shown(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case int() if value.bit_length() > _LONGEST_SHOWN_BITS:
            return f"a whole number of {value.bit_length()} bits"
        case _:
            return short(repr(value))


MAX_DOCUMENT_BYTES = 64 << 20
"""Of a file of JSON: a plan of ten thousand layers has about 30 MB."""

MAX_TOML_BYTES = 2 << 20
"""Of a file of TOML, which people write, and of which Python reads about 1 MB a second."""


def open_regular(path: StrPath) -> BufferedReader:
    """Open a file to read its bytes; OSError where it is a device, a pipe or a folder, of which there may be no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_limited(path: StrPath, limit_bytes: int) -> bytes:
    """Return the bytes of a regular file; OSError for another one, and for one of more than the limit."""
    with open_regular(path) as stream:
        # Not told to the reader, which would allocate so many.
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes > limit_bytes:
            raise OSError(errno.EFBIG, f"it has {size_bytes:,} bytes; at most {limit_bytes:,} are read")
        return stream.read(size_bytes)


def read_text(path: StrPath, failure: type[PaseError], called: str) -> str:
    """Return the text of a regular file of at most `MAX_DOCUMENT_BYTES`.

    Args:
        path: The file.
        failure: What to raise where it cannot be read.
        called: What messages call it.
    """
    try:
        return read_limited(path, MAX_DOCUMENT_BYTES).decode()
    except UnicodeDecodeError:
        raise failure(f"{called} cannot be read: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # a path that none can have
        raise failure(f"{called} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write_or_fail(path: StrPath, data: str | bytes, failure: type[PaseError], *, called: str = "") -> None:
    """Replace a file as a whole, as `write_atomically` does; a failure says why it cannot be written."""
    try:
        write_atomically(Path(path), data)
    except OSError as error:
        raise failure(f"{called}{path} cannot be written: {error.strerror or error}") from None


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file as a whole: whoever reads it sees the old contents or the new ones, never a half.

    A link is followed. What is no regular file (/dev/stdout, a pipe) is written to, not replaced. The permissions of
    the old file are kept. What earlier calls that were killed have left beside it is removed. Raises OSError where the
    folder is missing or not writable.
    """
    raw = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(raw)
        return
    path = Path(os.path.realpath(path))
    _remove_left(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
    try:
        with os.fdopen(handle, "wb") as stream:
            # Held until the process ends, however it does: see `_remove_left`.
            flock(stream, LOCK_EX)
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
            Path(temporary).chmod(_permissions(path))
            Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_PART = ".part"

_LEFT_S = 60.0
"""Age from which a file may be what a process that was killed has left: one that is made now is not locked yet."""


def _permissions(path: Path) -> int:
    """Return the permissions of a file; those of a new one where it is not there yet."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _remove_left(path: Path) -> None:
    """Remove the temporary files of `write_atomically` beside a file whose processes are gone."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_PART}"):
        with suppress(OSError), open_regular(left) as stream:
            if time.time() - os.fstat(stream.fileno()).st_mtime > _LEFT_S:
                flock(stream, LOCK_EX | LOCK_NB)
                left.unlink()


# -- TOML, and in which line of it each field stands, which the parser of the standard library does not say
#
# The text is one that the parser has read, so that the scanner needs to recognise no error. What it finds is compared
# with what the parser found, and nothing is returned where the two differ: no line is better than a wrong one.


def toml_field(text: str, error: type[PaseError], source: str) -> Field:
    """Return a TOML text as a document whose errors name lines; raise the error where it is none.

    source: what messages call it.
    """
    if len(text) > MAX_TOML_BYTES:
        raise error(f"{source} has {len(text):,} characters of TOML; at most {MAX_TOML_BYTES:,} are read")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as found:  # numbers of thousands of digits, brackets thousands deep
        raise error(f"{source} is not TOML: {found}{_quoted_line(text, str(found))}") from None
    return Field(document, "", error, source, field_lines(text, document))


def _quoted_line(text: str, error: str) -> str:
    """Return the line of a text that an error of the TOML parser names by its number."""
    found = re.search(r"\(at line (\d+), column \d+\)", error)
    lines = text.split("\n")
    if not found or int(found[1]) > len(lines):
        return ""
    return f": {lines[int(found[1]) - 1].strip()[:60]!r}"


_Place = tuple[str | int, ...]
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


def _paths(value: object, path: _Place = ()) -> Iterator[_Place]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key)
        yield from _paths(member, (*path, key))


def _name(path: _Place) -> str:
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
        self._starts: dict[_Place, int] = {}
        self._explicit: set[_Place] = set()
        self._num_tables: dict[_Place, int] = {}

    def fields(self) -> dict[_Place, int]:
        """Return the offset at which each field's key, header or element begins."""
        table: _Place = ()
        self._skip()
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._assignment(table)
            self._skip()
        return self._starts

    def _header(self) -> _Place:
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

    def _assignment(self, table: _Place) -> None:
        start = self._at
        path = self._dotted_key(table, start)
        self._record(path, start, is_explicit=True)
        self._expect("=")
        self._match(_SPACE)
        self._value(path)

    def _value(self, path: _Place) -> None:
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

    def _dotted_key(self, path: _Place, start: int) -> _Place:
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

    def _record(self, path: _Place, start: int, *, is_explicit: bool = False) -> None:
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
