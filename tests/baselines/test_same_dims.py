"""Which dims are the same: by hand, and by what it costs to split them alike."""

import pytest

from pase import load_machine
from pase.analysis.baselines.rules import dense_product, follows, is_convolution, leads_to, same_dims, transformer_dims
from pase.graph import Access, Builder, Dim, Edge, Graph, Operator, SliceOf
from pase.graph.operators import attention, dense, embedding, layer_norm, softmax_loss
from pase.planning.problems import problem_of
from tests.networks import SMALL, small_graph


def _classes(graph: Graph) -> set[frozenset[str]]:
    """Return the sets of more than one dim that are the same, as texts "layer.dim"."""
    found: dict[int, set[str]] = {}
    for (layer, dim), number in same_dims(graph).items():
        found.setdefault(number, set()).add(f"{layer}.{dim}")
    return {frozenset(dims) for dims in found.values() if len(dims) > 1}


def _of(*texts: str) -> set[frozenset[str]]:
    return {frozenset(text.split()) for text in texts}


def test_dims_follow_the_tensors() -> None:
    assert _classes(small_graph("mlp")) == _of(
        "fc1.b fc2.b fc3.b softmax.b", "fc1.n fc2.c", "fc2.n fc3.c", "fc3.n softmax.n"
    )


def test_a_tied_weight_makes_the_vocabulary_of_both_ends_one() -> None:
    net = Builder("tied")
    x = net.add(embedding, "tokens", net.input((4, 8)), vocabulary=32, size=16, shared="table")
    x = net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=(("v", 32),), bias=False, shared="table")
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    assert _classes(net.build()) == _of(
        "tokens.b fc.b softmax.b", "tokens.s fc.s softmax.s", "tokens.d fc.d", "tokens.v fc.v softmax.v"
    )


def _attention_of_one_projection() -> Graph:
    """Return an attention whose heads are a view of a dense layer's width, that its keys share, in groups of two."""
    b, s, width, groups, shared, size = 2, 8, 64, 4, 2, 8
    q, k = (b, s, groups * shared, size), (b, s, groups, size)
    wide, narrow = (b, s, groups * shared * size), (b, s, groups * size)
    net = Builder("grouped")
    x = net.input((b, s, width))
    lead = {"lead": ("b", "s"), "reduce": ("d",)}
    heads = [
        net.add(dense, name, x, out=(("n", shape[-1]),), **lead)
        for name, shape in (("q", wide), ("k", narrow), ("v", narrow))
    ]
    net.add(_grouped, "attention", *(net.reshape(y, shape) for y, shape in zip(heads, (q, k, k), strict=True)))
    return net.build()


