"""What a cost model is, and the ones there are: one module and one line here for each."""

from collections.abc import Callable
from typing import Protocol

from pase.costs.alpha_beta import AlphaBetaCostModel, ProgramCostModel
from pase.costs.paper import PaperCostModel
from pase.costs.traffic import Communication, LayerTraffic, PassWork
from pase.errors import CostError, unknown_name
from pase.machine import Machine
from pase.sharding.overlap import Redistribution
from pase.sharding.shards import FloatArray, IntArray


class CostModel(Protocol):
    """Turns work and traffic into cost, for arrays of configurations; all results in `unit`."""

    @property
    def unit(self) -> str:
        """Of every cost: "FLOP" or "s"."""
        ...

    @property
    def sums_by_level(self) -> bool:
        """Whether all-reduces add within a node before they go between nodes."""
        ...

    def work(self, work: PassWork) -> FloatArray:
        """Return the [K] cost of one pass over a layer on one device."""
        ...

    def messages(self, traffic: LayerTraffic) -> tuple[FloatArray, ...]:
        """Return the [K] cost of each message inside a layer, in their order; they add up.

        Of a sum that ends on an edge (`Communication.ends_on_edge`) a model may leave a part to that edge: the part in
        which `Redistribution.sum_members` take part.
        """
        ...

    def sum_members(self, traffic: LayerTraffic, message: Communication) -> IntArray:
        """Return [K, levels]: how the devices that add something up lie over the machine.

        Only as far as the model's `transfer` looks at it: no columns where it does not.
        """
        ...

    def transfer(self, fetch: Redistribution) -> FloatArray:
        """Return the cost of bringing a tensor from one layout to another, one way, on the device that fetches most."""
        ...


COST_MODELS: dict[str, Callable[[Machine, int], CostModel]] = {
    "alpha_beta": AlphaBetaCostModel.of,
    "paper": PaperCostModel.of,
    "program": ProgramCostModel.of,
}


def cost_model(name: str, machine: Machine, num_devices: int) -> CostModel:
    """Return a cost model by name for some devices of a machine; CostError where there is none of that name."""
    if name not in COST_MODELS:
        raise CostError(unknown_name("cost model", name, COST_MODELS))
    return COST_MODELS[name](machine, num_devices)
