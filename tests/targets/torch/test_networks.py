"""Built-in networks on ranks, under any strategy: they train as on one device, and move what their plan predicts."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from scripts.benchmarks.strategies import NETWORKS
from scripts.benchmarks.trials import SMALL_RATES, random_strategy
from tests.targets.torch.lockstep import Trained, added, put_together
from tests.targets.torch.networks import (
    RELATIVE,
    check,
    differences,
    given_to,
    graph_of,
    of_process,
    searched,
    trained_by,
)
from tests.targets.torch.ranks import Pool

RATE = 1e-3


def optimizer(name: str) -> Any:
    return partial(torch.optim.AdamW, lr=min(RATE, SMALL_RATES.get(name, RATE)))


@cache
def alone(name: str) -> Trained:
    return trained_by(searched(name, 1), optimizer(name))


def compare(name: str, num_devices: int, seed: int | None) -> None:
    """Compare a random strategy, or the searched one, with one rank; weights after the steps, too."""
    plan = searched(name, num_devices)
    plan = plan if seed is None else random_strategy(plan, seed)
    found, expected = trained_by(plan, optimizer(name)), alone(name)
    check(plan, found, expected)
    weights = differences(found.weights, expected.weights, are_weights=True)
    # What the bias of keys adds to all scores of a query, softmax takes out again: its gradient is rounding alone,
    # which AdamW makes steps of.
    own = {name: difference for name, difference in weights.items() if not name.endswith("_k/bias")}
    assert max(own.values()) <= RELATIVE, own
    assert max(weights.values()) <= 100 * RELATIVE, weights


CASES = {
    "mlp": {2: (0,), 4: (None, 1), 6: (0,), 8: (0,)},
    "rnnlm": {4: (None, 0, 1)},
    "lenet5": {4: (0,)},
    "gpt": {4: (0,)},
    "transformer": {4: (None,)},
    "inception_v3": {2: (None,)},
}


@pytest.mark.parametrize(
    ("name", "num_devices", "seed"),
    [(name, p, seed) for name, seeds in CASES.items() for p, own in seeds.items() for seed in own],
)
def test_training_is_that_of_one_rank(name: str, num_devices: int, seed: int | None) -> None:
    compare(name, num_devices, seed)


def test_processes_with_gloo_find_the_same(ranks: Pool) -> None:
    """What stands for collectives in the other tests is held against the library: layers and steps of an LSTM split."""
    plan = searched("rnnlm", 4)
    layers = [
        replace(x, splits={**dict.fromkeys(x.splits, 1), "l": 2, "s": 2}) if x.kind == "lstm" else x
        for x in plan.layers
    ]
    plan = replace(random_strategy(plan, 1), layers=tuple(layers))
    values, batches = given_to(plan)
    found = ranks.run(of_process, plan, values, batches, 0.05)
    expected = trained_by(plan, partial(torch.optim.SGD, lr=0.05))
    assert all(losses == pytest.approx(expected.losses, rel=RELATIVE) for losses, _, _ in found)
    weights = differences(put_together([own for _, own, _ in found]), expected.weights)
    assert max(weights.values()) <= RELATIVE, weights
    assert added([sent for _, _, sent in found]) == expected.sent


@pytest.mark.full
@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [(name, p) for name in NETWORKS for p in (2, 4, 6, 8) if p < 6 or name in ("mlp", "rnnlm")],
)
def test_training_is_that_of_one_rank_for_every_network(name: str, num_devices: int, seed: int | None) -> None:
    compare(name, num_devices, seed)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("transformer", "rnnlm") else pytest.mark.full) for name in NETWORKS],
)
def test_one_rank_is_the_reference(name: str) -> None:
    """The reference is TensorFlow's: it shares the first weights and the batches, and nothing else."""
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training
    from pase.targets.training.options import Schedule, TrainingOptions

    rate = SMALL_RATES.get(name, 0.05)
    options = TrainingOptions(steps=3, dtype="float64", schedule=Schedule(peak=rate), seed=0)
    expected = reference_training(graph_of(name), options)
    found = trained_by(searched(name, 1), partial(torch.optim.SGD, lr=rate))
    assert found.losses == pytest.approx(expected.losses, rel=RELATIVE)
    own = differences(found.weights, {n: torch.from_numpy(x) for n, x in expected.weights.items()}, are_weights=True)
    assert max(own.values()) <= RELATIVE, own
