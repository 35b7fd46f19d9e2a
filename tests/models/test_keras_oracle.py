"""Built-in image networks against keras.applications: the same vertices, shapes and edges."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import networkx as nx
import pytest

from pase.graph import Graph, Operator
from pase.models import build

pytestmark = [
    pytest.mark.slow,
    # What TensorFlow's own imports warn of is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

FOLDED = {"InputLayer", "Activation", "ReLU", "ZeroPadding2D", "Flatten", "Reshape", "Dropout"}
"""Layers of Keras that are no vertices here: ReLUs are folded in, padding is an option, a reshape is seen through."""

Label = tuple[Any, ...]


@pytest.fixture(scope="module")
def applications() -> Any:
    return pytest.importorskip("keras").applications


def _keras_labels(layer: Any) -> Label:
    kind = type(layer).__name__
    shape = tuple(layer.output.shape[1:])
    if len(shape) == 3:
        rows, cols, channels = shape
        shape = (channels, rows, cols)
    window = tuple(getattr(layer, "kernel_size", getattr(layer, "pool_size", ())))
    return (kind, shape, window)


_KINDS = {
    "conv2d": "Conv2D",
    "batch_norm": "BatchNormalization",
    "concat": "Concatenate",
    "elementwise": "Add",
    "global_pool": "GlobalAveragePooling2D",
    "dense": "Dense",
}
_POOLS = {"max": "MaxPooling2D", "mean": "AveragePooling2D"}


def _label(operator: Operator) -> Label:
    kind = _KINDS.get(operator.kind) or _POOLS[operator.attribute("reduction", "")]
    window = (operator.extents["r"], operator.extents["s"]) if "r" in operator.extents else ()
    return (kind, operator.writes[0].shape[1:], window)


def _keras_graph(model: Any) -> "nx.DiGraph[str]":
    """Return the network with Keras' labels, folded layers contracted into what they read."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for layer in model.layers:
        graph.add_node(layer.name, label=_keras_labels(layer), folded=type(layer).__name__ in FOLDED)
        for source in _sources(layer):
            graph.add_edge(source, layer.name)
    for name in [n for n, folded in graph.nodes(data="folded") if folded]:
        graph.add_edges_from((u, v) for u in list(graph.predecessors(name)) for v in list(graph.successors(name)))
        graph.remove_node(name)
    return graph


def _sources(layer: Any) -> Iterator[str]:
    for node in layer._inbound_nodes:
        for tensor in node.input_tensors:
            yield tensor._keras_history.operation.name


def _our_graph(graph: Graph) -> "nx.DiGraph[str]":
    """Return the network with the same labels, without the softmax, which Keras folds into its last layer."""
    ours: nx.DiGraph[str] = nx.DiGraph()
    for operator in graph.operators[:-1]:
        ours.add_node(operator.name, label=_label(operator))
    ours.add_edges_from((e.producer, e.consumer) for e in graph.edges if e.consumer != graph.operators[-1].name)
    return ours


def _check_same(ours: "nx.DiGraph[str]", theirs: "nx.DiGraph[str]") -> None:
    def labels(graph: "nx.DiGraph[str]") -> Counter[Label]:
        return Counter(label for _, label in graph.nodes(data="label"))

    assert labels(ours) == labels(theirs)
    assert ours.number_of_edges() == theirs.number_of_edges()
    for graph in (ours, theirs):
        nx.set_node_attributes(graph, {n: repr(label) for n, label in graph.nodes(data="label")}, "label")
    # Equal for isomorphic labelled graphs: where two networks differ in an edge, some neighbourhood differs.
    assert nx.weisfeiler_lehman_graph_hash(ours, node_attr="label", iterations=12) == nx.weisfeiler_lehman_graph_hash(
        theirs, node_attr="label", iterations=12
    )


def _norm_channels(graph: Graph) -> int:
    return sum(operator.extents["c"] for operator in graph.operators if operator.kind == "batch_norm")


def _multiply_adds(model: Any) -> int:
    """Return the multiply-adds of one image: each output of a convolution or dense layer, times its filter's size."""
    total = 0
    for layer in model.layers:
        if type(layer).__name__ in {"Conv2D", "Dense"}:
            total += prod(layer.output.shape[1:-1]) * prod(layer.kernel.shape)
    return total


def _our_multiply_adds(graph: Graph) -> float:
    return graph.forward_flop(contractions_only=True) / 2


def test_inception_v3(applications: Any) -> None:
    model = applications.InceptionV3(weights=None)
    graph = build("inception_v3", batch=1)
    theirs = _keras_graph(model)
    assert theirs.number_of_nodes() == 218
    _check_same(_our_graph(graph), theirs)
    # No scales, but a moving mean and a moving variance for each channel.
    assert model.count_params() == graph.num_parameters + _norm_channels(graph)
    assert _multiply_adds(model) == _our_multiply_adds(graph)


@pytest.mark.parametrize("name", ["vgg16", pytest.param("vgg19", marks=pytest.mark.full)])
def test_vgg(name: str, applications: Any) -> None:
    model = getattr(applications, name.upper())(weights=None)
    graph = build(name, batch=1)
    _check_same(_our_graph(graph), _keras_graph(model))
    assert model.count_params() == graph.num_parameters
    assert _multiply_adds(model) == _our_multiply_adds(graph)


@pytest.mark.full
def test_densenet121(applications: Any) -> None:
    model = applications.DenseNet121(weights=None)
    graph = build("densenet121", batch=1, arguments={"chained": True})
    _check_same(_our_graph(graph), _keras_graph(model))
    assert model.count_params() == graph.num_parameters + 2 * _norm_channels(graph)
    assert _multiply_adds(model) == _our_multiply_adds(graph)


@pytest.mark.full
def test_resnet101(applications: Any) -> None:
    model = applications.ResNet101(weights=None)
    graph = build("resnet101", batch=1)
    ours, theirs = _our_graph(graph), _keras_graph(model)
    # Keras has a stage's stride in the first 1x1 convolution, not in the 3x3: positions differ there, channels do not.
    for network in (ours, theirs):
        for _, data in network.nodes(data=True):
            kind, shape, window = data["label"]
            data["label"] = (kind, shape[:1], window)
    _check_same(ours, theirs)
    # A bias on each convolution, as many as its normalisation has channels, and two moving statistics.
    assert model.count_params() == graph.num_parameters + 3 * _norm_channels(graph)


def test_lstm_parameters() -> None:
    layers, units = 2, 5
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((3, units))])
    for _ in range(layers):
        model.add(keras.layers.LSTM(units, return_sequences=True))
    graph = build("rnnlm", arguments={"layers": layers, "units": units, "steps": 3, "vocabulary": 7})
    assert model.count_params() == sum(access.size for access in graph["lstm"].parameters)
