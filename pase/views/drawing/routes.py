"""Polylines of edges: straight down beside boxes, to the side only between two rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The height that a row takes; left and right: how far its boxes, and the edges that pass them, reach."""

    top: float
    bottom: float
    left: float
    right: float

    @property
    def middle(self) -> float:
        """Where the boxes of the row are."""
        return (self.top + self.bottom) / 2


def through(
    xs: Sequence[float], bands: Sequence[Band], source_height: float, target_height: float
) -> tuple[Point, ...]:
    """Return the way of an edge through some rows; xs: where it is in each, from its source to its target."""
    first, last = bands[0], bands[-1]
    points = [(xs[0], first.middle + source_height / 2), (xs[0], first.bottom)]
    for x, band in zip(xs[1:-1], bands[1:-1], strict=True):
        points += [(x, band.top), (x, band.bottom)]
    return (*points, (xs[-1], last.top), (xs[-1], last.middle - target_height / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """Edges with one source that go round the drawing; targets: vertex by edge number."""

    source: int
    targets: Mapping[int, int]


def detours(
    found: Iterable[Detour], row_of: Sequence[int], bands: Sequence[Band], positions: Sequence[Point], gap: float
) -> Iterator[tuple[Detour, float, float]]:
    """Yield each detour with its lane: where it is, outside of all that stands in the rows it passes, and a number in
    [0, 1).

    Shorter ones are nearer to the drawing. The numbers tell lanes apart where they meet.
    """
    left, right = [band.left for band in bands], [band.right for band in bands]

    def span(detour: Detour) -> tuple[int, int]:
        return row_of[detour.source] + 1, max(row_of[v] for v in detour.targets.values())

    for number, detour in enumerate(sorted(found, key=lambda d: (span(d)[1] - span(d)[0], span(d)[0], d.source))):
        first, last = span(detour)
        lanes = (max(right[first:last]) + gap, min(left[first:last]) - gap)
        ends = [positions[v][0] for v in (detour.source, *detour.targets.values())]
        lane = min(lanes, key=lambda x: sum(abs(x - end) for end in ends))
        side = right if lane == lanes[0] else left
        side[first:last] = [lane] * (last - first)
        yield detour, lane, number * 0.381966 % 1


def detour(
    lane: float, number: float, source: Point, target: Point, rows: tuple[Band, Band, Band, Band]
) -> tuple[Point, ...]:
    """Return the way of an edge along a lane, between two points on the boundaries of its boxes.

    rows: the source's, the next, the one before the target's, the target's. number: in [0, 1), how high between two
    rows.
    """
    leave = rows[0].bottom + (rows[1].top - rows[0].bottom) * (0.2 + 0.6 * number)
    enter = rows[2].bottom + (rows[3].top - rows[2].bottom) * (0.2 + 0.6 * number)
    (x, y), (end, end_y) = source, target
    return ((x, y), (x, leave), (lane, leave), (lane, enter), (end, enter), (end, end_y))


def straightened(route: Sequence[Point]) -> tuple[Point, ...]:
    """Return a polyline without the points that lie on the straight line between those beside them."""
    kept: list[Point] = []
    for point in route:
        if kept and point == kept[-1]:
            continue
        while len(kept) > 1 and _on_line(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return tuple(kept)


def _on_line(a: Point, b: Point, c: Point) -> bool:
    across = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
    along = (b[0] - a[0]) * (c[0] - b[0]) + (b[1] - a[1]) * (c[1] - b[1])
    return abs(across) < 1e-6 and along >= 0
