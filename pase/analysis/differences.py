"""How two plans of one model differ, layer by layer, and what one plan moves under other placements."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pase.common.words import short
from pase.errors import PlanError
from pase.machine import Level
from pase.machine.machine import level_between
from pase.planning.plan import LayerPlan, Plan
from pase.planning.stages import step_flows
from pase.sharding.edges import edge_steps
from pase.sharding.layouts import Layout
from pase.sharding.reshard import ReshardStep
from pase.sharding.traffic import Flow, flows


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
        """What the second plan costs more.

        Of plans without micro-batches, stages and modes it is, to rounding, the sum over the layers less what overlaps
        more (`Plan.hidden_cost`).
        """
        first, second = self.plans
        return second.total_cost - first.total_cost


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


Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTraffic:
    """What is moved under one placement. name: of the placement. flows: what moves."""

    name: str
    flows: tuple[Flow, ...]


def compare_placements(plan: Plan) -> tuple[PlacementTraffic, ...]:
    """Return what moves under the plan's placement, the paper's greedy one and the plain order of the devices.

    Of a plan in stages, whose groups of devices are as they are, under its own alone.
    """
    if plan.num_groups > 1:
        return (PlacementTraffic(name="plan", flows=step_flows(plan)),)
    return tuple(
        PlacementTraffic(name=name, flows=flows(placed_anew(plan, place(plan)))) for name, place in PLACEMENTS.items()
    )


def placed_anew(plan: Plan, devices: Iterable[Devices]) -> Plan:
    """Return the plan with other devices for its parts, [layers]."""
    layers = tuple(replace(layer, devices=where) for layer, where in zip(plan.layers, devices, strict=True))
    return replace(plan, layers=layers)


def plain_order(plan: Plan) -> tuple[Devices, ...]:
    """Return every layer's parts on the devices in their order."""
    return tuple(tuple(range(plan.num_devices)) for _ in plan.layers)


def greedy_order(plan: Plan) -> tuple[Devices, ...]:
    """Return the greedy assignment that maximises locality, as the paper words it (PaSE section II).

    Layers are gone through in topological order; of a layer's parts and the devices the pair comes first whose overlap
    |A(v,d) ∩ A(u,d)| with what the device holds of its producers is largest, then the next among those left. Ties go to
    the part, then to the device, of the lowest number.
    """
    placed = dict(zip((layer.name for layer in plan.layers), plain_order(plan), strict=True))
    unplaced = placed_anew(plan, plain_order(plan))
    into: dict[str, list[tuple[str, NDArray[np.float64]]]] = {name: [] for name in placed}
    for edge in plan.graph.edges:
        if plan.graph[edge.consumer].reads[edge.input].is_differentiable:
            into[edge.consumer].append((edge.producer, _overlaps(edge_steps(unplaced, edge))))
    for name in placed:
        gain = np.zeros((plan.num_devices, plan.num_devices))
        for producer, overlap in into[name]:
            gain[:, list(placed[producer])] += overlap
        placed[name] = _largest_first(gain)
    return tuple(placed.values())


PLACEMENTS: dict[str, Callable[[Plan], tuple[Devices, ...]]] = {
    "plan": lambda plan: tuple(layer.devices for layer in plan.layers),
    "greedy": greedy_order,
    "device order": plain_order,
}


def bytes_by_level(pairs: Mapping[tuple[int, int], int], levels: tuple[Level, ...]) -> tuple[int, ...]:
    """Return [levels] the bytes that go between devices of one group of a level but of none further in."""
    total = [0] * len(levels)
    for (sender, receiver), size in pairs.items():
        total[level_between(levels, sender, receiver)] += size
    return tuple(total)


def _overlaps(steps: tuple[ReshardStep, ...]) -> NDArray[np.float64]:
    """Return [target positions, source positions] the points in common, where parts go from one layout to another."""
    # Of three hops the first and the last stay on the layers' own devices.
    hop = steps[len(steps) // 2] if len(steps) == 3 else steps[0]
    target, source = _bounds(hop.target), _bounds(hop.source)
    low = np.maximum(target[:, None, :, 0], source[None, :, :, 0])
    high = np.minimum(target[:, None, :, 1], source[None, :, :, 1])
    common: NDArray[np.float64] = np.clip(high - low, 0, None).astype(np.float64).prod(axis=2)
    return common


def _bounds(layout: Layout) -> NDArray[np.int64]:
    """Return [positions, rank, 2] the bounds of the boxes."""
    return np.array(layout.boxes, dtype=np.int64).reshape(len(layout.boxes), -1, 2)


def _largest_first(gain: NDArray[np.float64]) -> Devices:
    """Return the device of each part, the largest entries of [parts, devices] first."""
    count = len(gain)
    devices = [-1] * count
    taken = [False] * count
    for entry in np.argsort(-gain, axis=None, kind="stable").tolist():
        part, device = divmod(entry, count)
        if devices[part] < 0 and not taken[device]:
            devices[part], taken[device] = device, True
    return tuple(devices)
