"""Which gradients there are, and that what has none costs nothing: no FLOP, no sums, nothing sent back."""

from dataclasses import replace

import numpy as np
import pytest

import pase
from pase.costs import StepMemory, build_problem, cost_model, edge_layouts, transfer_bytes
from pase.costs.edges import traffic_of
from pase.costs.memory import keeping
from pase.graph import Builder, Graph, Tensor, verify
from pase.graph.operators import (
    add_parameter,
    attention,
    batch_norm,
    conv2d,
    dense,
    elementwise,
    embedding,
    layer_norm,
    lstm,
    padded,
    pool2d,
    recurrent,
    softmax,
    softmax_loss,
)
from pase.machine import load_machine
from tests.networks import row_of

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
                map(tuple, problem.configurations[problem.graph.index["conv"]].tolist()),
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


def test_a_frozen_weight_costs_no_sum_and_no_gradient() -> None:
    graph = _mixed()
    fc = graph["fc"]
    frozen = replace(fc, reads=(fc.reads[0], *(replace(read, is_trained=False) for read in fc.reads[1:])))
    graph = verify(replace(graph, operators=tuple(frozen if op is fc else op for op in graph.operators)))
    assert [graph.has_gradient(frozen, i) for i in range(3)] == [False, False, False]
    # All before the loss that depends on a weight that is trained: the words'.
    assert graph.trained == {"words", "last", "loss"}
    problem = build_problem(graph, 4, cost_model("paper", MACHINE, 4))
    rows = problem.configurations[graph.index["fc"]]
    costs = problem.tables.vertex_costs[problem.tables.vertex_table[graph.index["fc"]]]
    # Of [8, 16] by [16, 16], forward alone, and the bias, on a fourth of the batch.
    (cost,) = (cost for row, cost in zip(rows.tolist(), costs.tolist(), strict=True) if row == [4, 1, 1])
    assert cost == (2 * 8 * 16 * 16 + 8 * 16) / 4
    memory = StepMemory(
        graph=graph, keeps=keeping(graph), configurations=problem.configurations, optimiser="adam", micro_batches=2
    )
    v = graph.index["fc"]
    held = memory.lasting(v, memory.layers[v], has_casts=True)
    # Its part of [16, 16] and of the bias; neither gradients nor the optimizer's state.
    parts = [4 * (16 * 16 / (n * c) + 16 / n) for _, n, c in rows.tolist()]
    assert held.tolist() == parts


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


# -- work of what an operator does inside itself


def _flop(graph: Graph, name: str = "", **split: int) -> float:
    """FLOP of a step on the busiest device, of one layer or of all of them."""
    total = 0.0
    for operator in graph.operators:
        if name in ("", operator.name):
            row = row_of(operator, split)
            total += traffic_of(graph, operator, row).flop.item()
    return total


B, S, U = 3, 4, 5


def _input(net: Builder, *shape: int, is_trained: bool, name: str = "before") -> Tensor:
    """Return a tensor that has a gradient, or data."""
    x, dims = net.input(shape), tuple("abcd"[: len(shape)])
    return net.add(add_parameter, name, x, dims=dims, over=dims) if is_trained else x


def _stack(*, is_trained: bool, layers: int) -> Graph:
    net = Builder("stack")
    net.add(lstm, "lstm", _input(net, B, S, U, is_trained=is_trained), layers=layers, units=U)
    return net.build()


def _lstm_flop(layers: range, *, is_trained: bool) -> int:
    """Count the operations of some layers of a stack, one product and one sum after the other."""
    count = 0
    for layer in layers:
        for _ in range(B * S):
            for _ in range(4 * U):  # units of gates
                for _ in range(U):  # of the input
                    count += 2  # gate += x w
                    count += 2  # gradient of w += gate's x
                    count += 2 * (layer > 0 or is_trained)  # gradient of x += gate's w
                for _ in range(U):  # of the step before
                    count += 3 * 2  # the same of h and u: the step before is computed from weights
            count += 2 * 9 * U  # the cells, forward and backward
    return count


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_first_layer_s_product_alone_has_no_gradient_of_raw_inputs(layers: int, is_trained: bool) -> None:
    graph = _stack(is_trained=is_trained, layers=layers)
    assert _flop(graph, "lstm") == _lstm_flop(range(layers), is_trained=is_trained)
    for parts in (k for k in (2, 4) if k <= layers):
        size = layers // parts
        groups = [range(size * i, size * (i + 1)) for i in range(parts)]
        # Each device waits for those before it: a wavefront over so many groups and all steps.
        waiting = 1 + (parts - 1) * min((size - 1) * S + 1, size) / (size * S)
        # All but the first group do as much backward whatever x is.
        busiest = max(_lstm_flop(group, is_trained=is_trained) for group in groups)
        assert _flop(graph, "lstm", l=parts) == pytest.approx(busiest * waiting, rel=1e-14)


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_layers_of_raw_inputs_send_gradients_through_steps_and_layers(
    cell: str, gates: int, directions: int
) -> None:
    width, layers, rows = 7, 3, gates * U
    widths = [width] + [U * directions] * (layers - 1)
    weights = [shape for w in widths for _ in range(directions) for shape in ((rows, w), (rows, U), (rows,), (rows,))]
    forward = sum(2 * B * S * directions * rows * (w + U) for w in widths)
    found = {}
    for is_trained in (False, True):
        net = Builder("net")
        net.add(
            recurrent,
            "rnn",
            _input(net, B, S, width, is_trained=is_trained),
            weights=weights,
            outputs=[(B, S, U * directions)],
            units=U,
            gates=gates,
            layers=layers,
            directions=directions,
            product_flop=float(forward),
            cell=cell,
        )
        found[is_trained] = _flop(net.build(), "rnn")
    # A product of the step before, or of the layer below, works for three; of the data, for two.
    cells = 2 * layers * 3 * B * S * directions * rows
    of_data = 2 * B * S * directions * rows * width
    assert found[True] == pytest.approx(3 * forward + cells, rel=1e-14)
    assert found[False] == pytest.approx(3 * forward + cells - of_data, rel=1e-14)


