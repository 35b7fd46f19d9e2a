"""The order of the vertices within each row, so that few edges cross (barycentres, then swaps of neighbours)."""

from bisect import bisect_right, insort
from collections.abc import Sequence

Adjacency = Sequence[Sequence[int]]

_ROUNDS = 12
_PATIENCE = 2
"""Rounds without fewer crossings before the search ends."""

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
