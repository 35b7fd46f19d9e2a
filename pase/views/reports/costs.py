"""What every layer of a plan pays for, under the plan's own cost model."""

from collections.abc import Hashable

import numpy as np

from pase.analysis.explanation import Part, own_parts
from pase.costs import cost_model, signature, traffic_of
from pase.planning.plan import Plan


def cost_parts(plan: Plan) -> tuple[tuple[Part, ...], ...]:
    """Return [layers] the parts of each layer cost t_l; repeated layers are taken apart once."""
    model = cost_model(plan.cost_model, plan.machine, plan.num_devices)
    known: dict[Hashable, tuple[Part, ...]] = {}
    found = []
    for operator, layer in zip(plan.graph.operators, plan.layers, strict=True):
        splits = np.array([list(layer.splits.values())], dtype=np.int32)
        key = signature(plan.graph, operator), splits.tobytes()
        if key not in known:
            known[key] = own_parts(operator, traffic_of(plan.graph, operator, splits), model)
        found.append(known[key])
    return tuple(found)
