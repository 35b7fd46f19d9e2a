"""A drawing's rows cut into stretches that can be arranged one at a time: repeated ones are arranged once.

Where a row holds a single vertex and no edge passes beside it, what is above does not see what is below. All such
vertices stand on one vertical line.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pase.views.drawing.coordinates import abscissas
from pase.views.drawing.crossings import ordered

NODE_GAP = 22.0
"""Between two boxes of a row."""

EDGE_GAP = 12.0
"""Between an edge and what stands beside it."""

_STRAIGHT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Rows of points, numbered within the stretch from left to right and from top to bottom as they were given.

    row_lengths: points in each row. widths: of each point's box, or -1 for a point that an edge passes. pieces: pairs
    of points in neighbouring rows. tied: whether the first and the last row are one vertex on the common line.
    """

    row_lengths: tuple[int, ...]
    widths: tuple[float, ...]
    pieces: tuple[tuple[int, int], ...]
    tied: tuple[bool, bool]


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
    abscissa = [0.0] * len(row_of)
    passed: dict[int, list[float]] = {number: [] for number in within}
    known: dict[Stretch, tuple[float, ...]] = {}
    for first, last in _stretches([len(row) for row in points]):
        stretch = _stretch(points[first : last + 1], pieces[first:last], widths)
        if stretch not in known:
            known[stretch] = _arranged(stretch)
        found = iter(known[stretch])
        for row_points in points[first : last + 1]:
            for edge, v in row_points:
                if v >= 0:
                    abscissa[v] = next(found)
                else:
                    passed[edge].append(next(found))
    return abscissa, {number: tuple(xs) for number, xs in passed.items()}


def _stretches(lengths: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the first and last rows between which a drawing can be arranged by itself."""
    if len(lengths) < 2:
        return [(0, 0)] * len(lengths)
    ends = [0, *(row for row in range(1, len(lengths) - 1) if lengths[row] == 1), len(lengths) - 1]
    return pairwise(ends)


def _stretch(
    points: Sequence[Sequence[tuple[int, int]]], pieces: Sequence[Sequence[tuple[int, int]]], widths: Sequence[float]
) -> Stretch:
    firsts = [0, *accumulate(len(row) for row in points)]
    return Stretch(
        row_lengths=tuple(len(row) for row in points),
        widths=tuple(widths[v] if v >= 0 else -1.0 for row in points for _, v in row),
        pieces=tuple((firsts[i] + a, firsts[i + 1] + b) for i, row in enumerate(pieces) for a, b in row),
        tied=(len(points[0]) == 1, len(points[-1]) == 1),
    )


def _arranged(stretch: Stretch) -> tuple[float, ...]:
    """Return the abscissa of each point of a stretch; those of the common line are at 0."""
    if len(stretch.widths) == len(stretch.row_lengths):
        return (0.0,) * len(stretch.widths)
    above: list[list[int]] = [[] for _ in stretch.widths]
    below: list[list[int]] = [[] for _ in stretch.widths]
    for u, v in stretch.pieces:
        below[u].append(v)
        above[v].append(u)
    order = ordered(list(_rows(stretch)), above, below)
    half_widths = [EDGE_GAP / 2 if width < 0 else (width + NODE_GAP) / 2 for width in stretch.widths]
    found = abscissas(order, above, below, half_widths, [width >= 0 for width in stretch.widths])
    return _tied(found, stretch)


def _rows(stretch: Stretch) -> Iterator[list[int]]:
    first = 0
    for length in stretch.row_lengths:
        yield list(range(first, first + length))
        first += length


def _tied(found: Sequence[float], stretch: Stretch) -> tuple[float, ...]:
    """Move a stretch so that its ends are on the common line; an end that stands beside it is put there.

    As few edges of the ends as can be are made oblique, and those as little.
    """
    last = len(found) - 1
    ends = [end for end, is_tied in zip((0, last), stretch.tied, strict=True) if is_tied]
    if not ends:
        return tuple(found)
    near = [v if u in ends else u for u, v in stretch.pieces if u in ends or v in ends]
    line = min(
        [found[end] for end in ends],
        key=lambda x: (sum(abs(found[v] - x) > _STRAIGHT for v in near), sum(abs(found[v] - x) for v in near)),
    )
    moved = [x - line for x in found]
    for end in ends:
        moved[end] = 0.0
    return tuple(moved)
