"""Mixtures of experts that are split over ranks: what these find, beside the unmodified module, and send."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pase
from pase.costs.edges import traffic_of
from pase.importers.frameworks import difference as difference_of
from pase.importers.torch.live import trace_live
from pase.planning.plan import Plan
from pase.planning.plan_file import read_plan, write_plan
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.module import Parallel
from pase.targets.torch.values import from_tensors
from tests.runtime.plans import make_plan
from tests.targets.torch.equality import RELATIVE, difference, full
from tests.targets.torch.lockstep import added
from tests.targets.torch.modules import Batch
from tests.targets.torch.networks import predicted
from tests.targets.torch.ranks import Pool

TOKENS, WIDTH, INNER, EXPERTS = 32, 6, 10, 4


class Mixture(nn.Module):
    """Two layers of so many experts for each token, those with the highest scores; its loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.before, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(EXPERTS))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Any, scores: Any) -> Any:
        experts = (scores * self.weight).topk(self.count).indices
        asked, order = experts.flatten().sort(stable=True)
        counts = torch.histc(asked.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        multiply = torch.ops.transformers.grouped_mm_fallback
        rows = self.before(x)[order // self.count]
        made = multiply(multiply(rows, self.up, ends).tanh(), self.down, ends)
        return made[order.argsort()].view(*experts.shape, WIDTH).sum(1).square().mean()


def _module(count: int) -> nn.Module:
    torch.manual_seed(0)
    return Mixture(count).double()


def _batch(scores: Any) -> Batch:
    numbers = torch.Generator().manual_seed(1)
    return {"x": torch.randn((TOKENS, WIDTH), generator=numbers, dtype=torch.float64), "scores": scores.double()}


def evenly() -> Batch:
    """Of the tokens of any rank as many ask for each expert."""
    return _batch(torch.stack([-torch.arange(EXPERTS).roll(token) for token in range(TOKENS)]))


def _plan(graph: pase.Graph, world: int) -> Plan:
    """Tokens, rows and experts are split, each over all ranks."""
    first = {"experts": "n", "dense": "b"}

    def dim(operator: Any) -> str:
        exchanged = next((x.over[0] for x in operator.exchanges), "")
        return exchanged or first.get(operator.kind) or next(iter(operator.extents))

    return make_plan(graph, world, {op.name: {dim(op): world} for op in graph.operators if op.extents[dim(op)] > 1})


@dataclass(frozen=True, kw_only=True)
class Found:
    """differences: of the loss and of gradients, by name. sent: by a rank, within layers that exchange rows; predicted:
    of all."""

    differences: dict[str, float]
    sent: dict[Movement, int]
    predicted: dict[Movement, int]


def _trained(rank: int, world: int, count: int, batch: Batch) -> Found:
    __import__("transformers.integrations.moe")
    own, module = _module(count), _module(count)
    live = trace_live((module, evenly()))
    plan = _plan(live.model.graph, world)
    values = from_tensors({**module.state_dict(keep_vars=True)})
    parallel = Parallel(module, live, plan, rank=rank, weights=values, seed=0)
    parallel.traffic.is_counted = True
    expected, loss = own(**batch), parallel(**batch)
    expected.backward()
    loss.backward()
    routed = {op.name for op in plan.graph.operators if op.exchanges}
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    parameters = dict(parallel.named_parameters())
    return Found(
        differences={
            "": difference(loss, expected),
            **{name: difference(full(parameters[name].grad), grad) for name, grad in gradients.items()},
        },
        sent={key: size for key, size in parallel.traffic.sent.items() if size and _is_within(key, routed)},
        predicted={key: size for key, size in predicted(plan).items() if _is_within(key, routed)},
    )


def _is_within(movement: Movement, layers: set[str]) -> bool:
    is_forward = movement.phase is Phase.FORWARD
    return movement.producer == movement.consumer and movement.consumer in layers and is_forward


@pytest.mark.parametrize(("world", "count"), [(2, 1), (4, 2)])
def test_tokens_go_to_their_experts_and_back(ranks: Pool, world: int, count: int) -> None:
    """A rank sends each other one the rows of tokens that its experts are asked for, but no token twice.

    What is routed evenly lies where its experts are: products exchange nothing.
    """
    pytest.importorskip("transformers")
    found = ranks.run(_trained, count, evenly(), world=world)
    for own in found:
        assert max(own.differences.values()) <= RELATIVE, own.differences
    sent = added([own.sent for own in found])
    assert sent == found[0].predicted
    # Forward a row to each rank that a token's experts are on, back its gradient; then what each expert made.
    others = world - 1
    expected = [2 * others * rows * TOKENS * WIDTH * 8 // world for rows in (min(count, world), count)]
    assert sorted(sent.values()) == expected


@pytest.mark.parametrize("count", [1, 2])
def test_experts_that_are_asked_unequally(ranks: Pool, count: int) -> None:
    """Any routing is computed as the unmodified module does: at random, or all to one expert."""
    pytest.importorskip("transformers")
    scores = torch.rand((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(3))
    batch = _batch(scores if count > 1 else torch.eye(EXPERTS)[[2] * TOKENS])
    for own in ranks.run(_trained, count, batch):
        assert max(own.differences.values()) <= RELATIVE, own.differences


@cache
def traced(count: int) -> pase.Graph:
    return trace_live((_module(count), evenly())).model.graph


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_dispatch_and_combine_cost_an_all_to_all(devices: int, count: int) -> None:
    """A device fetches, of its T k / a rows, what a - 1 others have (GShard, Lepikhin et al. 2021), a token once."""
    pytest.importorskip("transformers.integrations.moe")
    graph = traced(count)
    own = TOKENS // devices
    # As many tokens of each other device, or all of its own where each has experts here.
    expected = {"index": min(own * count / devices, own), "index_1": own * count / devices}
    for name, rows in expected.items():
        operator = graph[name]
        (over,) = operator.exchanges[0].over
        values = np.array([[devices if dim == over else 1 for dim in operator.extents]], dtype=np.int32)
        (message,) = traffic_of(graph, operator, values).messages
        assert message.size_bytes.item() == (devices - 1) * rows * WIDTH * 4
        assert (message.times, message.forward_times) == (2, 1)


def test_imbalance_is_the_plans_and_no_matter_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")
    graph = traced(2)
    plans = [pase.search(graph, 4, imbalance=factor) for factor in (None, 1.0, 3.0)]
    assert [plan.graph.imbalance for plan in plans] == [1.0, 1.0, 3.0]
    assert plans[0].total_cost == plans[1].total_cost <= plans[2].total_cost
    write_plan(plans[2], tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").graph == plans[2].graph
    assert not difference_of(plans[2].graph, graph)
    split = {"pin": {op.name: "n=4" for op in graph.operators if op.kind == "dense" and op.exchanges}}
    costs = [pase.search(graph, 4, imbalance=factor, constraints=split).total_cost for factor in (1.0, 1.5)]
    assert costs[0] < costs[1]
