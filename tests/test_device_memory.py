"""Predicted memory against the cost model's own and small cases written out."""

import numpy as np
import pytest

from pase.costs import memory_bytes
from pase.device_memory import device_memory
from tests.runtime.networks import small, tied
from tests.runtime.plans import make_plan, random_plan


@pytest.mark.parametrize(("num_devices", "seed"), [(4, 0), (6, 1), (12, 2)])
def test_weights_and_outputs_are_those_of_the_cost_model(num_devices: int, seed: int) -> None:
    graph = small("mlp")
    plan = random_plan(graph, num_devices, seed)
    found = device_memory(plan)
    expected = sum(
        memory_bytes(operator, np.array([list(plan[operator.name].splits.values())], dtype=np.int32), word_bytes=4)[0]
        for operator in graph.operators
        if operator.kind != "softmax_loss"
    )
    assert found.weights_bytes + found.gradients_bytes + found.activations_bytes == expected


def test_a_small_network_written_out() -> None:
    """24 points of 12 inputs, layers of 24, 24 and 12; fc2 split in b = 2, n = 2, the others not at all."""
    found = device_memory(make_plan(small("mlp"), 4, {"fc2": {"b": 2, "n": 2}}))
    weights = 12 * 24 + 24 + (24 * 12 + 12) + 24 * 12 + 12
    assert found.weights_bytes == found.gradients_bytes == 4 * weights
    assert found.activations_bytes == 4 * 2 * (24 * 24 + 12 * 12 + 24 * 12)
    # The data and the labels without gradients; what fc2, fc3 and the softmax read with theirs.
    assert found.buffers_bytes == 4 * (24 * 12 + 24 + 2 * (12 * 24 + 24 * 24 + 24 * 12))
    assert found.total_bytes == 8 * weights + found.activations_bytes + found.buffers_bytes


def test_a_shared_weight_is_held_once() -> None:
    plan = make_plan(tied(), 4, {})
    found = device_memory(plan)
    assert found.weights_bytes == 4 * (12 * 8 + 12)
    assert found.gradients_bytes == 4 * (3 * 12 * 8 + 12)
    assert device_memory(plan, word_bytes=8).total_bytes == 2 * found.total_bytes
