"""SVG: the graph of a plan as one self-contained picture.

All selectors in its style sheet start with the picture's own id, so that several pictures in one page do not interfere.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import pairwise
from math import dist, sqrt
from unicodedata import combining, east_asian_width

from pase.common.words import quantity, visible
from pase.common.words import shortened as shortened_text
from pase.planning.plan import LayerPlan, Plan, configuration_text
from pase.targets.emitter.text import Grammar, Text, joined, word
from pase.views.drawing.folding import Arrangement, Frame, arranged
from pase.views.drawing.layered import Point
from pase.views.drawing.plans import (
    FILLS,
    PATTERNS,
    DrawnPlan,
    SplitClass,
    drawn_plan,
    extents_text,
    split_text,
)
from pase.views.exports import Exported, ExportOptions

_THIN = frozenset("ijl.,:'| ")
_NARROW = frozenset("frtI()[];/\\-!")
_WIDE = frozenset("mwMW@%…")
_CAPITALS = frozenset("ABCDEFGHJKLNOPQRSTUVXYZ&")
_SIGNS = frozenset("#+=<>~^×→")


def text_width(text: str, size: float) -> float:
    """Return an upper bound on the width of a line of text, in units of a drawing, in any common sans-serif font."""
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
    """Shorten a line to a maximum width, with an ellipsis in place of its middle."""
    return shortened_text(text, widest, lambda line: text_width(line, size), narrowest=0.34 * size)


def xml_text(text: str) -> str:
    """Return text as XML holds it, in elements and in attributes; characters that XML 1.0 forbids become U+FFFD.

    A parser returns every other character, including line ends and tabs.
    """
    allowed = "".join(c if _is_allowed(ord(c)) else "\ufffd" for c in text)
    return escape(allowed).translate({9: "&#9;", 10: "&#10;", 13: "&#13;"})


xml = Grammar(xml_text, between="").write
"""Returns XML text; values may be in elements, and in quoted attributes."""


def _is_allowed(code: int) -> bool:
    """Return whether a character may be in XML 1.0 (section 2.2); discouraged ones are excluded as well."""
    return (
        code in (0x9, 0xA, 0xD)
        or 0x20 <= code <= 0x7E
        or 0xA0 <= code <= 0xD7FF
        or 0xE000 <= code <= 0xFDCF
        or 0xFDF0 <= code <= 0xFFFD
        or (code >= 0x10000 and code & 0xFFFE != 0xFFFE)
    )


THINNEST, WIDEST = 1.2, 7.0
"""Width of an edge without transfers, and of the one with the most bytes."""

_RADIUS = 9.0
"""Radius of round corners."""

_LONG = 60.0
"""Least length of a vertical piece of an edge that has room for a label."""


def stroke_width(moved_bytes: float, most_bytes: float) -> float:
    """Return the width of an edge, by the square root of its bytes, so that small transfers are visible."""
    if moved_bytes <= 0 or most_bytes <= 0:
        return THINNEST
    return THINNEST + 0.6 + (WIDEST - THINNEST - 0.6) * sqrt(moved_bytes / most_bytes)


def path_data(route: Sequence[Point]) -> Text:
    """Return a polyline with round corners, as the `d` of an SVG path."""
    parts = [xml("M{}", _pair(route[0]))]
    for before, corner, after in zip(route, route[1:], route[2:], strict=False):
        radius = min(_RADIUS, dist(before, corner) / 2, dist(corner, after) / 2)
        start, end = towards(corner, before, radius), towards(corner, after, radius)
        parts.append(xml("L{}Q{} {}", _pair(start), _pair(corner), _pair(end)))
    return xml("{}L{}", parts, _pair(route[-1]))


def head_data(start: Point, tip: Point, width: float) -> tuple[Text, Point]:
    """Return an arrowhead for a line of that width, as the `d` of a path, and the point where the line ends behind
    it."""
    length = min(6.0 + 1.3 * width, 0.9 * dist(start, tip))
    half = 2.6 + 0.8 * width
    base = towards(tip, start, length)
    whole = dist(start, tip) or 1.0
    across = ((tip[1] - start[1]) / whole * half, (start[0] - tip[0]) / whole * half)
    left, right = (base[0] + across[0], base[1] + across[1]), (base[0] - across[0], base[1] - across[1])
    return xml("M{}L{}L{}z", _pair(left), _pair(tip), _pair(right)), towards(tip, start, 0.8 * length)


def _x_at(a: Point, b: Point, y: float) -> float:
    part = (y - a[1]) / (b[1] - a[1]) if b[1] != a[1] else 0.5
    return a[0] + (b[0] - a[0]) * min(max(part, 0.0), 1.0)


def number(value: float) -> Text:
    """Return a coordinate rounded to a tenth of a unit, in as few characters as possible."""
    tenths = round(value, 1)
    return xml("{}", int(tenths) if tenths == int(tenths) else tenths)


def _pair(point: Point) -> Text:
    return xml("{} {}", number(point[0]), number(point[1]))


def towards(start: Point, end: Point, length: float) -> Point:
    """Return the point of a line at a distance from its start."""
    whole = dist(start, end)
    part = length / whole if whole else 0.0
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part


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
"""Colours of everything except splits."""

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
"""Patterns laid over a colour, in a square of 8."""


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


_MARK = 26.0
"""Width of the symbol before an entry's text."""

