import random
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.views.drawing.folding import FoldedEdge, Repeat, fold, folded
from tests.drawing.graphs import Edges, deep_network

Case = tuple[list[int], Edges]


def _is_run(signatures: Sequence[Hashable], edges: Edges, first: int, period: int, count: int) -> bool:
    """Return whether blocks repeat, edge by edge as the definition has it."""
    end = first + period * count
    inside = range(first, end)
    if any(signatures[v] != signatures[v + period] for v in range(first, end - period)):
        return False
    held = Counter(edges)

    def block(v: int) -> int:
        return (v - first) // period

    # Between blocks: the same edges from each block to the one that many after it.
    between = Counter(
        (block(u), block(v) - block(u), (u - first) % period, (v - first) % period)
        for u, v in edges
        if u in inside and v in inside
    )
    for (k, distance, a, b), number in between.items():
        if any(between[(j, distance, a, b)] != number for j in range(count - distance) if j != k):
            return False
    for (u, v), number in held.items():
        after, before = held[(u + period, v + period)], held[(u - period, v - period)]
        # What passes over a block does so before the run and after it, too.
        passes = u in inside and v in inside and block(v) - block(u) > 1
        if passes and ((u - period < first and before < number) or (v + period >= end and after < number)):
            return False
        # The block before reads it in its place, or the same, and the block after does; the first one is free of that.
        if v in inside and u < first:
            if block(v) >= 1 and max(before, held[(u, v - period)]) < number:
                return False
            if 1 <= block(v) < count - 1 and max(after, held[(u, v + period)]) < number:
                return False
        if u in inside and v >= end:
            if block(u) < count - 1 and max(after, held[(u + period, v)]) < number:
                return False
            if 1 <= block(u) < count - 1 and max(before, held[(u - period, v)]) < number:
                return False
    return True


def _most_removed(signatures: Sequence[Hashable], edges: Edges) -> int:
    """Return how many vertices the best folding removes, of all."""
    n = len(signatures)
    best = [0] * (n + 1)
    for end in range(1, n + 1):
        best[end] = best[end - 1]
        for period in range(1, end // 2 + 1):
            for count in range(2, end // period + 1):
                removed = period * (count - 1)
                first = end - period * count
                if (
                    removed > 1
                    and best[first] + removed > best[end]
                    and _is_run(signatures, edges, first, period, count)
                ):
                    best[end] = best[first] + removed
    return best[n]


def _removed(repeats: Sequence[Repeat]) -> int:
    return sum(repeat.period * (repeat.count - 1) for repeat in repeats)


def _check(signatures: Sequence[Hashable], edges: Edges, repeats: Sequence[Repeat]) -> None:
    reached = 0
    for repeat in repeats:
        assert repeat.first >= reached
        reached = repeat.end
        assert repeat.count >= 2
        assert _is_run(signatures, edges, repeat.first, repeat.period, repeat.count)
    assert reached <= len(signatures)


@st.composite
def small_graphs(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 10))
    signatures = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(1, 3)).map(lambda e: (e[0], e[0] + e[1]))
    return signatures, draw(st.lists(pairs.filter(lambda e: e[1] < n), max_size=n + 4))


@st.composite
def repeated_graphs(draw: st.DrawFn) -> tuple[list[int], Edges, Repeat]:
    """Draw a block that comes several times between other vertices; signatures within the block differ."""
    period, count = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    before, after = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    first, end = before, before + period * count
    places = st.integers(0, period - 1)
    inner = draw(st.lists(st.tuples(places, places).filter(lambda e: e[0] < e[1]), max_size=6)) if period > 1 else []
    following = draw(st.lists(st.tuples(places, places), max_size=3))
    common = draw(st.lists(st.tuples(st.integers(0, before - 1), places), max_size=3))
    gathered = draw(st.lists(st.tuples(places, st.integers(0, after - 1)), max_size=3))
    edges = [(first + k * period + a, first + k * period + b) for k in range(count) for a, b in inner]
    edges += [(first + k * period + a, first + (k + 1) * period + b) for k in range(count - 1) for a, b in following]
    edges += [(u, first + k * period + a) for k in range(count) for u, a in common]
    edges += [(first + k * period + a, end + v) for k in range(count) for a, v in gathered]
    # Only the first block, or the last, has these.
    edges += draw(st.lists(st.tuples(st.integers(0, before - 1), places.map(lambda a: first + a)), max_size=3))
    last = places.map(lambda a: end - period + a)
    edges += draw(st.lists(st.tuples(last, st.integers(end, end + after - 1)), max_size=3))
    signatures = [*range(100, 100 + before), *list(range(period)) * count, *range(200, 200 + after)]
    return signatures, draw(st.permutations(edges)), Repeat(first=first, period=period, count=count)


@given(repeated_graphs())
@settings(max_examples=60)
def test_a_planted_repeat_is_found(case: tuple[list[int], Edges, Repeat]) -> None:
    signatures, edges, planted = case
    expected = (planted,) if planted.period * (planted.count - 1) > 1 else ()
    assert fold(signatures, edges) == expected


@given(small_graphs())
@settings(max_examples=100)
def test_the_best_of_all_foldings_is_found(case: Case) -> None:
    signatures, edges = case
    repeats = fold(signatures, edges)
    _check(signatures, edges, repeats)
    assert _removed(repeats) == _most_removed(signatures, edges)


