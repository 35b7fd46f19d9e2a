"""`Source`: a kind of data that can be named, and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pase.datasets.dataset import Dataset, Part

Read = Callable[[Path | None, Part], Dataset]
"""Reads one part from a path, which is None for a source that has none; DatasetError where it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One way to name data.

    form: what a user types. needs_path: a path follows the name. has_parts: the same name stands for examples to
    train on and for others to test with.
    """

    name: str
    form: str
    description: str
    needs_path: bool
    has_parts: bool
    read: Read
