"""A strategy tried: a program trained in this process, its losses and weights beside those of one device."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pase import Graph, Plan, emit, load, load_machine, search
from pase.graph import Operator, Scalar
from pase.machine import override_machine

if TYPE_CHECKING:
    from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult

TOLERANCE = 1e-12
"""The largest relative difference of a loss, and of a weight, that is none."""

SMALLEST_SHARE = 1e-3
"""A weight that is smaller than this share of the largest one of its layer counts as this large.

Biases of queries and keys begin as 0 and have next to no gradient: that of the keys adds the same to all scores of a
query, which softmax takes out again. What they become is rounding in part, on one device too.
"""

VANISHING = 1e-15
"""A weight that is nowhere as large as this, under the strategy and on one device, is 0."""

LEARNING_RATE = 0.05

SMALL_RATES = {"densenet121": 1e-3, "inception_v3": 1e-7, "resnet101": 1e-7}
"""Networks in which rounding grows with every update.

At the rate of the others a change of their initial weights in the last place changes the third loss by up to 1e-10 on
one device. At this one an update is still 3e-8 of a weight and more, far above the tolerance.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One strategy to try. seed: of a random one, None for the searched one."""

    network: str
    arguments: tuple[tuple[str, Scalar], ...]
    num_devices: int
    seed: int | None
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial showed.

    loss_difference: the largest of any step, relative. weight_difference: the largest of any weight, by its size or,
    if more, `SMALLEST_SHARE` of its layer's; worst_weight: whose it is. own_difference: the largest by the weight's own
    size, however small. time_s: the program written, built and run. error: why there is no result.
    """

    trial: Trial
    num_layers: int = 0
    loss_difference: float = 0.0
    weight_difference: float = 0.0
    worst_weight: str = ""
    own_difference: float = 0.0
    time_s: float = 0.0
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether losses and weights are those of one device."""
        return not self.error and self.loss_difference <= TOLERANCE and self.weight_difference <= TOLERANCE


def attempt(trial: Trial) -> Outcome:
    """Train under a strategy and on one device, in float64, and compare."""
    from pase.targets.execute import max_relative_difference

    reference = _reference(trial.network, trial.arguments, trial.steps)
    searched = _searched(trial.network, trial.arguments, trial.num_devices)
    start_s = perf_counter()
    plan = searched if trial.seed is None else random_strategy(searched, trial.seed)
    losses, weights = _trained(plan, trial.steps, _rate(trial.network))
    time_s = perf_counter() - start_s
    if set(weights) != set(reference.weights):
        raise ValueError(f"other weights: {sorted(set(weights) ^ set(reference.weights))}")
    differences = weight_differences(weights, reference.weights)
    worst = max(differences, key=lambda name: differences[name][0])
    return Outcome(
        trial=trial,
        num_layers=len(plan.layers),
        loss_difference=max_relative_difference(losses, reference.losses),
        weight_difference=differences[worst][0],
        worst_weight=worst,
        own_difference=max(own for _, own in differences.values()),
        time_s=time_s,
    )


def weight_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the largest difference of each weight, relative to what it counts for and to its own size."""
    sizes = {name: float(abs(value).max()) for name, value in expected.items()}
    layers: dict[str, float] = {}
    for name, size in sizes.items():
        # A normalisation's begin as 0, for the 1 of what they scale and shift.
        counted = 1.0 if name.endswith(("/scale", "/shift")) else size
        layers[_layer_of(name)] = max(layers.get(_layer_of(name), 0.0), counted)
    differences = {}
    for name, size in sizes.items():
        difference = float(abs(found[name] - expected[name]).max())
        counted = max(size, SMALLEST_SHARE * layers[_layer_of(name)], VANISHING)
        vanishes = size < VANISHING and float(abs(found[name]).max()) < VANISHING
        differences[name] = difference / counted, 0.0 if vanishes else difference / max(size, VANISHING)
    return differences


def _layer_of(weight: str) -> str:
    return weight.rpartition("/")[0] or weight


def random_strategy(plan: Plan, seed: int) -> Plan:
    """Return the plan with a random configuration of each layer on random devices; most use all of them."""
    numbers = random.Random(f"{plan.graph.name} {plan.num_devices} {seed}")
    layers = []
    for layer in plan.layers:
        choices = configurations(plan.graph[layer.name], plan.num_devices)
        full = [splits for splits in choices if prod(splits.values()) == plan.num_devices]
        splits = numbers.choice(full if full and numbers.random() < 0.7 else choices)
        devices = tuple(numbers.sample(range(plan.num_devices), plan.num_devices))
        layers.append(replace(layer, splits=splits, devices=devices))
    return replace(plan, layers=tuple(layers))


def configurations(operator: Operator, num_devices: int) -> list[dict[str, int]]:
    """Return every tuple of splits that divide their dims and whose product divides the devices."""
    found: list[dict[str, int]] = [{}]
    for dim, extent in operator.extents.items():
        most = 1 if dim in operator.unsplittable else num_devices
        found = [
            {**splits, dim: k}
            for splits in found
            for k in range(1, most + 1)
            if extent % k == 0 and num_devices % (k * prod(splits.values())) == 0
        ]
    return found


@cache
def _graph(network: str, arguments: tuple[tuple[str, Scalar], ...]) -> Graph:
    return load(network, arguments=dict(arguments))


@cache
def _searched(network: str, arguments: tuple[tuple[str, Scalar], ...], num_devices: int) -> Plan:
    # Devices this slow are worth using even for layers this small.
    machine = override_machine(load_machine("1080ti"), flop_per_s=1e9, bandwidth_bytes_per_s=None)
    return search(_graph(network, arguments), num_devices, machine=machine)


@cache
def _reference(network: str, arguments: tuple[tuple[str, Scalar], ...], steps: int) -> "ReferenceResult":
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training
    from pase.targets.training.options import Schedule, TrainingOptions

    options = TrainingOptions(steps=steps, dtype="float64", schedule=Schedule(peak=_rate(network)), seed=0)
    found = reference_training(_graph(network, arguments), options)
    # A network that does not learn would hide a wrong gradient.
    if network not in SMALL_RATES and found.losses[-1] >= found.losses[0]:
        raise ValueError(f"{network} does not learn: its losses are {found.losses}")
    return found


def _rate(network: str) -> float:
    return SMALL_RATES.get(network, LEARNING_RATE)


def _trained(plan: Plan, steps: int, learning_rate: float) -> tuple[list[float], Mapping[str, Any]]:
    """Return the losses of a plan's program and its weights after the last step."""
    from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
    from pase.targets.mesh_tensorflow.runtime.program import Program
    from pase.targets.mesh_tensorflow.runtime.training import Training
    from pase.targets.training.data import Batches

    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(emit(plan), "<emitted>", "exec"), namespace)
    with ProgramGraph().as_default():
        program = Program(num_devices=plan.num_devices, dtype="float64")
        loss = namespace["build"](program)
        batches = Batches(program.inputs, seed=0)
        training = Training.start(program, loss, learning_rate=learning_rate, seed=0)
        try:
            losses = [training.step(batches.batch(step)).loss for step in range(steps)]
            return losses, training.weights()
        finally:
            training.close()
