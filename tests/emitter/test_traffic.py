"""The bytes in an emitted program's comments are those that its reshards are lowered to."""

import re

import pytest

from pase.graph import Builder, Graph
from pase.graph.operators import dense, elementwise, pool2d, softmax_loss
from pase.sharding.traffic import edge_bytes
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from tests.runtime.networks import attentions, lstms, mixed, small
from tests.runtime.plans import random_plan
from tests.runtime.training import builder_of


def pooled() -> Graph:
    """A network whose first layers hold no weights: nothing flows back to them."""
    net = Builder("pooled")
    x = net.add(pool2d, "pool", net.input((12, 2, 6, 6)), kernel=2, stride=2)
    x = net.add(elementwise, "square", x, x, dims=("b", "c", "h", "w"), function="multiply")
    x = net.add(dense, "fc", net.reshape(x, (12, 18)), out=(("n", 6),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def test_data_get_no_gradient() -> None:
    graph = pooled()
    assert [graph.has_gradient(graph[edge.consumer], edge.input) for edge in graph.edges] == [False, False, False, True]


@pytest.mark.parametrize(
    ("graph", "num_devices"),
    [(pooled(), 4), (small("mlp"), 2), (small("rnnlm"), 6), (mixed(), 4), (attentions(), 6), (lstms(), 4)],
    ids=str,
)
def test_comments_are_what_is_lowered(graph: Graph, num_devices: int) -> None:
    plan = random_plan(graph, num_devices, 17)
    source = emit(plan)
    with ProgramGraph().as_default():
        program = Program(num_devices=num_devices)
        training = Training.start(program, builder_of(source)(program), learning_rate=0.1, seed=0)
        training.close()
    moved = training.traffic.bytes_by_operation
    lowered = sum(size for operation, size in moved.items() if not operation.endswith("/all_reduce"))
    written = sum(int(number) for number in re.findall(r"(\d+) B (?:forward|backward)", source))
    assert written == lowered
    assert written == sum(sum(edge_bytes(plan, edge)) for edge in graph.edges)
    assert written > 0
