"""A graph as a document: through JSON text and back, and what is said of a document that was changed by hand."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from pase.common.documents import DocumentSource
from pase.errors import PlanError
from pase.graph import Builder, Graph, graph_document, graph_from_document, uniform
from pase.graph.operators import (
    attention,
    batch_norm,
    concat,
    conv2d,
    dense,
    lstm,
    pool2d,
    softmax_loss,
    transposed_convolution,
)
from tests.networks import SMALL, small_graph


def _read(document: object) -> Graph:
    return graph_from_document(document, DocumentSource(PlanError, "plan.json"))


def _every_feature() -> Graph:
    """Return a graph with windows, parts, products of dims, every exchange, a pipeline and a shared weight."""
    net = Builder("net", precision=uniform("float64"))
    x = net.add(conv2d, "conv", net.input((2, 4, 8, 8)), out=4, kernel=3, stride=2, padding=1, groups=2)
    x = net.add(batch_norm, "norm", x, activation="relu")
    y = net.add(pool2d, "pool", x, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    x = net.add(concat, "join", x, y)
    x = net.add(lstm, "lstm", net.reshape(x, (2, 8, 16)), layers=2, units=16)
    x = net.reshape(x, (2, 8, 4, 4))
    x = net.add(attention, "attention", x, x, x, causal=True)
    x = net.add(
        dense, "fc", x, lead=("b", "s"), reduce=("h", "k"), out=(("v", 5),), bias=False, activation="tanh", shared="w"
    )
    net.add(softmax_loss, "softmax", x, dims=("b", "s", "v"))
    return net.build({"batch": 2, "grouped": True, "blocks": "1,2", "rate": 0.5})


@pytest.mark.parametrize("name", SMALL)
def test_every_network_comes_back_through_json(name: str) -> None:
    graph = small_graph(name)
    assert _read(json.loads(json.dumps(graph_document(graph)))) == graph


def test_every_feature_comes_back_through_json() -> None:
    graph = _every_feature()
    kinds = {type(exchange).__name__ for operator in graph.operators for exchange in operator.exchanges}
    assert kinds == {"AllReduce", "Relayout", "Handoff"}
    text = json.dumps(graph_document(graph))
    again = _read(json.loads(text))
    assert again == graph
    assert json.dumps(graph_document(again)) == text


def test_options_of_steps_come_back_through_json() -> None:
    document = json.loads(json.dumps(graph_document(_spread())))
    (step, _) = document["operators"][0]["body"]["steps"]
    assert step["options"] == {"strides": [2, 1], "dilations": [1, 3], "pads": [1, 0]}
    assert _read(document) == _spread()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("strides", [2], r"'convolve_transposed', has option strides = \(2,\); it has strides, dilations, pads"),
        ("strides", [0, 1], r"has option strides = \(0, 1\)"),
        ("pads", "1,0", "has option pads = '1,0'"),
        ("pads", [1, -1], r"options.pads\[1\] is -1; expected a whole number"),
        ("pads", [1, 1.5], r"options.pads\[1\] is 1.5; expected a whole number"),
        ("pads", {"0": 1}, "options.pads is an object; expected text, a number, or true or false"),
        ("steps", [1, 1], r"has option steps = \(1, 1\)"),
    ],
)
def test_options_that_are_none_of_a_step_are_refused(name: str, value: object, message: str) -> None:
    document = json.loads(json.dumps(graph_document(_spread())))
    document["operators"][0]["body"]["steps"][0]["options"][name] = value
    with pytest.raises(PlanError, match=message):
        _read(document)


def test_a_transposed_convolution_without_strides_is_refused() -> None:
    document = json.loads(json.dumps(graph_document(_spread())))
    del document["operators"][0]["body"]["steps"][0]["options"]["strides"]
    with pytest.raises(PlanError, match="has 6 dims and 2 options; expected three dims, and one number of each of str"):
        _read(document)


def _spread() -> Graph:
    net = Builder("net")
    options: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 1), "dilation": (1, 3), "padding": (1, 0)}
    net.add(transposed_convolution, "spread", net.input((2, 4, 3, 3)), out=2, **options)
    return net.build()


def _set(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


def _delete(*path: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_delete("name"), "plan.json: name is missing"),
        (_delete("operators", 0, "reads"), r"plan.json: operators\[0\].reads is missing"),
        (_set("word_bytes", to=0), "word_bytes is 0; expected one of 2, 4, 8"),
        (_set("arguments", to=[1]), "arguments is an array; expected an object"),
        (
            _set("arguments", "batch", to=[1]),
            "arguments.batch is an array; expected text, a number, or true or false",
        ),
        (_set("operators", to={}), "operators is an object; expected an array"),
        (_set("operators", 0, "dims", "b", to=0), r"operators\[0\].dims.b is 0; expected a whole number of 1 or more"),
        (_set("operators", 0, "dims", "b", to=True), r"operators\[0\].dims.b is True; expected a whole number"),
        (
            _set("operators", 0, "reads", 0, "role", to="weight"),
            r"reads\[0\].role is 'weight'; expected one of activation, i",
        ),
        (
            _set("operators", 0, "reads", 0, "axes", 0, to=5),
            r"reads\[0\].axes\[0\] is 5; expected a dim, a list of dims",
        ),
        (_delete("operators", 0, "reads", 0, "axes", 2, "window", "stride"), r"axes\[2\].window.stride is missing"),
        (
            _set("operators", 3, "reads", 1, "axes", 1, "part", "offset", to=-1),
            r"part.offset is -1; expected a whole number",
        ),
        (
            _set("operators", 1, "exchanges", 0, "pattern", to="gossip"),
            r"pattern is 'gossip'; expected one of all_reduce, r",
        ),
        (_set("operators", 0, "work", 0, "contraction", to=1), r"work\[0\].contraction is 1; expected true or false"),
        (
            _set("operators", 0, "work", 0, "flop_per_point", to=-2),
            "flop_per_point is -2; expected a number of 0 or more",
        ),
        (
            _set("edges", 0, to=["conv", 0, "norm"]),
            r"edges\[0\] has 3 entries; expected producer, output, consumer, input",
        ),
        (_set("operators", to=[]), "operators is empty; expected an array of 1 or more"),
        (_set("operators", 0, "dims", "h", to=5), "the document is not a valid graph: layer 'conv' .* but h = 5"),
        (_set("edges", to=[]), "the document is not a valid graph: graph 'net' is not connected"),
    ],
)
def test_a_changed_document_is_refused(change: Callable[[Any], None], message: str) -> None:
    document = deepcopy(graph_document(_every_feature()))
    change(document)
    with pytest.raises(PlanError, match=message):
        _read(document)


def test_a_document_that_is_no_object_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan\.json: the document is an array; expected an object"):
        _read([])