_MOST_CLASSES = 20

_GAP = 18.0
_ROW = 20.0
_SIZE = 11.0


Entry = tuple[Text, str]
"""A symbol of the legend and its meaning; the symbol is SVG, within 26 x 14 from (0, 0)."""


def class_entries(classes: Sequence[SplitClass]) -> Iterator[Entry]:
    """Yield an entry for each class of layers with the most layers; the last one counts the omitted classes."""
    for i, of in enumerate(classes[:_MOST_CLASSES]):
        layers = f"{of.num_layers} layer{'s' * (of.num_layers != 1)}"
        mark = xml('<rect class="box c{}" x="1" y="1" width="22" height="12" rx="3"/>', i)
        if of.pattern != PATTERNS[0]:
            mark = xml('{}<rect class="overlay p{}" x="1" y="1" width="22" height="12" rx="3"/>', mark, i)
        split = f"split in {visible(of.label)}" if of.dims else of.label
        yield mark, f"{split} ({layers})"
    if others := classes[_MOST_CLASSES:]:
        yield xml(""), f"{len(others)} others ({sum(of.num_layers for of in others)} layers)"


def line_entries(most_bytes: float, what: str, *, has_blocks: bool, has_loops: bool) -> Iterator[Entry]:
    """Yield an entry for each kind of line in a picture; most_bytes: of one edge; what: meaning of the bytes."""
    yield _line(THINNEST, "still"), "nothing moves"
    if most_bytes:
        few = most_bytes / 16
        yield _line(stroke_width(few, most_bytes), "moving"), quantity(few, "B")
        yield _line(WIDEST, "moving"), f"{quantity(most_bytes, 'B')} in a step, {what}"
    if has_blocks:
        mark = xml('<rect class="frame" x="1" y="1" width="22" height="12" rx="3"/>')
        yield mark, "comes ×n, shown once"
    if has_loops:
        yield _line(THINNEST, "still", " back"), "to the next block"


def _line(width: float, kind: str, look: str = "") -> Text:
    form = '<g class="{}"><path class="edge{}" stroke-width="{}" d="M1 7H23"/></g>'
    return xml(form, kind, look, number(width))


def legend(groups: Sequence[Sequence[Entry]], width: float) -> tuple[Text, float]:
    """Return groups of entries in rows of a maximum width, as SVG from (0, 0) down, and their height."""
    found = []
    y = -_ROW
    for group in groups:
        x, y = 0.0, y + _ROW
        for mark, name in group:
            text = shortened(name, _SIZE, width - _MARK)
            needed = _MARK + text_width(text, _SIZE)
            if x and x + needed > width:
                x, y = 0.0, y + _ROW
            form = '<g transform="translate({} {})">{}<text x="{}" y="11">{}</text></g>'
            found.append(xml(form, number(x), number(y), mark, number(_MARK + 2), text))
            x += needed + _GAP
    return joined(found), y + _ROW


