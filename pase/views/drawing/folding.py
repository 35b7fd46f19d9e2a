"""`fold`: the parts of a graph that come several times in a row; `folded`: the graph in which they are one.

Runs of blocks are where a graph continues as it was a period before. For a period p, each vertex is compared with the
one p before it, and each edge with its copy, the edge between the vertices p before its own. In a run of blocks all
edges between its vertices have copies; what comes in from before the run, or goes out to after it, may instead come
from the same vertex, or go to the same, in all blocks.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """`count` isomorphic blocks of `period` vertices each, one after the other from vertex `first`."""

    first: int
    period: int
    count: int

    @property
    def first_block(self) -> range:
        """The vertices of the first block, which stands for all."""
        return range(self.first, self.first + self.period)

    @property
    def end(self) -> int:
        """The first vertex after the last block."""
        return self.first + self.period * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What one period leaves of the edges into vertices. Pairs (w, w + period) are told by w.

    starts: [V + 1] whether two blocks may begin at a vertex. broken: [V] whether a pair after the first block ends a
    run. outside: [V] the last vertex that either of a pair reads without a copy: it has to be before the run; -1 for
    none.
    """

    starts: Bools
    broken: Bools
    outside: Ints


class Side:
    """The edges of a graph by what comes into its vertices; of the graph read backwards, by what goes out.

    classes: [V] equal numbers for equal signatures. sources, targets: [E], each source before its target.
    """

    def __init__(self, classes: Ints, sources: Ints, targets: Ints) -> None:
        self.classes = classes
        order = np.lexsort((targets, sources))
        self.sources, self.targets = sources[order], targets[order]
        # Edges between the same two vertices are told apart by their number among them.
        pairs = self.sources * len(classes) + self.targets
        self.numbers = np.arange(len(pairs)) - np.searchsorted(pairs, pairs)
        self.width = int(self.numbers.max(initial=0)) + 1
        self.keys = pairs * self.width + self.numbers
        self.nearest = np.full(len(classes), len(classes), np.int64)
        np.minimum.at(self.nearest, self.targets, self.targets - self.sources)

    def candidates(self, period: int) -> Bools:
        """Return [V + 1] where two blocks may begin as far as signatures and the nearest edge into each vertex
        tell."""
        w = np.arange(len(self.classes) - period)
        equal = self.classes[period:] == self.classes[:-period]
        nearest, later = self.nearest[:-period], self.nearest[period:]
        # Where one of a pair alone has an edge that short, it must come from before the run.
        reach = np.where(equal, w - np.minimum(nearest, later), w)
        wrong = ~equal | (nearest != later)
        return ~_any((w - period + 1)[wrong], reach[wrong], len(self.classes))

    def view(self, period: int) -> _View:
        """Return what a period leaves, with every edge compared."""
        size = len(self.classes)
        has_earlier = self._present(-period, -period)
        has_later = self._present(period, period)
        later = (self.targets >= period) & ~has_earlier
        earlier = (self.targets < size - period) & ~has_later
        same_before, same_after = self._present(0, -period)[later], self._present(0, period)[earlier]
        w_later, u_later = self.targets[later] - period, self.sources[later]
        w_earlier, u_earlier = self.targets[earlier], self.sources[earlier]
        w = np.arange(size - period)
        unequal = w[self.classes[period:] != self.classes[:-period]]
        lone, from_lone = w_later[~same_before], u_later[~same_before]
        first = np.concatenate([unequal, w_earlier, w_later]) - period + 1
        last = np.concatenate([unequal, u_earlier, u_later - period])
        first = np.concatenate([first, np.maximum(lone - period + 1, from_lone + 1)])
        last = np.concatenate([last, lone])
        broken = np.zeros(size, np.bool_)
        broken[unequal] = broken[lone] = broken[w_earlier[~same_after]] = True
        outside = np.full(size, -1, np.int64)
        np.maximum.at(outside, w_later, u_later)
        np.maximum.at(outside, w_earlier, u_earlier)
        return _View(starts=~_any(first, last, size), broken=broken, outside=outside)

    def _present(self, by_source: int, by_target: int) -> Bools:
        """Return [E] whether there is an edge between the vertices so far from each edge's own."""
        size = len(self.classes)
        sources, targets = self.sources + by_source, self.targets + by_target
        keys = (sources * size + targets) * self.width + self.numbers
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        inside = (sources >= 0) & (sources < targets) & (targets < size)
        return np.asarray(inside & (self.keys[place] == keys), np.bool_) if len(keys) else np.zeros(0, np.bool_)


