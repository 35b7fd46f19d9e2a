"""Where the vertices of the rows of a drawing stand, and where edges pass them.

Rows are cut into segments that can be arranged one at a time, repeated ones once: where a row holds a single vertex and
no edge passes beside it, what is above does not see what is below. All such vertices stand on one vertical line.

Within a segment the order of each row is found first, so that few edges cross (barycentres, then swaps of neighbours);
then where each vertex stands, so that edges are straight (Brandes and Köpf 2002): vertices are joined to blocks that
stand on one vertical line, in four ways: with their neighbours above or below, the left or the right of two in the
middle. Each way is packed from the left; the result is the mean of the middle two.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

Adjacency = Sequence[Sequence[int]]

_ROUNDS = 12
_PATIENCE = 2
"""The search ends after so many rounds without fewer crossings."""

_SWAPPED = 400
"""Vertices in a drawing whose neighbours are swapped as well: that costs more than it gives in large ones."""


def ordered(rows: Sequence[Sequence[int]], above: Adjacency, below: Adjacency) -> list[list[int]]:
    """Return the vertices of each row from left to right, with no more crossings than in the order given.

    above, below: [V] neighbours in the row before and after; edges join neighbouring rows alone.
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
    """Exchange neighbours in a row wherever that takes crossings away."""
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
    """Return how many crossings of two neighbours' edges an exchange takes away."""
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
    """Return [V] where the middle of each vertex is, so that those of a row do not meet.

    order: the vertices of each row from left to right. half_widths: half of the room that each takes. is_vertex: False
    for the points of an edge that crosses a row; a chain of them is made straight before anything else.
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
    """Return the pieces (upper, lower) that cross a piece within a long edge: those give way to it."""
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
    """Return [V] the middle neighbours on one side, from left to right, of which each vertex is a middle one, too.

    Of two, a vertex alone before an edge that passes: the way through a block is straight, what skips it is beside it.
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
    """Return [V] the x_coordinates of blocks that stand as far to one side as those before them let them."""
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
    # From the first side, each as near to it as it may be.
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
    # What has something after it comes as near to that as it may, so that no block stays behind alone.
    for v in reversed(queue):
        if following[v]:
            position[v] = min([position[w] - before[w][v] for w in following[v]])
    sign = 1.0 if leftwards else -1.0
    return [sign * position[r] for r in root]


def _balanced(ways: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of the middle two of four, after all have been moved to where the narrowest stands."""
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
"""Gap between an edge and what stands beside it."""

_STRAIGHT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows of points, numbered within the segment from left to right and from top to bottom as they were given.

    rows: the points of each; where the first or the last is one point, that is a vertex on the common line. widths: of
    each point's box, or -1 for a point that an edge passes. pieces: pairs of points in neighbouring rows.
    """

    rows: tuple[range, ...]
    widths: tuple[float, ...]
    pieces: tuple[tuple[int, int], ...]


def placed(
    row_of: Sequence[int], widths: Sequence[float], edges: Sequence[tuple[int, int]], within: Iterable[int]
) -> tuple[list[float], dict[int, tuple[float, ...]]]:
    """Return [V] where each vertex is, and by edge where it passes the rows between its ends."""
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
    """Return where each point of a segment is; those of the common line are at 0."""
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
    """Move a segment so that its ends are on the common line; an end that stands beside it is put there.

    As few edges of the ends as can be are made oblique, and those as little.
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
