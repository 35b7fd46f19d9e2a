"""Every network under any strategy: the losses of the emitted program are those of one device."""

from functools import cache
from itertools import pairwise

import pytest

from pase.graph import Graph
from pase.runtime.execute import max_relative_difference
from pase.runtime.reference import reference_losses
from tests.runtime.networks import mixed, small, tied
from tests.runtime.plans import configurations, data_parallel_plan, make_plan, random_plan
from tests.runtime.training import parallel_losses

TOLERANCE = 1e-12
RATE = 0.05


@cache
def network(name: str) -> Graph:
    makers = {"mixed": mixed, "tied": tied}
    return makers[name]() if name in makers else small(name)


@cache
def reference(name: str) -> list[float]:
    losses = reference_losses(network(name), steps=5, dtype="float64", learning_rate=RATE)
    # A network that does not learn would hide a wrong gradient.
    assert all(later < earlier for earlier, later in pairwise(losses)), losses
    return losses


def check(name: str, losses: list[float]) -> None:
    assert max_relative_difference(losses, reference(name)) < TOLERANCE


@pytest.mark.parametrize("num_devices", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", ["mlp", "rnnlm", "tied", "lenet5", "alexnet", "mixed"])
def test_random_strategies(name: str, num_devices: int) -> None:
    seeds = {"mlp": 3, "rnnlm": 3, "lenet5": 2}
    for seed in range(seeds.get(name, 1)):
        check(name, parallel_losses(random_plan(network(name), num_devices, seed), rate=RATE))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 5, 6, 8, 9, 12])
@pytest.mark.parametrize("name", ["mlp", "rnnlm", "tied", "lenet5", "alexnet", "mixed"])
def test_more_random_strategies(name: str, num_devices: int) -> None:
    for seed in range(100, 104):
        check(name, parallel_losses(random_plan(network(name), num_devices, seed), rate=RATE))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "rnnlm", "lenet5", "alexnet"])
def test_data_parallelism(name: str, num_devices: int) -> None:
    check(name, parallel_losses(data_parallel_plan(network(name), num_devices), rate=RATE))


@pytest.mark.parametrize("name", ["mlp", "rnnlm"])
def test_every_configuration_of_every_layer(name: str) -> None:
    """Layer by layer, the others data-parallel; several layers change at once, each through all its configurations."""
    graph = network(name)
    choices = {operator.name: configurations(operator, 4) for operator in graph.operators}
    for i in range(max(len(found) for found in choices.values())):
        splits = {layer: found[i % len(found)] for layer, found in choices.items()}
        check(name, parallel_losses(make_plan(graph, 4, splits), rate=RATE))


@pytest.mark.parametrize(
    "splits",
    [
        {"r": 11},
        {"h": 5},
        {"w": 3, "h": 3},
        pytest.param({"s": 11}, marks=pytest.mark.slow),
        pytest.param({"r": 5}, marks=pytest.mark.slow),
    ],
)
def test_odd_numbers_of_devices_split_windows(splits: dict[str, int]) -> None:
    """AlexNet's windows have 11, 5 and 3 points."""
    graph = network("alexnet")
    num_devices = next(iter(splits.values())) if len(splits) == 1 else 9
    chosen = {
        operator.name: splits
        for operator in graph.operators
        if all(operator.extents.get(d, 1) % k == 0 and d not in operator.unsplittable for d, k in splits.items())
    }
    assert chosen
    check("alexnet", parallel_losses(make_plan(graph, num_devices, chosen), rate=RATE))
