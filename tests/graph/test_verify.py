from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import GraphError
from pase.graph import (
    Access,
    AllReduce,
    Builder,
    Dim,
    Edge,
    Graph,
    Handoff,
    Operator,
    Pipeline,
    Relayout,
    Role,
    SliceOf,
    Window,
    Work,
    verify,
    verify_operator,
)
from pase.graph.operators import dense


def _access(shape: tuple[int, ...] = (4, 6), axes: Any = ("b", "n"), **options: Any) -> Access:
    return Access(tensor="x", shape=shape, index_map=axes, **options)


def _operator(name: str = "layer", num_inputs: int = 1, **options: Any) -> Operator:
    values: dict[str, Any] = {
        "name": name,
        "kind": "test",
        "dims": (Dim("b", 4), Dim("n", 6), Dim("r", 3)),
        "reads": tuple(_access() for _ in range(num_inputs)),
        "writes": (_access(),),
    }
    return Operator(**(values | options))


def _graph(operators: tuple[Operator, ...], edges: tuple[Edge, ...] = ()) -> Graph:
    return Graph(name="net", operators=operators, edges=edges)


def _edge(producer: str, consumer: str, *, output: int = 0, read: int = 0) -> Edge:
    return Edge(producer=producer, output=output, consumer=consumer, input=read)


# -- operators


