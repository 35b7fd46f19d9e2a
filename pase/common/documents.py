"""Reading files that come from outside under limits, naming what is wrong in them, and replacing files atomically."""

import errno
import glob
import os
import re
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from io import BufferedReader
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
class Source:
    """Where a document comes from.

    Attributes:
        error: What to raise where something is wrong with it.
        name: What messages call it, such as "plan file p.json".
    """

    error: type[PaseError]
    name: str

    def fail(self, path: str, problem: str) -> PaseError:
        """Return the error that says what is wrong with a field, by its path, such as "levels[1].name"."""
        return self.error(f"{self.name}: {path or 'the document'} {problem}")


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a document.

    path: where it stands, "levels[1].name". error: what to raise. source: what messages call the file.
    """

    value: object
    path: str
    error: type[PaseError]
    source: str

    def fail(self, problem: str) -> PaseError:
        """Return the error that says what is wrong with this field."""
        return Source(self.error, self.source).fail(self.path, problem)

    def __getitem__(self, key: str) -> "Field":
        """Return a member of an object."""
        found = self.get(key)
        if found is None:
            raise self._child(key, None).fail("is missing")
        return found

    def get(self, key: str) -> "Field | None":
        """Return a member of an object, None if it is absent."""
        if not isinstance(self.value, dict):
            raise self.fail(f"is {shown(self.value)}; expected an object")
        return self._child(key, self.value[key]) if key in self.value else None

    def members(self) -> Iterator[tuple[str, "Field"]]:
        """Yield the members of an object in order."""
        if not isinstance(self.value, dict):
            raise self.fail(f"is {shown(self.value)}; expected an object")
        for key, value in self.value.items():
            yield str(key), self._child(str(key), value)

    def items(self) -> tuple["Field", ...]:
        """Return the elements of an array."""
        if not isinstance(self.value, list):
            raise self.fail(f"is {shown(self.value)}; expected an array")
        return tuple(Field(v, f"{self.path}[{i}]", self.error, self.source) for i, v in enumerate(self.value))

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail(f"is {shown(self.value)}; expected text")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail(f"is {shown(self.value)}; expected true or false")
        return self.value

    def integer(self, minimum: int = 0) -> int:
        """Return a whole number that is not below the minimum."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < minimum:
            raise self.fail(f"is {shown(self.value)}; expected a whole number of {minimum} or more")
        if self.value > LARGEST_INTEGER:
            raise self.fail(f"is {shown(self.value)}; expected a whole number of at most {LARGEST_INTEGER}")
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
        raise self.fail(f"is {shown(value)}; expected a number {'above 0' if above == 0 else 'of 0 or more'}")

    def scalar(self) -> str | int | float | bool:
        """Return text, a finite number, or true or false."""
        value = self.value
        if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not isfinite(value)):
            raise self.fail(f"is {shown(value)}; expected text, a number, or true or false")
        return value

    def _child(self, key: str, value: object) -> "Field":
        return Field(value, f"{self.path}.{key}" if self.path else key, self.error, self.source)


def attributes(value: object, names: str) -> dict[str, Any]:
    """Return attributes of a value as members of a JSON object; names: "kind machine.name member=other.attribute"."""
    pairs = (name.rpartition("=") for name in names.split())
    found = {member or path.rpartition(".")[2]: attrgetter(path)(value) for member, _, path in pairs}
    return {name: list(member) if isinstance(member, tuple) else member for name, member in found.items()}


def shown(value: object) -> str:
    """Return a value of a document as messages show it."""
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


def toml_document(text: str, source: Source) -> dict[str, Any]:
    """Return the document of a TOML text; the source's error where it is none, or too long."""
    if len(text) > MAX_TOML_BYTES:
        raise source.error(f"{source.name} has {len(text):,} characters of TOML; at most {MAX_TOML_BYTES:,} are read")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as found:  # numbers of thousands of digits, brackets thousands deep
        raise source.error(f"{source.name} is not TOML: {found}{_quoted_line(text, str(found))}") from None


def _quoted_line(text: str, error: str) -> str:
    """Return the line of a text that an error of the TOML parser names by its number."""
    found = re.search(r"\(at line (\d+), column \d+\)", error)
    lines = text.split("\n")
    if not found or int(found[1]) > len(lines):
        return ""
    return f": {lines[int(found[1]) - 1].strip()[:60]!r}"
