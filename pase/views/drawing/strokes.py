"""Lines of a drawing: rounded ways of edges, their widths, and where along them a label stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import dist, sqrt

from pase.targets.mesh_tensorflow.emitter.text import Text
from pase.views.drawing.lettering import xml
from pase.views.drawing.routes import Point

THINNEST, WIDEST = 1.2, 7.0
"""Width of an edge over which nothing moves, and of the one over which most moves."""

_RADIUS = 9.0
"""Of the round corners."""

_LONG = 60.0
"""Of a vertical piece beside which there is room for a label."""


def stroke_width(moved_bytes: float, most_bytes: float) -> float:
    """Return the width of an edge; by the root of the bytes, so that few are seen beside many."""
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


def longest_piece(route: Sequence[Point]) -> tuple[Point, Point]:
    """Return the ends of the longest straight piece of a polyline."""
    return max(pairwise(route), key=lambda piece: dist(*piece))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPlace:
    """Where a label's baseline begins, or ends where it is left of its line."""

    x: float
    y: float
    is_left: bool


def label_place(route: Sequence[Point], width: float, *, near_target: bool) -> LabelPlace:
    """Return where the label of a line of that width stands: beside it, clear of the boxes at both ends.

    It is where edges that meet at the other end are apart; beside the way round other vertices, if there is one.
    """
    aside = width / 2 + 4.0
    if len(route) > 2 and route[-3][0] == route[-2][0] and route[-2][1] - route[-3][1] >= _LONG:
        return LabelPlace(x=route[-2][0] + aside, y=(route[-3][1] + route[-2][1]) / 2 + 3.5, is_left=False)
    if not near_target:
        return LabelPlace(x=_x_at(route[0], route[1], route[0][1] + 9.0) + aside, y=route[0][1] + 14.0, is_left=False)
    start, tip = route[-2], route[-1]
    is_left = start[0] > tip[0] + 1.0
    return LabelPlace(
        x=_x_at(start, tip, tip[1] - 9.0) + (-aside if is_left else aside), y=tip[1] - 6.0, is_left=is_left
    )


def _x_at(a: Point, b: Point, y: float) -> float:
    part = (y - a[1]) / (b[1] - a[1]) if b[1] != a[1] else 0.5
    return a[0] + (b[0] - a[0]) * min(max(part, 0.0), 1.0)


def number(value: float) -> Text:
    """Return a coordinate in as few characters as a tenth of a unit needs."""
    tenths = round(value, 1)
    return xml("{}", int(tenths) if tenths == int(tenths) else tenths)


def _pair(point: Point) -> Text:
    return xml("{} {}", number(point[0]), number(point[1]))


def towards(start: Point, end: Point, length: float) -> Point:
    """Return the point of a line that is so far from its start."""
    whole = dist(start, end)
    part = length / whole if whole else 0.0
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part
