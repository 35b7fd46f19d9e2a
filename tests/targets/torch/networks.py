"""Built-in networks at small extents, trained by ranks that are threads, and what their plans predict."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from pase import Plan, emit, load, load_machine, search
from pase.graph import Graph, Scalar
from pase.machine import override_machine
from pase.planning.stages import step_bytes
from pase.targets.training.counted import initial_value
from pase.targets.training.data import Batches
from scripts.benchmarks.strategies import NETWORKS
from tests.targets.torch.lockstep import (
    Build,
    Placed,
    Rank,
    Sent,
    Trained,
    declared,
    layer_of,
    layer_sizes,
    trained,
)
from tests.targets.torch.trained import builder_of

STEPS = 3
RELATIVE = 1e-12

SMALLER: dict[str, dict[str, Scalar]] = {
    "inception_v3": {"image": 75, "blocks": "1,1,1"},
    "densenet121": {"image": 32, "blocks": "2,1,1,1"},
    "resnet101": {"image": 32, "blocks": "1,1,1,1"},
    "gpt": {"layers": 1},
    "bert_large": {"layers": 1},
}
"""What makes networks shallower than `NETWORKS` has them."""


def arguments_of(name: str) -> tuple[tuple[str, Scalar], ...]:
    return tuple((NETWORKS[name] | SMALLER.get(name, {})).items())


@cache
def graph_of(name: str) -> Graph:
    return load(name, arguments=dict(arguments_of(name)))


@cache
def searched(name: str, num_devices: int) -> Plan:
    # Devices this slow are worth using even for layers this small.
    machine = override_machine(load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)
    return search(graph_of(name), num_devices, machine=machine)


def build_of(plan: Plan) -> Build:
    """Return the program that is emitted of a plan."""
    build = builder_of(emit(plan, target="torch"))
    return lambda program: {"loss": build(program)}


Optimizer = Callable[[Sequence[Any]], Any]


def given_to(plan: Plan, steps: int = STEPS) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return weights and batches, whole, which are the same for every plan."""
    alone = declared(build_of(plan), plan.num_devices)
    values = {}
    for name, weight in alone.weights.items():
        values[name] = torch.from_numpy(
            initial_value(name, weight.tensor.shape, weight.deviation, 0, weight.mean)
        ).double()
    source = Batches(alone.inputs.values(), seed=0)
    batches = [{name: torch.from_numpy(x) for name, x in source.batch(step).items()} for step in range(steps)]
    return values, [{n: x.double() if x.is_floating_point() else x for n, x in b.items()} for b in batches]


def trained_by(plan: Plan, optimizer: Optimizer, steps: int = STEPS) -> Trained:
    """Return what training under a plan finds."""
    return trained(build_of(plan), plan.num_devices, *given_to(plan, steps), optimizer)


def of_process(
    rank: int, world: int, plan: Plan, values: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], rate: float
) -> tuple[list[float], Placed, Sent]:
    """Return the losses of training by plain gradients, the weights after it and bytes, of a rank of its own."""
    own = Rank(build_of(plan), rank, world, values, trains=True)
    rule = torch.optim.SGD([leaf for leaf in own.leaves.values() if leaf.requires_grad], lr=rate)
    losses = []
    for batch in batches:
        rule.zero_grad()
        own.program.traffic.is_counted = not losses
        losses.append(own.run(batch, None, {})[0]["loss"].item())
        rule.step()
    return losses, own.placed(own.leaves), dict(own.program.traffic.sent)


def predicted(plan: Plan) -> Sent:
    """Return what a step is predicted to move, in words of float64."""
    found = step_bytes(plan)
    return {movement: size * 8 // plan.graph.precision.itemsize for movement, size in found.items() if size}


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, are_weights: bool = False
) -> dict[str, float]:
    """Return how far each tensor is from another, relative to the largest number of its layer's tensors.

    Scales and shifts of normalisations begin as 0, for the 1 of what they change: this is what their weights count for.
    """
    assert set(found) == set(expected)
    sizes = layer_sizes(expected.items())
    for name in expected if are_weights else ():
        if name.endswith(("/scale", "/shift")):
            sizes[layer_of(name)] = max(sizes[layer_of(name)], 1.0)
    return {name: float((found[name] - x).abs().max()) / sizes[layer_of(name)] for name, x in expected.items()}


def check(plan: Plan, found: Trained, alone: Trained) -> None:
    """Assert that ranks find the losses and gradients of one of them, and send what is predicted."""
    for loss, own in zip(found.losses, alone.losses, strict=True):
        assert abs(loss - own) <= RELATIVE * abs(own), (found.losses, alone.losses)
    gradients = differences(found.gradients, alone.gradients)
    assert max(gradients.values()) <= RELATIVE, gradients
    assert {what: size for what, size in found.sent.items() if size} == predicted(plan)