@given(repeated_graphs(), st.data())
@settings(max_examples=40)
def test_blocks_of_a_changed_graph_are_isomorphic(case: tuple[list[int], Edges, Repeat], data: st.DataObject) -> None:
    networkx = pytest.importorskip("networkx")
    signatures, edges, _ = case
    if edges and data.draw(st.booleans()):
        del edges[data.draw(st.integers(0, len(edges) - 1))]
    else:
        u = data.draw(st.integers(0, len(signatures) - 2))
        edges.append((u, data.draw(st.integers(u + 1, len(signatures) - 1))))
    repeats = fold(signatures, edges)
    _check(signatures, edges, repeats)
    graph = networkx.MultiDiGraph(edges)
    graph.add_nodes_from((v, {"signature": signature}) for v, signature in enumerate(signatures))
    for repeat in repeats:
        starts = range(repeat.first, repeat.end, repeat.period)
        blocks = [graph.subgraph(range(start, start + repeat.period)) for start in starts]
        match = networkx.algorithms.isomorphism.categorical_node_match("signature", None)
        assert all(networkx.is_isomorphic(blocks[0], block, node_match=match) for block in blocks[1:])


def test_one_edge_out_of_place_ends_a_run() -> None:
    _, edges = deep_network(12)
    signatures = ["x", "y", *list(range(11)) * 12]
    assert fold(signatures, edges) == (Repeat(first=2, period=11, count=12),)
    # In block 7 (from 0), the second residual begins at the attention.
    edges[edges.index((2 + 7 * 11 + 6, 2 + 7 * 11 + 10))] = (2 + 7 * 11 + 4, 2 + 7 * 11 + 10)
    found = fold(signatures, edges)
    _check(signatures, edges, found)
    assert [(repeat.period, repeat.count) for repeat in found] == [(11, 7), (11, 4)]
    assert found[0].end <= 2 + 7 * 11 + 10 < found[1].end - 4 * 11


def test_an_output_of_one_block_alone_is_not_folded_away() -> None:
    edges = [(i, i + 1) for i in range(19)]
    assert fold([0] * 20, edges) == (Repeat(first=0, period=1, count=20),)
    assert fold([*[0] * 20, 1], [*edges, (8, 20)]) == (
        Repeat(first=0, period=1, count=9),
        Repeat(first=9, period=1, count=11),
    )


def test_what_every_block_reads_may_be_anywhere_before() -> None:
    """A decoder whose blocks all read the encoder's last vertex."""
    edges = [(0, 1), (1, 2), *((2 + 3 * k + i, 3 + 3 * k + i) for k in range(6) for i in range(3))]
    edges += [(1, 3 + 3 * k) for k in range(6)]
    assert fold(["source", "encoder", "target", *list("abc") * 6], edges) == (Repeat(first=3, period=3, count=6),)


def test_encoder_and_decoder_blocks_that_are_joined_one_to_one() -> None:
    edges = [(i, i + 1) for i in range(11)] + [(i, i + 6) for i in range(6)]
    assert fold(["e"] * 6 + ["d"] * 6, edges) == (
        Repeat(first=0, period=1, count=6),
        Repeat(first=6, period=1, count=6),
    )


def test_parallel_branches_are_blocks_too() -> None:
    branches = [(0, 1 + 2 * k) for k in range(5)] + [(1 + 2 * k, 2 + 2 * k) for k in range(5)]
    edges = branches + [(2 + 2 * k, 11) for k in range(5)]
    assert fold(["in", *["a", "b"] * 5, "out"], edges) == (Repeat(first=1, period=2, count=5),)


def test_of_two_cuts_the_one_that_gives_least_to_the_next_block() -> None:
    """A final norm is like the norm of a block: the run could begin at either end of it."""
    n, edges = deep_network(4)
    signatures = ["x", "y", *list(range(11)) * 4, 0]
    assert fold(signatures, [*edges, (n - 1, n)]) == (Repeat(first=2, period=11, count=4),)


def test_nothing_and_little() -> None:
    assert fold([], []) == ()
    assert fold(["a"], []) == ()
    assert fold(["a", "a"], [(0, 1)]) == ()
    assert fold(["a", "a", "a"], [(0, 1), (1, 2)]) == (Repeat(first=0, period=1, count=3),)


def _large() -> Iterator[tuple[str, Sequence[Hashable], Edges]]:
    _, edges = deep_network(454)
    yield "language model", ["x", "y", *list(range(11)) * 454], edges
    yield "chain", [0] * 5000, [(i, i + 1) for i in range(4999)]
    pick = random.Random(1)
    edges = [(max(0, v - 1 - pick.randrange(6)), v) for v in range(1, 5000)]
    edges += [(u, min(4999, u + 1 + pick.randrange(50))) for u in (pick.randrange(4999) for _ in range(3000))]
    yield "without order", [0] * 5000, edges


@pytest.mark.parametrize(("signatures", "edges"), [pytest.param(s, e, id=name) for name, s, e in _large()])
def test_five_thousand_vertices_take_a_moment(signatures: Sequence[Hashable], edges: Edges) -> None:
    begin = time.process_time()
    repeats = fold(signatures, edges)
    assert time.process_time() - begin < 1.0
    assert all(_is_run(signatures, edges, r.first, r.period, min(r.count, 9)) for r in repeats[:2])


# -- the graph in which repeated blocks are one


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
