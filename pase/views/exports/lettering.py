"""Text in pictures: how wide it is, how it is shortened, and how it is written into XML."""

from html import escape
from unicodedata import combining, east_asian_width

from pase.targets.mesh_tensorflow.emitter.text import Grammar

ELLIPSIS = "…"

_THIN = frozenset("ijl.,:'| ")
_NARROW = frozenset("frtI()[];/\\-!")
_WIDE = frozenset("mwMW@%…")
_CAPITALS = frozenset("ABCDEFGHJKLNOPQRSTUVXYZ&")
_SIGNS = frozenset("#+=<>~^×→")


def text_width(text: str, size: float) -> float:
    """Return how wide a line of text is at most, in units of a drawing, in any of the usual sans-serif fonts."""
    return size * sum(map(_ems, text))


def _ems(character: str) -> float:
    if combining(character):
        return 0.0
    if east_asian_width(character) in "WF":
        return 1.05
    if character in _THIN:
        return 0.34
    if character in _NARROW:
        return 0.43
    if character in _WIDE:
        return 1.0
    if character in _CAPITALS:
        return 0.79
    if character in _SIGNS:
        return 0.84
    return 0.64 if character < "\u0250" else 0.85


def shortened(text: str, size: float, widest: float) -> str:
    """Return a line that is no wider than that, with an ellipsis in its middle where some of it had to go.

    The beginning and the end are kept: names of layers differ there.
    """
    # No character that counts is much narrower than this: the rest of a very long name need not be measured.
    most = int(widest / (0.34 * size)) + 1
    if len(text) <= 4 * most and text_width(text, size) <= widest:
        return text
    for kept in range(min(most, len(text)), 0, -1):
        found = f"{text[: (kept + 1) // 2]}{ELLIPSIS}{text[len(text) - kept // 2 :]}"
        if text_width(found, size) <= widest:
            return found
    return ELLIPSIS


def xml_text(text: str) -> str:
    """Return text as XML holds it, in elements and in attributes; what XML 1.0 forbids becomes U+FFFD.

    A parser gives back every other character, line ends and tabs included.
    """
    allowed = "".join(c if _is_allowed(ord(c)) else "\ufffd" for c in text)
    return escape(allowed).translate({9: "&#9;", 10: "&#10;", 13: "&#13;"})


xml = Grammar(xml_text, between="").write
"""Returns text of XML. Text from outside stands in elements, and between the quotes of attributes."""


def _is_allowed(code: int) -> bool:
    """Return whether a character may be in XML 1.0 (section 2.2); those that it discourages are left out as well."""
    return (
        code in (0x9, 0xA, 0xD)
        or 0x20 <= code <= 0x7E
        or 0xA0 <= code <= 0xD7FF
        or 0xE000 <= code <= 0xFDCF
        or 0xFDF0 <= code <= 0xFFFD
        or (code >= 0x10000 and code & 0xFFFE != 0xFFFE)
    )