MARGIN = 20.0
"""Margin around the picture."""

_BOX_HEIGHT, _BOX_PAD = 38.0, 9.0
_LEAST_BOX, _MOST_BOX = 76.0, 220.0
_NAME_SIZE, _TEXT_SIZE, _TITLE_SIZE, _BYTES_SIZE = 13.2, 11.0, 17.6, 10.0
"""Font sizes; bold ones are larger by as much as bold letters are wider."""

_HEADING = 56.0
"""Height of the title and the lines below it."""

_LEAST_WIDTH = 480.0
"""Least width of the picture, so that its legend has room."""


def svg(plan: Plan, *, fold: bool = True) -> str:
    """Return the graph of a plan as SVG text; fold: whether repeated blocks are drawn once, framed.

    Boxes are layers, coloured by which dims are split; wide edges transfer many bytes. Names are always escaped as
    text.
    """
    drawn = drawn_plan(plan, is_folded=fold)
    graph, repeats = drawn.graph, drawn.repeats
    lines = [_lines(plan.layers[v]) for v in graph.vertices]
    drawing = arranged(graph, repeats, [(_box_width(*line), _BOX_HEIGHT) for line in lines])
    width = max(drawing.width, _LEAST_WIDTH)
    has_loops = any(edge.is_loop_back for edge in graph.edges)
    signs, signs_height = legend(
        [
            list(class_entries(drawn.classes.classes)),
            list(line_entries(drawn.most_bytes, drawn.transferred.what, has_blocks=bool(repeats), has_loops=has_loops)),
        ],
        width,
    )
    head = _HEADING + signs_height + MARGIN
    body = [
        *_heading(plan, width),
        xml('<g transform="translate({} {})">', number(MARGIN), number(MARGIN + _HEADING)),
        signs,
        xml("</g>"),
        xml('<g transform="translate({} {})">', number(MARGIN + (width - drawing.width) / 2), number(MARGIN + head)),
        *(_frame(frame, plan) for frame in drawing.frames),
        *_edges(drawn, drawing),
        *_vertices(drawn, drawing, lines),
        xml("</g>"),
    ]
    return _document(drawn, joined(body), width + 2 * MARGIN, drawing.height + head + 2 * MARGIN)


def _document(drawn: DrawnPlan, body: Text, width: float, height: float) -> Text:
    classes = drawn.classes.classes
    own = xml("pase-{}", sha256(body.encode()).hexdigest()[:10])
    size = number(width), number(height)
    lines = [
        xml('<svg xmlns="http://www.w3.org/2000/svg" id="{}" viewBox="0 0 {} {}" ', own, *size),
        xml('width="{}" height="{}" role="img" aria-labelledby="{}-title {}-desc">\n', *size, own, own),
        xml('<title id="{}-title">{}</title>\n', own, _title(drawn.plan)),
        xml('<desc id="{}-desc">{}</desc>\n', own, _description(drawn)),
        xml("<style>\n{}\n</style>\n", style(own, classes)),
        xml("<defs>{}</defs>\n", patterns(own, classes)),
        xml('<rect class="paper" width="100%" height="100%"/>\n{}\n</svg>\n', body),
    ]
    return xml("{}", lines)


def _title(plan: Plan) -> str:
    return f"{visible(plan.graph.name)} {_where(plan)}"


def _where(plan: Plan) -> str:
    return f"on {plan.num_devices} × {visible(plan.machine.device.name)}"


def _verdict(plan: Plan) -> str:
    cost = quantity(plan.total_cost, plan.cost_unit)
    return f"total cost {cost} a step, {plan.certificate} (cost model {plan.cost_model})"


