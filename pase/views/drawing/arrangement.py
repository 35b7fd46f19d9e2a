"""`arranged`: a drawing of a folded graph, with each repeated block in a frame of its own.

Every block is drawn by itself; around it, the rest of the graph is drawn with the frame as one box. Edges pass a
frame's border at ports. Those from one vertex outside share a port above the block, those from one vertex of the block
share a port below it. What a block gives to the next one leaves below and goes round the frame's right side to a port
above: to that of the vertex which the first block reads in its place, where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from pase.views.drawing.folding import FoldedGraph, Repeat
from pase.views.drawing.layered import Drawing, Point, layered, straightened

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The border round a block; x, y: its upper left corner."""

    repeat: Repeat
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Where everything of a folded graph is; y grows downwards, everything lies in [0, width] x [0, height].

    positions: [V] the middle of each representative's box, in the graph's order. routes: [E] a polyline for each of
    the graph's edges, from its source's boundary to its target's; those of loops lead round their frame. frames: of
    each repeat.
    """

    positions: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    frames: tuple[Frame, ...]
    width: float
    height: float


def arranged(graph: FoldedGraph, repeats: Sequence[Repeat], sizes: Sequence[tuple[float, float]]) -> Arrangement:
    """Return the drawing of a graph folded by these repeats; sizes: [V] of each representative's box, in its order."""
    size_of = dict(zip(graph.vertices, sizes, strict=True))
    blocks = [framed(graph, repeat, size_of) for repeat in repeats]
    owner = {
        v: number for number, repeat in enumerate(repeats) for v in range(repeat.first, repeat.first + repeat.period)
    }
    outer = _outer(graph, blocks, owner, size_of)
    corners = []
    for number, block in enumerate(blocks):
        x, y = outer.drawing.positions[outer.box_of[repeats[number].first]]
        corners.append((x - block.axis, y - block.height / 2))
    positions = []
    for v in graph.vertices:
        if v in owner:
            inner = blocks[owner[v]].positions[v - repeats[owner[v]].first]
            positions.append(_moved(inner, corners[owner[v]]))
        else:
            positions.append(outer.drawing.positions[outer.box_of[v]])
    routes = [_route(graph, n, outer, blocks, owner, corners) for n in range(len(graph.edges))]
    frames = [
        Frame(repeat=block.repeat, x=x, y=y, width=block.width, height=block.height)
        for block, (x, y) in zip(blocks, corners, strict=True)
    ]
    return _tight(positions, sizes, routes, frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outer:
    """The drawing in which each frame is one box; box_of: by vertex. lines: by the graph's edge, outside of frames."""

    drawing: Drawing
    box_of: Mapping[int, int]
    lines: Mapping[int, int]


def _outer(
    graph: FoldedGraph,
    blocks: Sequence[Framed],
    owner: Mapping[int, int],
    size_of: Mapping[int, tuple[float, float]],
) -> _Outer:
    """Edges between the same two boxes that pass a frame at the same place are one line."""
    box_of: dict[int, int] = {}
    boxes: list[tuple[float, float]] = []
    for v in graph.vertices:
        first = blocks[owner[v]].repeat.first if v in owner else v
        if first == v:
            boxes.append(_room(blocks[owner[v]]) if v in owner else size_of[v])
        box_of[v] = box_of[first] if first < v else len(boxes) - 1
    joined: dict[tuple[int, int, float, float], int] = {}
    lines = {}
    for n, edge in enumerate(graph.edges):
        u, v = edge.source, edge.target
        if u in owner and owner.get(v) == owner[u]:
            continue
        below = blocks[owner[u]].leaves[n][-1][0] - blocks[owner[u]].axis if u in owner else 0.0
        above = blocks[owner[v]].enters[n][0][0] - blocks[owner[v]].axis if v in owner else 0.0
        lines[n] = joined.setdefault((box_of[u], box_of[v], below, above), len(joined))
    drawing = layered(boxes, [(u, v) for u, v, *_ in joined], ends=[(a, b) for *_, a, b in joined])
    return _Outer(drawing=drawing, box_of=box_of, lines=lines)


def _route(
    graph: FoldedGraph,
    n: int,
    outer: _Outer,
    blocks: Sequence[Framed],
    owner: Mapping[int, int],
    corners: Sequence[Point],
) -> tuple[Point, ...]:
    u, v = graph.edges[n].source, graph.edges[n].target
    if n not in outer.lines:
        return straightened(_all_moved(blocks[owner[u]].routes[n], corners[owner[u]]))
    before = _all_moved(blocks[owner[u]].leaves[n], corners[owner[u]]) if u in owner else []
    after = _all_moved(blocks[owner[v]].enters[n], corners[owner[v]]) if v in owner else []
    return straightened([*before, *outer.drawing.routes[outer.lines[n]], *after])


def _room(block: Framed) -> tuple[float, float]:
    """Return the size of the box with the block's axis in its middle that its frame fits into."""
    return 2 * max(block.axis, block.width - block.axis), block.height


def _moved(point: Point, corner: Point) -> Point:
    return point[0] + corner[0], point[1] + corner[1]


def _all_moved(points: Sequence[Point], corner: Point) -> list[Point]:
    return [_moved(point, corner) for point in points]


def _tight(
    positions: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    routes: Sequence[Sequence[Point]],
    frames: Sequence[Frame],
) -> Arrangement:
    """Return the arrangement moved to where its left and upper edges are at 0."""
    xs = [x for route in routes for x, _ in route]
    ys = [y for route in routes for _, y in route]
    for (x, y), (width, height) in zip(positions, sizes, strict=True):
        xs += [x - width / 2, x + width / 2]
        ys += [y - height / 2, y + height / 2]
    for frame in frames:
        xs += [frame.x, frame.x + frame.width]
        ys += [frame.y, frame.y + frame.height]
    left, top = min(xs, default=0.0), min(ys, default=0.0)
    corner = (-left, -top)
    return Arrangement(
        positions=tuple(_all_moved(positions, corner)),
        routes=tuple(tuple(_all_moved(route, corner)) for route in routes),
        frames=tuple(Frame(repeat=f.repeat, x=f.x - left, y=f.y - top, width=f.width, height=f.height) for f in frames),
        width=max(xs, default=0.0) - left,
        height=max(ys, default=0.0) - top,
    )
