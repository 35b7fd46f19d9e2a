"""The looks of a picture: one style sheet for light and dark surroundings, and patterns.

Everything begins with the picture's own id: several pictures in one page leave one another alone.
"""

from collections.abc import Sequence
from itertools import chain

from pase.drawing.colours import PATTERNS, SplitClass

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

FONT = 'system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'

_RULES = f"""
 text{{font-family:{FONT};font-size:11px;fill:var(--ink)}}
 .paper{{fill:var(--paper)}}
 .title{{font-size:16px;font-weight:600}}
 .muted{{fill:var(--muted)}}
 .name{{font-size:12px;font-weight:600;text-anchor:middle}}
 .text{{text-anchor:middle}}
 .verdict{{font-size:12px}}
 .box{{stroke:var(--border);stroke-width:1}}
 .frame{{fill:var(--frame);stroke:var(--border);stroke-width:1.2;stroke-dasharray:6 3}}
 .times{{font-size:13px;font-weight:700}}
 .edge{{fill:none;stroke-linejoin:round}}
 .still .edge{{stroke:var(--quiet)}}
 .still .head{{fill:var(--quiet)}}
 .moving .edge{{stroke:var(--moving)}}
 .moving .head{{fill:var(--moving)}}
 .back{{stroke-dasharray:5 4}}
 .bytes{{font-size:10px;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}}
 .left{{text-anchor:end}}
 .overlay{{stroke:none}}
"""

_DRAWN = {
    "stripes": '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4"/>',
    "dots": '<path d="M2 2h.01M6 6h.01" stroke-width="2.4" stroke-linecap="round"/>',
    "grid": '<path d="M0 4h8M4 0v8"/>',
    "waves": '<path d="M0 4q2-4 4 0t4 0" fill="none"/>',
}
"""Patterns that are laid over a colour, in a square of 8."""


def style(own: str, classes: Sequence[SplitClass]) -> str:
    """Return the style sheet of the picture with that id; `.c0`, `.c1`, … are the fills of its classes."""
    rules = [f"#{own}{{max-width:100%;height:auto;{_variables(own, _LIGHT, classes, is_dark=False)}}}"]
    for line in _RULES.strip().splitlines():
        selector, _, rest = line.strip().partition("{")
        rules.append(f"#{own} {selector}{{{rest}")
    for number, of in enumerate(classes):
        rules.append(f"#{own} .c{number}{{fill:var(--c{number})}}")
        if of.pattern != PATTERNS[0]:
            rules.append(f"#{own} .p{number}{{fill:url(#{own}-{of.pattern})}}")
    rules.append(f"@media (prefers-color-scheme:dark){{#{own}{{{_variables(own, _DARK, classes, is_dark=True)}}}}}")
    return "\n".join(rules)


def _variables(own: str, colours: dict[str, str], classes: Sequence[SplitClass], *, is_dark: bool) -> str:
    fills = ((f"c{number}", of.dark if is_dark else of.light) for number, of in enumerate(classes))
    return ";".join(f"--{name}:{colour}" for name, colour in chain(colours.items(), fills))


def patterns(own: str, classes: Sequence[SplitClass]) -> str:
    """Return the definitions of the patterns that the classes use."""
    return "".join(
        f'<pattern id="{own}-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<g stroke="var(--ink)" stroke-opacity=".35" stroke-width="1.2">{_DRAWN[name]}</g></pattern>'
        for name in dict.fromkeys(of.pattern for of in classes)
        if name in _DRAWN
    )
