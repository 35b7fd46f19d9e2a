"""Pipelines: modules in stages on ranks, with random configurations within these, against the unmodified module."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.graph import Graph
from pase.graph.stages import cuts, with_cuts
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from tests.runtime.plans import make_plan, random_plan
from tests.targets.torch.equality import difference, full
from tests.targets.torch.modules import Batch, Block, Module, floats, words
from tests.targets.torch.ranks import Pool


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in ((8, 16), (16, 16), (16, 32), (32, 16), (16, 4))))

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return functional.cross_entropy(self.layers[-1](x), labels)


class Gpt(nn.Module):
    """The table of the tokens is that of the projection to them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(24, 16), nn.Sequential(Block(16, 4), Block(16, 4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = functional.dropout(self.tokens(tokens), 0.0)
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class Pictures(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.after = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.third, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 4 * 4, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        x = functional.relu(self.norm(self.first(x)))
        x = functional.relu(self.after(self.second(x)))
        return functional.cross_entropy(self.head(self.third(x).flatten(1)), labels)


def _labels(count: int, seed: int) -> Any:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))


CASES = {
    "mlp": Module(make=Layers, batch=lambda seed: {**floats(seed, "x", 4, 8), "labels": _labels(4, seed)}),
    "gpt": Module(make=Gpt, batch=lambda seed: words(seed, "tokens", "targets", shape=(4, 8))),
    "cnn": Module(make=Pictures, batch=lambda seed: {**floats(seed, "x", 4, 3, 8, 8), "labels": _labels(4, seed)}),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().double()


def micro_batches(name: str, step: int, count: int) -> list[Batch]:
    return [CASES[name].batch(100 * step + i) for i in range(count)]


def together(batches: list[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def staged_plan(name: str, world: int, groups: int, count: int, schedule: str, seed: int, chunks: int = 1) -> Plan:
    graph = pase.load((made(name), CASES[name].batch(0)))
    return in_stages(graph, world, groups, count, schedule, seed, chunks)


def in_stages(graph: Graph, world: int, groups: int, count: int, schedule: str, seed: int, chunks: int = 1) -> Plan:
    """A plan with random cuts, and random configurations and devices within the stages."""
    graph = with_cuts(graph)
    numbers, size = random.Random(seed), world // groups
    weighted = [i for i, operator in enumerate(graph.operators) if operator.parameters]
    possible = [at for at in cuts(graph) if weighted[0] < at <= weighted[-1]]
    at = sorted(numbers.sample(possible, groups * chunks - 1))
    layers = []
    for i, layer in enumerate(random_plan(graph, size, seed).layers):
        stage = sum(i >= cut for cut in at)
        first = stage % groups * size
        layers.append(replace(layer, stage=stage, devices=tuple(first + device for device in layer.devices)))
    return replace(
        make_plan(graph, world, {}),
        layers=tuple(layers),
        num_groups=groups,
        micro_batches=count,
        schedule=schedule,
    )


STEPS = 2


def by_itself(name: str, count: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, first gradients and the state in the end of the unmodified module."""
    module = made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, first = [], dict[str, Any]()
    for step in range(STEPS):
        found = [module(**batch) for batch in micro_batches(name, step, count)]
        loss = sum(found) / count
        loss.backward()
        first = first or {key: p.grad.clone() for key, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, module.state_dict()


def on_rank(_rank: int, _world: int, name: str, plan: Plan) -> Any:
    module = parallelize((made(name), CASES[name].batch(0)), plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, first = [], dict[str, Any]()
    for step in range(STEPS):
        loss = module.accumulate(**together(micro_batches(name, step, plan.micro_batches)))
        first = first or {key: full(p.grad).clone() for key, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, module.full_state_dict()


def assert_close(found: Any, expected: Any, what: object) -> None:
    error = difference(found, expected)
    assert error < 1e-12, (what, error)


QUICK = [
    ("mlp", 2, 2, 2, "gpipe", 1),
    ("mlp", 2, 2, 4, "1f1b", 1),
    ("mlp", 4, 2, 4, "1f1b", 1),
    ("mlp", 4, 4, 8, "zero_bubble", 1),
    ("mlp", 2, 2, 4, "interleaved", 2),
    ("gpt", 2, 2, 2, "zero_bubble", 1),
    ("gpt", 4, 2, 4, "1f1b", 1),
    ("gpt", 4, 4, 4, "1f1b", 1),
    ("cnn", 4, 2, 2, "1f1b", 1),
]


@pytest.mark.parametrize(("name", "world", "groups", "count", "schedule", "chunks"), QUICK)
def test_a_module_trains_in_stages(
    ranks: Pool, name: str, world: int, groups: int, count: int, schedule: str, chunks: int
) -> None:
    plan = staged_plan(name, world, groups, count, schedule, world + count, chunks)
    losses, gradients, state = by_itself(name, count)
    found = ranks.run(on_rank, name, plan, world=world)
    seen = set[str]()
    for found_losses, found_gradients, _ in found:
        assert found_losses == pytest.approx(losses, rel=1e-12)
        seen |= found_gradients.keys()
        for key, gradient in found_gradients.items():
            assert_close(gradient, gradients[key], f"gradient of {key}")
    assert seen == gradients.keys()
    assert list(found[0][2]) == list(state)
    for key, x in state.items():
        assert_close(found[0][2][key], x, key)
