"""A program that copies the arrays of an HDF5 file, and nothing else in it: python h5_copy.py SOURCE TARGET.

The HDF5 library is C and reads what a stranger wrote: this is a process of its own, with limits on time and memory.
Links, data of other files, filters and cycles are refused, so that what is read is no more than the file holds.
"""

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
"""Beside as much as the file has bytes, twice."""

_MAX_DEPTH = 64
_LONGEST_TEXT = 1000


def main() -> None:
    """Copy the file that the command line names; end with one line on standard error where that is not possible."""
    source, target = sys.argv[1:]
    limit = MEMORY_BYTES + 2 * Path(source).stat().st_size
    for kind, most in ((resource.RLIMIT_AS, limit), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(kind, (most, most))
    import h5py

    try:
        with h5py.File(source, "r") as old, h5py.File(target, "w") as new:
            _copy(h5py, old, new, set(), 0)
    except Exception as error:  # noqa: BLE001 of C, of many classes
        sys.exit(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _copy(h5py: Any, old: Any, new: Any, seen: set[int], depth: int) -> None:
    address = int(h5py.h5o.get_info(old.id).addr)
    if address in seen or depth > _MAX_DEPTH:
        raise ValueError(f"group {old.name!r} lies within itself, or too deep")
    seen.add(address)
    _copy_texts(old, new)
    for name in old:
        if not isinstance(old.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{name!r} is a link")
        item = old[name]
        if isinstance(item, h5py.Group):
            _copy(h5py, item, new.create_group(name), seen, depth + 1)
            continue
        if not isinstance(item, h5py.Dataset) or item.dtype.kind not in "fiubV" or item.dtype.hasobject:
            raise ValueError(f"{name!r} is no array of numbers")
        if item.is_virtual or item.external or item.id.get_create_plist().get_nfilters():
            raise ValueError(f"{name!r} lies in another file, or is compressed")
        if item.size * item.dtype.itemsize > item.id.get_storage_size():
            raise ValueError(f"{name!r} claims the shape {item.shape}, more than the file holds")
        _copy_texts(item, new.create_dataset(name, data=item[()]))


def _copy_texts(old: Any, new: Any) -> None:
    """Copy the attributes that are short texts: Keras notes types there."""
    for key, value in old.attrs.items():
        if isinstance(value, str) and len(value) <= _LONGEST_TEXT:
            new.attrs[key] = value


if __name__ == "__main__":
    main()
