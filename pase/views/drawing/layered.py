"""`layered`: draw a graph in rows, from top to bottom (Sugiyama, Tagawa and Toda 1981).

Edges are polylines that are vertical within rows and slanted only between two rows.

The rows are divided into segments that are laid out separately, repeated ones once: if a row consists of a single
vertex and no edge passes it, the parts above and below are independent. All such vertices are on one vertical line.
Within a segment, vertices are first ordered in each row to reduce crossings (barycentres, then swaps of neighbours).
Then they are positioned so that edges are straight (Brandes and Köpf 2002): vertices are joined to vertically aligned
blocks in four ways, with their neighbours above or below, preferring the left or the right of two medians. Each way is
packed from one side; the result is the mean of the middle two.
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import inf


def rows(
    num_vertices: int,
    edges: Sequence[tuple[int, int]],
    *,
    at_top: Collection[int] = (),
    at_bottom: Collection[int] = (),
) -> tuple[int, ...]:
    """Return [V] the row of each vertex of an acyclic graph: every edge leads to a later row.

    A vertex without successors is as early as its predecessors permit, all others as late as their successors permit.
    An additional input is thus next to its reader, and an additional output next to its source.

    Args:
        num_vertices: Number of vertices.
        edges: (source, target).
        at_top: Vertices without predecessors to place in a row before all others.
        at_bottom: Vertices without successors to place in a row after all others.
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
    """The vertical extent of a row; left and right: how far its boxes, and the edges that pass them, reach."""

    top: float
    bottom: float
    left: float
    right: float

    @property
    def middle(self) -> float:
        """Height of the centre of the row's boxes."""
        return (self.top + self.bottom) / 2


def _through(
    xs: Sequence[float], bands: Sequence[Band], source_height: float, target_height: float
) -> tuple[Point, ...]:
    """Return the route of an edge through some rows; xs: its position in each, from its source to its target."""
    first, last = bands[0], bands[-1]
    points = [(xs[0], first.middle + source_height / 2), (xs[0], first.bottom)]
    for x, band in zip(xs[1:-1], bands[1:-1], strict=True):
        points += [(x, band.top), (x, band.bottom)]
    return (*points, (xs[-1], last.top), (xs[-1], last.middle - target_height / 2))


def straightened(route: Sequence[Point]) -> tuple[Point, ...]:
    """Return a polyline without the points that are on the straight line between their neighbours."""
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
"""Gap between two rows; it is wider where edges lead far to the side between the rows."""

_MOST_ROW_GAP = 76.0
_SLOPE = 0.12
"""Additional height of the gap for each unit that an edge leads to the side."""

_LONGEST = 12
"""Maximum number of rows that an edge passes within the drawing; longer ones are routed around it."""

