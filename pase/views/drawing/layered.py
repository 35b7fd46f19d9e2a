"""`layered`: a drawing of a graph in rows, from top to bottom (Sugiyama, Tagawa and Toda 1981).

Edges are polylines: straight down beside boxes, to the side only between two rows.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from pase.views.drawing.x_coordinates import EDGE_GAP, placed


def rows(
    num_vertices: int,
    edges: Sequence[tuple[int, int]],
    *,
    at_top: Collection[int] = (),
    at_bottom: Collection[int] = (),
) -> tuple[int, ...]:
    """Return [V] the row of each vertex of an acyclic graph: every edge leads to a later row.

    A vertex that nothing follows stands as early as its predecessors let it, all others as late as their successors
    let them: what enters late (a second input) stands by its reader, and what ends early (a second output) by its
    source. at_top: vertices without predecessors, in a row before all others; at_bottom: without successors, after all
    others.
    """
    apart = {*at_top, *at_bottom}
    inner = [(u, v) for u, v in edges if not (u in apart or v in apart)] if apart else edges
    found = _tight_rows(num_vertices, inner)
    if not apart:
        return tuple(found)
    shift = 1 if at_top else 0
    last = max((found[v] for v in range(num_vertices) if v not in apart), default=-1) + shift + 1
    top, bottom = dict.fromkeys(at_top, 0), dict.fromkeys(at_bottom, last)
    return tuple(top.get(v, bottom.get(v, row + shift)) for v, row in enumerate(found))


def _tight_rows(num_vertices: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in range(num_vertices)]
    waiting = [0] * num_vertices
    for u, v in edges:
        after[u].append(v)
        waiting[v] += 1
    row = [0] * num_vertices
    order = [v for v in range(num_vertices) if not waiting[v]]
    for u in order:
        following = row[u] + 1
        for v in after[u]:
            if row[v] < following:
                row[v] = following
            waiting[v] -= 1
            if not waiting[v]:
                order.append(v)  # the list is the queue
    assert len(order) == num_vertices, "the graph has a cycle"
    for u in reversed(order):
        if after[u]:
            row[u] = min([row[v] for v in after[u]]) - 1
    return row


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
        """Return the height of the middle of the row's boxes."""
        return (self.top + self.bottom) / 2


def _through(
    xs: Sequence[float], bands: Sequence[Band], source_height: float, target_height: float
) -> tuple[Point, ...]:
    """Return the way of an edge through some rows; xs: where it is in each, from its source to its target."""
    first, last = bands[0], bands[-1]
    points = [(xs[0], first.middle + source_height / 2), (xs[0], first.bottom)]
    for x, band in zip(xs[1:-1], bands[1:-1], strict=True):
        points += [(x, band.top), (x, band.bottom)]
    return (*points, (xs[-1], last.top), (xs[-1], last.middle - target_height / 2))


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


ROW_GAP = 26.0
"""Gap between two rows; it is wider where edges go far to the side between the rows."""

_MOST_ROW_GAP = 76.0
_SLOPE = 0.12
"""Height that the gap gains for each unit that an edge goes to the side."""

_LONGEST = 12
"""Rows that an edge passes within the drawing; longer ones go round it."""

_PARALLEL = 6.0
"""Gap between edges that join the same two boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Where everything is; y grows downwards, everything lies in [0, width] x [0, height].

    positions: [V] the middle of each vertex's box. routes: [E] one polyline for each edge, from its source's boundary
    to its target's.
    """

    positions: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def layered(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    *,
    ends: Sequence[tuple[float, float]] | None = None,
    at_top: Collection[int] = (),
    at_bottom: Collection[int] = (),
) -> Drawing:
    """Return a drawing in which edges lead downwards and boxes stay clear of one another and of edges.

    sizes: [V] width and height of each box. edges: (source, target), without cycles; several between two vertices are
    all drawn. The same input gives the same drawing. ends: [E] how far from the middle of its source and of its target
    each edge begins and ends; the middle by default. at_top: vertices that nothing precedes, for a row above all
    others; at_bottom: that nothing follows, below them.
    """
    assert all(0 <= v < len(sizes) for edge in edges for v in edge), "an edge of a vertex that is not there"
    row_of = rows(len(sizes), edges, at_top=at_top, at_bottom=at_bottom)
    within, around = _divided(row_of, edges)
    ends = _apart(edges, [(0.0, 0.0)] * len(edges) if ends is None else ends, row_of, sizes)
    x_of, passed = placed(row_of, [width for width, _ in sizes], edges, within)
    ways = {}
    for number in within:
        (u, v), (from_middle, to_middle) = edges[number], ends[number]
        ways[number] = (x_of[u] + from_middle, *passed[number], x_of[v] + to_middle)
    bands = _bands(row_of, sizes, x_of, [(row_of[edges[number][0]], way) for number, way in ways.items()])
    positions = [(x_of[v], bands[row].middle) for v, row in enumerate(row_of)]
    routes: list[tuple[Point, ...]] = [()] * len(edges)
    for number, way in ways.items():
        u, v = edges[number]
        routes[number] = _through(way, bands[row_of[u] : row_of[v] + 1], sizes[u][1], sizes[v][1])
    for number, route in _around(around, row_of, edges, ends, sizes, positions, bands):
        routes[number] = route
    routes = [straightened(route) for route in routes]
    boxes = [(x - w / 2, y - h / 2, w, h) for (x, y), (w, h) in zip(positions, sizes, strict=True)]
    left, top, width, height = extent(boxes, routes)
    return Drawing(
        positions=moved(positions, -left, -top),
        routes=tuple(moved(route, -left, -top) for route in routes),
        width=width,
        height=height,
    )


