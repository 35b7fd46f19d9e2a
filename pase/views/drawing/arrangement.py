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
from pase.views.drawing.layered import Drawing, Point, extent, layered, moved, straightened

PAD = 14.0
"""Gap between a frame and what is in it."""

HEAD = 30.0
"""Height of the strip in which a frame says how often its block comes."""

LANE = 10.0
"""Gap between edges to the next block, on a frame's right side."""

_FOOT = 6.0
"""Gap between edges to the next block, below a block."""


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


def _around(
    graph: FoldedGraph, owner: Mapping[int, _Block], size_of: Mapping[int, tuple[float, float]]
) -> tuple[Drawing, Mapping[int, int], Mapping[int, int]]:
    """Return the drawing in which each frame is one box, the box of each vertex, the line of each edge out of frames.

    A box is as wide as lets its block's axis stand in its middle. Edges between the same two boxes that pass a frame at
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
    # Ports above and below the block, and above it those of what later blocks read, by the vertex whose tensor passes.
    free = count(repeat.period)
    above = {u: next(free) for u in dict.fromkeys(edges[n].source for n in entering)}
    next_above: dict[int, int] = {}
    for u in dict.fromkeys(edges[n].source for n in back):
        ports = (above[v] for v in above if readers[v] == readers[u] and above[v] not in next_above.values())
        port = next(ports, None)
        next_above[u] = next(free) if port is None else port
    below = {u: next(free) for u in dict.fromkeys(edges[n].source for n in (*leaving, *back))}
    # Each edge of the graph as the lines of the block's drawing: one to a port below, and one from a port or a vertex.
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