def test_hidden_gradients_move_where_x_has_none() -> None:
    found = []
    for is_trained in (False, True):
        graph = _stack(is_trained=is_trained, layers=2)
        row = np.array([[2, 1, 1, 1, 5]], dtype=np.int32)
        messages = traffic_of(graph, graph["lstm"], row).messages
        found.append([m.size_bytes.item() for m in messages if m.tensor == "hidden_gradient"])
    assert found[0] == found[1] == [4 * B * S * U, 4 * B * S * U], "summed over five parts; handed to the layer below"


@pytest.mark.parametrize(
    ("operator", "shapes", "options"),
    [
        (conv2d, [(4, 6, 8, 8)], {"out": 5, "kernel": 3}),
        (dense, [(4, 6)], {"out": (("n", 5),)}),
        (batch_norm, [(4, 6, 8, 8)], {}),
        (elementwise, [(4, 6), (4, 6), (4, 6)], {"dims": ("b", "n")}),
        (elementwise, [(4, 6), (4, 6)], {"dims": ("b", "n"), "function": "multiply"}),
    ],
)
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_fused_counts_as_if_it_stood_alone(operator, shapes, options, is_trained: bool) -> None:  # type: ignore[no-untyped-def]
    def graph(*, is_fused: bool) -> Graph:
        net = Builder("net")
        dims = ("b", "n", "h", "w")[: len(shapes[0])]
        # The last tensor alone may be trained.
        x = [*map(net.input, shapes[:-1]), _input(net, *shapes[-1], is_trained=is_trained)]
        y = net.add(operator, "layer", *x, **options, **({"activation": "relu"} if is_fused else {}))
        if not is_fused:
            net.add(elementwise, "relu", y, dims=dims, function="relu")
        return net.build()

    assert _flop(graph(is_fused=True)) == _flop(graph(is_fused=False))


@pytest.mark.parametrize(
    ("function", "activation", "trained", "flop"),
    [
        ("add", "", (True, True), 1),
        ("add", "relu", (True, True), 3),
        ("add", "relu", (False, False), 2),
        ("multiply", "", (True, True), 3),
        ("multiply", "", (True, False), 2),
        ("multiply", "", (False, False), 1),
        ("multiply", "tanh", (False, True), 4),
        ("add", "", (True, True, True), 2),
        ("multiply", "", (True, True, False), 2 + 2 * 2),
    ],
)
def test_sums_and_products_of_several_tensors(
    function: str, activation: str, trained: tuple[bool, ...], flop: int
) -> None:
    net = Builder("net")
    tensors = [_input(net, 4, 6, is_trained=is_trained, name=f"p{i}") for i, is_trained in enumerate(trained)]
    net.add(elementwise, "last", *tensors, dims=("b", "n"), function=function, activation=activation)
    assert _flop(net.build(), "last") == flop * 4 * 6


def test_a_scale_works_backward_where_what_it_scales_has_no_gradient() -> None:
    for is_trained in (False, True):
        net = Builder("net")
        net.add(layer_norm, "norm", _input(net, 4, 6, 8, is_trained=is_trained))
        # Normalised in 3; times the scale; plus the shift. Backward 3 and both factors, or the scale alone.
        assert _flop(net.build(), "norm") == 4 * 6 * 8 * (3 + 1 + 1 + (3 + 2 if is_trained else 1))


def test_what_is_reduced_inside_a_layer_of_data_is_not_reduced_backward() -> None:
    heads = (2, 8, 4, 4)
    for is_trained in (False, True):
        for operator, shapes, options, split, tensor, times in (
            (attention, [heads] * 3, {}, "t", "softmax", (2, 3)),
            (attention, [heads] * 3, {}, "k", "scores", (1, 2)),
            (softmax, [(2, 8)], {"dims": ("b", "n"), "over": "n"}, "n", "rows", (2, 3)),
            (layer_norm, [(2, 8)], {"dims": ("b", "n")}, "n", "moments", (1, 2)),
        ):
            net = Builder("net")
            x = [net.input(shape) for shape in shapes]
            x[len(x) // 2] = _input(net, *shapes[0], is_trained=is_trained)  # of attention's tensors the keys
            net.add(operator, "layer", *x, **options)  # type: ignore[arg-type]
            graph = net.build()
            row = np.array([[4 if dim == split else 1 for dim in graph["layer"].extents]], dtype=np.int32)
            found = {m.tensor: m.times for m in traffic_of(graph, graph["layer"], row).messages}
            assert found[tensor] == times[is_trained]
