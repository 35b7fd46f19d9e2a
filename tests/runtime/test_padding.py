"""Windows that lie in the padding alone, as in a convolution of one point with padding: costed, imported, run."""

from functools import cache

import pytest

from pase.common.documents import Field
from pase.errors import GraphError, PlanError
from pase.graph import Builder, Graph, graph_document, graph_from_document
from pase.graph.operators import conv2d, dense, pool2d, softmax_loss
from pase.importers.frameworks import import_model
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from tests.runtime.plans import make_plan
from tests.runtime.training import options, parallel_training


@cache
def padded() -> Graph:
    net = Builder("padded")
    x = net.add(conv2d, "first", net.input((6, 3, 4, 4)), out=4, kernel=1)
    x = net.add(conv2d, "wide", x, out=4, kernel=1, padding=1, activation="tanh")
    x = net.add(conv2d, "wider", x, out=4, kernel=2, padding=3, stride=2, activation="tanh")
    x = net.add(conv2d, "after", x, out=2, kernel=1, padding=((0, 3), (2, 0)), stride=2, activation="tanh")
    x = net.add(dense, "fc", x, lead=("b",), reduce=("c", "h", "w"), out=(("n", 6),))
    net.add(softmax_loss, "loss", x)
    return net.build()


@cache
def reference() -> ReferenceResult:
    return reference_training(padded(), options(3, rate=0.05))


@pytest.mark.parametrize(
    ("num_devices", "splits"),
    [
        (2, {"wide": {"h": 2}, "wider": {"w": 2}}),
        # The first and the last of six parts read zeros alone.
        (6, {"wide": {"h": 6}, "wider": {"h": 6}}),
        (6, {"wide": {"w": 3, "h": 2}, "wider": {"r": 2, "h": 3}}),
    ],
)
def test_programs_read_zeros(num_devices: int, splits: dict[str, dict[str, int]]) -> None:
    losses, _ = parallel_training(make_plan(padded(), num_devices, splits), steps=3, rate=0.05)
    assert max_relative_difference(losses, reference().losses) < 1e-12


def test_a_graph_with_such_windows_is_read_back() -> None:
    graph = padded()
    # Each is as wide as torch says: floor((extent + zeros - kernel) / stride) + 1.
    assert [graph[name].extents["h"] for name in ("wide", "wider", "after")] == [6, 6, 5]
    assert [graph[name].extents["w"] for name in ("wide", "wider", "after")] == [6, 6, 4]
    assert graph_from_document(Field(graph_document(graph), "graph", PlanError, "plan.json")) == graph


def test_a_pooling_window_may_not_lie_in_the_padding_alone() -> None:
    net = Builder("pool")
    with pytest.raises(GraphError, match=r"padding \(1, 1\) holds a whole window of 1"):
        net.add(pool2d, "pool", net.input((2, 3, 4, 4)), kernel=1, stride=1, padding=1)


def test_a_convolution_of_one_point_with_padding_is_imported() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, kernel_size=1, padding=1), torch.nn.ReLU())
    x = torch.zeros(8, 3, 6, 6)
    graph = import_model((module, (x,))).lowered.graph
    (convolution,) = graph.operators
    assert convolution.kind == "conv2d"
    assert convolution.writes[0].shape == tuple(module(x).shape) == (8, 8, 8, 8)
