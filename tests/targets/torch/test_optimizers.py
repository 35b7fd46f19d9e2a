"""Optimizers of our own on the parameters of modules under plans, against the papers' equations on whole weights."""

from typing import Any

import numpy as np
import pytest

import pase
from pase.errors import ProgramError
from pase.planning.plan import Plan
from pase.targets.torch.optimizers import Adafactor, RuleOptimizer
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.placements import Split
from pase.targets.training.optimisers import make_rule
from tests.runtime.plans import random_plan
from tests.targets.torch.equality import full, micro_batches_of, stepped
from tests.targets.torch.modules import MODULES, made
from tests.targets.torch.plans import with_states
from tests.targets.torch.ranks import Pool

STEPS = 3


def _trained(_rank: int, _world: int, name: str, plan: Plan, rule: str) -> dict[str, Any]:
    """Return of each parameter how its dims are split, its gradients in some steps, and its values before and after."""
    parallel = parallelize((made(name), MODULES[name].batch(0)), plan, check=False)
    parameters = dict(parallel.named_parameters())
    optimizer = (
        Adafactor(parallel.parameters())
        if rule == "adafactor"
        else RuleOptimizer(parallel.parameters(), make_rule(rule, {"momentum": 0.8}), 0.1)
    )
    before = {key: full(x.detach()).numpy().copy() for key, x in parameters.items()}
    gradients: dict[str, list[Any]] = {key: [] for key in parameters}
    for step in range(STEPS):
        # As `tests.runtime.test_optimisers.rates` has it.
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        stepped(parallel, name, micro_batches_of(name, step, 1))
        for key, x in parameters.items():
            if x.grad is not None:
                gradients[key].append(full(x.grad).numpy().copy())
        optimizer.step()
        optimizer.zero_grad()
    split = {key for key, own in parallel._stored.stored.items() if any(isinstance(x, Split) for x in own.splits)}
    return {
        key: (key in split, before[key], own, full(parameters[key].detach()).numpy()) for key, own in gradients.items()
    }


@pytest.mark.parametrize(
    ("rule", "name", "state", "seed"),
    [
        ("adafactor", "picture", "zero3", 5),
        ("adafactor", "gpt", "replicated", 3),
        ("momentum", "gpt", "zero1", 3),
    ],
)
def test_split_parameters_are_updated_as_whole_ones(ranks: Pool, rule: str, name: str, state: str, seed: int) -> None:
    from tests.runtime.test_optimisers import adafactor, momentum

    plan = with_states(random_plan(pase.load((made(name), MODULES[name].batch(0))), 2, seed), state)
    for found in ranks.run(_trained, name, plan, rule, world=2):
        assert any(is_split and before.ndim > 1 for is_split, before, _, _ in found.values())
        for key, (_, before, gradients, after) in found.items():
            if not gradients:
                assert np.array_equal(before, after), key
                continue
            expected = adafactor(before, gradients) if rule == "adafactor" else momentum(before, gradients, 0.8)
            np.testing.assert_allclose(after, expected, rtol=1e-11, atol=1e-13, err_msg=key)


def test_options_are_those_of_the_rule() -> None:
    with pytest.raises(ProgramError, match=r"optimiser adafactor has no beta1; it has epsilon1, epsilon2, clip, decay"):
        Adafactor([], beta1=0.9)
