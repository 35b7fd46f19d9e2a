"""Every network under any strategy: the losses of the emitted program are those of one device."""

from functools import cache
from itertools import pairwise

import pytest

from pase.graph import Graph, Scalar
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from scripts.benchmarks.strategies import NETWORKS
from scripts.benchmarks.trials import Trial, attempt
from tests.runtime.networks import mixed, small, tied
from tests.runtime.plans import configurations, data_parallel_plan, make_plan, random_plan
from tests.runtime.training import options, parallel_losses

TOLERANCE = 1e-12
RATE = 0.05


@cache
def network(name: str) -> Graph:
    makers = {"mixed": mixed, "tied": tied}
    return makers[name]() if name in makers else small(name)


@cache
def reference(name: str) -> list[float]:
    losses = reference_losses(network(name), options(5, rate=RATE))
    # A network that does not learn would hide a wrong gradient.
    assert all(later < earlier for earlier, later in pairwise(losses)), losses
    return losses


def check(name: str, losses: list[float]) -> None:
    assert max_relative_difference(losses, reference(name)) < TOLERANCE


RANDOM = [
    # On 2, 4 and 8 devices the built-in ones are in test_built_in_networks, with their weights.
    *((name, p) for name in ("mlp", "rnnlm", "lenet5", "alexnet") for p in (3, 6)),
    *((name, p) for name in ("tied", "mixed") for p in (3, 4, 8)),
    *(pytest.param(name, p, marks=pytest.mark.full) for name in ("tied", "mixed") for p in (2, 6)),
]


@pytest.mark.parametrize(("name", "num_devices"), RANDOM)
def test_random_strategies(name: str, num_devices: int) -> None:
    for seed in range(2 if name in ("mlp", "rnnlm") else 1):
        check(name, parallel_losses(random_plan(network(name), num_devices, seed), rate=RATE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *(("mlp", p) for p in (5, 9, 12)),
        *(("tied", 5), ("rnnlm", 9), ("lenet5", 12), ("mixed", 9)),
        *(pytest.param("tied", p, marks=pytest.mark.full) for p in (9, 12)),
        *(pytest.param("rnnlm", p, marks=pytest.mark.full) for p in (5, 12)),
        *(pytest.param("lenet5", p, marks=pytest.mark.full) for p in (5, 9)),
        *(pytest.param("mixed", p, marks=pytest.mark.full) for p in (5, 12)),
    ],
)
def test_random_strategies_on_odd_numbers_of_devices(name: str, num_devices: int) -> None:
    check(name, parallel_losses(random_plan(network(name), num_devices, 100), rate=RATE))


SHALLOW: dict[str, dict[str, Scalar]] = {
    "vgg16": {},
    "gpt": {"layers": 1},
    "transformer": {"layers": 1},
    "transformer_big": {"layers": 1},
    "bert_large": {"layers": 1},
    "vgg19": {},
    "googlenet": {},
    "inception_v3": {"image": 75, "blocks": "1,1,1"},
    "densenet121": {"image": 32, "blocks": "2,1,1,1"},
    "resnet101": {"image": 32, "blocks": "1,1,1,1"},
}
"""Networks that take seconds a program, and what makes them shallower."""

SEEDS = {2: (None, 0), 4: (None, 0), 8: (None, 0)}
SEEDS_OF_SHALLOW: dict[int, tuple[int | None, ...]] = {2: (0,), 8: (0,)}
"""By number of devices; None is the searched strategy. With 4 devices they are in test_layer_kinds."""

FULL = {
    *((name, 2) for name in SHALLOW if name != "gpt"),
    *((name, 8) for name in SHALLOW),
}
"""With 4 devices they, or their like, are in test_layer_kinds; with 8 each kind of layer is, there or above."""

CASES = [
    *(pytest.param(name, p, seeds) for name in NETWORKS if name not in SHALLOW for p, seeds in SEEDS.items()),
    *(
        pytest.param(name, p, seeds, marks=pytest.mark.full if (name, p) in FULL else pytest.mark.slow)
        for name in SHALLOW
        for p, seeds in SEEDS_OF_SHALLOW.items()
    ),
]


@pytest.mark.parametrize(("name", "num_devices", "seeds"), CASES)
def test_built_in_networks(name: str, num_devices: int, seeds: tuple[int | None, ...]) -> None:
    """A sample of what `scripts/bench strategies` does: losses and weights, random strategies and the searched one."""
    arguments = tuple((NETWORKS[name] | SHALLOW.get(name, {})).items())
    for seed in seeds:
        outcome = attempt(Trial(network=name, arguments=arguments, num_devices=num_devices, seed=seed, steps=3))
        assert outcome.loss_difference < TOLERANCE
        assert outcome.weight_difference < TOLERANCE, outcome.worst_weight


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
        pytest.param({"s": 11}, marks=pytest.mark.full),
        pytest.param({"r": 5}, marks=pytest.mark.full),
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
