"""Memory that a device needs for a step of a plan, by what it is for."""

from dataclasses import dataclass

from pase.costs import shared_weights
from pase.emitter.kinds import KINDS
from pase.emitter.traffic import layer_mesh, needs_gradient
from pase.graph import Role
from pase.plan import Plan
from pase.traffic import shard_points


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on each device (parts are of one size, so that all devices need the same).

    weights_bytes: parts of weights. gradients_bytes: theirs. activations_bytes: outputs of layers and their gradients.
    buffers_bytes: what layers read as they need it, halos and data included, and its gradients. Optimiser state is none
    for gradient descent. Their sum is an upper bound where every tensor is kept to the end of the step.
    """

    weights_bytes: int
    gradients_bytes: int
    activations_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.gradients_bytes + self.activations_bytes + self.buffers_bytes


def device_memory(plan: Plan, *, word_bytes: int | None = None) -> DeviceMemory:
    """Return what a step of a plan needs on each device; word_bytes: by default that of the plan's graph."""
    word_bytes = word_bytes or plan.graph.word_bytes
    shared = {(weight.user, weight.user_read) for weight in shared_weights(plan.graph)}
    weights = gradients = activations = buffers = 0
    for operator in plan.graph.operators:
        mesh = layer_mesh(plan, operator.name)
        has_gradient = bool(operator.parameters)
        for position, read in enumerate(operator.reads):
            points = shard_points(operator, read.shape, read.axes, mesh)
            edge = plan.graph.incoming.get((operator.name, position))
            if read.role is Role.PARAMETER:
                gradients += points
                if (operator.name, position) in shared:
                    buffers += points
                else:
                    weights += points
                continue
            flows_back = edge is not None and needs_gradient(plan.graph, edge)
            has_gradient = has_gradient or flows_back
            buffers += points * (2 if flows_back else 1)
        if not (operator.kind in KINDS and KINDS[operator.kind].is_loss):
            written = sum(shard_points(operator, write.shape, write.axes, mesh) for write in operator.writes)
            activations += written * (2 if has_gradient else 1)
    return DeviceMemory(
        weights_bytes=weights * word_bytes,
        gradients_bytes=gradients * word_bytes,
        activations_bytes=activations * word_bytes,
        buffers_bytes=buffers * word_bytes,
    )