def test_a_good_operator_passes() -> None:
    verify_operator(
        _operator(
            work=(Work(dims=("b", "n"), flop_per_point=2, inputs=(0,)),),
            unsplittable=("r",),
            exchanges=(
                AllReduce(tensor="m", shape=(4,), index_map=("b",), over=("n",), times=1),
                Relayout(tensor="h", shape=(4, 6), index_map=("b", "n"), read=("b", None), times=1),
                Handoff(tensor="s", shape=(4,), index_map=("b",), across="n", times=1),
            ),
            pipeline=Pipeline(stage="b", sequence="n"),
        )
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ()}, r"layer 'layer' \(test\) has no iteration dims; at least one is needed"),
        ({"dims": (Dim("b", 4), Dim("b", 6))}, "names an iteration dim twice: b, b"),
        ({"dims": (Dim("b", 0), Dim("n", 6))}, "dim 'b' has extent 0; expected a whole number of 1 or more"),
        ({"dims": (Dim("b", 4), Dim("n", -6))}, "dim 'n' has extent -6; expected a whole number"),
        ({"dims": (Dim("b", 4.5), Dim("n", 6))}, r"dim 'b' has extent 4\.5; expected a whole number"),  # type: ignore[arg-type]
        ({"writes": ()}, r"layer 'layer' \(test\) writes nothing"),
        ({"work": (Work(dims=("b", "q"), flop_per_point=1),)}, "work names dim 'q'; the iteration space is b, n, r"),
        ({"work": (Work(dims=("b",), flop_per_point=1, inputs=(1,)),)}, r"work names inputs \(1,\); there are 1 reads"),
        ({"work": (Work(dims=("b",), flop_per_point=1, inputs=(-1,)),)}, r"work names inputs \(-1,\)"),
        ({"unsplittable": ("q",)}, "unsplittable names dim 'q'"),
        ({"pipeline": Pipeline(stage="b", sequence="q")}, "pipeline names dim 'q'"),
        ({"pipeline": Pipeline(stage="q", sequence="n")}, "pipeline names dim 'q'"),
        (
            {"exchanges": (AllReduce(tensor="m", shape=(4,), index_map=("b",), over=("q",), times=1),)},
            "exchange 'm' names dim 'q'",
        ),
        (
            {"exchanges": (AllReduce(tensor="m", shape=(5,), index_map=("b",), over=("n",), times=1),)},
            r"tensor 'm' of shape \(5,\): dim 0 has extent 5, but b = 4",
        ),
        (
            {"exchanges": (Relayout(tensor="h", shape=(4,), index_map=("b",), read=("n",), times=1),)},
            r"tensor 'h' of shape \(4,\): dim 0 has extent 4, but n = 6",
        ),
        (
            {"exchanges": (Handoff(tensor="s", shape=(4, 6), index_map=("b",), across="n", times=1),)},
            "tensor 's' has 2 dims and 1 axes; expected one axis for each dim",
        ),
    ],
)
def test_a_bad_operator_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify_operator(_operator(**options))


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((4, 6), ("b",), "tensor 'x' has 2 dims and 1 axes; expected one axis for each dim"),
        ((4, 6), ("b", "q"), "tensor 'x' names dim 'q'; the iteration space is b, n, r"),
        ((6,), (Window(out="n", kernel="q"),), "tensor 'x' names dim 'q'"),
        ((4, 4), ("b", "b"), "indexes two dims by the same iteration dim: b, b"),
        ((24, 4), (("b", "n"), "b"), "indexes two dims by the same iteration dim: b, n, b"),
        ((4, 5), ("b", "n"), r"of shape \(4, 5\): dim 1 has extent 5, but n = 6"),
        ((25,), (("b", "n"),), "dim 0 has extent 25, but b·n = 24"),
        ((4, 0), ("b", None), "dim 1 has extent 0, but it must be at least 1"),
        ((8,), (Window(out="n", kernel="r", stride=0),), "its window has stride 0, dilation 1, pad 0"),
        ((8,), (Window(out="n", kernel="r", dilation=0),), "its window has stride 1, dilation 0, pad 0"),
        ((8,), (Window(out="n", kernel="r", pad=-1),), "its window has stride 1, dilation 1, pad -1"),
        ((10,), (Window(out="n", kernel="r", stride=2),), "window 6 starts at 10, past its end"),
        ((3,), (SliceOf(dim="n", offset=4, extent=3),), r"the part \[4, 7\) is not within n = 6"),
        ((3,), (SliceOf(dim="n", offset=-1, extent=3),), r"the part \[-1, 2\) is not within n = 6"),
        ((2,), (SliceOf(dim="n", offset=0, extent=3),), "dim 0 has extent 2, but its part has 3"),
    ],
)
def test_a_bad_access_is_refused(shape: tuple[int, ...], axes: Any, message: str) -> None:
    bad = (_access(shape, axes),)
    for operator in (_operator(reads=bad), _operator(writes=bad)):
        with pytest.raises(GraphError, match=message):
            verify_operator(operator)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((24,), (("b", "n"),)),
        ((4, 9), ("b", None)),
        ((8,), (Window(out="n", kernel="r"),)),
        ((11,), (Window(out="n", kernel="r", stride=2),)),
        ((10,), (Window(out="n", kernel="r", stride=2, pad=1),)),
        ((2,), (SliceOf(dim="n", offset=4, extent=2),)),
        ((), ()),
    ],
)
def test_a_good_access_passes(shape: tuple[int, ...], axes: Any) -> None:
    verify_operator(_operator(reads=(_access(shape, axes),)))


# -- graphs