def _grouped(name: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> Operator:
    heads = ("h1", "h2")
    dims = {"b": q[0], "h1": k[2], "h2": q[2] // k[2], "s": q[1], "t": k[1], "k": q[3]}
    return Operator(
        name=name,
        kind="attention",
        dims=tuple(Dim(dim, extent) for dim, extent in dims.items()),
        reads=(
            Access(tensor="q", shape=q, index_map=("b", "s", heads, "k")),
            Access(tensor="k", shape=k, index_map=("b", "t", "h1", "k")),
            Access(tensor="v", shape=v, index_map=("b", "t", "h1", "k")),
        ),
        writes=(Access(tensor="y", shape=q, index_map=("b", "s", heads, "k")),),
    )


def test_the_first_factor_of_a_viewed_dim_is_the_same_as_the_whole() -> None:
    graph = _attention_of_one_projection()
    assert _classes(graph) == _of(
        "q.b k.b v.b attention.b", "q.s attention.s", "k.s v.s attention.t", "q.n k.n v.n attention.h1"
    )
    found = transformer_dims(graph)
    assert found is not None
    assert found.heads == {found.classes["q", "n"]}
    assert found.batch == {found.classes["q", "b"]}
    assert (found.hidden, found.vocabulary) == (frozenset(), frozenset())


def test_a_piece_of_a_dim_is_the_same_as_the_dim() -> None:
    """A projection of queries, keys and values in one, cut in three."""
    net = Builder("fused")
    x = net.input((2, 8, 16))
    x = net.add(dense, "first", x, lead=("b", "s"), reduce=("d",), out=(("n", 48),))
    graph = net.build()
    pieces = tuple(
        Access(tensor=f"y{i}", shape=(2, 8, 16), index_map=("b", "s", SliceOf(dim="n", offset=16 * i, extent=16)))
        for i in range(3)
    )
    first = graph["first"]
    fused = Operator(name="fused", kind="dense", dims=first.dims, reads=first.reads, writes=pieces, work=first.work)
    heads = attention("attention", (2, 8, 4, 4), (2, 8, 4, 4), (2, 8, 4, 4))
    edges = tuple(Edge(producer="fused", output=i, consumer="attention", input=i) for i in range(3))
    joined = Graph(name="joined", operators=(fused, heads), edges=edges)
    assert _classes(joined) == _of("fused.b attention.b", "fused.s attention.s attention.t", "fused.n attention.h")


def test_width_and_hidden_units_are_told_apart() -> None:
    """Hidden units lie between two dense layers with nothing in between that must see them all."""
    net = Builder("block")
    x = net.input((2, 8, 16))
    lead = ("b", "s")
    q, k, v = (net.add(dense, n, x, lead=lead, reduce=("d",), out=(("h", 4), ("k", 4))) for n in ("q", "k", "v"))
    y = net.add(attention, "attention", q, k, v)
    y = net.add(dense, "o", y, lead=lead, reduce=("h", "k"), out=(("d", 16),))
    y = net.add(dense, "up", y, lead=lead, reduce=("d",), out=(("e", 64),))
    y = net.add(dense, "down", y, lead=lead, reduce=("e",), out=(("d", 16),))
    y = net.add(dense, "first", y, lead=lead, reduce=("d",), out=(("e", 32),))
    y = net.add(layer_norm, "norm", y)
    y = net.add(dense, "second", y, lead=lead, reduce=("e",), out=(("d", 16),))
    y = net.add(dense, "head", y, lead=lead, reduce=("d",), out=(("v", 100),))
    net.add(softmax_loss, "softmax", y, dims=("b", "s", "v"))
    found = transformer_dims(net.build())
    assert found is not None
    split = {dim for dim, number in found.classes.items() if number in found.hidden}
    assert {("up", "e"), ("down", "e")} <= split
    assert split.isdisjoint({("first", "e"), ("norm", "d"), ("o", "d"), ("up", "d"), ("q", "d")})
    assert found.vocabulary == {found.classes["head", "v"]}


@pytest.mark.parametrize("model", ["alexnet", "transformer", "bert_large", "rnnlm", "gpt", "vgg16"])
def test_equal_splits_of_the_same_dim_move_nothing(model: str) -> None:
    """Where both sides index a tensor dim by one dim of theirs, and split it alike and nothing else, edges are free."""
    problem = problem_of(small_graph(model), 2, load_machine("1080ti"), "paper")
    graph = problem.graph
    classes = same_dims(graph)
    num_seen = 0
    for number, edge in enumerate(graph.edges):
        u, v = graph[edge.producer], graph[edge.consumer]
        written, read = u.writes[edge.output], v.reads[edge.input]
        for one, other in [(a, b) for a in u.extents for b in v.extents if classes[u.name, a] == classes[v.name, b]]:
            if (
                one not in written.index_map
                or other not in read.index_map
                or u.extents[one] % 2
                or v.extents[other] % 2
            ):
                continue
            row, col = (
                problem.choice(graph.index[op.name], tuple(2 if d == dim else 1 for d in op.extents))
                for op, dim in ((u, one), (v, other))
            )
            assert row is not None
            assert col is not None
            if written.index_map.index(one) == read.index_map.index(other):
                assert problem.tables.edge(number).cost(row, col) == 0, (edge, one, other)
                num_seen += 1
    assert num_seen >= len(graph.edges)


@pytest.mark.parametrize("model", SMALL)
def test_dense_layers_and_convolutions_are_recognised(model: str) -> None:
    for operator in small_graph(model).operators:
        assert is_convolution(operator) == operator.kind.startswith("conv")
        product = dense_product(operator)
        assert (product is not None) == (operator.kind == "dense")
        if product:
            assert [*product.lead, *product.out, *product.reduce] == [*operator.extents]


def test_what_leads_to_a_layer_and_what_follows_it() -> None:
    graph = small_graph("alexnet")
    names = [operator.name for operator in graph.operators]
    last = names.index("conv5")
    assert leads_to(graph, is_convolution) == set(names[:last])
    assert follows(graph, is_convolution) == set(names[1:])
