"""Parameters that each worker holds: the part of every weight that a plan's program keeps on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pase.costs import shared_weights
from pase.graph import Role
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.traffic import layer_mesh
from pase.targets.mesh_tensorflow.runtime.boxes import Box, num_points, whole
from pase.targets.mesh_tensorflow.runtime.initial import parameter_name
from pase.targets.mesh_tensorflow.runtime.layouts import layout_of
from pase.targets.mesh_tensorflow.runtime.optimisers import Rule
from pase.targets.mesh_tensorflow.runtime.tensor_dims import tensor_dims


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


def held_weights(plan: Plan) -> tuple[HeldWeight, ...]:
    """Return every weight of a plan's layers, once, at the layer that keeps it: shared ones at their first user."""
    shared = {(weight.user, weight.user_read) for weight in shared_weights(plan.graph)}
    found = []
    for operator in plan.graph.operators:
        for i, access in enumerate(operator.reads):
            if access.role is not Role.PARAMETER or (operator.name, i) in shared:
                continue
            layout = layout_of(layer_mesh(plan, operator.name), tensor_dims(operator, access), layer=operator.name)
            parts = dict(zip(layout.devices, layout.boxes, strict=True))
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


def optimiser_numbers(weights: Sequence[HeldWeight], rule: Rule) -> int:
    """Return how many numbers an update rule keeps on a device, parts being of one size."""
    return sum(
        prod(high - low for i, (low, high) in enumerate(weight.parts[0]) if i in kept)
        for weight in weights
        for kept in rule.slots(weight.shape).values()
    )
