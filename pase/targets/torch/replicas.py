"""Replicas of parameter shards, which several ranks update separately, and their reconciliation.

Ranks that compute a layer on the same data have the same gradients, so no all-reduce synchronises them.
Nondeterministic kernels (the backward passes of flash attention and cuDNN) leave such gradients different by rounding,
and the weights would drift apart. Therefore the first of these ranks regularly broadcasts its shards to the others.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pase.targets.torch.collectives import Group, Groups
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.placements import Storage
from pase.targets.torch.states import WeightSum, local_of

DEFAULT_STEPS = 100
"""Steps between two broadcasts: their traffic is less than 1 % of that of a step of the built-in networks."""


class Replicas:
    """The shards that ranks hold in common, without a gradient all-reduce over all of these ranks.

    Args:
        storage: Storage of all parameters and buffers.
        sums: Gradient all-reduces of parameters, by name.
        groups: Creates process groups; all ranks request the same ones.
    """

    def __init__(self, storage: Storage, sums: Mapping[str, WeightSum], groups: Groups) -> None:
        partitions: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name, own in sums.items():
            holders: dict[object, list[int]] = {}
            for rank, held in enumerate(storage.stored[name].held):
                holders.setdefault(held, []).append(rank)
            summed = {tuple(sorted(ranks)) for ranks in own.groups}
            apart = tuple(ranks for ranks in map(tuple, holders.values()) if len(ranks) > 1 and ranks not in summed)
            if apart:
                partitions.setdefault(apart, []).append(name)
        self._shared = [(groups.of(partition), names) for partition, names in sorted(partitions.items())]

    @property
    def groups(self) -> list[tuple[Group, list[str]]]:
        """The groups that this rank is in, and the parameters whose shards they have in common."""
        return [(group, names) for group, names in self._shared if len(group.ranks) > 1]

    def make_equal(self, tensor_of: Callable[[str], Any]) -> None:
        """Have the first rank of each group send its shards to the others.

        Args:
            tensor_of: Returns a parameter by its name.
        """
        for group, names in self.groups:
            for name in names:
                local = local_of(tensor_of(name))
                shard = local.contiguous()
                with torch.no_grad(), naming_lost_ranks():
                    dist.broadcast(shard, group=group.handle, group_src=0)
                    if shard is not local:
                        local.copy_(shard)
