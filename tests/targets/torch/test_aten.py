"""Modules that only their own graph trains, split over ranks, beside the unmodified ones."""

from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.parallel import parallelize
from tests.importers.test_torch_training import DRAWN, OWN, REFUSED
from tests.runtime.plans import random_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 32, dtype=torch.float64).reshape(4, 8).sin() * 2


def _made(name: str) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = REFUSED[name][0]().double()
    return module


def _trained(module: nn.Module) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = module(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: full(x).clone() for key, x in module.state_dict().items()}


def _on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan, check=False)) for name, plan in given]


def test_what_its_own_graph_trains_is_trained_on_ranks(ranks: Pool) -> None:
    given = [
        (name, random_plan(pase.load((_made(name), X)), 2, seed))
        for name in OWN
        for seed in (0, 3)
        if name != "no_grad"
    ]
    alone = {name: _trained(_made(name)) for name, _ in given}
    for found in ranks.run(_on_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items() if x.is_floating_point()), name


def _numbers_of_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan)) for name, plan in given]


def test_random_numbers_are_those_of_one_device_whatever_the_plan(ranks: Pool) -> None:
    """Seeds are of the step and the place in the graph; one device is compared with the module in its first step."""
    given = [(name, random_plan(pase.load((_made(name), X)), 2, seed)) for name in DRAWN for seed in (0, 3)]
    alone = {name: _trained(parallelize(_made(name), pase.search((_made(name), X), devices=1))) for name in DRAWN}
    for found in ranks.run(_numbers_of_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert len(set(losses)) == 3, name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items() if x.is_floating_point()), name


def test_a_layer_whose_splits_are_not_carried_through_is_named() -> None:
    """A function of the user's own is given whole tensors."""
    graph = pase.load((_made("gradient reversal"), X))
    live = trace_live((_made("gradient reversal"), X))
    plan = random_plan(graph, 2, 0)
    layers = AtenLayers(live, plan)
    assert layers.problem == ""
    assert set(layers.layers) == {op.name for op in plan.graph.operators if not op.is_fan_out}
    assert layers.others == {}
