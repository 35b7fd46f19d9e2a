"""`arranged`: a drawing of a folded graph, with each repeated block in a frame of its own.

Every block is drawn by itself; around it, the rest of the graph is drawn with the frame as one box.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.views.drawing.folded import FoldedGraph
from pase.views.drawing.folding import Repeat
from pase.views.drawing.frames import Framed, framed
from pase.views.drawing.layered import Drawing, layered
from pase.views.drawing.routes import Point, straightened


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
