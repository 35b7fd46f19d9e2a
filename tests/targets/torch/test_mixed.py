"""Weights in pieces, recomputation, micro-batches and stages at once, against the unmodified module."""

from dataclasses import replace
from typing import Any

import pytest

import pase
from pase.errors import PlanError
from pase.targets.jax.parallel import Parallel
from tests.runtime.networks import small
from tests.runtime.plans import random_plan

# -- other targets


@pytest.mark.parametrize(
    ("changes", "of_layer", "match"),
    [
        ({}, {"state": "zero1"}, r"holds the weights of layer 'fc1' in pieces \(zero1\)"),
        ({}, {"is_recomputed": True}, "recomputes layer 'fc1'"),
        ({"micro_batches": 2}, {}, "has 2 micro-batches in a step"),
        ({"num_groups": 2}, {"stage": 1}, "has 2 stages"),
    ],
)
def test_other_targets_refuse(changes: dict[str, Any], of_layer: dict[str, Any], match: str) -> None:
    plan = random_plan(small("mlp"), 2, 1)
    layers = (replace(plan["fc1"], **of_layer), *plan.layers[1:])
    plan = replace(plan, layers=layers, **changes)
    with pytest.raises(PlanError, match=f"the plan {match}; a program for mesh_tensorflow takes no such plan"):
        pase.emit(plan, target="mesh_tensorflow")
    with pytest.raises(PlanError, match=f"the plan {match}; JAX takes no such plan"):
        Parallel(lambda x: x, plan, mesh=None)
