"""Where the vertices of a row stand, so that edges are straight (Brandes and Köpf 2002).

Vertices are joined to blocks that stand on one vertical line, in four ways: with their neighbours above or below, the
left or the right of two in the middle. Each way is packed from the left; the result is the mean of the middle two.
"""

from collections.abc import Sequence
from itertools import pairwise

from pase.views.drawing.crossings import Adjacency


def abscissas(
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
    """Return [V] the abscissas of blocks that stand as far to one side as those before them let them."""
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
