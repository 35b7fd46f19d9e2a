"""`fold`: the parts of a graph that come several times in a row."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pase.views.drawing.periods import Run, runs

LEAST_REMOVED = 2
"""Vertices that a fold has to take away: a frame around one vertex that comes twice says no less than two vertices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """`count` blocks of `period` vertices each, one after the other from vertex `first`."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The first vertex after the last block."""
        return self.first + self.period * self.count


def fold(signatures: Sequence[Hashable], edges: Sequence[tuple[int, int]]) -> tuple[Repeat, ...]:
    """Return runs of isomorphic blocks that do not overlap and of which folding takes away most vertices.

    signatures: [V] what vertices have to share, in topological order. edges: (source, target), source < target. Blocks
    have the same signatures, the same edges within and the same edges to the blocks after them. What they read from
    before the run, or give to vertices after it, is the same vertex for all, or as far from each; the first block, and
    the last, may have others there in place of a block that is not there. Edges that pass over a whole block do not
    begin or end with the run.
    """
    assert all(0 <= u < v < len(signatures) for u, v in edges), "vertices are not in topological order"
    known: dict[Hashable, int] = {}
    classes = [known.setdefault(signature, len(known)) for signature in signatures]
    last_reader = [0] * len(classes)
    for u, v in edges:
        last_reader[u] = max(last_reader[u], v)
    return tuple(_best(runs(classes, edges), last_reader))


def _best(found: Sequence[Run], last_reader: Sequence[int]) -> list[Repeat]:
    """Return the parts of runs that remove most together (weighted intervals); last_reader: [V] of each vertex.

    On ties: the smallest periods, then the fewest vertices that one block gives to the next, then the latest: what
    matches in front of a run is often the end of something else.
    """
    by_position: list[list[tuple[Run, int]]] = [[] for _ in range(len(last_reader) + 1)]  # with its blocks before
    for run in found:
        for block in range(run.count + 1):
            by_position[run.first + block * run.period].append((run, block))
    given = {run: _num_given(run, last_reader) for run in found}
    # Of the folds of what comes before each position, the best: what it is worth, and its last fold if that ends here.
    best: list[_Worth] = [(0, 0, 0, 0)]
    ends: list[Repeat | None] = [None]
    # Within each run the best block to begin with, as if it removed everything from the run's first block on.
    begin: dict[Run, tuple[_Worth, int]] = {}
    for position, entries in enumerate(by_position):
        if position:
            best.append(best[-1])
            ends.append(None)
        for run, block in entries:
            start = block - _least_count(run.period)
            if start < 0:
                continue
            first = run.first + start * run.period
            removed, periods, gifts, firsts = best[first]
            worth = (removed - run.period * (start + 1), periods - run.period, gifts - given[run], firsts + first)
            if run not in begin or worth > begin[run][0]:
                begin[run] = (worth, start)
            (removed, periods, gifts, firsts), start = begin[run]
            worth = (removed + run.period * block, periods, gifts, firsts)
            if worth > best[position]:
                best[position] = worth
                first = run.first + start * run.period
                ends[position] = Repeat(first=first, period=run.period, count=block - start)
    return _chosen(ends)


_Worth = tuple[int, int, int, int]
"""Vertices removed, minus the sum of periods, minus vertices that are given on, sum of first vertices."""


def _least_count(period: int) -> int:
    return max(2, 1 - -LEAST_REMOVED // period)


def _num_given(run: Run, last_reader: Sequence[int]) -> int:
    """Return how many vertices of a block others read after it."""
    end = run.first + run.period
    return sum(last >= end for last in last_reader[run.first : end])


def _chosen(ends: Sequence[Repeat | None]) -> list[Repeat]:
    chosen = []
    position = len(ends) - 1
    while position > 0:
        repeat = ends[position]
        if repeat is None:
            position -= 1
        else:
            chosen.append(repeat)
            position = repeat.first
    return chosen[::-1]
