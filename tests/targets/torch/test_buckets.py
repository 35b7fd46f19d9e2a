"""When gradients are reduced: which of them wait for each other, on all ranks in one order, while backward goes on."""

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pase
from pase.costs.edges import hiding_layers
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.states import Gradients
from tests.runtime.options import options
from tests.runtime.plans import data_parallel_plan, make_plan
from tests.targets.torch.modules import STEPS, TOKENS, Block, words
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
    parallel = parallelize((module, batch), plan, check=False)
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


@pytest.mark.parametrize("state", [pytest.param("zero2", marks=pytest.mark.full), "zero3"])
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


# -- overlap with the backward pass


class Gpt(nn.Module):
    """Blocks of which queries, keys and values are parts of one product, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, GPT_WIDTH), nn.Embedding(STEPS, GPT_WIDTH)
        self.blocks = nn.ModuleList([Block(GPT_WIDTH, 4) for _ in range(GPT_DEPTH)])
        self.norm, self.head = nn.LayerNorm(GPT_WIDTH), nn.Linear(GPT_WIDTH, TOKENS, bias=False)

    def forward(self, words: Any, targets: Any) -> Any:
        x = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


GPT_WIDTH, GPT_DEPTH = 96, 6


def _gpt() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Gpt(), words(0, "words", "targets")


class _Products(TorchDispatchMode):
    """Counts the products that are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


def _overlapped(_rank: int, _world: int, plan: pase.Plan) -> tuple[list[tuple[int, int]], int]:
    """Return, for each all-reduce of gradients, the products of backward before it and its bytes; all products."""
    module, batch = _gpt()
    parallel = parallelize((module, batch), plan, check=False)
    found: list[tuple[int, int]] = []
    all_reduce = dist.all_reduce
    loss = parallel(**batch)
    with _Products() as products:

        def watched(x: Any, *args: Any, **options: Any) -> Any:
            found.append((products.count, x.nbytes))
            return all_reduce(x, *args, **options)

        with mock.patch.object(dist, "all_reduce", watched):
            loss.backward()
    return found, products.count


@pytest.mark.parametrize("is_recomputed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients_of_a_transformer_are_reduced_while_backward_goes_on(ranks: Pool, is_recomputed: bool) -> None:
    """As much of them overlaps with products as the cost model takes to be overlappable, but for the last bucket."""
    graph = pase.load(_gpt())
    plan = data_parallel_plan(graph, 2)
    if is_recomputed:
        # Each block is a run of its own, since the normalisation that it begins with is saved.
        layers = [replace(layer, is_recomputed=layer.kind != "layer_norm") for layer in plan.layers[:-1]]
        plan = replace(plan, layers=(*layers, plan.layers[-1]))
    reductions, num_products = ranks.run(_overlapped, plan, world=2)[0]
    total = sum(size for _, size in reductions)
    assert len(reductions) >= 8
    begun = 0
    block = num_products / GPT_DEPTH
    for products, size in reductions:
        begun += size
        # What a block has of gradients and what it computes are in proportion to the whole.
        assert products <= begun / total * num_products + block
    trained = sum(4 * parameter.numel() for parameter in _gpt()[0].parameters())
    assert total == trained
    overlappable = sum(
        4 * prod(read.shape)
        for operator, (can_overlap, _) in zip(graph.operators, hiding_layers(graph), strict=True)
        for read in operator.parameters
        if can_overlap
    )
    overlapped = sum(size for products, size in reductions if products < num_products)
    assert overlapped >= overlappable - trained / 8