_PARALLEL = 6.0
"""Gap between edges that join the same two boxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Positions of boxes and edges; y grows downwards, everything is within [0, width] x [0, height].

    Attributes:
        positions: [V] the centre of each vertex's box.
        routes: [E] one polyline for each edge, from its source's boundary to its target's.
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
    """Return a drawing in which edges lead downwards, and boxes overlap neither each other nor edges.

    The same input gives the same drawing.

    Args:
        sizes: [V] width and height of each box.
        edges: (source, target), without cycles; parallel edges are all drawn.
        ends: [E] offset of each edge's ends from the centre of its source and of its target; default: 0.
        at_top: Vertices without predecessors, for a row above all others.
        at_bottom: Vertices without successors, for a row below all others.
    """
    assert all(0 <= v < len(sizes) for edge in edges for v in edge), "an edge has an unknown vertex"
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
    """Return the bounding box of boxes and routes, as its left and upper edge, width and height, like the boxes."""
    xs, ys = [x for route in routes for x, _ in route], [y for route in routes for _, y in route]
    for x, y, width, height in boxes:
        xs += [x, x + width]
        ys += [y, y + height]
    left, top = min(xs, default=0.0), min(ys, default=0.0)
    return left, top, max(xs, default=0.0) - left, max(ys, default=0.0) - top


def moved(points: Iterable[Point], x: float, y: float) -> tuple[Point, ...]:
    """Return points translated by (x, y)."""
    return tuple((px + x, py + y) for px, py in points)


def _divided(row_of: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the edges that pass through the rows between their ends, and those routed around the drawing.

    Each row that an edge passes costs as much as a vertex: the longest edges are routed around where they would
    outnumber the vertices.
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
    """Return the vertical extents of rows: the height of the highest box, with a wider gap below long slanted edges.

    ways: first row of each edge, and its position in that and the following rows.
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
    """Yield (edge, route) of the edges that are routed around the drawing.

    Edges of one source share a lane, outside of all boxes in the rows that it passes; shorter ones are nearer to the
    drawing. The height at which an edge leaves and enters between two rows distinguishes lanes where they meet.
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
    """Return the ends of edges, moved to the side where several edges would coincide."""
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


Adjacency = Sequence[Sequence[int]]

_ROUNDS = 12
_PATIENCE = 2
"""The search ends after this many rounds without fewer crossings."""

_SWAPPED = 400
"""Maximum number of vertices in a drawing for which neighbours are swapped, which is expensive in large ones."""


def ordered(rows: Sequence[Sequence[int]], above: Adjacency, below: Adjacency) -> list[list[int]]:
    """Return the vertices of each row from left to right, with no more crossings than in the given order.

    above, below: [V] neighbours in the previous and next row; edges only join neighbouring rows.
    """
    order = [list(row) for row in rows]
    place = [0] * len(above)
    for row in order:
        _number(row, place)
    best, fewest = order, count_crossings(order, below, place)
    waited = 0
    for round_ in range(_ROUNDS):
        if not fewest or waited == _PATIENCE:
            break
        order = [list(row) for row in order]
        changed = _sweep(order[1:], above, place, to_right=round_ % 4 > 1)
        changed |= _sweep(order[-2::-1], below, place, to_right=round_ % 4 > 1)
        if len(above) <= _SWAPPED:
            changed |= _swap(order, above, below, place)
        crossings = count_crossings(order, below, place)
        waited = 0 if crossings < fewest else waited + 1
        if crossings < fewest:
            best, fewest = order, crossings
        elif not changed:
            break
    return best


def count_crossings(order: Sequence[Sequence[int]], below: Adjacency, place: Sequence[int]) -> int:
    """Return how many pairs of edges cross between neighbouring rows; place: [V] position of each vertex in its
    row."""
    total = 0
    for row in order:
        if len(row) > 1:
            ends: list[int] = []
            for v in row:
                targets = sorted([place[w] for w in below[v]])
                for target in targets:
                    total += len(ends) - bisect_right(ends, target)
                for target in targets:
                    insort(ends, target)
    return total


def _number(row: Sequence[int], place: list[int]) -> None:
    for position, v in enumerate(row):
        place[v] = position


def _sweep(order: Sequence[list[int]], near: Adjacency, place: list[int], *, to_right: bool) -> bool:
    """Sort each row by the mean position of its vertices' neighbours; vertices without any keep their place."""
    changed = False
    for row in order:
        if len(row) == 1:
            continue
        means = {}
        for v in row:
            if neighbours := near[v]:
                means[v] = sum([place[w] for w in neighbours]) / len(neighbours)
        movable = [v for v in (reversed(row) if to_right else row) if v in means]
        movable.sort(key=means.__getitem__)
        if len(movable) < len(row):
            following = iter(movable)
            movable = [next(following) if v in means else v for v in row]
        if movable != row:
            changed = True
            row[:] = movable
            _number(row, place)
    return changed


def _swap(order: Sequence[list[int]], above: Adjacency, below: Adjacency, place: list[int]) -> bool:
    """Swap neighbours in a row wherever that reduces crossings."""
    changed = improved = True
    changed = False
    while improved:
        improved = False
        for row in order:
            for i in range(len(row) - 1):
                v, w = row[i], row[i + 1]
                gain = _pair(above[v], above[w], place) + _pair(below[v], below[w], place)
                if gain > 0:
                    row[i], row[i + 1] = w, v
                    place[v], place[w] = i + 1, i
                    improved = changed = True
    return changed


def _pair(left: Sequence[int], right: Sequence[int], place: Sequence[int]) -> int:
    """Return by how much a swap of two neighbours reduces the crossings of their edges."""
    gain = 0
    for a in left:
        for b in right:
            if place[a] > place[b]:
                gain += 1
            elif place[a] < place[b]:
                gain -= 1
    return gain


def x_coordinates(
    order: Sequence[Sequence[int]],
    above: Adjacency,
    below: Adjacency,
    half_widths: Sequence[float],
    is_vertex: Sequence[bool],
) -> list[float]:
    """Return [V] the x coordinate of each vertex's centre, without overlaps in a row.

    Args:
        order: The vertices of each row from left to right.
        above, below: [V] neighbours in the previous and next row.
        half_widths: Half of the width that each takes.
        is_vertex: False for the points at which an edge crosses a row; chains of these are straightened first.
    """
    place = [0] * len(half_widths)
    for row in order:
        for position, v in enumerate(row):
            place[v] = position
    above = [sorted(vs, key=place.__getitem__) if len(vs) > 1 else vs for vs in above]
    below = [sorted(vs, key=place.__getitem__) if len(vs) > 1 else vs for vs in below]
    barred = _barred(order, above, place, is_vertex)
    own_medians, other_medians = _mutual(above, below, is_vertex), _mutual(below, above, is_vertex)
    ways = []
    for downwards in (True, False):
        rows = order if downwards else order[::-1]
        for leftwards in (True, False):
            medians = own_medians if downwards else other_medians
            root = _aligned(rows, medians, place, barred, downwards=downwards, leftwards=leftwards)
            ways.append(_packed(order, root, half_widths, leftwards=leftwards))
    return _balanced(ways)


