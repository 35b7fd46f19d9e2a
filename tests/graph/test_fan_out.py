"""Where a graph gets a fan-out, what it is, and what is no fan-out."""

from dataclasses import replace

import pytest

from pase.errors import GraphError
from pase.graph import Builder, Graph, verify
from pase.graph.operators import concat, conv2d, dense, elementwise, embedding, fan_out, layer_norm, with_fan_outs
from tests.networks import SMALL, small_graph


def fan_outs(model: Graph) -> dict[str, list[str]]:
    """The readers of each fan-out."""
    graph = with_fan_outs(model)
    names = [operator.name for operator in graph.operators if operator.is_fan_out]
    return {name: [edge.consumer for edge in graph.edges if edge.producer == name] for name in names}


def attention_inputs(*, trained: bool = True) -> Graph:
    """What q, k and v read, and a residual."""
    net = Builder("block")
    x = net.input((4, 8, 16))
    if trained:
        x = net.add(layer_norm, "norm", x)
    else:
        x = net.add(elementwise, "norm", x, dims=("b", "s", "d"), function="tanh")
    heads = (("h", 4), ("k", 6))
    q, k, v = (net.add(dense, n, x, lead=("b", "s"), reduce=("d",), out=heads) for n in "qkv")
    y = net.add(elementwise, "sum", q, k, v, dims=("b", "s", "h", "k"))
    y = net.add(dense, "o", y, lead=("b", "s"), reduce=("h", "k"), out=(("d", 16),))
    net.add(elementwise, "residual", x, y, dims=("b", "s", "d"))
    return net.build()


def test_all_readers_of_one_tensor_are_fed_by_its_fan_out() -> None:
    graph = with_fan_outs(attention_inputs())
    assert fan_outs(attention_inputs()) == {"norm_fan_out": ["q", "k", "v", "residual"]}
    assert [operator.name for operator in graph.operators][:3] == ["norm", "norm_fan_out", "q"]
    operator = graph["norm_fan_out"]
    # 4 heads of 6: a projection can leave the gradient in 24 parts, the residual in one.
    assert operator.extents == {"b": 4, "s": 8, "d": 16, "g": 24}
    assert operator.partial_dims(operator.reads[0]) == ("g",)
    assert operator.partial_dims(operator.writes[0]) == ()
    assert operator.work == ()


def test_a_tensor_without_a_gradient_has_none() -> None:
    assert fan_outs(attention_inputs(trained=False)) == {}


def test_one_reader_that_leaves_parts_sums_them_itself() -> None:
    net = Builder("residual")
    x = net.add(dense, "first", net.input((8, 16)), out=(("n", 16),))
    y = net.add(dense, "second", x, out=(("n", 16),))
    net.add(elementwise, "add", x, y, dims=("b", "n"))
    assert with_fan_outs(net.build()).operators == net.build().operators


@pytest.mark.parametrize("name", SMALL)
def test_the_model_keeps_its_layers_and_edges(name: str) -> None:
    graph = small_graph(name)
    found = with_fan_outs(graph)
    assert verify(found) is found
    assert with_fan_outs(found) is found
    assert tuple(operator for operator in found.operators if not operator.is_fan_out) == graph.operators
    above = {edge.consumer: edge for edge in found.edges if found[edge.consumer].is_fan_out}
    seen = [
        replace(edge, producer=above[edge.producer].producer, output=above[edge.producer].output)
        if edge.producer in above
        else edge
        for edge in found.edges
        if not found[edge.consumer].is_fan_out
    ]
    assert tuple(seen) == graph.edges
    # Two at least of its readers can leave a gradient in parts.
    for operator in (operator for operator in found.operators if operator.is_fan_out):
        readers = [edge for edge in found.edges if edge.producer == operator.name]
        partial = [found[e.consumer].partial_dims(found[e.consumer].reads[e.input]) for e in readers]
        assert sum(bool(dims) for dims in partial) >= 2
        assert all(found.has_gradient(found[e.consumer], e.input) for e in readers)


def test_names_of_dims_and_of_layers_are_new() -> None:
    net = Builder("groups")
    x = net.add(conv2d, "stem", net.input((4, 8, 6, 6)), out=8, kernel=1, groups=2)
    a = net.add(conv2d, "stem_fan_out", x, out=4, kernel=3, padding=1)
    b = net.add(conv2d, "other", x, out=6, kernel=1)
    net.add(concat, "join", a, b)
    graph = with_fan_outs(net.build())
    (operator,) = [operator for operator in graph.operators if operator.is_fan_out]
    assert operator.name == "stem_fan_out_2"
    # The channels are a product of groups and channels of each.
    assert operator.reads[0].index_map == graph["stem"].writes[0].index_map
    over = operator.partial_dims(operator.reads[0])
    assert over == ("g_2",)
    assert set(operator.extents) == {"b", "g", "n", "h", "w", "g_2"}
    # Kernels leave parts too: 4 filters of 3 by 3, 6 of 1 by 1.
    assert operator.extents["g_2"] == 36


def test_indices_are_read_from_where_they_are() -> None:
    net = Builder("indices")
    x = net.input((4, 6))
    a, b = (net.add(embedding, name, x, vocabulary=12, size=8) for name in "ab")
    net.add(elementwise, "add", a, b, dims=("b", "s", "d"))
    assert fan_outs(net.build()) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reads": ()}, "hands on one tensor as it is"),
        (
            {"writes": (fan_out("f", (4,), axes=("b",), extents={"b": 4}, parts=2).writes[0],) * 2},
            "one tensor as it is",
        ),
        ({"dims": fan_out("f", (4,), axes=("b",), extents={"b": 4, "c": 3}, parts=2).dims}, "lacks c, g of b, c, g"),
    ],
)
def test_what_is_called_a_fan_out_is_one(change: dict[str, object], said: str) -> None:
    graph = with_fan_outs(attention_inputs())
    right = fan_out("f", (4,), axes=("b",), extents={"b": 4}, parts=2)
    assert right.extents == {"b": 4, "g": 2}
    changed = replace(right, **change)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=said):
        verify(replace(graph, operators=(*graph.operators, changed)))
