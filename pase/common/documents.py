"""Read files from outside under size limits with precise error messages, and replace files atomically."""

import errno
import glob
import os
import re
import stat
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any

from pase.common.words import short
from pase.errors import PaseError

StrPath = str | os.PathLike[str]
"""A path, as text or as a `pathlib.Path`."""

LARGEST_INTEGER = 2**63 - 1
"""Largest integer that NumPy represents."""

_LONGEST_SHOWN_BITS = 128
"""Longer integers are not printed: Python refuses to from 4,300 digits on."""


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """Where a document comes from.

    Attributes:
        error: Class of the error to raise where something is wrong with it.
        name: What messages call it, such as "plan file p.json".
    """

    error: type[PaseError]
    name: str

    def fail(self, path: str, problem: str) -> PaseError:
        """Return the error that says what is wrong with a field, by its path, such as "levels[1].name"."""
        return self.error(f"{self.name}: {path or 'the document'} {problem}")


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
        case list() | tuple():
            return "an array"
        case int() if value.bit_length() > _LONGEST_SHOWN_BITS:
            return f"a whole number of {value.bit_length()} bits"
        case _:
            return short(repr(value))


MAX_DOCUMENT_BYTES = 64 << 20
"""Size limit of JSON files: a plan of ten thousand layers has about 30 MB."""

MAX_TOML_BYTES = 2 << 20
"""Size limit of TOML files, which people write, and of which Python reads about 1 MB a second."""


def open_regular(path: StrPath) -> BufferedReader:
    """Open a file for reading bytes; OSError for a device, a pipe or a folder, which may be endless."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_limited(path: StrPath, limit_bytes: int) -> bytes:
    """Return the bytes of a regular file; OSError for any other kind of file and for one above the limit."""
    with open_regular(path) as stream:
        # Do not pass the limit to the reader, which would allocate that much.
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes > limit_bytes:
            raise OSError(errno.EFBIG, f"it has {size_bytes:,} bytes; at most {limit_bytes:,} are read")
        return stream.read(size_bytes)


def read_text(path: StrPath, failure: type[PaseError], called: str) -> str:
    """Return the text of a regular file of at most `MAX_DOCUMENT_BYTES`.

    Args:
        path: The file.
        failure: Class of the error to raise where it cannot be read.
        called: What messages call it.
    """
    try:
        return read_limited(path, MAX_DOCUMENT_BYTES).decode()
    except UnicodeDecodeError:
        raise failure(f"{called} cannot be read: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # an invalid path
        raise failure(f"{called} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write_or_fail(path: StrPath, data: str | bytes, failure: type[PaseError], *, called: str = "") -> None:
    """Replace a file as `write_atomically` does; on failure, raise `failure` with the reason."""
    try:
        write_atomically(Path(path), data)
    except OSError as error:
        raise failure(f"{called}{path} cannot be written: {error.strerror or error}") from None


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace a file atomically: a concurrent reader sees the old contents or the new ones, never a mixture.

    Links are followed. A path that is not a regular file (/dev/stdout, a pipe) is written to, not replaced. The
    permissions of the old file are preserved. Temporary files that killed processes left in the folder are removed.

    Raises:
        OSError: The folder is missing or not writable.
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
            # Locked until the process ends, even if it is killed: see `_remove_left`.
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
"""Minimum age of a temporary file to be removed: one that is just being created is not locked yet."""


def _permissions(path: Path) -> int:
    """Return the permissions of a file; the default ones if it does not exist yet."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _remove_left(path: Path) -> None:
    """Remove temporary files that `write_atomically` left next to a file in processes that have ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_PART}"):
        with suppress(OSError), open_regular(left) as stream:
            if time.time() - os.fstat(stream.fileno()).st_mtime > _LEFT_S:
                flock(stream, LOCK_EX | LOCK_NB)
                left.unlink()


def toml_document(text: str, source: DocumentSource) -> dict[str, Any]:
    """Parse a TOML text; raise the source's error if it is invalid or too long."""
    if len(text) > MAX_TOML_BYTES:
        raise source.error(f"{source.name} has {len(text):,} characters of TOML; at most {MAX_TOML_BYTES:,} are read")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as found:  # numbers of thousands of digits, brackets thousands deep
        raise source.error(f"{source.name} is not TOML: {found}{_quoted_line(text, str(found))}") from None


def _quoted_line(text: str, error: str) -> str:
    """Return the line of a text to which an error of the TOML parser refers."""
    found = re.search(r"\(at line (\d+), column \d+\)", error)
    lines = text.split("\n")
    if not found or int(found[1]) > len(lines):
        return ""
    return f": {lines[int(found[1]) - 1].strip()[:60]!r}"
