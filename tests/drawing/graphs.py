"""Graphs for tests of drawings, and what a person sees of a drawing: boxes, lines, what crosses what."""

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import strategies as st

Point = tuple[float, float]
Edges = list[tuple[int, int]]

SIZES = st.tuples(st.integers(10, 120).map(float), st.integers(10, 60).map(float))


@st.composite
def directed_graphs(draw: st.DrawFn, *, most: int = 14) -> tuple[list[tuple[float, float]], Edges]:
    """Draw sizes and edges without cycles: several between two vertices, and vertices without any, too."""
    n = draw(st.integers(1, most))
    names = draw(st.permutations(range(n)))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] != e[1])
    edges = draw(st.lists(pairs.map(lambda e: (names[min(e)], names[max(e)])), max_size=2 * n)) if n > 1 else []
    return draw(st.lists(SIZES, min_size=n, max_size=n)), edges


def deep_network(num_blocks: int) -> tuple[int, Edges]:
    """Return the number of vertices and the edges of a language model: 11 vertices a block, two residuals each."""
    edges, last, v = [(0, 1)], 1, 2
    for _ in range(num_blocks):
        norm, q, k, value, attention, o, add, ff_norm, ff_1, ff_2, ff_add = range(v, v + 11)
        edges += [(last, norm), (norm, q), (norm, k), (norm, value), (q, attention), (k, attention), (value, attention)]
        edges += [(attention, o), (last, add), (o, add), (add, ff_norm), (ff_norm, ff_1), (ff_1, ff_2)]
        edges += [(ff_2, ff_add), (add, ff_add)]
        last, v = ff_add, v + 11
    return v, edges


def overlap(a: tuple[Point, tuple[float, float]], b: tuple[Point, tuple[float, float]]) -> bool:
    """Return whether two boxes, (middle, size), have more than a border in common."""
    return all(abs(a[0][i] - b[0][i]) < (a[1][i] + b[1][i]) / 2 - 1e-6 for i in (0, 1))


def runs_through(start: Point, end: Point, middle: Point, size: tuple[float, float]) -> bool:
    """Return whether a line enters a box: whether any part of it is strictly inside (Liang and Barsky's clipping)."""
    first, last = 0.0, 1.0
    for i in (0, 1):
        low, high = middle[i] - size[i] / 2 + 1e-6, middle[i] + size[i] / 2 - 1e-6
        step = end[i] - start[i]
        if abs(step) < 1e-12:
            if not low < start[i] < high:
                return False
            continue
        a, b = sorted(((low - start[i]) / step, (high - start[i]) / step))
        first, last = max(first, a), min(last, b)
    return first < last


def crossings(lines: Sequence[tuple[Point, Point]]) -> int:
    """Return how many pairs of lines between the same two heights change their order on the way."""
    return sum((a[0][0] - b[0][0]) * (a[1][0] - b[1][0]) < -1e-9 for a, b in combinations(lines, 2))


def check_no_box_is_hit(
    positions: Sequence[Point], sizes: Sequence[tuple[float, float]], routes: Sequence[Sequence[Point]]
) -> None:
    for route in routes:
        for start, end in pairwise(route):
            for middle, size in zip(positions, sizes, strict=True):
                assert not runs_through(start, end, middle, size), (route, middle, size)
