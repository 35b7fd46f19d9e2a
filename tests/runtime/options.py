"""Options of trainings. Without TensorFlow, so that ranks of PyTorch, which get them too, need not load it."""

from collections.abc import Mapping
from typing import Any

from pase.targets.training.optimisers import make_rule
from pase.targets.training.options import Schedule, TrainingOptions


def options(steps: int, *, rate: float = 0.05, dtype: str = "float64", **others: Any) -> TrainingOptions:
    """Options of a training in float64 with a constant learning rate."""
    return TrainingOptions(steps=steps, dtype=dtype, schedule=Schedule(peak=rate), **others)


RULES: dict[str, tuple[str, float, Mapping[str, Any]]] = {
    "sgd": ("sgd", 0.2, {}),
    "sgd with weight decay": ("sgd", 0.2, {"weight_decay": 0.1}),
    "momentum": ("momentum", 0.1, {"momentum": 0.8}),
    "nesterov": ("momentum", 0.1, {"nesterov": True, "weight_decay": 0.05}),
    "adam": ("adam", 0.01, {"beta1": 0.8, "epsilon": 1e-6}),
    "adamw": ("adamw", 0.01, {"beta2": 0.99, "weight_decay": 0.2}),
    "adafactor": ("adafactor", 0.05, {"clip": 0.7, "decay": -0.6, "epsilon2": 0.3}),
}
"""Every rule, with a learning rate and options."""


def options_of_rule(name: str, steps: int) -> TrainingOptions:
    """Options of a training by a rule, its rate in steps after a warm-up."""
    rule, rate, given = RULES[name]
    schedule = Schedule(peak=rate, kind="step", warmup_steps=2, decay_every=2, decay_factor=0.5)
    return TrainingOptions(steps=steps, dtype="float64", schedule=schedule, rule=make_rule(rule, given), seed=2)
