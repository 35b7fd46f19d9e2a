"""What each worker holds: against the predicted memory; every number of a weight is in the parts, or in replicas."""

from math import prod

import numpy as np
import pytest

from pase.sharding.boxes import num_points
from pase.sharding.traffic import held_weights, optimiser_numbers, parameters_per_device
from pase.targets.training.optimisers import make_rule
from tests.runtime.networks import small, tied
from tests.runtime.plans import make_plan, random_plan


@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("lenet5", 1), ("transformer", 2), ("lstm_lm", 0)])
def test_every_number_is_held(name: str, seed: int) -> None:
    plan = random_plan(small(name), 4, seed)
    weights = held_weights(plan)
    for weight in weights:
        held = np.zeros(weight.shape, int)
        for part in weight.parts:
            held[tuple(slice(low, high) for low, high in part)] += 1
        # As often everywhere: 4 devices, of which replicas hold equal parts.
        assert held.min() == held.max() == sum(map(num_points, weight.parts)) // weight.size
        assert weight.size == prod(weight.shape)
    assert set(parameters_per_device(weights)) == {plan.memory.weights_bytes // 4}
    assert len({weight.name for weight in weights}) == len(weights)


def test_a_shared_weight_is_held_by_its_first_user() -> None:
    weights = held_weights(make_plan(tied(), 4, {"first": {"v": 4}, "fc": {"v": 2}}))
    assert [(weight.layer, weight.shape) for weight in weights] == [("first", (12, 8)), ("fc", (12,))]
    assert weights[0].parts == tuple(((3 * i, 3 * i + 3), (0, 8)) for i in range(4))


def test_parts_lie_on_the_devices_that_the_plan_names() -> None:
    plan = make_plan(small("mlp"), 4, {"fc1": {"n": 2, "c": 2}}, {"fc1": (3, 1, 0, 2)})
    (weight,) = (weight for weight in held_weights(plan) if weight.name == "fc1/w")
    # Positions are row-major over n, then c; weights are [c, n] = [12, 24].
    assert weight.parts == (((0, 6), (12, 24)), ((6, 12), (0, 12)), ((6, 12), (12, 24)), ((0, 6), (0, 12)))


def test_what_an_optimiser_keeps_written_out() -> None:
    weights = held_weights(make_plan(small("mlp"), 4, {"fc2": {"n": 2, "c": 2}}))
    # Weights and biases of fc1 [12, 24], a quarter of fc2 [24, 24] and half of its bias, fc3 [24, 12].
    sizes = [(12, 24), (12, 12), (24, 12)]
    biases = 24 + 12 + 12
    assert optimiser_numbers(weights, make_rule("sgd", {}).slots) == 0
    assert optimiser_numbers(weights, make_rule("adam", {}).slots) == 2 * (sum(map(prod, sizes)) + biases)
    assert optimiser_numbers(weights, make_rule("adafactor", {}).slots) == sum(map(sum, sizes)) + biases
