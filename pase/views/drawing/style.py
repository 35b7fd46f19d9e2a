"""The looks of a picture: one style sheet for light and dark surroundings, and patterns.

Everything begins with the picture's own id: several pictures in one page leave one another alone.
"""

from collections.abc import Mapping, Sequence

from pase.targets.mesh_tensorflow.emitter.text import Text, joined, word
from pase.views.drawing.colours import FILLS, PATTERNS, SplitClass
from pase.views.drawing.lettering import xml

_LIGHT = {
    "paper": "#ffffff",
    "ink": "#16191d",
    "muted": "#4d545c",
    "border": "#5b636c",
    "quiet": "#8b939c",
    "moving": "#1d3557",
    "frame": "#f1f3f5",
}
_DARK = {
    "paper": "#14171a",
    "ink": "#f4f6f8",
    "muted": "#b6bec7",
    "border": "#aab3bd",
    "quiet": "#79828c",
    "moving": "#f2c879",
    "frame": "#20252a",
}
"""Colours of everything but what is split."""

_RULES = (
    xml(
        'text{font-family:system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:11px;fill:var(--ink)}'
    ),
    xml(".paper{fill:var(--paper)}"),
    xml(".title{font-size:16px;font-weight:600}"),
    xml(".muted{fill:var(--muted)}"),
    xml(".name{font-size:12px;font-weight:600;text-anchor:middle}"),
    xml(".text{text-anchor:middle}"),
    xml(".verdict{font-size:12px}"),
    xml(".box{stroke:var(--border);stroke-width:1}"),
    xml(".frame{fill:var(--frame);stroke:var(--border);stroke-width:1.2;stroke-dasharray:6 3}"),
    xml(".times{font-size:13px;font-weight:700}"),
    xml(".edge{fill:none;stroke-linejoin:round}"),
    xml(".still .edge{stroke:var(--quiet)}"),
    xml(".still .head{fill:var(--quiet)}"),
    xml(".moving .edge{stroke:var(--moving)}"),
    xml(".moving .head{fill:var(--moving)}"),
    xml(".back{stroke-dasharray:5 4}"),
    xml(".bytes{font-size:10px;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}"),
    xml(".left{text-anchor:end}"),
    xml(".overlay{stroke:none}"),
)

_DRAWN = {
    "stripes": xml('<path d="M-2 2l4-4M0 8l8-8M6 10l4-4"/>'),
    "dots": xml('<path d="M2 2h.01M6 6h.01" stroke-width="2.4" stroke-linecap="round"/>'),
    "grid": xml('<path d="M0 4h8M4 0v8"/>'),
    "waves": xml('<path d="M0 4q2-4 4 0t4 0" fill="none"/>'),
}
"""Patterns that are laid over a colour, in a square of 8."""


def style(own: Text, classes: Sequence[SplitClass]) -> Text:
    """Return the style sheet of the picture with that id; `.c0`, `.c1`, … are the fills of its classes."""
    rules = [xml("#{}{max-width:100%;height:auto;{}}", own, _variables(_LIGHT, classes, is_dark=False))]
    rules += [xml("#{} {}", own, rule) for rule in _RULES]
    for number, of in enumerate(classes):
        rules.append(xml("#{} .c{}{fill:var(--c{})}", own, number, number))
        if of.pattern != PATTERNS[0]:
            rules.append(xml("#{} .p{}{fill:url(#{}-{})}", own, number, own, word(of.pattern, PATTERNS)))
    dark = _variables(_DARK, classes, is_dark=True)
    return joined([*rules, xml("@media (prefers-color-scheme:dark){#{}{{}}}", own, dark)])


def _variables(colours: Mapping[str, str], classes: Sequence[SplitClass], *, is_dark: bool) -> Text:
    fills = (of.dark if is_dark else of.light for of in classes)
    named = [xml("--{}:{}", name, colour) for name, colour in colours.items()]
    named += [xml("--c{}:{}", number, word(fill, FILLS)) for number, fill in enumerate(fills)]
    return joined(named, ";")


def patterns(own: Text, classes: Sequence[SplitClass]) -> Text:
    """Return the definitions of the patterns that the classes use."""
    form = (
        '<pattern id="{}-{}" width="8" height="8" patternUnits="userSpaceOnUse">'
        '<g stroke="var(--ink)" stroke-opacity=".35" stroke-width="1.2">{}</g></pattern>'
    )
    names = dict.fromkeys(of.pattern for of in classes)
    return xml("{}", [xml(form, own, name, _DRAWN[name]) for name in names if name in _DRAWN])
