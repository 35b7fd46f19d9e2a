"""What a picture says above the graph: whose it is, what it costs, and what colours and lines stand for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pase.common.quantities import quantity
from pase.graph.names import visible
from pase.targets.mesh_tensorflow.emitter.text import Text, joined
from pase.views.drawing.colours import PATTERNS, SplitClass
from pase.views.drawing.lettering import shortened, text_width, xml
from pase.views.drawing.strokes import THINNEST, WIDEST, number, stroke_width

_MARK = 26.0
"""Width of what stands before an entry's text."""

_MOST_CLASSES = 20

_GAP = 18.0
_ROW = 20.0
_SIZE = 11.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A sign and what it stands for; mark: SVG, within 26 x 14 from (0, 0)."""

    mark: Text
    text: str


def class_entries(classes: Sequence[SplitClass]) -> Iterator[Entry]:
    """Yield an entry for each class of layers, those with the most layers; the last one says how many others are
    left."""
    for i, of in enumerate(classes[:_MOST_CLASSES]):
        layers = f"{of.num_layers} layer{'s' * (of.num_layers != 1)}"
        mark = xml('<rect class="box c{}" x="1" y="1" width="22" height="12" rx="3"/>', i)
        if of.pattern != PATTERNS[0]:
            mark = xml('{}<rect class="overlay p{}" x="1" y="1" width="22" height="12" rx="3"/>', mark, i)
        split = f"split in {visible(of.label)}" if of.dims else of.label
        yield Entry(mark=mark, text=f"{split} ({layers})")
    if others := classes[_MOST_CLASSES:]:
        yield Entry(mark=xml(""), text=f"{len(others)} others ({sum(of.num_layers for of in others)} layers)")


def line_entries(most_bytes: float, *, has_blocks: bool, has_loops: bool) -> Iterator[Entry]:
    """Yield an entry for each kind of line that a picture has; most_bytes: that move along one edge."""
    yield Entry(mark=_line(THINNEST, "still"), text="nothing moves")
    if most_bytes:
        few = most_bytes / 16
        yield Entry(mark=_line(stroke_width(few, most_bytes), "moving"), text=quantity(few, "B"))
        yield Entry(mark=_line(WIDEST, "moving"), text=f"{quantity(most_bytes, 'B')} move between layouts")
    if has_blocks:
        mark = xml('<rect class="frame" x="1" y="1" width="22" height="12" rx="3"/>')
        yield Entry(mark=mark, text="comes ×n, shown once")
    if has_loops:
        yield Entry(mark=_line(THINNEST, "still", " back"), text="to the next block")


def _line(width: float, kind: str, look: str = "") -> Text:
    form = '<g class="{}"><path class="edge{}" stroke-width="{}" d="M1 7H23"/></g>'
    return xml(form, kind, look, number(width))


def legend(groups: Sequence[Sequence[Entry]], width: float) -> tuple[Text, float]:
    """Return groups of entries in rows no wider than that, as SVG from (0, 0) down, and how high they are."""
    found = []
    y = -_ROW
    for group in groups:
        x, y = 0.0, y + _ROW
        for entry in group:
            text = shortened(entry.text, _SIZE, width - _MARK)
            needed = _MARK + text_width(text, _SIZE)
            if x and x + needed > width:
                x, y = 0.0, y + _ROW
            form = '<g transform="translate({} {})">{}<text x="{}" y="11">{}</text></g>'
            found.append(xml(form, number(x), number(y), entry.mark, number(_MARK + 2), text))
            x += needed + _GAP
    return joined(found), y + _ROW
