from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.views.drawing.folding import Arrangement, FoldedGraph, Frame, Repeat, arranged, fold, folded
from tests.drawing.graphs import SIZES, Edges, check_no_box_is_hit, deep_network, overlap
from tests.drawing.test_folding import repeated_graphs

Sizes = list[tuple[float, float]]


def _box(frame: Frame) -> tuple[tuple[float, float], tuple[float, float]]:
    return (frame.x + frame.width / 2, frame.y + frame.height / 2), (frame.width, frame.height)


def _check(graph: FoldedGraph, sizes: Sizes, drawing: Arrangement) -> None:
    boxes = dict(zip(graph.vertices, zip(drawing.positions, sizes, strict=True), strict=True))
    assert not any(overlap(a, b) for a, b in combinations(boxes.values(), 2))
    for frame in drawing.frames:
        (x, y), (width, height) = _box(frame)
        own = range(frame.repeat.first, frame.repeat.first + frame.repeat.period)
        for v, box in boxes.items():
            if v in own:
                assert abs(box[0][0] - x) <= (width - box[1][0]) / 2
                assert abs(box[0][1] - y) <= (height - box[1][1]) / 2
            else:
                assert not overlap(box, _box(frame))
    assert not any(overlap(_box(a), _box(b)) for a, b in combinations(drawing.frames, 2))
    check_no_box_is_hit(drawing.positions, sizes, drawing.routes)
    for edge, route in zip(graph.edges, drawing.routes, strict=True):
        for v, (x, y), below in ((edge.source, route[0], 1), (edge.target, route[-1], -1)):
            (middle_x, middle_y), (width, height) = boxes[v]
            assert abs(x - middle_x) <= width / 2
            assert y == pytest.approx(middle_y + below * height / 2)
    for x, y in chain.from_iterable(drawing.routes):
        assert -1e-6 <= x <= drawing.width + 1e-6
        assert -1e-6 <= y <= drawing.height + 1e-6


@given(repeated_graphs(), st.data())
@settings(max_examples=40)
def test_frames_hold_their_blocks_and_nothing_else(case: tuple[list[int], Edges, Repeat], data: st.DataObject) -> None:
    signatures, edges, planted = case
    graph = folded(len(signatures), edges, (planted,))
    sizes = data.draw(st.lists(SIZES, min_size=len(graph.vertices), max_size=len(graph.vertices)))
    drawing = arranged(graph, (planted,), sizes)
    _check(graph, sizes, drawing)
    assert [frame.repeat for frame in drawing.frames] == [planted]
    assert arranged(graph, (planted,), sizes) == drawing


def test_a_language_model_has_one_frame_on_a_straight_line() -> None:
    n, edges = deep_network(96)
    edges += [(n - 1, n), (n, n + 1)]
    repeats = fold(["x", "y", *list(range(11)) * 96, "norm", "loss"], edges)
    graph = folded(n + 2, edges, repeats)
    sizes = [(100.0, 36.0)] * len(graph.vertices)
    drawing = arranged(graph, repeats, sizes)
    _check(graph, sizes, drawing)
    line = drawing.positions[0][0]
    beside = [v for v, (x, _) in zip(graph.vertices, drawing.positions, strict=True) if x != pytest.approx(line)]
    assert beside == [3, 5]  # queries and values; keys are in the middle
    (frame,) = drawing.frames
    loops = [route for edge, route in zip(graph.edges, drawing.routes, strict=True) if edge.is_loop_back]
    assert len(loops) == 2
    for route in loops:
        assert max(y for _, y in route) > drawing.positions[12][1] + 18  # below the last vertex
        assert min(y for _, y in route) < drawing.positions[2][1] - 18  # and above the first
        assert all(frame.x <= x <= frame.x + frame.width and frame.y <= y <= frame.y + frame.height for x, y in route)


def test_without_repeats_every_vertex_is_drawn() -> None:
    edges = [(0, 1), (0, 1), (1, 2), (0, 2)]
    graph = folded(3, edges, ())
    sizes = [(40.0, 20.0)] * 3
    drawing = arranged(graph, (), sizes)
    _check(graph, sizes, drawing)
    assert drawing.frames == ()
    assert len(drawing.routes) == 3
