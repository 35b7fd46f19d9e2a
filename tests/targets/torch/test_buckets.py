"""When gradients are reduced: which of them wait for each other, on all ranks in one order, while backward goes on."""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pase
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.states import Gradients
from tests.runtime.plans import data_parallel_plan, make_plan
from tests.runtime.training import options
from tests.targets.torch.ranks import Pool
from tests.targets.torch.trained import events

# -- gradients that wait


class Mlp(nn.Module):
    """Large products between a small first and a small last one."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = (16, *[width] * (depth - 1), 16)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


WIDTH, DEPTH = 512, 10


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Mlp(WIDTH, DEPTH), {"x": torch.randn(4, 16)}


def _waiting(_rank: int, _world: int, plan: pase.Plan) -> int:
    """Return the most bytes of whole gradients of sharded weights that are allocated at once."""
    module, batch = _mlp()
    parallel = parallelize((module, batch), plan)
    storages: list[tuple[StorageWeakRef, int]] = []
    most, arrived = 0, Gradients.arrived

    def watched(gradients: Gradients, parameter: Any, gradient: Any) -> None:
        nonlocal most
        if gradient.numel() == WIDTH * WIDTH:
            storages.append((StorageWeakRef(gradient.untyped_storage()), gradient.nbytes))
        arrived(gradients, parameter, gradient)
        most = max(most, sum(size for storage, size in storages if not storage.expired()))

    with mock.patch.object(Gradients, "arrived", watched):
        parallel(**batch).backward()
    assert len(storages) == DEPTH - 2
    return most


@pytest.mark.parametrize("state", ["zero2", "zero3"])
def test_a_bucket_of_both_ends_of_a_network_holds_up_no_other(ranks: Pool, state: str) -> None:
    """The first and the last weight are replicated: what their bucket is of is there when the backward pass ends."""
    plan = data_parallel_plan(pase.load(_mlp()), 2)
    dense = [i for i, layer in enumerate(plan.layers) if layer.kind == "dense"]
    layers = [replace(layer, state=state if i in dense[1:-1] else layer.state) for i, layer in enumerate(plan.layers)]
    plan = replace(plan, layers=tuple(layers))
    # Of each, which fills a bucket alone, the whole gradient is there until it is on its way.
    one = 4 * WIDTH * WIDTH
    for found in ranks.run(_waiting, plan, world=2):
        assert found <= 2 * one
    bound = plan.memory
    assert plan.peak.bytes <= bound.total_bytes


# -- one order on all ranks


class Uneven(nn.Module):
    """The first and the last weight make one bucket only where the part of the second is the larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 1100, bias=False)
        self.second = nn.Linear(1100, 1025, bias=False)
        self.third = nn.Linear(1025, 71, bias=False)

    def forward(self, x: Any) -> Any:
        return self.third(torch.tanh(self.second(self.first(x)))).square().mean()


def _uneven() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Uneven(), {"x": torch.randn(4, 7)}


def _reduced(rank: int, world: int, source: str) -> tuple[list[tuple[tuple[int, ...], int]], list[float]]:
    """Return what is reduced, by the ranks that do and how many numbers, in order; and the losses."""
    began: list[tuple[tuple[int, ...], int]] = []
    all_reduce = dist.all_reduce

    def watched(x: Any, *args: Any, group: Any = None, **options: Any) -> Any:
        if group is not None and x.numel() > 1:
            began.append((tuple(dist.get_process_group_ranks(group)), x.numel()))
        return all_reduce(x, *args, group=group, **options)

    with mock.patch.object(dist, "all_reduce", watched):
        losses = events(rank, world, source, options(2))[-1]["losses"]
    return began, losses


def test_ranks_with_parts_of_other_sizes_form_the_same_buckets(ranks: Pool) -> None:
    graph = pase.load(_uneven())
    dense = [operator.name for operator in graph.operators if operator.kind == "dense"]
    splits = {name: {"b": 4} for name in graph.index} | {dense[1]: {"b": 2, "n": 2}}
    alone = ranks.run(_reduced, pase.emit(make_plan(graph, 1, {}), target="torch"), world=1)[0]
    source = pase.emit(make_plan(graph, 4, splits), target="torch")
    found = ranks.run(_reduced, source, world=4, timeout_s=60.0)
    everywhere = [[size for group, size in began if len(group) == 4] for began, _ in found]
    assert all(sizes == everywhere[0] for sizes in everywhere)
    in_pairs = {size for began, _ in found for group, size in began if len(group) == 2}
    assert {513 * 1100, 512 * 1100} <= in_pairs
    assert all(losses == pytest.approx(alone[1], rel=1e-9) for _, losses in found)
