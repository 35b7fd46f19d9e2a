"""How long a device computes on its part of a layer, in each phase of a step."""

from dataclasses import dataclass

import numpy as np

from pase.costs import ReadTraits, cost_model, layer_traffic
from pase.graph import Operator
from pase.layer_movements import shard_points
from pase.machine import Machine
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.emitter.traffic import layer_mesh

_UPDATE_FLOP = 2
"""Of gradient descent, for each weight: a product and a sum."""

_UPDATE_WORDS = 3
"""What it touches: the weight, its gradient, the weight again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Seconds on each device. backward_s: None where no gradient reaches a layer; update_s: where it has no weights."""

    forward_s: float
    backward_s: float | None
    update_s: float | None


def layer_work(plan: Plan, machine: Machine) -> dict[str, LayerWork]:
    """Return the work of every layer, as the `alpha_beta` cost model times it: FLOP or memory, whichever takes longer.

    What waits in a recurrent layer's pipeline counts as work.
    """
    model = cost_model("alpha_beta", machine, plan.num_devices)
    owned: set[str] = set()
    found = {}
    for operator in plan.graph.operators:
        gradients = plan.graph.read_gradients(operator)
        splits = np.array([[plan[operator.name].splits[dim] for dim in operator.extents]], dtype=np.int32)
        traits = tuple(ReadTraits(has_gradient=has, is_fed=False, is_owned=True) for has in gradients)
        work = layer_traffic(operator, splits, traits, word_bytes=plan.graph.word_bytes)
        found[operator.name] = LayerWork(
            forward_s=float(model.work(work.forward)[0]),
            backward_s=float(model.work(work.backward)[0]) if any(gradients) else None,
            update_s=_update_s(plan, operator, machine, owned),
        )
    return found


def _update_s(plan: Plan, operator: Operator, machine: Machine, owned: set[str]) -> float | None:
    """Return the time of updating a layer's own weights: a shared one is updated by its first user."""
    mesh = layer_mesh(plan, operator.name)
    own = [access for access in operator.parameters if not access.shared or access.shared not in owned]
    owned.update(access.shared for access in own if access.shared)
    points = sum(shard_points(operator, access.shape, access.axes, mesh) for access in own)
    touched_bytes = _UPDATE_WORDS * points * plan.graph.word_bytes
    bandwidth = machine.device.memory_bandwidth_bytes_per_s or float("inf")
    return max(_UPDATE_FLOP * points / machine.peak_flop_per_s(), touched_bytes / bandwidth) if own else None
