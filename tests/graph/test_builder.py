import pytest

from pase.errors import GraphError
from pase.graph import PRECISIONS, Builder, Edge, Graph
from pase.graph.operators import concat, dense, elementwise, embedding, softmax_loss


def _perceptron() -> Graph:
    net = Builder("net")
    x = net.add(dense, "fc1", net.input((32, 784)), out=(("n", 128),), activation="relu")
    x = net.add(dense, "fc2", x, out=(("n", 10),))
    net.add(softmax_loss, "softmax", x)
    return net.build({"batch": 32})


def test_layers_are_joined_in_the_order_in_which_they_are_written() -> None:
    graph = _perceptron()
    assert [operator.name for operator in graph.operators] == ["fc1", "fc2", "softmax"]
    assert graph.edges == (
        Edge(producer="fc1", output=0, consumer="fc2", input=0),
        Edge(producer="fc2", output=0, consumer="softmax", input=0),
    )
    assert graph.arguments == (("batch", 32),)
    assert graph.precision == PRECISIONS["float32"]
    assert graph.neighbours == (frozenset({1}), frozenset({0, 2}), frozenset({1}))


def test_the_network_s_input_has_no_edge_and_needs_no_gradient() -> None:
    graph = _perceptron()
    assert ("fc1", 0) not in graph.incoming
    assert not graph.has_gradient(graph["fc1"], 0)
    assert graph.has_gradient(graph["fc1"], 1)
    assert graph.has_gradient(graph["fc2"], 0)
    assert not graph.has_gradient(graph["softmax"], 1), "labels are indices"


def test_a_tensor_may_be_read_twice_by_one_layer() -> None:
    net = Builder("net")
    x = net.add(dense, "fc", net.input((4, 6)), out=(("n", 8),))
    net.add(elementwise, "square", x, x, dims=("b", "n"), function="multiply")
    assert [(edge.producer, edge.input) for edge in net.build().edges] == [("fc", 0), ("fc", 1)]


def test_a_reshape_is_seen_through() -> None:
    net = Builder("net")
    x = net.add(dense, "fc1", net.input((4, 6)), out=(("h", 2), ("k", 4)))
    x = net.add(dense, "fc2", net.reshape(x, (4, 8)), out=(("n", 3),))
    graph = net.build()
    assert len(graph.operators) == 2
    assert graph.incoming["fc2", 0].producer == "fc1"


def test_a_reshape_must_keep_the_size() -> None:
    net = Builder("net")
    with pytest.raises(GraphError, match=r"shape \(4, 6\) cannot be reshaped to \(4, 7\): sizes differ"):
        net.reshape(net.input((4, 6)), (4, 7))


def test_a_layer_that_does_not_fit_is_refused_when_it_is_added() -> None:
    net = Builder("net")
    with pytest.raises(GraphError, match=r"layer 'fc' \(dense\): dim 'n' has extent 0"):
        net.add(dense, "fc", net.input((4, 6)), out=(("n", 0),))


def test_a_shared_parameter_counts_once() -> None:
    net = Builder("net")
    x = net.add(embedding, "embedding", net.input((2, 3)), vocabulary=11, size=5, shared="table")
    net.add(dense, "fc", x, lead=("b", "s"), reduce=("d",), out=(("v", 11),), shared="table")
    assert net.build().num_parameters == 11 * 5 + 11


def test_forward_flop_counts_a_multiply_add_as_two() -> None:
    graph = _perceptron()
    contractions = 2 * 32 * (784 * 128 + 128 * 10)
    # Bias and ReLU of fc1, bias of fc2, and the softmax's four operations.
    points = 32 * (2 * 128 + 10 + 4 * 10)
    assert graph.forward_flop(contractions_only=True) == contractions
    assert graph.forward_flop() == contractions + points


def test_a_layer_is_found_by_name() -> None:
    graph = _perceptron()
    assert graph["fc2"].extents == {"b": 32, "n": 10, "c": 128}
    with pytest.raises(KeyError, match="fc3"):
        graph["fc3"]


def test_every_output_reaches_every_consumer() -> None:
    net = Builder("net")
    x = net.add(dense, "fc", net.input((4, 6)), out=(("n", 8),))
    net.add(concat, "join", x, x, x, dims=("b", "n"), along="n")
    graph = net.build()
    assert [edge.input for edge in graph.edges] == [0, 1, 2]
    assert graph.neighbours == (frozenset({1}), frozenset({0}))
