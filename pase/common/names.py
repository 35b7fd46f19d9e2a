"""Names of models, layers and dims as people see them: they come from anywhere, and may hold anything."""

from collections.abc import Callable, Sequence

LONGEST = 60
"""Characters of a name that a drawing or a table shows."""


def visible(name: str, *, keeping: str = "") -> str:
    r"""Return a name with whatever does not show (control characters, lone surrogates) written out, as in \x1b.

    keeping: characters that stay as they are.
    """
    return "".join(c if c.isprintable() or c in keeping else c.encode("unicode_escape").decode("ascii") for c in name)


def short(name: str) -> str:
    """Return a name as one short line."""
    shown = visible(name)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def shortened(text: str, room: float, width: Callable[[str], float] = len, *, narrowest: float = 1.0) -> str:
    """Return a text that is no wider than the room for it, with an ellipsis in its middle where some of it had to go.

    Its beginning and its end are kept: names of layers differ there. width: of a text; narrowest: of its characters,
    but for few.
    """
    # The rest of a very long name need not be measured.
    most = int(room / narrowest) + 1
    if len(text) <= 4 * most and width(text) <= room:
        return text
    for kept in range(min(most, len(text)), 0, -1):
        found = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if width(found) <= room:
            return found
    return "…"


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Return the first of some names as a sentence has them, with the number of the others."""
    shown = ", ".join(short(name) or repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
