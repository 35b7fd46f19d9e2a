"""Find consecutive repeated blocks of a graph (`fold`), merge them to one, and draw the result.

A run of blocks is a stretch in which the graph is periodic. For a period p, each vertex is compared with the one p
positions earlier, and each edge with its copy, the edge shifted back by p. Within a run, all edges between its vertices
have copies. Edges from before the run, or to vertices after it, may instead have the same outer vertex in all blocks.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pase.views.drawing.layered import Drawing, Point, extent, layered, moved, straightened

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
        """Vertices of the first block, which represents all blocks."""
        return range(self.first, self.first + self.period)

    @property
    def end(self) -> int:
        """First vertex after the last block."""
        return self.first + self.period * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Constraints that one period places on runs, from the edges into vertices. The pair (w, w + period) has index w.

    Attributes:
        starts: [V + 1] whether two blocks may start at a vertex.
        broken: [V] whether a pair after the first block ends a run.
        outside: [V] the last vertex from which either of a pair has an edge without a copy: it must be before the run;
            -1 for none.
    """

    starts: Bools
    broken: Bools
    outside: Ints


class Side:
    """Edges of a graph by their targets; or, for the reversed graph, by their sources.

    Attributes:
        classes: [V] equal numbers for equal signatures.
        sources, targets: [E], each source before its target.
    """

    def __init__(self, classes: Ints, sources: Ints, targets: Ints) -> None:
        self.classes = classes
        order = np.lexsort((targets, sources))
        self.sources, self.targets = sources[order], targets[order]
        # Parallel edges are distinguished by their number.
        pairs = self.sources * len(classes) + self.targets
        self.numbers = np.arange(len(pairs)) - np.searchsorted(pairs, pairs)
        self.width = int(self.numbers.max(initial=0)) + 1
        self.keys = pairs * self.width + self.numbers
        self.nearest = np.full(len(classes), len(classes), np.int64)
        np.minimum.at(self.nearest, self.targets, self.targets - self.sources)

    def candidates(self, period: int) -> Bools:
        """Return [V + 1] candidates for the start of two blocks, from signatures and each vertex's shortest edge."""
        w = np.arange(len(self.classes) - period)
        equal = self.classes[period:] == self.classes[:-period]
        nearest, later = self.nearest[:-period], self.nearest[period:]
        # If only one vertex of a pair has an edge that short, the edge must come from before the run.
        reach = np.where(equal, w - np.minimum(nearest, later), w)
        wrong = ~equal | (nearest != later)
        return ~_any((w - period + 1)[wrong], reach[wrong], len(self.classes))

    def view(self, period: int) -> _View:
        """Return the constraints of a period, comparing every edge."""
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
        """Return [E] whether the graph has the edge between the vertices at these offsets from each edge's own."""
        size = len(self.classes)
        sources, targets = self.sources + by_source, self.targets + by_target
        keys = (sources * size + targets) * self.width + self.numbers
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        inside = (sources >= 0) & (sources < targets) & (targets < size)
        return np.asarray(inside & (self.keys[place] == keys), np.bool_) if len(keys) else np.zeros(0, np.bool_)


def _any(first: Ints, last: Ints, size: int) -> Bools:
    """Return [size + 1] which numbers are in any of some closed intervals; empty intervals contain none."""
    full = last >= np.maximum(first, 0)
    first, last = np.maximum(first[full], 0), last[full]
    steps = np.bincount(first, minlength=size + 2) - np.bincount(last + 1, minlength=size + 2)
    return np.asarray(np.cumsum(steps)[: size + 1] > 0, np.bool_)


