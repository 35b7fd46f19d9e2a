"""Small charts as SVG text: panels of stacked bars, and curves; the same figures give the same file."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log10
from xml.sax.saxutils import escape

FONT = "font-family='sans-serif' font-size='11'"
LEFT, TOP, BOTTOM = 52, 34, 62
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_HEIGHT = 330, 190, 26
_LEGEND_COLUMNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of a bar's parts: a name for the legend, a colour, and whether it is hatched."""

    name: str
    colour: str
    hatched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stack. heights: one for each part, in the chart's unit; note: bold, above it."""

    label: str
    heights: tuple[float, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes with bars. limit: bars beyond it are cut off there, and their heights written above them."""

    title: str
    bars: tuple[Bar, ...]
    limit: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points (x, y) joined by a line."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """One set of axes with curves, from x = 0 to right; what is beyond its edges is cut off."""

    title: str
    x_label: str
    lines: tuple[Curve, ...]
    right: float


def stacked_bars(panels: Sequence[Panel], parts: Sequence[Part], *, unit: str) -> str:
    """Return panels of stacked bars, two in a row, each with its own scale; unit: what the heights are in."""
    rows = -(-len(panels) // 2)
    cell_height = TOP + PANEL_HEIGHT + BOTTOM
    shown = [part for k, part in enumerate(parts) if any(bar.heights[k] for panel in panels for bar in panel.bars)]
    body = [_legend([(part.name, part.colour) for part in shown], unit)]
    for number, panel in enumerate(panels):
        x = (number % 2) * (LEFT + PANEL_WIDTH) + LEFT
        y = LEGEND_HEIGHT + number // 2 * cell_height + TOP
        body.append(_panel(panel, parts, x, y))
    width = min(2, len(panels)) * (LEFT + PANEL_WIDTH) + 8
    return svg(width, LEGEND_HEIGHT + rows * cell_height, body)


def curves(lines: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> str:
    """Return curves on one set of axes that begin at 0."""
    width, height = 2 * PANEL_WIDTH, PANEL_HEIGHT + 40
    top_x = max(x for line in lines for x, _ in line.points)
    top_y = _round_up(max(y for line in lines for _, y in line.points))
    x0, y0 = LEFT, LEGEND_HEIGHT + TOP
    body = [_legend([(line.name, line.colour) for line in lines], y_label), _text(x0, y0 - 12, title)]
    body += _y_axis(x0, y0, width, height, top_y)
    for k in range(6):
        x = x0 + width * k / 5
        body.append(_text(x, y0 + height + 16, f"{top_x * k / 5:g}", anchor="middle"))
    body.append(_text(x0 + width / 2, y0 + height + 34, x_label, anchor="middle"))
    for line in lines:
        points = " ".join(f"{x0 + width * x / top_x:.1f},{y0 + height * (1 - y / top_y):.1f}" for x, y in line.points)
        dash = " stroke-dasharray='5 3'" if line.dashed else ""
        body.append(f"<polyline points='{points}' fill='none' stroke='{line.colour}' stroke-width='1.8'{dash}/>")
    return svg(x0 + width + 24, y0 + height + 44, body)


def curve_panels(
    panels: Sequence[Axes], *, y_label: str, bottom: float, top: float, level: float, level_name: str
) -> str:
    """Return panels of curves, two in a row, from bottom to top; level: of a dashed line, which has a name."""
    entries = list({line.name: line.colour for panel in panels for line in panel.lines}.items())
    body = [_text(10, 18, f"{y_label}; {level_name}: dashed line")]
    for number, (name, colour) in enumerate(entries):
        x, y = 10 + number % _LEGEND_COLUMNS * 148, 26 + number // _LEGEND_COLUMNS * 18
        body += [f"<rect x='{x}' y='{y}' width='11' height='11' fill='{colour}'/>", _text(x + 16, y + 10, name)]
    head = LEGEND_HEIGHT + 18 * -(-len(entries) // _LEGEND_COLUMNS)
    for number, panel in enumerate(panels):
        x = (number % 2) * (LEFT + PANEL_WIDTH) + LEFT
        y = head + number // 2 * (TOP + PANEL_HEIGHT + BOTTOM) + TOP
        body += _axes(panel, x, y, bottom, top, level)
    return svg(2 * (LEFT + PANEL_WIDTH) + 8, head + -(-len(panels) // 2) * (TOP + PANEL_HEIGHT + BOTTOM), body)


def _axes(panel: Axes, x0: float, y0: float, bottom: float, top: float, level: float) -> list[str]:
    width = PANEL_WIDTH - 24

    def at(x: float, y: float) -> str:
        down = (top - min(max(y, bottom), top)) / (top - bottom)
        return f"{x0 + width * x / panel.right:.1f},{y0 + PANEL_HEIGHT * down:.1f}"

    body = [_text(x0, y0 - 12, panel.title)]
    for k in range(5):
        y = bottom + (top - bottom) * k / 4
        body.append(f"<polyline points='{at(0, y)} {at(panel.right, y)}' stroke='#ddd'/>")
        body.append(_text(x0 - 4, y0 + PANEL_HEIGHT * (1 - k / 4) + 4, f"{y:g}", anchor="end"))
        body.append(_text(x0 + width * k / 4, y0 + PANEL_HEIGHT + 16, f"{panel.right * k / 4:,.4g}", anchor="middle"))
    body.append(_text(x0 + width / 2, y0 + PANEL_HEIGHT + 34, panel.x_label, anchor="middle"))
    body.append(f"<polyline points='{at(0, level)} {at(panel.right, level)}' stroke='#888' stroke-dasharray='3 3'/>")
    for line in panel.lines:
        points = " ".join(at(x, y) for x, y in line.points if x <= panel.right)
        dash = " stroke-dasharray='5 3'" if line.dashed else ""
        body.append(f"<polyline points='{points}' fill='none' stroke='{line.colour}' stroke-width='1.6'{dash}/>")
    return body


def svg(width: float, height: float, body: Sequence[str]) -> str:
    """Return a whole SVG file on white, with a pattern #hatch for hatched parts."""
    hatch = (
        "<defs><pattern id='hatch' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        "<line x1='0' y1='0' x2='0' y2='6' stroke='white' stroke-width='2'/></pattern></defs>"
    )
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' {FONT}>"
    return (
        "\n".join([head, hatch, f"<rect width='{width:g}' height='{height:g}' fill='white'/>", *body, "</svg>"]) + "\n"
    )


def _panel(panel: Panel, parts: Sequence[Part], x0: float, y0: float) -> str:
    top = _round_up(min(panel.limit, max(sum(bar.heights) for bar in panel.bars)))
    width = PANEL_WIDTH - 10
    body = [_text(x0, y0 - 18, panel.title), *_y_axis(x0, y0, width, PANEL_HEIGHT, top)]
    pitch = width / len(panel.bars)
    for number, bar in enumerate(panel.bars):
        x, y = x0 + pitch * (number + 0.2), y0 + PANEL_HEIGHT
        for part, value in zip(parts, bar.heights, strict=True):
            height = min(PANEL_HEIGHT * value / top, y - y0)
            y -= height
            box = f"x='{x:.1f}' y='{y:.2f}' width='{pitch * 0.6:.1f}' height='{height:.2f}'"
            body.append(f"<rect {box} fill='{part.colour}'/>")
            if part.hatched:
                body.append(f"<rect {box} fill='url(#hatch)'/>")
        middle = x + pitch * 0.3
        note = f"{sum(bar.heights):.0f}" if sum(bar.heights) > top else bar.note
        if note:
            body.append(_text(middle, y - 4, note, anchor="middle", bold=note == bar.note))
        body.append(_text(middle, y0 + PANEL_HEIGHT + 8, bar.label, anchor="end", turned=True))
    return "\n".join(body)


def _y_axis(x0: float, y0: float, width: float, height: float, top: float) -> list[str]:
    body = []
    for k in range(5):
        y = y0 + height * (1 - k / 4)
        body.append(f"<line x1='{x0}' y1='{y:g}' x2='{x0 + width:g}' y2='{y:g}' stroke='#ddd'/>")
        body.append(_text(x0 - 4, y + 4, f"{top * k / 4:g}", anchor="end"))
    return body


def _legend(entries: Sequence[tuple[str, str]], unit: str) -> str:
    body, x = [_text(10, 18, f"{unit}:")], 24 + 6.2 * len(unit)
    for name, colour in entries:
        body.append(f"<rect x='{x:g}' y='8' width='11' height='11' fill='{colour}'/>")
        body.append(_text(x + 16, 18, name))
        x += 34 + 6.2 * len(name)
    return "\n".join(body)


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, turned: bool = False) -> str:
    more = " font-weight='bold'" if bold else ""
    if turned:
        more += f" transform='rotate(-50 {x:.1f} {y:.1f})'"
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{more}>{escape(text)}</text>"


def _round_up(value: float) -> float:
    """Return the next number with a round quarter."""
    scale = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    return next(k * scale for k in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if k * scale >= value * (1 - 1e-12))
