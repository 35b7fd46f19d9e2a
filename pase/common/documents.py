"""Reading documents (JSON, TOML) that come from outside, and replacing files atomically.

Every value is asked for by type; what is not as expected raises the caller's PaseError with the field's path.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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


def write_or_fail(path: StrPath, data: str | bytes, failure: type[PaseError], *, called: str = "") -> None:
    """Replace a file as a whole, as `write_atomically` does; a failure says why it cannot be written."""
    try:
        write_atomically(Path(path), data)
    except OSError as error:
        raise failure(f"{called}{path} cannot be written: {error.strerror or error}") from None


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file as a whole: whoever reads it sees the old contents or the new ones, never a half.

    A link is followed. What is no regular file (/dev/stdout, a pipe) is written to, not replaced. Raises OSError
    where the folder is missing or not writable.
    """
    raw = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(raw)
        return
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner may read; a result file has the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
