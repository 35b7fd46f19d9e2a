"""Ranks that compute a layer on the same data: what keeps their weights equal where their gradients are not."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pase
from pase.errors import ProgramError
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.states import Gradients, local_of
from tests.runtime.plans import data_parallel_plan, make_plan
from tests.targets.torch.equality import micro_batches_of, of_step
from tests.targets.torch.modules import MODULES, made
from tests.targets.torch.plans import in_stages, with_states
from tests.targets.torch.ranks import Pool

STEPS = 3
NOISE = 1e-3

Shards = Mapping[str, tuple[Any, Any]]
"""Of each parameter, which box of it a rank of a group has, and the values."""


def _noisy(arrived: Any, gradients: Gradients, parameter: Any, gradient: Any) -> None:
    arrived(gradients, parameter, gradient + NOISE * torch.randn_like(gradient))


def _trained(rank: int, _world: int, plan: Plan, period: int, noisy: int) -> tuple[int, Shards, list[float], int]:
    """Return the group of ranks, the shards, the losses, and how many tensors were sent from one rank to others.

    Gradients of one rank have noise. The last step is not followed by an update.
    """
    module = made("mlp")
    parallel = parallelize((module, MODULES["mlp"].batch(0)), plan, check=False, reconciling_steps=period)
    optimizer, losses, sent = torch.optim.AdamW(parallel.parameters(), lr=0.01), [], list[Any]()
    broadcast, arrived = dist.broadcast, Gradients.arrived

    def counted(x: Any, *args: Any, group_src: int | None = None, **options: Any) -> Any:
        own = {} if group_src is None else {"group_src": group_src}
        sent.extend(own)
        return broadcast(x, *args, **own, **options)

    with mock.patch.object(dist, "broadcast", counted):
        for step in range(STEPS + 1):
            added = lambda *given: _noisy(arrived, *given)  # noqa: E731
            with mock.patch.object(Gradients, "arrived", added) if rank == noisy else nullcontext():
                losses.append(parallel.accumulate(**of_step(micro_batches_of("mlp", step, plan.micro_batches))).item())
            if step < STEPS:
                optimizer.step()
            optimizer.zero_grad()
    size = prod(parallel._stored.sizes)
    held = {name: own.held[rank % size] for name, own in parallel._stored.stored.items()}
    shards = {name: (held[name], local_of(p).detach().clone()) for name, p in parallel.named_parameters()}
    return rank // size, shards, losses, len(sent)


def differences(found: list[tuple[int, Shards, list[float], int]]) -> list[float]:
    """Return by how much shards of the same box differ in each group of ranks."""
    boxes: dict[Any, list[Any]] = {}
    for group, shards, _, _ in found:
        for name, (held, values) in shards.items():
            boxes.setdefault((group, name, held), []).append(values)
    return [float((each - own[0]).abs().max()) for own in boxes.values() for each in own[1:] if each.numel()]


def _plan(kind: str) -> Plan:
    graph = pase.load((made("mlp"), MODULES["mlp"].batch(0)))
    if kind == "stages":
        plan = in_stages(graph, 4, 2, 2, "1f1b", 0)
        # Every layer on the two ranks of its stage alike.
        return replace(plan, layers=tuple(replace(own, splits=dict.fromkeys(own.splits, 1)) for own in plan.layers))
    splits = {op.name: {"b": 2} for op in graph.operators if "b" in op.extents and "b" not in op.unsplittable}
    return with_states(make_plan(graph, 4, splits), kind)


@pytest.mark.parametrize(
    "kind",
    ["replicated", *(pytest.param(state, marks=pytest.mark.full) for state in ("zero1", "zero2")), "zero3", "stages"],
)
def test_noise_in_the_gradients_of_one_replica_leaves_the_weights_of_all_equal(ranks: Pool, kind: str) -> None:
    plan = _plan(kind)
    assert max(differences(ranks.run(_trained, plan, 0, 1, world=4))) > NOISE
    found = ranks.run(_trained, plan, 1, 1, world=4)
    assert set(differences(found)) == {0.0}
    assert all(sent for _, _, _, sent in found)


def test_replicas_that_are_alike_train_as_they_do_by_themselves(ranks: Pool) -> None:
    plan = _plan("zero1")
    alone, together = (ranks.run(_trained, plan, period, -1, world=4) for period in (0, 2))
    assert together[0][2] == pytest.approx(alone[0][2], rel=1e-14)
    assert [sent for _, _, _, sent in alone] == [0] * 4


def test_what_sums_keep_equal_is_not_sent(ranks: Pool) -> None:
    plan = data_parallel_plan(pase.load((made("mlp"), MODULES["mlp"].batch(0))), 2)
    assert [sent for _, _, _, sent in ranks.run(_trained, plan, 1, -1, world=2)] == [0, 0]


def _refused(_rank: int, _world: int) -> None:
    batch = MODULES["mlp"].batch(0)
    plan = make_plan(pase.load((made("mlp"), batch)), 1, {})
    with pytest.raises(ProgramError, match="reconciling_steps is -1; give a number of steps, or 0 for never"):
        parallelize((made("mlp"), batch), plan, reconciling_steps=-1)


def test_a_period_below_zero_is_refused(ranks: Pool) -> None:
    ranks.run(_refused, world=1)
