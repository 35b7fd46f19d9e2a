"""The files that a page has written: changed as a diff says, and forgotten."""

import re
import sys
from pathlib import Path


def patched(text: str, diff: str) -> str:
    """Return a text with the changes of a diff; AssertionError where what it changes is not there, once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] not in other) for other in "+-"
        )
        assert text.count(before) == 1, f"the file has other lines than these of the diff:\n{before}"
        text = text.replace(before, after)
    return text


def forget_modules(folder: Path) -> None:
    """Unload what was imported from a page's folder."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]