def extent(
    boxes: Iterable[tuple[float, float, float, float]], routes: Iterable[Iterable[Point]]
) -> tuple[float, float, float, float]:
    """Return the left and upper edge, the width and the height of boxes, told in the same way, and routes together."""
    xs, ys = [x for route in routes for x, _ in route], [y for route in routes for _, y in route]
    for x, y, width, height in boxes:
        xs += [x, x + width]
        ys += [y, y + height]
    left, top = min(xs, default=0.0), min(ys, default=0.0)
    return left, top, max(xs, default=0.0) - left, max(ys, default=0.0) - top


def moved(points: Iterable[Point], x: float, y: float) -> tuple[Point, ...]:
    """Return points, so much further to the right and down."""
    return tuple((px + x, py + y) for px, py in points)


def _divided(row_of: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the edges that pass through the rows between their ends, and those that go round the drawing.

    Each row that an edge passes costs as much as a vertex: the longest go round where they would outnumber them.
    """
    spans = sorted((row_of[v] - row_of[u], number) for number, (u, v) in enumerate(edges))
    budget = 1000 + 2 * len(row_of)
    within: list[int] = []
    around: list[int] = []
    for span, number in spans:
        budget -= span - 1
        (within if span <= _LONGEST and budget >= 0 else around).append(number)
    return sorted(within), sorted(around)


def _bands(
    row_of: Sequence[int],
    sizes: Sequence[tuple[float, float]],
    x_of: Sequence[float],
    ways: Sequence[tuple[int, tuple[float, ...]]],
) -> list[Band]:
    """Return what each row takes: as high as its highest box, farther from the next where edges go far to the side.

    ways: the first row of an edge and where it is in that and the following ones.
    """
    num_rows = max(row_of, default=-1) + 1
    heights, aside = [0.0] * num_rows, [0.0] * num_rows
    left, right = [inf] * num_rows, [-inf] * num_rows
    for v, row in enumerate(row_of):
        width, height = sizes[v]
        heights[row] = max(heights[row], height)
        left[row], right[row] = min(left[row], x_of[v] - width / 2), max(right[row], x_of[v] + width / 2)
    for first, way in ways:
        for row, (x, following) in enumerate(pairwise(way), first):
            aside[row] = max(aside[row], abs(following - x))
        for row, x in enumerate(way[1:-1], first + 1):
            left[row], right[row] = min(left[row], x), max(right[row], x)
    bands, top = [], 0.0
    for row, height in enumerate(heights):
        bands.append(Band(top=top, bottom=top + height, left=left[row], right=right[row]))
        top += height + min(ROW_GAP + _SLOPE * aside[row], _MOST_ROW_GAP)
    return bands


def _around(
    numbers: Sequence[int],
    row_of: Sequence[int],
    edges: Sequence[tuple[int, int]],
    ends: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    positions: Sequence[Point],
    bands: Sequence[Band],
) -> Iterator[tuple[int, tuple[Point, ...]]]:
    """Yield (edge, way) of those that go round the drawing.

    Edges of one source share a lane, outside of all that stands in the rows that it passes; shorter ones are nearer to
    the drawing. How high an edge leaves and enters between two rows tells lanes apart where they meet.
    """
    of_source: dict[int, list[int]] = {}
    for number in numbers:
        of_source.setdefault(edges[number][0], []).append(number)
    spans = {u: (row_of[u] + 1, max(row_of[edges[n][1]] for n in of)) for u, of in of_source.items()}
    left, right = [band.left for band in bands], [band.right for band in bands]
    for place, u in enumerate(sorted(spans, key=lambda u: (spans[u][1] - spans[u][0], spans[u][0], u))):
        first, last = spans[u]
        lanes = (max(right[first:last]) + EDGE_GAP, min(left[first:last]) - EDGE_GAP)
        xs = [positions[v][0] for v in (u, *(edges[n][1] for n in of_source[u]))]
        lane = min(lanes, key=lambda x: sum(abs(x - end) for end in xs))
        (right if lane == lanes[0] else left)[first:last] = [lane] * (last - first)
        level = 0.2 + 0.6 * (place * 0.381966 % 1)
        for number in of_source[u]:
            v, (from_middle, to_middle) = edges[number][1], ends[number]
            above, below = bands[row_of[u]], bands[row_of[v] - 1]
            leave = above.bottom + (bands[row_of[u] + 1].top - above.bottom) * level
            enter = below.bottom + (bands[row_of[v]].top - below.bottom) * level
            x, end = positions[u][0] + from_middle, positions[v][0] + to_middle
            start_y, end_y = positions[u][1] + sizes[u][1] / 2, positions[v][1] - sizes[v][1] / 2
            yield number, ((x, start_y), (x, leave), (lane, leave), (lane, enter), (end, enter), (end, end_y))


def _apart(
    edges: Sequence[tuple[int, int]],
    ends: Sequence[tuple[float, float]],
    row_of: Sequence[int],
    sizes: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Return the ends of edges, moved to the side where several lie on the same line."""
    between: dict[tuple[int, int, tuple[float, float]], list[int]] = {}
    for number, (u, v) in enumerate(edges):
        if row_of[v] == row_of[u] + 1:
            between.setdefault((u, v, ends[number]), []).append(number)
    moved = list(ends)
    for (u, v, (from_middle, to_middle)), numbers in between.items():
        gap = min(_PARALLEL, 0.8 * min(sizes[u][0], sizes[v][0]) / len(numbers))
        for i, number in enumerate(numbers):
            aside = gap * (i - (len(numbers) - 1) / 2)
            moved[number] = (from_middle + aside, to_middle + aside)
    return moved
