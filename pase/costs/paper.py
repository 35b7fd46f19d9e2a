"""The `paper` cost model: PaSE's Eq. 1, FLOP plus r × bytes."""

from dataclasses import dataclass

import numpy as np

from pase.costs.traffic import Communication, LayerTraffic, PassWork, Pattern
from pase.machine import Machine
from pase.sharding.overlap import Redistribution
from pase.sharding.shards import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCostModel:
    """``F(G,φ) = Σ t_l(v,φ,r) + Σ r · t_x(u,v,φ)`` (Eq. 1), in FLOP.

    flop_per_byte: r, peak FLOP/s of a device ÷ bytes/s of a link; where devices span several levels of the
    machine, the slowest link counts (section V).
    """

    flop_per_byte: float
    unit: str = "FLOP"
    sums_by_level: bool = False

    @classmethod
    def of(cls, machine: Machine, num_devices: int) -> "PaperCostModel":
        """Return the model for some devices of a machine."""
        return cls(flop_per_byte=machine.flop_per_byte(num_devices))

    def work(self, work: PassWork) -> FloatArray:
        """Return the FLOP themselves."""
        return work.flop

    def messages(self, traffic: LayerTraffic) -> tuple[FloatArray, ...]:
        """Return r × bytes of each message."""
        return tuple(map(self.message, traffic.messages))

    def message(self, message: Communication) -> FloatArray:
        """Return r × bytes: an all-reduce of n bytes over k devices sends 2 (k - 1) / k · n, anything else n."""
        factor: FloatArray | float = 1.0
        if message.pattern is Pattern.ALL_REDUCE:
            factor = _all_reduce_factor(message.group)
        return self.flop_per_byte * message.times * factor * message.size_bytes

    def sum_members(self, traffic: LayerTraffic, message: Communication) -> IntArray:
        """Return no columns: where the devices of a sum lie makes no difference here."""
        return np.empty((len(message.group), 0), dtype=np.int64)

    def transfer(self, fetch: Redistribution) -> FloatArray:
        """Return r × bytes."""
        return self.flop_per_byte * fetch.moved_bytes


def _all_reduce_factor(group: IntArray) -> FloatArray:
    factor: FloatArray = 2.0 * (group - 1) / np.maximum(group, 1)
    return factor