def runs(classes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[Repeat]:
    """Return maximal runs of at least two blocks for each start of their period.

    Runs within a run whose period divides theirs are omitted. Time: O(V + E) for each period for which signatures and
    shortest edges repeat; O(V) otherwise.
    """
    size = len(classes)
    pairs = np.asarray(edges, np.int64).reshape(-1, 2)
    numbers = np.asarray(classes, np.int64)
    forwards = Side(numbers, pairs[:, 0], pairs[:, 1])
    backwards = Side(numbers[::-1].copy(), size - 1 - pairs[:, 1], size - 1 - pairs[:, 0])
    found: list[Repeat] = []
    long: list[Repeat] = []  # a run of a longer period could be a part of one of these
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
    # The same pairs, indexed by their earlier vertices again.
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
    """Return [size + 1] the first marked number at or after each index; `size` where there is none."""
    size = len(marks)
    places = np.where(marks, np.arange(size), size)
    return np.append(np.minimum.accumulate(places[::-1])[::-1], size)


LEAST_REMOVED = 2
"""Least number of vertices that a fold must remove: framing one vertex that repeats twice gains nothing."""


def fold(signatures: Sequence[Hashable], edges: Sequence[tuple[int, int]]) -> tuple[Repeat, ...]:
    """Return non-overlapping runs of isomorphic blocks whose folding removes the most vertices.

    Blocks have the same signatures, the same edges within, and the same edges to the next block. Their edges from
    before the run, or to vertices after it, have the same outer vertex for all blocks, or one at equal distance; the
    first and the last block may have others in place of the missing neighbour. An edge that skips a whole block must
    not start or end within the run.

    Args:
        signatures: [V] values that must be equal for vertices to match, in topological order.
        edges: (source, target), source < target.
    """
    assert all(0 <= u < v < len(signatures) for u, v in edges), "vertices are not in topological order"
    known: dict[Hashable, int] = {}
    classes = [known.setdefault(signature, len(known)) for signature in signatures]
    last_reader = [0] * len(classes)
    for u, v in edges:
        last_reader[u] = max(last_reader[u], v)
    return tuple(_best(runs(classes, edges), last_reader))


_Worth = tuple[int, int, int, int]
"""Vertices removed, minus the sum of periods, minus vertices passed on to the next block, sum of first vertices."""


def _best(found: Sequence[Repeat], last_reader: Sequence[int]) -> list[Repeat]:
    """Return the parts of runs that remove most in total (weighted interval scheduling).

    Ties are resolved by the smallest periods, then the fewest vertices that one block passes to the next, then the
    latest start: a match before a run is often the end of another structure.

    Args:
        found: The runs.
        last_reader: [V] last vertex that reads each one.
    """
    by_position: list[list[tuple[Repeat, int]]] = [[] for _ in range(len(last_reader) + 1)]  # with its blocks before
    for run in found:
        for block in range(run.count + 1):
            by_position[run.first + block * run.period].append((run, block))
    # Number of vertices of a block that later vertices outside it read.
    given = {
        run: sum(last >= run.first_block.stop for last in last_reader[run.first : run.first_block.stop])
        for run in found
    }
    # For each prefix of positions the best folds: their worth, and the last fold if it ends there.
    best: list[_Worth] = [(0, 0, 0, 0)]
    ends: list[Repeat | None] = [None]
    # Within each run the best block to start with, as if it removed everything from the run's first block on.
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
    """Edges of a graph that folding merges into one.

    Attributes:
        source, target: Representatives.
        is_loop_back: Whether it leads from a block to a later one of the same repeat.
        edges: Numbers of the edges that it represents.
    """

    source: int
    target: int
    is_loop_back: bool
    edges: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedGraph:
    """A graph in which one vertex represents those at its place in every block of a repeat.

    Attributes:
        vertices: Representatives, in their order.
        members: All vertices that each one represents.
        edges: Edges, in the order of the first that each represents.
    """

    vertices: tuple[int, ...]
    members: dict[int, tuple[int, ...]]
    edges: tuple[FoldedEdge, ...]


def folded(num_vertices: int, edges: Sequence[tuple[int, int]], repeats: Sequence[Repeat]) -> FoldedGraph:
    """Return the graph in which the first block of each repeat represents all of its blocks."""
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


# -- the drawing
#
# Every block is drawn separately; around it, the rest of the graph is drawn with the frame as one box. Edges pass a
# frame's border at ports. Those from one vertex outside share a port above the block, those from one vertex of the
# block share a port below it. Edges from a block to the next one leave below and lead around the frame's right side to
# a port above: the port of the vertex which the first block reads in its place, if there is one.

PAD = 14.0
"""Gap between a frame and what is in it."""

HEAD = 30.0
"""Height of the strip in which a frame shows the number of blocks."""

LANE = 10.0
"""Gap between edges to the next block, on a frame's right side."""

_FOOT = 6.0
"""Gap between edges to the next block, below a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The border around a block; x, y: its upper left corner."""

    repeat: Repeat
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Positions of all parts of a folded graph; y grows downwards, everything is within [0, width] x [0, height].

    Attributes:
        positions: [V] the centre of each representative's box, in the graph's order.
        routes: [E] a polyline for each of the graph's edges, from its source's boundary to its target's; those of loops
            lead around their frame.
        frames: Frame of each repeat.
    """

    positions: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    frames: tuple[Frame, ...]
    width: float
    height: float


def arranged(graph: FoldedGraph, repeats: Sequence[Repeat], sizes: Sequence[tuple[float, float]]) -> Arrangement:
    """Return the drawing of a graph folded by these repeats; sizes: [V] of each representative's box, in its order."""
    size_of = dict(zip(graph.vertices, sizes, strict=True))
    blocks = [_block(graph, repeat, size_of) for repeat in repeats]
    owner = {v: block for block in blocks for v in block.repeat.first_block}
    drawing, box_of, lines = _around(graph, owner, size_of)
    corners: dict[int, Point] = {}  # by the first vertex of the block
    for block in blocks:
        x, y = drawing.positions[box_of[block.repeat.first]]
        corners[block.repeat.first] = x - block.axis, y - block.height / 2

    def placed(v: int, points: Sequence[Point]) -> tuple[Point, ...]:
        return moved(points, *corners[owner[v].repeat.first])

    positions: list[Point] = []
    for v in graph.vertices:
        if v in owner:
            positions += placed(v, [owner[v].positions[v - owner[v].repeat.first]])
        else:
            positions.append(drawing.positions[box_of[v]])
    routes = []
    for n, edge in enumerate(graph.edges):
        u, v = edge.source, edge.target
        if n in lines:
            before = placed(u, owner[u].leaves[n]) if u in owner else ()
            after = placed(v, owner[v].enters[n]) if v in owner else ()
            routes.append(straightened([*before, *drawing.routes[lines[n]], *after]))
        else:
            routes.append(straightened(placed(u, owner[u].routes[n])))
    boxes = [(x - w / 2, y - h / 2, w, h) for (x, y), (w, h) in zip(positions, sizes, strict=True)]
    boxes += [(*corners[block.repeat.first], block.width, block.height) for block in blocks]
    left, top, width, height = extent(boxes, routes)
    return Arrangement(
        positions=moved(positions, -left, -top),
        routes=tuple(moved(route, -left, -top) for route in routes),
        frames=tuple(
            Frame(repeat=block.repeat, x=x - left, y=y - top, width=block.width, height=block.height)
            for block, (x, y) in zip(blocks, corners.values(), strict=True)
        ),
        width=width,
        height=height,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A repeat's block with its frame, whose upper left corner is at (0, 0).

    Attributes:
        positions: [period] the centre of each vertex.
        routes: Routes of the graph's edges within the block or to the next, by number.
        enters, leaves: For the graph's other edges, by number, the part within the frame, from border to vertex or from
            vertex to border.
        axis: Where the frame should be placed below the vertices that it reads.
    """

    repeat: Repeat
    positions: tuple[Point, ...]
    routes: Mapping[int, tuple[Point, ...]]
    enters: Mapping[int, tuple[Point, ...]]
    leaves: Mapping[int, tuple[Point, ...]]
    axis: float
    width: float
    height: float


def _around(
    graph: FoldedGraph, owner: Mapping[int, _Block], size_of: Mapping[int, tuple[float, float]]
) -> tuple[Drawing, Mapping[int, int], Mapping[int, int]]:
    """Return the drawing with each frame as one box, the box of each vertex, and the line of each edge out of frames.

    A box is wide enough for its block's axis to be in its middle. Edges between the same two boxes that pass a frame at
    the same place are one line.
    """
    box_of: dict[int, int] = {}
    boxes: list[tuple[float, float]] = []
    for v in graph.vertices:
        first = owner[v].repeat.first if v in owner else v
        if v in owner and first == v:
            block = owner[v]
            boxes.append((2 * max(block.axis, block.width - block.axis), block.height))
        elif first == v:
            boxes.append(size_of[v])
        box_of[v] = box_of[first] if first < v else len(boxes) - 1
    joined: dict[tuple[int, int, float, float], int] = {}
    lines = {}
    for n, edge in enumerate(graph.edges):
        u, v = edge.source, edge.target
        if u in owner and owner.get(v) is owner[u]:
            continue
        below = owner[u].leaves[n][-1][0] - owner[u].axis if u in owner else 0.0
        above = owner[v].enters[n][0][0] - owner[v].axis if v in owner else 0.0
        lines[n] = joined.setdefault((box_of[u], box_of[v], below, above), len(joined))
    drawing = layered(boxes, [(u, v) for u, v, *_ in joined], ends=[(a, b) for *_, a, b in joined])
    return drawing, box_of, lines


def _block(graph: FoldedGraph, repeat: Repeat, sizes: Mapping[int, tuple[float, float]]) -> _Block:
    """Return the drawing of a repeat's first block; sizes: width and height of each vertex."""
    edges, first = graph.edges, repeat.first
    inner: list[int] = []
    entering: list[int] = []
    leaving: list[int] = []
    back: list[int] = []
    readers: dict[int, set[int]] = {}
    for n, edge in enumerate(edges):
        starts, ends = edge.source in repeat.first_block, edge.target in repeat.first_block
        if starts and ends:
            (back if edge.is_loop_back else inner).append(n)
        elif ends:
            entering.append(n)
        elif starts:
            leaving.append(n)
        if ends and (edge.is_loop_back or not starts):
            readers.setdefault(edge.source, set()).add(edge.target)
    # Ports above and below the block, and those above it for reads by later blocks, by the vertex whose tensor passes.
    free = count(repeat.period)
    above = {u: next(free) for u in dict.fromkeys(edges[n].source for n in entering)}
    next_above: dict[int, int] = {}
    for u in dict.fromkeys(edges[n].source for n in back):
        ports = (above[v] for v in above if readers[v] == readers[u] and above[v] not in next_above.values())
        port = next(ports, None)
        next_above[u] = next(free) if port is None else port
    below = {u: next(free) for u in dict.fromkeys(edges[n].source for n in (*leaving, *back))}
    # Each edge of the graph as lines of the block's drawing: one to a port below, and one from a port or a vertex.
    down = {n: (edges[n].source - first, below[edges[n].source]) for n in (*leaving, *back)}
    up = {n: (edges[n].source - first, edges[n].target - first) for n in inner}
    up |= {n: (above[edges[n].source], edges[n].target - first) for n in entering}
    up |= {n: (next_above[edges[n].source], edges[n].target - first) for n in back}
    lines = sorted({*down.values(), *up.values()})
    tops, bottoms = {*above.values(), *next_above.values()}, {*below.values()}
    boxes = [sizes[v] for v in repeat.first_block] + [(0.0, 0.0)] * (len(tops) + len(bottoms))
    drawing = layered(boxes, lines, at_top=sorted(tops), at_bottom=sorted(bottoms))
    route_of = {line: moved(route, PAD, HEAD) for line, route in zip(lines, drawing.routes, strict=True)}
    lanes = {u: i for i, u in enumerate(next_above)}
    right, height = drawing.width + 2 * PAD, drawing.height + HEAD + PAD + _FOOT * len(lanes)
    routes = {n: route_of[up[n]] for n in inner}
    for n in back:
        before, after, lane = route_of[down[n]], route_of[up[n]], lanes[edges[n].source]
        x, low, high = right + LANE * (lane - 0.4), height - _FOOT * (lane + 1), 12.0 + 4.0 * lane
        routes[n] = (*before, (before[-1][0], low), (x, low), (x, high), (after[0][0], high), *after)
    # Below the port from which most edges lead on; in the middle without any.
    fans = {port: sum(u == port for u, _ in lines) for port in above.values()}
    axis = drawing.positions[max(fans, key=fans.__getitem__)][0] if fans else drawing.width / 2
    return _Block(
        repeat=repeat,
        positions=moved(drawing.positions[: repeat.period], PAD, HEAD),
        routes=routes,
        enters={n: ((route_of[up[n]][0][0], 0.0), *route_of[up[n]]) for n in entering},
        leaves={n: (*route_of[down[n]], (route_of[down[n]][-1][0], height)) for n in leaving},
        axis=axis + PAD,
        width=right + LANE * len(lanes),
        height=height,
    )
