import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pase.views.drawing.layered import Drawing, layered, rows
from tests.drawing.graphs import Edges, check_no_box_is_hit, crossings, deep_network, directed_graphs, overlap

Sizes = Sequence[tuple[float, float]]


def _check_boxes(drawing: Drawing, sizes: Sizes) -> None:
    boxes = list(zip(drawing.positions, sizes, strict=True))
    for i, box in enumerate(boxes):
        assert not any(overlap(box, other) for other in boxes[:i])
        for middle, size, end in zip(*box, (drawing.width, drawing.height), strict=True):
            assert size / 2 - 1e-6 <= middle <= end - size / 2 + 1e-6


def _check_ends(drawing: Drawing, sizes: Sizes, edges: Edges) -> None:
    """Every line begins and ends on the border of its boxes."""
    for (u, v), route in zip(edges, drawing.routes, strict=True):
        for vertex, (x, y) in ((u, route[0]), (v, route[-1])):
            aside, below = abs(x - drawing.positions[vertex][0]), abs(y - drawing.positions[vertex][1])
            width, height = sizes[vertex]
            assert aside <= width / 2 + 1e-6
            assert below <= height / 2 + 1e-6
            assert aside == pytest.approx(width / 2) or below == pytest.approx(height / 2)
        assert all(0 - 1e-6 <= x <= drawing.width + 1e-6 for x, _ in route)


@given(directed_graphs())
@settings(max_examples=60)
@example(([(20.0, 60.0), (20.0, 10.0), (90.0, 10.0)], [(0, 1), (0, 1), (0, 2), (1, 2)]))
def test_boxes_and_lines_of_acyclic_graphs(graph: tuple[list[tuple[float, float]], Edges]) -> None:
    sizes, edges = graph
    drawing = layered(sizes, edges)
    _check_boxes(drawing, sizes)
    _check_ends(drawing, sizes, edges)
    check_no_box_is_hit(drawing.positions, sizes, drawing.routes)
    for (u, v), route in zip(edges, drawing.routes, strict=True):
        assert drawing.positions[u][1] + sizes[u][1] / 2 < drawing.positions[v][1] - sizes[v][1] / 2
        assert all(a[1] <= b[1] + 1e-6 for a, b in pairwise(route))
    assert layered(sizes, edges) == drawing


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4).flatmap(
        lambda lengths: st.tuples(
            st.just(lengths),
            st.lists(
                st.integers(0, len(lengths) - 2).flatmap(
                    lambda row: st.tuples(
                        st.just(row), st.integers(0, lengths[row] - 1), st.integers(0, lengths[row + 1] - 1)
                    )
                ),
                max_size=20,
                unique=True,
            ),
        )
    )
)
@settings(max_examples=60)
def test_there_are_no_more_crossings_than_in_the_order_given(
    graph: tuple[list[int], list[tuple[int, int, int]]],
) -> None:
    """Graphs whose rows are fixed: every vertex has a chain of its own above it, so that no row has a choice."""
    lengths, found = graph
    firsts = [sum(lengths[:row]) for row in range(len(lengths))]
    edges = [(firsts[row] + a, firsts[row + 1] + b) for row, a, b in found]
    # Vertices without predecessors or successors could stand elsewhere: keep the graphs where none does.
    row_of = rows(sum(lengths), edges)
    drawing = layered([(10.0, 10.0)] * sum(lengths), edges)
    before = after = 0
    for row in range(max(row_of)):
        between = [(u, v) for u, v in edges if row_of[u] == row]
        if any(row_of[v] != row + 1 for _, v in between):
            return
        before += crossings([((u, 0), (v, 1)) for u, v in between])
        after += crossings([(drawing.positions[u], drawing.positions[v]) for u, v in between])
    assert after <= before


def test_crossings_that_need_not_be_are_gone() -> None:
    # Two trees whose leaves alternate, and a ladder whose rungs are given in the wrong order.
    trees = [(0, 2), (0, 4), (0, 6), (1, 3), (1, 5), (1, 7)]
    ladder = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 6), (4, 5), (5, 7), (6, 7)]
    for edges in (trees, ladder):
        drawing = layered([(20.0, 10.0)] * 8, edges)
        heights = sorted({y for _, y in drawing.positions})
        for y in heights[:-1]:
            between = [(u, v) for u, v in edges if drawing.positions[u][1] == y]
            assert crossings([(drawing.positions[u], drawing.positions[v]) for u, v in between]) == 0


def test_a_chain_is_a_straight_line() -> None:
    sizes = [(20.0 + 7 * (i % 4), 10.0) for i in range(30)]
    drawing = layered(sizes, [(i, i + 1) for i in range(29)])
    assert len({x for x, _ in drawing.positions}) == 1
    assert all(len(route) == 2 for route in drawing.routes)


def test_what_skips_a_block_goes_beside_it() -> None:
    """The way through the blocks of a language model is straight; residuals are at the side."""
    n, edges = deep_network(3)
    drawing = layered([(60.0, 20.0)] * n, edges)
    spine = [v for v in range(n) if (v - 2) % 11 not in (1, 3)]
    assert len({round(drawing.positions[v][0], 6) for v in spine}) == 1
    check_no_box_is_hit(drawing.positions, [(60.0, 20.0)] * n, drawing.routes)


def test_long_edges_of_one_source_go_round_together() -> None:
    """An encoder's output that every block of a decoder reads does not push the blocks apart."""
    edges = [(i, i + 1) for i in range(300)] + [(0, i) for i in range(60, 300, 10)]
    sizes = [(60.0, 20.0)] * 301
    drawing = layered(sizes, edges)
    assert len({x for x, _ in drawing.positions}) == 1
    lanes = {route[2][0] for (u, v), route in zip(edges, drawing.routes, strict=True) if v - u > 1}
    assert len(lanes) == 1
    assert drawing.width < 100
    check_no_box_is_hit(drawing.positions, sizes, drawing.routes)


def test_a_second_input_stands_by_its_reader_and_a_second_output_by_its_source() -> None:
    chain = [(i, i + 1) for i in range(9)]
    found = rows(12, [*chain, (10, 8), (2, 11)])
    assert found[10] == found[8] - 1
    assert found[11] == found[2] + 1


def test_rows_above_and_below_all_others() -> None:
    edges = [(0, 1), (1, 2), (3, 2), (0, 4), (5, 1)]
    assert rows(6, edges, at_top=[3, 5], at_bottom=[4]) == (1, 2, 3, 0, 4, 0)


def test_nothing_and_little() -> None:
    assert layered([], []) == Drawing(positions=(), routes=(), width=0.0, height=0.0)
    assert layered([(30.0, 20.0)], []).positions == ((15.0, 10.0),)


def test_five_thousand_vertices_take_a_moment() -> None:
    n, edges = deep_network(454)
    assert n > 4900
    begin = time.process_time()
    drawing = layered([(120.0, 36.0)] * n, edges)
    assert time.process_time() - begin < 1.0
    assert drawing.width < 600
