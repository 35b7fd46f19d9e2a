"""Every network under any strategy: losses and weights are those of one device, and what moves was predicted.

`scripts/bench strategies` does so with many more strategies.
"""

from functools import cache
from itertools import product
from math import prod

import pytest

from pase.graph import Graph
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.sharding.traffic import bytes_by_movement, flows
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from tests.networks import slow_machine
from tests.runtime.networks import EXCHANGING, MADE, SMALL, deep, small
from tests.runtime.options import options
from tests.runtime.plans import configurations, data_parallel_plan, make_plan, random_plan
from tests.runtime.training import Trained, by_ends, check, check_training, in_float64, trained

RATES = dict.fromkeys(("lstm", "lstm_lm", "lines", "volumes", "dropping"), 0.3)
RATES |= {"inception_v3": 1e-6, "all of inception_v3": 1e-6, "resnet101": 1e-3, "densenet121": 1e-3}
"""Of the others: 0.05. In many normalisations rounding grows with every update."""

SLOW_TO_LEARN = ("inception_v3", "all of inception_v3")


@cache
def network(name: str) -> Graph:
    if name in MADE:
        return MADE[name]()
    return deep("inception_v3") if name == "all of inception_v3" else small(name)


def rate(name: str) -> float:
    return RATES.get(name, 0.05)


@cache
def reference(name: str) -> ReferenceResult:
    found = reference_training(network(name), options(3, rate=rate(name)))
    # A network that does not learn would hide a wrong gradient.
    assert name in SLOW_TO_LEARN or found.losses[0] - found.losses[-1] > 1e-4, found.losses
    return found


@cache
def plan_of(name: str, num_devices: int, how: str | int) -> Plan:
    match how:
        case "searched":
            # On devices this slow even small layers are worth splitting.
            return search(network(name), num_devices, machine=slow_machine())
        case "data parallel":
            return data_parallel_plan(network(name), num_devices)
        case _:
            return random_plan(network(name), num_devices, int(how))


def check_plan(name: str, plan: Plan) -> None:
    # Normalisations and the like exchange something in passes that a plan does not tell apart.
    phases = name in ("mlp", "rnnlm", "lenet5", "alexnet", "mixed", "tied", "weightless")
    check(plan, reference(name), rate=rate(name), phases=phases)


QUICK: list[tuple[str, int, str | int]] = [
    *(("mlp", p, how) for p, how in ((1, "data parallel"), (3, 0), (4, "searched"), (5, 100))),
    *(("rnnlm", 6, 0), ("rnnlm", 8, "searched"), ("lenet5", 4, "searched")),
    *(("attention", 3, 3), ("lstm", 3, 3)),
    *(("gpt", 4, "searched"), ("volumes", 4, "searched")),
    *(("mixed", 4, 0), ("functions", 4, 0), ("rearranged", 4, 1), ("tied", 4, 0), ("lines", 4, 0)),
    ("weightless", 4, 17),
]
"""Each network made here, each way to a strategy, each number of devices: not all of their products."""

FULL: list[tuple[str, int, str | int]] = [
    *((name, 4, 1) for name in SMALL),
    *((name, p, p) for name in EXCHANGING for p in (3, 8)),
    *(("mlp", 12, 0), ("rnnlm", 9, 0), ("lenet5", 8, 1), ("alexnet", 6, 0), ("mixed", 3, 0), ("dropping", 8, 2)),
    *product((*SMALL, *MADE), (2, 4, 8), ("searched", "data parallel", 0)),
    *product(("mlp", "rnnlm", "lenet5", "mixed", "tied"), (5, 6, 9, 12), (100,)),
    *(("mlp", 8, 1), ("lenet5", 3, 0), ("tied", 8, 1), ("lines", 8, 3), ("all of inception_v3", 4, "searched")),
]


