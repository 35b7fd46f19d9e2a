"""`difference`: which layers two plans of one model treat differently, and what each of these differences costs."""

from dataclasses import dataclass
from math import fsum

from pase.common.names import short
from pase.errors import PlanError
from pase.planning.plan import LayerPlan, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """A layer that has another configuration or another cost in the second plan: its part of the first, of the second.

    What a layer costs is its own cost and that of the transfers to it.
    """

    name: str
    layers: tuple[LayerPlan, LayerPlan]

    @property
    def is_split_alike(self) -> bool:
        """Whether its configuration and modes are the same: then its neighbours are what makes its cost another."""
        first, second = ((one.splits, one.stage, one.state, one.is_recomputed) for one in self.layers)
        return first == second

    @property
    def costs(self) -> tuple[float, float]:
        """What the layer costs in the first and in the second plan."""
        first, second = self.layers
        return first.layer_cost + first.transfer_cost, second.layer_cost + second.transfer_cost

    @property
    def cost(self) -> float:
        """What it costs more in the second plan."""
        first, second = self.costs
        return second - first


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two plans of one model. layers: those that differ, the dearest difference first.

    placed: the layers of which other devices hold the parts, while their configurations are the same.
    """

    plans: tuple[Plan, Plan]
    layers: tuple[LayerDifference, ...]
    placed: tuple[str, ...]

    @property
    def cost(self) -> float:
        """What the second plan costs more: the sum over the layers, to rounding, where costs are such a sum."""
        first, second = self.plans
        if first.has_parts or second.has_parts:
            return second.total_cost - first.total_cost
        return fsum(layer.cost for layer in self.layers)


def difference(first: Plan, second: Plan) -> Difference:
    """Return how two plans of one model differ, layer by layer.

    Raises:
        PlanError: plans of different models, or whose costs are in different units.
    """
    for plan, other in ((first, second), (second, first)):
        for layer in plan:
            if layer.name not in other or other[layer.name].dims != layer.dims:
                dims = " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items())
                raise PlanError(
                    f"the plans are of different models: that of {short(plan.graph.name)!r} has a layer "
                    f"{short(layer.name)!r} of {dims}, which the other, of {short(other.graph.name)!r}, has not"
                )
    if first.cost_model != second.cost_model:
        raise PlanError(
            f"the costs of the plans are not comparable: cost models {first.cost_model} and {second.cost_model}; "
            "evaluate one of them with the other's (pase evaluate --cost-model)"
        )
    if first.precision != second.precision:
        raise PlanError(
            f"the costs of the plans are not comparable: they are of {first.precision.name} and "
            f"{second.precision.name}; evaluate one of them in the other's (pase evaluate --precision)"
        )
    pairs = [LayerDifference(name=layer.name, layers=(layer, second[layer.name])) for layer in first]
    differing = [pair for pair in pairs if pair.cost or not pair.is_split_alike]
    return Difference(
        plans=(first, second),
        layers=tuple(sorted(differing, key=lambda pair: -abs(pair.cost))),
        placed=tuple(
            pair.name for pair in pairs if pair.is_split_alike and pair.layers[0].devices != pair.layers[1].devices
        ),
    )
