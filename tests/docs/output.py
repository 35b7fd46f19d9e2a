"""Whether what a page shows of a command's output is what the command prints."""

import difflib
import re

GAP = "…"

_VOLATILE = (
    (re.compile(r"(search time\s+|costs worked out in |built in )\S+ m?s"), r"\1TIME"),
    (re.compile(r"\S+ m?s$", re.MULTILINE), "TIME"),
)
"""Times that the machine took. The last: the last column of a table; that of a step's cost has its unit before it."""


def difference(shown: str, printed: str) -> str:
    """Where the two differ, "" where they do not.

    White space does not count, so that a page may break lines where it likes, nor do times; `…` stands for anything.
    """
    for pattern, replacement in _VOLATILE:
        shown, printed = pattern.sub(replacement, shown), pattern.sub(replacement, printed)
    pieces = [re.escape(word) if word != GAP else "(?:.*)" for word in shown.split()]
    if re.fullmatch(r"\s*".join(pieces), " ".join(printed.split())):
        return ""
    return "\n".join(difflib.unified_diff(shown.splitlines(), printed.splitlines(), "shown", "printed", lineterm=""))