@pytest.mark.parametrize(
    ("name", "num_devices", "how"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL if case not in QUICK)],
)
def test_losses_weights_and_bytes(name: str, num_devices: int, how: str | int) -> None:
    check_plan(name, plan_of(name, num_devices, how))


@pytest.mark.parametrize(
    ("name", "num_devices", "kind"),
    [
        *(("mlp", 2, ""), ("rnnlm", 2, ""), ("dropping", 2, "dropout")),
        *((kind, 2, kind) for kind in EXCHANGING),
        *(
            pytest.param(name, p, "", marks=pytest.mark.full)
            for name, p in (("mlp", 4), ("rnnlm", 4), ("lines", 2), ("volumes", 2))
        ),
    ],
)
def test_every_configuration(name: str, num_devices: int, kind: str) -> None:
    """Layers, of one kind or all, go through theirs at once, each in an order of its own; others are not split."""
    graph = network(name)
    own = [operator for operator in graph.operators if kind in ("", operator.kind)]
    choices = {operator.name: configurations(operator, num_devices) for operator in own}
    for i in range(max(len(found) for found in choices.values())):
        splits = {layer: found[(i + j) % len(found)] for j, (layer, found) in enumerate(choices.items())}
        check_plan(name, make_plan(graph, num_devices, splits))


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("mixed", {"a": {"r": 3}, "spatial": {"s": 3}}),
        ("lines", {"a": {"s": 5}}),
        # The first and the last of six parts read zeros alone.
        ("zeros", {"wide": {"h": 6}, "wider": {"h": 6}}),
        ("zeros", {"wide": {"w": 3, "h": 2}, "wider": {"r": 2, "h": 3}}),
        pytest.param("mixed", {"a": {"r": 3, "s": 3}, "spatial": {"r": 3}}, marks=pytest.mark.full),
        pytest.param("alexnet", {"conv1": {"r": 11}}, marks=pytest.mark.full),
        pytest.param("alexnet", {"conv2": {"s": 5}}, marks=pytest.mark.full),
        pytest.param("alexnet", {"conv3": {"h": 3, "w": 3}}, marks=pytest.mark.full),
    ],
)
def test_windows_in_odd_numbers_of_parts(name: str, splits: dict[str, dict[str, int]]) -> None:
    check_plan(name, make_plan(network(name), max(prod(own.values()) for own in splits.values()), splits))


@cache
def ordinary(name: str, num_devices: int, how: str | int) -> Trained:
    """What a program does that leaves out what nobody uses."""
    return trained(in_float64(plan_of(name, num_devices, how)), rate=rate(name))


@pytest.mark.parametrize(
    ("name", "num_devices", "how"),
    [
        *(("mlp", 6, 0), ("lstm", 8, 0), ("alexnet", 4, "data parallel")),
        pytest.param("alexnet", 4, "searched", marks=pytest.mark.full),
    ],
)
def test_an_ordinary_step_sends_no_more(name: str, num_devices: int, how: str | int) -> None:
    """It leaves out replicas that nobody uses, and sends once what several need on a device."""
    predicted = by_ends(bytes_by_movement(flows(in_float64(plan_of(name, num_devices, how)))))
    found = ordinary(name, num_devices, how)
    check_training(found, reference(name))
    assert by_ends(found.traffic.bytes_by_movement) == predicted
    assert found.measured.elsewhere_bytes == 0
    assert by_ends(found.measured.by_movement) <= predicted
    assert found.measured.total_bytes > 0.75 * predicted.total()


def test_a_searched_plan_moves_less_than_data_parallelism_by_the_ratio_that_was_predicted() -> None:
    ours, theirs = ordinary("alexnet", 4, "searched"), ordinary("alexnet", 4, "data parallel")
    assert ours.traffic.total_bytes < theirs.traffic.total_bytes
    predicted = ours.traffic.total_bytes / theirs.traffic.total_bytes
    assert ours.measured.total_bytes / theirs.measured.total_bytes == pytest.approx(predicted, rel=0.02)
