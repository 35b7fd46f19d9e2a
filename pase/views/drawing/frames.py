"""The block of a repeat, drawn once in a frame of its own.

Edges pass a frame's border at ports. Those from one vertex outside share a port above the block, those from one vertex
of the block share a port below it. What a block gives to the next one leaves below and goes round the frame's right
side to a port above: to that of the vertex which the first block reads in its place, where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from pase.views.drawing.folded import FoldedGraph
from pase.views.drawing.folding import Repeat
from pase.views.drawing.layered import Drawing, layered
from pase.views.drawing.routes import Point

PAD = 14.0
"""Between a frame and what is in it."""

HEAD = 30.0
"""Above it, where the frame says how often it comes."""

LANE = 10.0
"""Between edges to the next block, on the right."""

_FOOT = 6.0
"""Between them, below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framed:
    """A repeat's block with its frame, whose upper left corner is at (0, 0).

    positions: [period] the middle of each vertex. routes: of each of the graph's edges within the block or to the
    next, by number. enters, leaves: of the graph's other edges, by number, the part within the frame, from border to
    vertex or from vertex to border. axis: where the frame should stand below what it reads.
    """

    repeat: Repeat
    positions: tuple[Point, ...]
    routes: Mapping[int, tuple[Point, ...]]
    enters: Mapping[int, tuple[Point, ...]]
    leaves: Mapping[int, tuple[Point, ...]]
    axis: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passing:
    """Numbers of the graph's edges by how they pass a frame: not at all, in, out, or from one block to a later one."""

    inner: Sequence[int]
    entering: Sequence[int]
    leaving: Sequence[int]
    back: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """Numbers of the ports above and below a block, by the vertex whose tensor passes there; back: of later blocks."""

    above: Mapping[int, int]
    back: Mapping[int, int]
    below: Mapping[int, int]


def framed(graph: FoldedGraph, repeat: Repeat, sizes: Mapping[int, tuple[float, float]]) -> Framed:
    """Return the drawing of a repeat's first block; sizes: width and height of each vertex."""
    edges, first = graph.edges, repeat.first
    passing = _passing(graph, range(first, first + repeat.period))
    ports = _ports(graph, repeat, passing)
    # Each edge of the graph as the lines of the block's drawing: one to a port below, and one from a port or a vertex.
    down = {n: (edges[n].source - first, ports.below[edges[n].source]) for n in (*passing.leaving, *passing.back)}
    up = {n: (edges[n].source - first, edges[n].target - first) for n in passing.inner}
    up |= {n: (ports.above[edges[n].source], edges[n].target - first) for n in passing.entering}
    up |= {n: (ports.back[edges[n].source], edges[n].target - first) for n in passing.back}
    lines = sorted({*down.values(), *up.values()})
    tops, bottoms = {*ports.above.values(), *ports.back.values()}, {*ports.below.values()}
    boxes = [sizes[first + i] for i in range(repeat.period)] + [(0.0, 0.0)] * (len(tops) + len(bottoms))
    drawing = layered(boxes, lines, at_top=sorted(tops), at_bottom=sorted(bottoms))
    moved = [tuple((x + PAD, y + HEAD) for x, y in route) for route in drawing.routes]
    route_of = dict(zip(lines, moved, strict=True))
    lanes = {source: i for i, source in enumerate(ports.back)}
    right, height = drawing.width + 2 * PAD, drawing.height + HEAD + PAD + _FOOT * len(lanes)
    routes = {n: route_of[up[n]] for n in passing.inner}
    for n in passing.back:
        before, after, lane = route_of[down[n]], route_of[up[n]], lanes[edges[n].source]
        x, low, high = right + LANE * (lane - 0.4), height - _FOOT * (lane + 1), 12.0 + 4.0 * lane
        routes[n] = (*before, (before[-1][0], low), (x, low), (x, high), (after[0][0], high), *after)
    return Framed(
        repeat=repeat,
        positions=tuple((x + PAD, y + HEAD) for x, y in drawing.positions[: repeat.period]),
        routes=routes,
        enters={n: ((route_of[up[n]][0][0], 0.0), *route_of[up[n]]) for n in passing.entering},
        leaves={n: (*route_of[down[n]], (route_of[down[n]][-1][0], height)) for n in passing.leaving},
        axis=_axis(drawing, ports, lines),
        width=right + LANE * len(lanes),
        height=height,
    )


def _passing(graph: FoldedGraph, block: range) -> _Passing:
    inner: list[int] = []
    entering: list[int] = []
    leaving: list[int] = []
    back: list[int] = []
    for n, edge in enumerate(graph.edges):
        starts, ends = edge.source in block, edge.target in block
        if starts and ends:
            (back if edge.is_loop_back else inner).append(n)
        elif ends:
            entering.append(n)
        elif starts:
            leaving.append(n)
    return _Passing(inner=inner, entering=entering, leaving=leaving, back=back)


def _ports(graph: FoldedGraph, repeat: Repeat, passing: _Passing) -> _Ports:
    readers: dict[int, set[int]] = {}
    for n in (*passing.entering, *passing.back):
        readers.setdefault(graph.edges[n].source, set()).add(graph.edges[n].target)
    free = count(repeat.period)
    above: dict[int, int] = {}
    for n in passing.entering:
        if graph.edges[n].source not in above:
            above[graph.edges[n].source] = next(free)
    back: dict[int, int] = {}
    for source in dict.fromkeys(graph.edges[n].source for n in passing.back):
        same = (above[u] for u in above if readers[u] == readers[source] and above[u] not in back.values())
        port = next(same, None)
        back[source] = next(free) if port is None else port
    below: dict[int, int] = {}
    for n in (*passing.leaving, *passing.back):
        if graph.edges[n].source not in below:
            below[graph.edges[n].source] = next(free)
    return _Ports(above=above, back=back, below=below)


def _axis(drawing: Drawing, ports: _Ports, lines: Sequence[tuple[int, int]]) -> float:
    """Return where the port above is from which most edges lead on; the middle without any."""
    fans = {port: sum(u == port for u, _ in lines) for port in ports.above.values()}
    if not fans:
        return drawing.width / 2 + PAD
    return drawing.positions[max(fans, key=fans.__getitem__)][0] + PAD
