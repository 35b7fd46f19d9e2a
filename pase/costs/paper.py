"""The `paper` cost model: PaSE's Eq. 1, FLOP plus r × bytes."""

from dataclasses import dataclass

import numpy as np

from pase.costs.layouts import FloatArray
from pase.costs.traffic import Message, Pattern
from pase.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCostModel:
    """``F(G,φ) = Σ t_l(v,φ,r) + Σ r · t_x(u,v,φ)`` (Eq. 1), in FLOP.

    flop_per_byte: r, peak FLOP/s of a device ÷ bytes/s of a link; where devices span several levels of the
    machine, the slowest link counts (section V).
    """

    flop_per_byte: float
    unit: str = "FLOP"

    @classmethod
    def of(cls, machine: Machine, num_devices: int) -> "PaperCostModel":
        """Return the model for some devices of a machine."""
        return cls(flop_per_byte=machine.flop_per_byte(num_devices))

    def compute(self, flop: FloatArray) -> FloatArray:
        """Return the FLOP themselves."""
        return flop

    def message(self, message: Message) -> FloatArray:
        """Return r × bytes: an all-reduce of n bytes over k devices sends 2 (k - 1) / k · n, anything else n."""
        factor: FloatArray | float = 1.0
        if message.pattern is Pattern.ALL_REDUCE:
            factor = 2.0 * (message.group - 1) / np.maximum(message.group, 1)
        return self.flop_per_byte * message.times * factor * message.size_bytes

    def transfer(self, moved_bytes: FloatArray) -> FloatArray:
        """Return r × bytes."""
        return self.flop_per_byte * moved_bytes
