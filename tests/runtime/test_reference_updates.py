"""The optimisers of programs against those of the reference, which were written apart from them, in float64."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from pase.graph import Graph
from pase.models import build
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from pase.targets.mesh_tensorflow.runtime.script import train
from pase.targets.programs import emit
from pase.targets.training.optimisers import OPTIMISERS, make_rule
from pase.targets.training.options import Schedule, TrainingOptions
from tests.runtime.networks import small
from tests.runtime.plans import random_plan
from tests.runtime.training import builder_of

RULES: dict[str, tuple[str, float, Mapping[str, Any]]] = {
    "sgd": ("sgd", 0.2, {}),
    "sgd with weight decay": ("sgd", 0.2, {"weight_decay": 0.1}),
    "momentum": ("momentum", 0.1, {"momentum": 0.8}),
    "nesterov": ("momentum", 0.1, {"nesterov": True, "weight_decay": 0.05}),
    "adam": ("adam", 0.01, {"beta1": 0.8, "epsilon": 1e-6}),
    "adamw": ("adamw", 0.01, {"beta2": 0.99, "weight_decay": 0.2}),
    "adafactor": ("adafactor", 0.05, {"clip": 0.7, "decay": -0.6, "epsilon2": 0.3}),
}


def options(name: str, steps: int) -> TrainingOptions:
    rule, rate, given = RULES[name]
    schedule = Schedule(peak=rate, kind="step", warmup_steps=2, decay_every=2, decay_factor=0.5)
    return TrainingOptions(steps=steps, dtype="float64", schedule=schedule, rule=make_rule(rule, given), seed=2)


def losses_of_both(graph: Graph, rule: str, num_devices: int, steps: int) -> tuple[list[float], list[float]]:
    plan = random_plan(graph, num_devices, 5)
    losses = train(builder_of(emit(plan)), options(rule, steps), num_devices=num_devices)
    return losses, reference_training(plan.graph, options(rule, steps)).losses


def test_every_rule_is_here() -> None:
    assert {rule for rule, _, _ in RULES.values()} == set(OPTIMISERS)


@pytest.mark.parametrize("rule", RULES)
def test_losses_are_those_of_the_reference(rule: str) -> None:
    losses, reference = losses_of_both(small("mlp"), rule, 4, 6)
    assert max_relative_difference(losses, reference) < 1e-12
    assert losses[-1] < losses[0]
    # What sets this rule apart is seen in the losses.
    assert rule == "sgd" or np.abs(np.subtract(losses, plain_losses())).max() > 1e-4


@cache
def plain_losses() -> list[float]:
    return reference_training(small("mlp"), options("sgd", 6)).losses


@pytest.mark.parametrize("rule", [pytest.param("nesterov", marks=pytest.mark.full), "adafactor"])
def test_losses_of_a_convolutional_network_are_those_of_the_reference(rule: str) -> None:
    """Filters have four dims, of which Adafactor factors two."""
    graph = build("lenet5", batch=4, arguments={})
    losses, reference = losses_of_both(graph, rule, 2, 3)
    assert max_relative_difference(losses, reference) < 1e-12
    assert abs(losses[-1] - losses[0]) > 1e-2


def test_float32_is_close_after_many_steps() -> None:
    """Powers of numbers near 1 are computed in 64 bits on both sides."""
    results = []
    for dtype in ("float32", "float64"):
        given = TrainingOptions(steps=200, dtype=dtype, rule=make_rule("adam", {}), schedule=Schedule(peak=1e-4))
        results.append(reference_training(small("mlp"), given).losses)
    assert max_relative_difference(*results) < 1e-4
