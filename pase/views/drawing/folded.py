"""`folded`: a graph in which the blocks of each repeat are one."""

from collections.abc import Sequence
from dataclasses import dataclass

from pase.views.drawing.folding import Repeat


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
