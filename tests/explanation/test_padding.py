"""Extents that are worth padding: each hint is the optimum of the network that was built with the padded extent."""

import pytest

import pase
from pase.analysis.advice import worthwhile_padding
from pase.graph import Builder, Graph
from pase.graph.operators import dense, pool2d, softmax_loss


def _mlp(hidden: int, classes: int, batch: int = 16) -> Graph:
    net = Builder("mlp")
    x = net.input((batch, 512))
    x = net.add(dense, "fc1", x, out=(("n", hidden),), activation="relu")
    x = net.add(dense, "fc2", x, out=(("n", classes),))
    net.add(softmax_loss, "softmax", x)
    return net.build({"batch": batch})


@pytest.mark.parametrize("model", ["paper", "alpha_beta"])
@pytest.mark.parametrize("hidden", [4099, 9001])
def test_a_padded_extent_costs_what_the_network_built_so_costs(hidden: int, model: str) -> None:
    plan = pase.search(_mlp(hidden, 8), 8, cost_model=model)
    (found,) = worthwhile_padding(plan, _mlp(hidden, 8), time_limit_s=60)
    padded = -(-hidden // 8) * 8
    assert (found.extent, found.padded, found.ways) == (hidden, padded, 8)
    assert found.dims == (("fc1", "n"), ("fc2", "c"))
    built = pase.search(_mlp(padded, 8), 8, cost_model=model)
    assert found.total_cost == built.total_cost < 0.99 * plan.total_cost


def test_the_extent_that_saves_most_comes_first() -> None:
    graph = _mlp(4099, 2051)
    plan = pase.search(graph, 8)
    first, second = worthwhile_padding(plan, graph, time_limit_s=60)
    assert (first.extent, second.extent) == (4099, 2051)
    assert first.total_cost < second.total_cost < plan.total_cost


def test_nothing_is_said_of_what_divides_or_what_would_grow_by_much() -> None:
    for graph in (_mlp(4096, 16), _mlp(4096, 10)):
        assert worthwhile_padding(pase.search(graph, 8), graph, time_limit_s=60) == ()


def test_images_and_the_batch_are_left_alone() -> None:
    """A window's extents follow from the image, and the batch is for whoever trains to choose."""
    net = Builder("pooled")
    x = net.add(pool2d, "pool", net.input((127, 8, 127, 127)), kernel=2, stride=2)
    x = net.reshape(x, (127, 8 * 63 * 63))
    net.add(softmax_loss, "softmax", net.add(dense, "fc", x, out=(("n", 8),)))
    graph = net.build({"batch": 127})
    plan = pase.search(graph, 8, keep_batch=True)
    assert worthwhile_padding(plan, graph, time_limit_s=60) == ()
