"""Process groups: who makes them in which order, and what their first call is."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import pase
from pase.planning.plan import Plan
from pase.targets.torch.parallel import parallelize
from tests.targets.torch.equality import micro_batches_of, of_step
from tests.targets.torch.modules import MODULES, made
from tests.targets.torch.plans import in_stages, plan_of
from tests.targets.torch.ranks import Pool

CALLS = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "broadcast")


class Record:
    """What a rank does with process groups.

    Attributes:
        made: The ranks of each group that is made, in order.
        first: Of each of these that this rank is in, by its place, the first call.
        mixed: How many calls begin sends and receives together.
    """

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.first: dict[int, str] = {}
        self.mixed = 0
        self._places: dict[Any, int] = {}

    def new_group(self, make: Callable[..., Any], ranks: Any = None, *args: Any, **options: Any) -> Any:
        handle = make(ranks, *args, **options)
        self._places[handle] = len(self.made)
        self.made.append(tuple(ranks or range(dist.get_world_size())))
        return handle

    def called(self, name: str, call: Callable[..., Any], *args: Any, group: Any = None, **options: Any) -> Any:
        self._noted(name, group)
        return call(*args, group=group, **options)

    def batch(self, call: Callable[..., Any], ops: list[Any]) -> Any:
        self._noted("batch_isend_irecv", ops[0].group)
        self.mixed += len({op.op for op in ops}) > 1
        return call(ops)

    def _noted(self, name: str, group: Any) -> None:
        if group in self._places:
            self.first.setdefault(self._places[group], name)


def _recorded(_rank: int, _world: int, name: str, plan: Plan) -> tuple[list[tuple[int, ...]], dict[int, str], int]:
    record, step = Record(), of_step(micro_batches_of(name, 0, plan.micro_batches))
    with ExitStack() as stack:
        for call in CALLS:
            watched = partial(record.called, call, getattr(dist, call))
            stack.enter_context(mock.patch.object(dist, call, watched))
        stack.enter_context(mock.patch.object(dist, "new_group", partial(record.new_group, dist.new_group)))
        watched = partial(record.batch, dist.batch_isend_irecv)
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", watched))
        parallelize((made(name), MODULES[name].batch(0)), plan, check=False).accumulate(**step)
    return record.made, record.first, record.mixed


@pytest.mark.parametrize("kind", ["1f1b", "random"])
def test_the_first_call_of_a_group_is_a_collective_of_all_of_its_ranks(ranks: Pool, kind: str) -> None:
    """With NCCL it makes the communicator; all ranks make groups in one order."""
    graph = pase.load((made("mlp"), MODULES["mlp"].batch(0)))
    plan = in_stages(graph, 4, 2, 4, "1f1b", 3) if kind == "1f1b" else plan_of(graph, kind, 4, 1)
    records = ranks.run(_recorded, "mlp", plan, world=4)
    groups = records[0][0]
    assert groups
    assert all(own == groups for own, _, _ in records)
    for rank, (_, first, mixed) in enumerate(records):
        assert first == {place: "all_reduce" for place, group in enumerate(groups) if rank in group}
        # Sends and receives of a micro-batch forward and another one back.
        assert (mixed > 0) == (kind == "1f1b")
