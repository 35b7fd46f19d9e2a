"""The `program` cost model: `alpha_beta` with sums as emitted programs do them.

An emitted program adds a sum where it is made, before anything else is done with it, and in pieces between all pairs of
devices: each of k devices gets its k-th of the others' shards, adds them, and sends the others the result. Nothing is
added within a node first, so that sums between nodes take more of the nodes' links than with `alpha_beta`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.costs.alpha_beta import AlphaBetaCostModel
from pase.costs.collectives import Link
from pase.costs.traffic import Communication, LayerTraffic
from pase.sharding.shards import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCostModel(AlphaBetaCostModel):
    """Seconds of a step of an emitted program on a machine; fields as those of `AlphaBetaCostModel`."""

    sums_by_level: bool = False

    def all_reduce(self, message: Communication, members: IntArray) -> FloatArray:
        """Return the time of a sum, all of it here."""
        return pairwise_all_reduce(message.size_bytes, list(members), self.links)

    def sum_members(self, traffic: LayerTraffic, message: Communication) -> IntArray:
        """Return how the devices of a sum lie over the levels; no columns where its edge has nothing left to do."""
        found = AlphaBetaCostModel.sum_members(self, traffic, message)
        return found[:, :0] if message.ends_on_edge else found


def pairwise_all_reduce(size_bytes: FloatArray, members: Sequence[IntArray], links: Sequence[Link]) -> FloatArray:
    """Return the time in which each of k devices exchanges a k-th of its n bytes with each of the others, twice.

    members, links: as for `collectives.hierarchical_all_reduce`.
    """
    size, group = np.asarray(size_bytes, dtype=np.float64), np.ones(np.shape(size_bytes))
    for count in members:
        group = group * count
    total, within = np.zeros(size.shape), np.ones(size.shape)
    for count, link in zip(members, links, strict=True):
        reached = within * count
        total = total + 2 * (reached - within) * (link.latency_s + size / group * link.s_per_byte)
        within = reached
    return np.where(size > 0, total, 0.0)