def _description(drawn: DrawnPlan) -> str:
    """Describe the picture, for screen readers."""
    plan, graph = drawn.plan, drawn.graph
    parts = [f"{_verdict(plan)}. {len(plan.layers)} layers"]
    if len(graph.vertices) < len(plan.layers):
        parts[0] += f", drawn as {len(graph.vertices)} because blocks repeat"
    split = (
        f"{of.num_layers} {f'split in {visible(of.label)}' if of.dims else of.label}" for of in drawn.classes.classes
    )
    total = sum(map(sum, drawn.transferred.edges))
    return f"{parts[0]}: {', '.join(split)}. Edges transfer {quantity(total, 'B')} in a step, {drawn.transferred.what}."


def _heading(plan: Plan, width: float) -> Iterator[Text]:
    name = shortened(visible(plan.graph.name), _TITLE_SIZE, width / 2)
    title = shortened(f"{name} {_where(plan)}", _TITLE_SIZE, width)
    yield xml('<text class="title" x="{}" y="{}">{}</text>', number(MARGIN), number(MARGIN + 16), title)
    verdict = shortened(_verdict(plan), _NAME_SIZE, width)
    yield xml('<text class="muted verdict" x="{}" y="{}">{}</text>', number(MARGIN), number(MARGIN + 36), verdict)


def _lines(layer: LayerPlan) -> tuple[str, str]:
    """Return the two lines of text in a layer's box."""
    room = _MOST_BOX - 2 * _BOX_PAD
    configuration = configuration_text({visible(dim): k for dim, k in layer.splits.items()}, len(layer.devices))
    return shortened(visible(layer.name) or "(no name)", _NAME_SIZE, room), shortened(configuration, _TEXT_SIZE, room)


def _box_width(name: str, text: str) -> float:
    return max(_LEAST_BOX, text_width(name, _NAME_SIZE) + 2 * _BOX_PAD, text_width(text, _TEXT_SIZE) + 2 * _BOX_PAD)


def _frame(frame: Frame, plan: Plan) -> Text:
    repeat = frame.repeat
    ends = plan.layers[repeat.first].name, plan.layers[repeat.end - 1].name
    box = xml(
        '<rect class="frame" x="{}" y="{}" width="{}" height="{}" rx="8"/>',
        *map(number, (frame.x, frame.y, frame.width, frame.height)),
    )
    times = xml('<text class="times" x="{}" y="{}">×{}</text>', number(frame.x + 9), number(frame.y + 18), repeat.count)
    form = "<g><title>{} blocks of {} layers: {} … {}</title>{}{}</g>"
    return xml(form, repeat.count, repeat.period, *ends, box, times)


def _edges(drawn: DrawnPlan, drawing: Arrangement) -> Iterator[Text]:
    """Yield edges with few bytes before those with many, and the labels after all of them."""
    graph, plan = drawn.graph, drawn.plan
    num_out = Counter(edge.source for edge in graph.edges)
    num_in = Counter(edge.target for edge in graph.edges)
    labels = []
    order = sorted(range(len(graph.edges)), key=lambda n: (drawn.edge_bytes(graph.edges[n]), n))
    for n in order:
        edge, route = graph.edges[n], drawing.routes[n]
        total, most = drawn.total_bytes(edge), drawn.edge_bytes(edge)
        ends = f"{plan.layers[edge.source].name} → {plan.layers[edge.target].name}"
        about = f"{ends}: {_amount(total, most, len(edge.edges)) or 'nothing moves'}"
        width = stroke_width(most, drawn.most_bytes)
        head, end = head_data(route[-2], route[-1], width)
        heads = [head]
        if edge.is_loop_back:
            start, tip = max(pairwise(route), key=lambda piece: dist(*piece))
            heads.append(head_data(start, towards(start, tip, dist(start, tip) / 2), width)[0])
        yield xml(
            '<g class="{}"><title>{}</title><path class="edge{}" d="{}" stroke-width="{}"/>'
            '<path class="head" d="{}"/></g>',
            "moving" if total else "still",
            about,
            " back" if edge.is_loop_back else "",
            path_data([*route[:-1], end]),
            number(width),
            heads,
        )
        if total:
            amount = _amount(total, most, len(edge.edges))
            is_near = num_out[edge.source] >= num_in[edge.target]
            labels.append(_label(route, width, amount, near_target=is_near, drawing_width=drawing.width))
    yield from labels


