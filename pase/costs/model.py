"""What a cost model is, the `paper` one (Eq. 1: FLOP plus r × bytes), and all that there are, a line for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from pase.costs.alpha_beta import PAIRWISE, AlphaBetaCostModel, step_cost_model
from pase.costs.traffic import Communication, LayerTraffic, PassWork, Pattern
from pase.errors import CostError, unknown_name
from pase.graph.precision import FLOAT32, Precision
from pase.machine import Machine
from pase.machine.machine import RING
from pase.sharding.overlap import Redistribution
from pase.sharding.shards import FloatArray, IntArray


class CostModel(Protocol):
    """Turns work and traffic into cost, for arrays of configurations; all results in `unit`."""

    @property
    def unit(self) -> str:
        """Of every cost: "FLOP" or "s"."""

    @property
    def sums_by_level(self) -> bool:
        """Whether all-reduces add within a node before they go between nodes."""

    @property
    def overlap(self) -> float:
        """ω: of the backward computation, the part that sums of weights' gradients hide behind; 0: costs add up."""

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Groups of the level before in one group of each level, as far as `sum_members` looks at levels."""

    def work(self, work: PassWork) -> FloatArray:
        """Return the [K] cost of one pass over a layer on one device."""

    def messages(self, traffic: LayerTraffic, more: Sequence[Communication] = ()) -> tuple[FloatArray, ...]:
        """Return the [K] cost of each message inside a layer, in their order, and of more of its; they add up.

        Of a sum that ends on an edge (`Communication.ends_on_edge`) a model may leave a part to that edge: the part in
        which `Redistribution.sum_members` take part.
        """

    def sum_members(self, traffic: LayerTraffic, message: Communication) -> IntArray:
        """Return [K, levels]: how the devices that add something up lie over the machine.

        Only as far as the model's `transfer` looks at it: no columns where it does not.
        """

    def transfer(self, fetch: Redistribution) -> FloatArray:
        """Return the cost of bringing a tensor from one layout to another, one way, on the device that fetches most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCostModel:
    """``F(G,φ) = Σ t_l(v,φ,r) + Σ r · t_x(u,v,φ)`` (Eq. 1), in FLOP.

    flop_per_byte: r, peak FLOP/s of a device ÷ bytes/s of a link; where devices span several levels of the
    machine, the slowest link counts (section V).
    """

    flop_per_byte: float
    unit: str = "FLOP"
    sums_by_level: bool = False
    overlap: float = 0.0
    fanouts: tuple[int, ...] = ()

    @classmethod
    def of(cls, machine: Machine, num_devices: int, precision: Precision = FLOAT32) -> "PaperCostModel":
        """Return the model for some devices of a machine; r is by its peak for the policy's products."""
        return cls(flop_per_byte=machine.flop_per_byte(num_devices, precision.products))

    def work(self, work: PassWork) -> FloatArray:
        """Return the FLOP themselves."""
        return work.flop

    def messages(self, traffic: LayerTraffic, more: Sequence[Communication] = ()) -> tuple[FloatArray, ...]:
        """Return r × bytes of each message."""
        return tuple(map(self.message, (*traffic.messages, *more)))

    def message(self, message: Communication) -> FloatArray:
        """Return r × bytes: an all-reduce of n bytes over k devices sends 2 (k - 1) / k · n, anything else n.

        A reduce-scatter or an all-gather sends half of what an all-reduce does.
        """
        factor: FloatArray | float = 1.0
        if message.pattern is Pattern.ALL_REDUCE:
            factor = _all_reduce_factor(message.group)
        elif message.pattern in (Pattern.REDUCE_SCATTER, Pattern.ALL_GATHER):
            factor = 0.5 * _all_reduce_factor(message.group)
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


COST_MODELS: dict[str, Callable[[Machine, int, Precision], CostModel]] = {
    "alpha_beta": AlphaBetaCostModel.of,
    "paper": PaperCostModel.of,
    "program": partial(AlphaBetaCostModel.of, sums=PAIRWISE),
    "ring": partial(AlphaBetaCostModel.of, sums=RING),
    "step": step_cost_model,
}


def cost_model(name: str, machine: Machine, num_devices: int, precision: Precision = FLOAT32) -> CostModel:
    """Return a cost model by name for some devices of a machine; CostError where there is none of that name.

    precision: that the network is trained in; MachineError where the machine gives no peak for its products.
    """
    if name not in COST_MODELS:
        raise CostError(unknown_name("cost model", name, COST_MODELS))
    return COST_MODELS[name](machine, num_devices, precision)
