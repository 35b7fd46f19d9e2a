from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pase.views.drawing.folding import FoldedEdge, Repeat, fold, folded
from tests.drawing.graphs import Edges, deep_network


def test_a_language_model() -> None:
    n, edges = deep_network(96)
    graph = folded(n, edges, fold(["x", "y", *list(range(11)) * 96], edges))
    assert graph.vertices == tuple(range(13))
    assert graph.members[0] == (0,)
    assert graph.members[5] == tuple(range(5, n, 11))
    back = [edge for edge in graph.edges if edge.is_loop_back]
    assert {(edge.source, edge.target, len(edge.edges)) for edge in back} == {(12, 2, 95), (12, 8, 95)}
    assert {len(edge.edges) for edge in graph.edges if edge.source > 1 and not edge.is_loop_back} == {96}


def test_edges_that_meet_after_folding_are_one() -> None:
    edges = [(0, 1), (0, 1), (0, 2), (1, 3), (2, 3)]
    assert folded(4, edges, (Repeat(first=1, period=1, count=2),)).edges == (
        FoldedEdge(source=0, target=1, is_loop_back=False, edges=(0, 1, 2)),
        FoldedEdge(source=1, target=3, is_loop_back=False, edges=(3, 4)),
    )


def test_an_edge_between_two_repeats_is_no_loop() -> None:
    repeats = (Repeat(first=0, period=1, count=3), Repeat(first=3, period=1, count=3))
    graph = folded(6, [(i, i + 1) for i in range(5)], repeats)
    assert [(edge.source, edge.target, edge.is_loop_back) for edge in graph.edges] == [
        (0, 0, True),
        (0, 3, False),
        (3, 3, True),
    ]


@given(st.data())
@settings(max_examples=40)
def test_every_vertex_and_every_edge_is_there_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])
    edges: Edges = data.draw(st.lists(pairs, max_size=15)) if n > 1 else []
    period = data.draw(st.integers(1, n))
    count = data.draw(st.integers(1, n // period))
    first = data.draw(st.integers(0, n - period * count))
    repeat = Repeat(first=first, period=period, count=count)
    graph = folded(n, edges, (repeat,))
    assert Counter(v for of in graph.vertices for v in graph.members[of]) == Counter(range(n))
    assert Counter(number for edge in graph.edges for number in edge.edges) == Counter(range(len(edges)))
    stands_for = {v: of for of, members in graph.members.items() for v in members}
    for edge in graph.edges:
        for number in edge.edges:
            u, v = edges[number]
            assert (stands_for[u], stands_for[v]) == (edge.source, edge.target)
            inside = first <= u < repeat.end and first <= v < repeat.end
            assert edge.is_loop_back == (inside and (u - first) // period != (v - first) // period)