def _any(first: Ints, last: Ints, size: int) -> Bools:
    """Return [size + 1] which numbers lie in any of some intervals, both ends included; empty ones count nothing."""
    full = last >= np.maximum(first, 0)
    first, last = np.maximum(first[full], 0), last[full]
    steps = np.bincount(first, minlength=size + 2) - np.bincount(last + 1, minlength=size + 2)
    return np.asarray(np.cumsum(steps)[: size + 1] > 0, np.bool_)


def runs(classes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[Repeat]:
    """Return runs of at least two blocks, as long as each start of its period lets them be.

    Left out are those that lie within a run of a period that divides theirs. Time: O(V + E) for each period for which
    signatures and shortest edges repeat; O(V) otherwise.
    """
    size = len(classes)
    pairs = np.asarray(edges, np.int64).reshape(-1, 2)
    numbers = np.asarray(classes, np.int64)
    forwards = Side(numbers, pairs[:, 0], pairs[:, 1])
    backwards = Side(numbers[::-1].copy(), size - 1 - pairs[:, 1], size - 1 - pairs[:, 0])
    found: list[Repeat] = []
    long: list[Repeat] = []  # of which a run of a longer period could be a part
    for period in range(1, size // 2 + 1):
        if np.count_nonzero(forwards.classes[period:] == forwards.classes[:-period]) < period:
            continue
        allowed = forwards.candidates(period)
        allowed[max(size - 2 * period + 1, 0) :] = False
        long = [run for run in long if run.end - run.first >= 2 * period]
        for run in long:
            if period % run.period == 0:
                allowed[run.first : run.end - 2 * period + 1] = False
        if allowed.any() and backwards.candidates(period).any():
            of_period = _of_period(period, forwards.view(period), backwards.view(period), allowed)
            found += of_period
            long += of_period
    return found


def _of_period(period: int, forwards: _View, backwards: _View, allowed: Bools) -> list[Repeat]:
    size = len(forwards.broken)
    starts = np.flatnonzero(forwards.starts & allowed)
    ends = backwards.starts[::-1]  # by the vertex after the last block
    # The same pairs, told by their earlier vertices again.
    broken_out = np.zeros(size, np.bool_)
    broken_out[: size - period] = backwards.broken[: size - period][::-1]
    outside_out = np.full(size, size, np.int64)
    outside_out[: size - period] = size - 1 - backwards.outside[: size - period][::-1]
    next_in, next_out = _following(forwards.broken), _following(broken_out)
    reached = [0] * period
    found = []
    for first in starts.tolist():
        if first + 2 * period <= reached[first % period]:
            continue
        last = min(int(next_in[min(first + period, size)]) + period, int(next_out[first]) + 2 * period, size)
        for end in range(first + (last - first) // period * period, first + period, -period):
            middle_in, middle_out = (
                forwards.outside[first + period : end - period],
                outside_out[first : end - 2 * period],
            )
            if ends[end] and middle_in.max(initial=-1) < first and middle_out.min(initial=size) >= end:
                found.append(Repeat(first=first, period=period, count=(end - first) // period))
                reached[first % period] = end
                break
    return found


def _following(marks: Bools) -> Ints:
    """Return [size + 1] the first marked number from each on; the size where there is none."""
    size = len(marks)
    places = np.where(marks, np.arange(size), size)
    return np.append(np.minimum.accumulate(places[::-1])[::-1], size)


LEAST_REMOVED = 2
"""Vertices that a fold has to take away: a frame around one vertex that comes twice says no less than two vertices."""


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


_Worth = tuple[int, int, int, int]
"""Vertices removed, minus the sum of periods, minus vertices that are given on, sum of first vertices."""


def _best(found: Sequence[Repeat], last_reader: Sequence[int]) -> list[Repeat]:
    """Return the parts of runs that remove most together (weighted intervals); last_reader: [V] of each vertex.

    On ties: the smallest periods, then the fewest vertices that one block gives to the next, then the latest: what
    matches in front of a run is often the end of something else.
    """
    by_position: list[list[tuple[Repeat, int]]] = [[] for _ in range(len(last_reader) + 1)]  # with its blocks before
    for run in found:
        for block in range(run.count + 1):
            by_position[run.first + block * run.period].append((run, block))
    # How many vertices of a block others read after it.
    given = {
        run: sum(last >= run.first_block.stop for last in last_reader[run.first : run.first_block.stop])
        for run in found
    }
    # Of the folds of what comes before each position, the best: what it is worth, and its last fold if that ends here.
    best: list[_Worth] = [(0, 0, 0, 0)]
    ends: list[Repeat | None] = [None]
    # Within each run the best block to begin with, as if it removed everything from the run's first block on.
    begin: dict[Repeat, tuple[_Worth, int]] = {}
    for position, entries in enumerate(by_position):
        if position:
            best.append(best[-1])
            ends.append(None)
        for run, block in entries:
            start = block - max(2, 1 - -LEAST_REMOVED // run.period)
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
    chosen: list[Repeat] = []
    position = len(ends) - 1
    while position > 0:
        repeat = ends[position]
        if repeat is not None:
            chosen.append(repeat)
        position = position - 1 if repeat is None else repeat.first
    return chosen[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedEdge:
    """Edges of a graph that are one after folding.

    source, target: representatives. is_loop_back: leads from a block to a later one of the same repeat. edges: numbers
    of those that it stands for.
    """

    source: int
    target: int
    is_loop_back: bool
    edges: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedGraph:
    """Vertices that stand for themselves, or for those at their place in every block of a repeat.

    vertices: representatives, in their order. members: all vertices of each. edges: in the order of their first.
    """

    vertices: tuple[int, ...]
    members: dict[int, tuple[int, ...]]
    edges: tuple[FoldedEdge, ...]


def folded(num_vertices: int, edges: Sequence[tuple[int, int]], repeats: Sequence[Repeat]) -> FoldedGraph:
    """Return the graph in which the first block of each repeat stands for all of them."""
    representative = list(range(num_vertices))
    block: list[tuple[int, int]] = [(-1, 0)] * num_vertices  # (repeat, block of it)
    for number, repeat in enumerate(repeats):
        for v in range(repeat.first, repeat.end):
            place = v - repeat.first
            representative[v] = repeat.first + place % repeat.period
            block[v] = (number, place // repeat.period)
    members: dict[int, list[int]] = {}
    for v, of in enumerate(representative):
        members.setdefault(of, []).append(v)
    merged: dict[tuple[int, int, bool], list[int]] = {}
    for number, (u, v) in enumerate(edges):
        (repeat_u, block_u), (repeat_v, block_v) = block[u], block[v]
        is_loop_back = repeat_u == repeat_v >= 0 and block_u != block_v
        merged.setdefault((representative[u], representative[v], is_loop_back), []).append(number)
    return FoldedGraph(
        vertices=tuple(members),
        members={of: tuple(vertices) for of, vertices in members.items()},
        edges=tuple(
            FoldedEdge(source=u, target=v, is_loop_back=back, edges=tuple(numbers))
            for (u, v, back), numbers in merged.items()
        ),
    )
