"""Weights that each device holds: the part of every weight that the program of a placed graph keeps there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pase.graph import Access, Operator, Role
from pase.sharding.boxes import Box, num_points, whole
from pase.sharding.edges import PlacedGraph, layer_mesh, shared_weights
from pase.sharding.layouts import layout_of, tensor_dims

Slots = Callable[[tuple[int, ...]], Mapping[str, Sequence[int]]]
"""From a weight's shape to what an update rule keeps for it: by name, the dims of the weight that each tensor has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A weight of a layer. parts: [devices] the box of it that each one holds; replicas hold equal ones."""

    layer: str
    name: str
    shape: tuple[int, ...]
    parts: tuple[Box, ...]

    @property
    def size(self) -> int:
        """Numbers in the whole weight."""
        return num_points(whole(self.shape))


def held_weights(plan: PlacedGraph) -> tuple[HeldWeight, ...]:
    """Return every weight of a placed graph, once, at the layer that keeps it: shared ones at their first user."""
    shared = {(weight.consumer, weight.input) for weight in shared_weights(plan.graph)}
    found = []
    for operator in plan.graph.operators:
        for i, access in enumerate(operator.reads):
            if access.role is not Role.PARAMETER or (operator.name, i) in shared:
                continue
            layout = layout_of(layer_mesh(plan, operator.name), tensor_dims(operator, access), layer=operator.name)
            parts = layout.by_device
            found.append(
                HeldWeight(
                    layer=operator.name,
                    name=parameter_name(operator, access),
                    shape=layout.shape,
                    parts=tuple(parts[device] for device in range(plan.num_devices)),
                )
            )
    return tuple(found)


def parameters_per_device(weights: Sequence[HeldWeight]) -> tuple[int, ...]:
    """Return [devices] how many parameters each one holds."""
    return tuple(sum(map(num_points, parts)) for parts in zip(*(weight.parts for weight in weights), strict=True))


def optimiser_numbers(weights: Sequence[HeldWeight], slots: Slots) -> int:
    """Return how many numbers an update rule of these slots keeps on a device, parts being of one size."""
    return sum(
        prod(high - low for i, (low, high) in enumerate(weight.parts[0]) if i in kept)
        for weight in weights
        for kept in slots(weight.shape).values()
    )


def parameter_name(operator: Operator, access: Access) -> str:
    """Return the name of a parameter, one for all layers that share it."""
    return access.shared or f"{operator.name}/{access.tensor}"
