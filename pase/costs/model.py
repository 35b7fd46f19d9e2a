"""What a cost model is, and the ones there are: one module and one line here for each."""

from collections.abc import Callable
from typing import Protocol

from pase.costs.layouts import FloatArray
from pase.costs.paper import PaperCostModel
from pase.costs.traffic import Message
from pase.errors import CostError, unknown_name
from pase.machine import Machine


class CostModel(Protocol):
    """Turns work and traffic into cost, for arrays of configurations; all results in `unit`."""

    @property
    def unit(self) -> str:
        """Of every cost: "FLOP" or "s"."""
        ...

    def compute(self, flop: FloatArray) -> FloatArray:
        """Return the cost of FLOP on one device."""
        ...

    def message(self, message: Message) -> FloatArray:
        """Return the cost of one communication inside a layer, all its `times` together."""
        ...

    def transfer(self, moved_bytes: FloatArray) -> FloatArray:
        """Return the cost of moving bytes along an edge, one way, on the device that fetches most."""
        ...


COST_MODELS: dict[str, Callable[[Machine, int], CostModel]] = {
    "paper": PaperCostModel.of,
}


def cost_model(name: str, machine: Machine, num_devices: int) -> CostModel:
    """Return a cost model by name for some devices of a machine; CostError where there is none of that name."""
    if name not in COST_MODELS:
        raise CostError(unknown_name("cost model", name, COST_MODELS))
    return COST_MODELS[name](machine, num_devices)
