"""Modules whose own nodes lie otherwise than the layers of a plan have it, split over ranks, beside the modules."""

from typing import Any

import pytest
import torch
from torch import nn

import pase
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.ranks import Pool

X = torch.linspace(-2.0, 3.0, 64, dtype=torch.float64).reshape(4, 2, 8).sin() * 2


class Permuted(nn.Module):
    """What is squashed, and read by others, is in another order than the product's result, of which it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x).reshape(4, 2, 3, 4).permute(3, 0, 2, 1).tanh()
        return (self.last(y.reshape(4, 4, 6)) * y.sum((2, 3))[..., None]).square().mean()


class Repeated(nn.Module):
    """What is squashed is repeated before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x).reshape(4, 1, 2, 6).expand(4, 3, 2, 6).transpose(0, 2).tanh()
        return self.last(y).square().mean()


class Joined(nn.Module):
    """A cache that is empty yet stands before the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        keys = self.keys(x)
        return torch.cat([keys.new_zeros(0), keys], dim=-2).sigmoid().mean()


class Waves(nn.Module):
    """Weights are complex where they are used; a gradient of theirs is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 5, 2)), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        waves = torch.einsum("bsf,cf->bsc", torch.fft.rfft(x), torch.view_as_complex(self.weight))
        return self.last(torch.fft.irfft(waves.conj(), 4)).square().mean()


MODULES = {kind.__name__: kind for kind in (Permuted, Repeated, Joined, Waves)}


def _made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]().double()


def _trained(module: nn.Module) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        loss = module(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: full(x).clone() for key, x in module.state_dict().items()}


def _on_rank(_rank: int, _world: int, given: list[tuple[str, Plan]]) -> list[Any]:
    return [_trained(parallelize(_made(name), plan, verify="off")) for name, plan in given]


def test_modules_are_trained_as_by_themselves(ranks: Pool) -> None:
    given = [
        (name, random_plan(graph, 2, seed))
        for name in MODULES
        for graph in [pase.load((_made(name), X))]
        for seed in (0, 3)
    ]
    alone = {name: _trained(_made(name)) for name in MODULES}
    for found in ranks.run(_on_rank, given, world=2):
        for (name, _), (losses, state) in zip(given, found, strict=True):
            expected_losses, expected = alone[name]
            assert losses == pytest.approx(expected_losses, rel=1e-12), name
            assert all(difference(state[key], x) < 1e-12 for key, x in expected.items()), name


def test_splits_are_carried_through_a_node_of_another_order() -> None:
    live = trace_live((_made("Permuted"), X))
    graph = live.model.graph
    plan = make_plan(graph, 2, {"first": {"b": 2}})
    layers = AtenLayers(live, plan)
    (order,) = layers.graphs[True].orders.values()
    assert order.base == (4, 2, 12)
    assert order.shape == (4, 4, 3, 2)
    assert not layers.layers["first"][True].layer.is_whole