def _amount(total: float, most: float, count: int) -> str:
    """Return the bytes over the edges that one represents, as text."""
    if not total:
        return ""
    if count == 1:
        return quantity(total, "B")
    return f"{quantity(most, 'B')} ×{count}" if total > 0.999 * most * count else f"{quantity(total, 'B')} in {count}"


def _label(route: Sequence[Point], width: float, text: str, *, near_target: bool, drawing_width: float) -> Text:
    """Return the label with the bytes of an edge, within the picture's margins, clear of the boxes at both ends.

    It is placed where edges that meet at the other end are apart; along the detour around other vertices, if there is
    one.
    """
    aside, is_left = width / 2 + 4.0, False
    start, tip = route[-2], route[-1]
    if len(route) > 2 and route[-3][0] == start[0] and start[1] - route[-3][1] >= _LONG:
        x, y = start[0] + aside, (route[-3][1] + start[1]) / 2 + 3.5
    elif not near_target:
        x, y = _x_at(route[0], route[1], route[0][1] + 9.0) + aside, route[0][1] + 14.0
    else:
        is_left = start[0] > tip[0] + 1.0
        x, y = _x_at(start, tip, tip[1] - 9.0) + (-aside if is_left else aside), tip[1] - 6.0
    room = text_width(text, _BYTES_SIZE)
    x = max(x, room - MARGIN) if is_left else min(x, drawing_width + MARGIN - room)
    return xml(
        '<text class="{}" x="{}" y="{}">{}</text>', "bytes left" if is_left else "bytes", number(x), number(y), text
    )


def _vertices(drawn: DrawnPlan, drawing: Arrangement, lines: Sequence[tuple[str, str]]) -> Iterator[Text]:
    for v, (x, y), (name, text) in zip(drawn.graph.vertices, drawing.positions, lines, strict=True):
        layer, number_of_class = drawn.plan.layers[v], drawn.classes.of_layer[v]
        width = _box_width(name, text)
        left, top = x - width / 2, y - _BOX_HEIGHT / 2
        box = xml(
            '<rect class="box c{}" x="{}" y="{}" width="{}" height="{}" rx="5"/>',
            number_of_class,
            *map(number, (left, top, width, _BOX_HEIGHT)),
        )
        if drawn.classes.classes[number_of_class].pattern != PATTERNS[0]:
            # Next to the text, not behind it.
            box = xml(
                '{}<rect class="overlay p{}" x="{}" y="{}" width="{}" height="{}" rx="4"/>',
                box,
                number_of_class,
                *map(number, (left + 1, top + 1, _BOX_PAD - 1, _BOX_HEIGHT - 2)),
            )
        shown = [
            xml('<text class="name" x="{}" y="{}">{}</text>', number(x), number(y - 3), name),
            xml('<text class="text" x="{}" y="{}">{}</text>', number(x), number(y + 12), text),
        ]
        yield xml("<g><title>{}</title>{}{}</g>", _about(drawn, v, layer), box, shown)


def _about(drawn: DrawnPlan, v: int, layer: LayerPlan) -> str:
    """Return the full description of a layer, its whole name first."""
    plan = drawn.plan
    count = len(drawn.graph.members[v])
    lines = [
        layer.name,
        f"{layer.kind}: {extents_text(layer.dims)}",
        split_text(plan, layer),
        f"cost of a step {', '.join(drawn.layer_text(v))}",
    ]
    if count > 1:
        lines.append(f"and {count - 1} more like it, to {plan.layers[drawn.graph.members[v][-1]].name}")
    return "\n".join(lines)


def write(plan: Plan, options: ExportOptions) -> Exported:
    """Return the self-contained picture."""
    text = svg(plan, fold=options.fold)
    return Exported(text=text if text.endswith("\n") else f"{text}\n")
