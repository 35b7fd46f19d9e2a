"""Which gradients there are, and that what has none costs nothing: no FLOP, no sums, nothing sent back."""

import numpy as np
import pytest

import pase
from pase.costs import build_problem, cost_model, edge_layouts, transfer_bytes
from pase.graph import Builder, Graph
from pase.graph.operators import conv2d, dense, elementwise, embedding, pool2d, softmax_loss
from pase.graph.operators.pieces import padded
from pase.machine import load_machine

MACHINE = load_machine("1080ti")

IMAGES = (8, 32, 18, 18)


def _convolution(before: str) -> Graph:
    """A convolution of images of 18 x 18, read as they are, or from a layer without parameters that makes them."""
    net = Builder("net")
    if before == "pad":
        dims = ("b", "c", "h", "w")
        x = net.add(padded, "first", net.input((8, 32, 16, 16)), dims=dims, before=(0, 0, 1, 1), out=IMAGES)
    elif before == "pool":
        x = net.add(pool2d, "first", net.input((8, 32, 36, 36)), kernel=2, stride=2, reduction="mean")
    else:
        x = net.input(IMAGES)
    net.add(conv2d, "conv", x, out=64, kernel=3, bias=False)
    return net.build()


@pytest.mark.parametrize("before", ["pad", "pool"])
@pytest.mark.parametrize("model", ["paper", "alpha_beta", "program"])
def test_a_convolution_costs_the_same_behind_a_layer_without_parameters(before: str, model: str) -> None:
    alone, behind = _convolution(""), _convolution(before)
    models = cost_model(model, MACHINE, 4)
    problems = [build_problem(graph, 4, models) for graph in (alone, behind)]
    costs = [
        dict(
            zip(
                map(tuple, problem.configurations[problem.graph.index["conv"]].splits.tolist()),
                problem.tables.vertex_costs[problem.tables.vertex_table[problem.graph.index["conv"]]].tolist(),
                strict=True,
            )
        )
        for problem in problems
    ]
    for splits, cost in costs[0].items():
        # Alone, halos come with the data.
        has_halo = splits[2] > 1 or splits[3] > 1
        assert costs[1][splits] > cost if has_halo else costs[1][splits] == cost, splits
    options = pase.SearchOptions(cost_model=model)
    plans = [pase.search(graph, 4, machine=MACHINE, options=options) for graph in (alone, behind)]
    assert plans[0]["conv"].splits == plans[1]["conv"].splits


def _mixed() -> Graph:
    """Data and indices go through layers of either kind, before and after the first weights."""
    net = Builder("mixed")
    shape = (8, 16)
    scaled = net.add(elementwise, "scaled", net.input(shape), dims=("b", "c"), function="tanh")
    both = net.add(elementwise, "both", scaled, scaled, dims=("b", "c"), function="multiply")
    fc = net.add(dense, "fc", both, out=(("n", 16),))
    joined = net.add(elementwise, "joined", fc, scaled, dims=("b", "c"), function="multiply")
    words = net.add(embedding, "words", net.input((8,)), vocabulary=10, size=16, dims=("b",))
    last = net.add(elementwise, "last", joined, words, dims=("b", "c"))
    net.add(softmax_loss, "loss", last)
    return net.build()


def test_what_has_a_gradient() -> None:
    graph = _mixed()
    expected = {
        "scaled": [False],
        "both": [False, False],
        "fc": [False, True, True],
        "joined": [True, False],
        "words": [False, True],
        "last": [True, True],
        "loss": [True, False],
    }
    found = {op.name: [graph.has_gradient(op, i) for i in range(len(op.reads))] for op in graph.operators}
    assert found == expected
    assert graph.trained == {"fc", "joined", "words", "last", "loss"}


def test_nothing_is_sent_back_to_what_is_not_trained() -> None:
    graph = _mixed()
    for edge in graph.edges:
        u, v = graph[edge.producer], graph[edge.consumer]
        batch = [np.array([[4 if dim == "b" else 1 for dim in op.extents]], dtype=np.int32) for op in (u, v)]
        whole = np.ones((1, len(v.dims)), dtype=np.int32)
        # The consumer reads all of it on every device: a device holds a fourth, and sends nothing back in full.
        gathered = transfer_bytes(graph, edge, *edge_layouts(graph, edge, batch[0], whole))
        assert gathered.forward.item() > 0
        # The consumer reads a fourth of what every device holds: its gradient alone has to come together.
        split = transfer_bytes(graph, edge, *edge_layouts(graph, edge, np.ones_like(batch[0]), batch[1]))
        assert split.forward.item() == 0
        assert (split.backward.item() > 0) == (edge.producer in ("fc", "words", "joined", "last"))


def test_repeated_layers_of_which_one_has_a_gradient_share_no_tables() -> None:
    net = Builder("net")
    x = net.input((8, 16))
    for name in ("early", "earlier"):
        x = net.add(elementwise, name, x, dims=("b", "c"), function="tanh")
    x = net.add(dense, "fc", x, out=(("n", 16),))
    for name in ("late", "later"):
        x = net.add(elementwise, name, x, dims=("b", "c"), function="tanh")
    graph = net.build()
    tables = build_problem(graph, 4, cost_model("paper", MACHINE, 4)).tables
    place = graph.index
    assert tables.vertex_table[place["late"]] == tables.vertex_table[place["later"]]
    assert tables.vertex_table[place["early"]] != tables.vertex_table[place["late"]]
    kinds = {(e.producer, e.consumer): tables.edge_table[i] for i, e in enumerate(graph.edges)}
    assert kinds["early", "earlier"] != kinds["late", "later"]
    one, other = (tables.edge_tables[kinds[ends]].values for ends in (("early", "earlier"), ("late", "later")))
    assert one.sum() < other.sum()