@pytest.mark.parametrize(
    ("layers", "edges", "message"),
    [
        ("", (), "graph 'net' is empty; a model needs at least one layer"),
        ("aba", (), "2 layers of graph 'net' are named 'a'; names must be unique"),
        ("abc", ("ac", "bc"), "edge from 'b' to 'c': input 0 has two producers"),
        ("abc", ("ab", "bc", "ca"), r"graph 'net' has a cycle: .* -> .*; a model must be acyclic"),
        ("a", ("aa",), "graph 'net' has a cycle: a -> a"),
        ("ba", ("ab",), "layer 'b' stands before 'a', which feeds it; order them topologically"),
        (
            "abcd",
            ("ab", "cd"),
            "is not connected: 2 of 4 layers, 'c' the first, share no path with 'a'; search each part on its own",
        ),
    ],
)
def test_a_bad_graph_is_refused(layers: str, edges: tuple[str, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(_graph(tuple(map(_operator, layers)), tuple(_edge(*ends) for ends in edges)))


def test_a_bad_operator_within_a_graph_is_refused() -> None:
    with pytest.raises(GraphError, match=r"layer 'a'.* writes nothing"):
        verify(_graph((_operator("a", writes=()),)))


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (_edge("a", "c"), "edge from 'a' to 'c': there is no layer 'c' in graph 'net'"),
        (_edge("c", "b"), "edge from 'c' to 'b': there is no layer 'c' in graph 'net'"),
        (_edge("a", "b", output=1), "output 1 does not exist; there are 1"),
        (_edge("a", "b", output=-1), "output -1 does not exist"),
        (_edge("a", "b", read=3), "input 3 does not exist; there are 3"),
        (_edge("a", "b", read=-1), "input -1 does not exist"),
        (_edge("a", "b", read=1), "'w' is a parameter; an edge can only feed an activation or an index"),
        (_edge("a", "b", read=2), r"the producer writes shape \(4, 6\), the consumer reads shape \(4,\)"),
    ],
)
def test_a_bad_edge_is_refused(edge: Edge, message: str) -> None:
    weight = Access(tensor="w", shape=(4, 6), index_map=("b", "n"), role=Role.PARAMETER)
    second = _operator("b", reads=(_access(), weight, _access((4,), ("b",))))
    with pytest.raises(GraphError, match=message):
        verify(_graph((_operator("a"), second), (edge,)))


def test_a_reshape_along_an_edge_is_seen_through() -> None:
    flat = _operator("b", reads=(_access((24,), (("b", "n"),)),))
    graph = _graph((_operator("a"), flat), (_edge("a", "b"),))
    assert verify(graph) is graph


@given(data=st.data(), num_layers=st.integers(1, 7))
def test_verify_agrees_with_networkx(data: st.DataObject, num_layers: int) -> None:
    layer = st.integers(0, num_layers - 1)
    pairs = data.draw(st.lists(st.tuples(layer, layer), max_size=10))
    operators = tuple(_operator(str(i), num_inputs=max(1, len(pairs))) for i in range(num_layers))
    edges = tuple(_edge(str(u), str(v), read=i) for i, (u, v) in enumerate(pairs))
    reference = nx.MultiDiGraph()
    reference.add_nodes_from(range(num_layers))
    reference.add_edges_from(pairs)
    graph = _graph(operators, edges)
    if not nx.is_directed_acyclic_graph(reference):
        with pytest.raises(GraphError, match="has a cycle"):
            verify(graph)
    elif any(u >= v for u, v in pairs):
        with pytest.raises(GraphError, match="stands before"):
            verify(graph)
    elif not nx.is_weakly_connected(reference):
        with pytest.raises(GraphError, match="is not connected"):
            verify(graph)
    else:
        assert verify(graph) is graph
        assert [set(n) for n in graph.neighbours] == [set(nx.all_neighbors(reference, v)) for v in range(num_layers)]


def test_a_shared_parameter_of_two_sizes_is_refused() -> None:
    net = Builder("net")
    x = net.add(dense, "first", net.input((4, 8)), out=(("n", 8),), shared="table")
    net.add(dense, "second", x, out=(("n", 3),), shared="table")
    with pytest.raises(GraphError, match="'first' and 'second' share parameter 'table', but one has 64 values of it"):
        net.build()


def test_a_shared_parameter_that_one_layer_alone_trains_is_refused() -> None:
    net = Builder("net")
    x = net.add(dense, "first", net.input((4, 8)), out=(("n", 8),), bias=False, shared="table")
    net.add(dense, "second", x, out=(("n", 8),), bias=False, shared="table")
    graph = net.build()
    second = graph["second"]
    frozen = replace(second, reads=(second.reads[0], replace(second.reads[1], is_trained=False)))
    with pytest.raises(GraphError, match="'first' and 'second' share parameter 'table', but one trains it and the"):
        verify(replace(graph, operators=(graph["first"], frozen)))
    frozen = replace(second, reads=tuple(replace(read, is_trained=False) for read in second.reads))
    with pytest.raises(GraphError, match="is frozen; only a parameter can be"):
        verify(replace(graph, operators=(graph["first"], frozen)))