def _barred(
    order: Sequence[Sequence[int]], above: Adjacency, place: Sequence[int], is_vertex: Sequence[bool]
) -> set[tuple[int, int]]:
    """Return the pieces (upper, lower) that cross a piece within a long edge, and so must not be straightened."""
    barred = set()
    for upper, lower in pairwise(order):
        inner = [
            (i, place[above[v][0]]) for i, v in enumerate(lower) if not is_vertex[v] and not is_vertex[above[v][0]]
        ]
        if not inner or len(lower) == 1 or len(upper) == 1:
            continue
        start, left = 0, 0
        for end, right in (*inner, (len(lower) - 1, len(upper) - 1)):
            for v in lower[start : end + 1]:
                for u in above[v]:
                    if not left <= place[u] <= right and (is_vertex[u] or is_vertex[v]):
                        barred.add((u, v))
            start, left = end, right
    return barred


def _mutual(near: Adjacency, far: Adjacency, is_vertex: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return [V] the median neighbours on one side, from left to right, of which each vertex is a median, too.

    Of two medians, only a vertex is kept if the other is a passing edge: the path through a block is straight, and skip
    connections run next to it.
    """
    middle, back = [_middle(vs, is_vertex) for vs in near], [_middle(vs, is_vertex) for vs in far]
    return [tuple(u for u in medians if v in back[u]) for v, medians in enumerate(middle)]


def _middle(neighbours: Sequence[int], is_vertex: Sequence[bool]) -> tuple[int, ...]:
    half = len(neighbours) // 2
    if len(neighbours) % 2:
        return (neighbours[half],)
    pair = tuple(neighbours[half - 1 : half + 1])
    vertices = tuple(u for u in pair if is_vertex[u])
    return vertices or pair


def _aligned(
    rows: Sequence[Sequence[int]],
    medians: Sequence[tuple[int, ...]],
    place: Sequence[int],
    barred: set[tuple[int, int]],
    *,
    downwards: bool,
    leftwards: bool,
) -> list[int]:
    """Return [V] the first vertex of the block that each vertex belongs to."""
    root = list(range(len(place)))
    taken = [False] * len(place)
    for row in rows[1:]:
        limit = -1 if leftwards else len(place)
        for v in row if leftwards else reversed(row):
            for u in medians[v] if leftwards else reversed(medians[v]):
                position = place[u]
                free = position > limit if leftwards else position < limit
                if free and not taken[u] and ((u, v) if downwards else (v, u)) not in barred:
                    taken[u] = True
                    root[v] = root[u]
                    limit = position
                    break
    return root


def _packed(
    order: Sequence[Sequence[int]], root: Sequence[int], half_widths: Sequence[float], *, leftwards: bool
) -> list[float]:
    """Return [V] the x coordinates of blocks that are packed as far to one side as the previous ones permit."""
    before: dict[int, dict[int, float]] = {v: {} for v in range(len(root)) if root[v] == v}
    following: dict[int, list[int]] = {v: [] for v in before}
    for row in order:
        line = row if leftwards else row[::-1]
        for v, w in pairwise(line):
            room = half_widths[v] + half_widths[w]
            rooms = before[root[w]]
            if root[v] not in rooms:
                following[root[v]].append(root[w])
                rooms[root[v]] = room
            elif rooms[root[v]] < room:
                rooms[root[v]] = room
    # From the first side, each as near to it as possible.
    waiting = {v: len(rooms) for v, rooms in before.items()}
    queue = [v for v, number in waiting.items() if not number]
    position: dict[int, float] = {}
    for v in queue:
        position[v] = max([position[u] + room for u, room in before[v].items()], default=0.0)
        for w in following[v]:
            waiting[w] -= 1
            if not waiting[w]:
                queue.append(w)
    assert len(position) == len(before), "blocks of a drawing cross"
    # Blocks with a successor move as near to it as possible, so that no block remains isolated.
    for v in reversed(queue):
        if following[v]:
            position[v] = min([position[w] - before[w][v] for w in following[v]])
    sign = 1.0 if leftwards else -1.0
    return [sign * position[r] for r in root]


def _balanced(ways: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of the middle two of four layouts, after aligning all with the narrowest."""
    extents = [(min(way), max(way)) for way in ways]
    narrow = min(range(4), key=lambda i: extents[i][1] - extents[i][0])
    shifts = []
    for number, (low, high) in enumerate(extents):
        left, right = extents[narrow][0] - low, extents[narrow][1] - high
        shifts.append(left if number % 2 == 0 else right)
    found = []
    for values in zip(*ways, strict=True):
        _, second, third, _ = sorted([value + shift for value, shift in zip(values, shifts, strict=True)])
        found.append((second + third) / 2)
    return found


NODE_GAP = 22.0
"""Gap between two boxes of a row."""

EDGE_GAP = 12.0
"""Gap between an edge and a neighbouring box."""

_STRAIGHT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows of points, numbered within the segment from left to right and from top to bottom as they were given.

    Attributes:
        rows: The points of each row; a first or last row of one point is a vertex on the common line.
        widths: Width of each point's box, or -1 for a point that an edge passes.
        pieces: Pairs of points in neighbouring rows.
    """

    rows: tuple[range, ...]
    widths: tuple[float, ...]
    pieces: tuple[tuple[int, int], ...]


def placed(
    row_of: Sequence[int], widths: Sequence[float], edges: Sequence[tuple[int, int]], within: Iterable[int]
) -> tuple[list[float], dict[int, tuple[float, ...]]]:
    """Return [V] the x coordinate of each vertex, and by edge its coordinates in the rows between its ends."""
    points: list[list[tuple[int, int]]] = [[] for _ in range(max(row_of, default=-1) + 1)]  # (edge or -1, vertex)
    place = [0] * len(row_of)
    for v, row in enumerate(row_of):
        place[v] = len(points[row])
        points[row].append((-1, v))
    pieces: list[list[tuple[int, int]]] = [[] for _ in points]  # by upper row: (place above, place below)
    for number in within:
        u, v = edges[number]
        position = place[u]
        for row in range(row_of[u] + 1, row_of[v]):
            pieces[row - 1].append((position, len(points[row])))
            position = len(points[row])
            points[row].append((number, -1))
        pieces[row_of[v] - 1].append((position, place[v]))
    x_of = [0.0] * len(row_of)
    passed: dict[int, list[float]] = {number: [] for number in within}
    known: dict[Segment, tuple[float, ...]] = {}
    ends = [0, *(row for row in range(1, len(points) - 1) if len(points[row]) == 1), len(points) - 1]
    for first, last in pairwise(ends) if len(points) > 1 else [(0, 0)] * len(points):
        own = points[first : last + 1]
        starts = [0, *accumulate(map(len, own))]
        segment = Segment(
            rows=tuple(range(start, end) for start, end in pairwise(starts)),
            widths=tuple(widths[v] if v >= 0 else -1.0 for row in own for _, v in row),
            pieces=tuple(
                (starts[i] + a, starts[i + 1] + b) for i, row in enumerate(pieces[first:last]) for a, b in row
            ),
        )
        if segment not in known:
            known[segment] = _arranged(segment)
        for (edge, v), x in zip(chain.from_iterable(own), known[segment], strict=True):
            if v >= 0:
                x_of[v] = x
            else:
                passed[edge].append(x)
    return x_of, {number: tuple(xs) for number, xs in passed.items()}


def _arranged(segment: Segment) -> tuple[float, ...]:
    """Return the x coordinate of each point of a segment; those on the common line are at 0."""
    if len(segment.widths) == len(segment.rows):
        return (0.0,) * len(segment.widths)
    above: list[list[int]] = [[] for _ in segment.widths]
    below: list[list[int]] = [[] for _ in segment.widths]
    for u, v in segment.pieces:
        below[u].append(v)
        above[v].append(u)
    order = ordered(segment.rows, above, below)
    half_widths = [EDGE_GAP / 2 if width < 0 else (width + NODE_GAP) / 2 for width in segment.widths]
    found = x_coordinates(order, above, below, half_widths, [width >= 0 for width in segment.widths])
    return _tied(found, segment)


def _tied(found: Sequence[float], segment: Segment) -> tuple[float, ...]:
    """Move a segment so that its ends are on the common line; an end that is off the line is moved onto it.

    As few edges of the ends as possible become oblique, and those as little as possible.
    """
    ends = [row[0] for row in (segment.rows[0], segment.rows[-1]) if len(row) == 1]
    if not ends:
        return tuple(found)
    near = [v if u in ends else u for u, v in segment.pieces if u in ends or v in ends]
    line = min(
        [found[end] for end in ends],
        key=lambda x: (sum(abs(found[v] - x) > _STRAIGHT for v in near), sum(abs(found[v] - x) for v in near)),
    )
    moved = [x - line for x in found]
    for end in ends:
        moved[end] = 0.0
    return tuple(moved)
