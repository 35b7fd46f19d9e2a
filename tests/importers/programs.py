"""What programs of imported models compute, on ranks that are threads of this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pase.planning.plan import Plan
from pase.targets.programs import emit
from pase.targets.training.data import Array
from tests.targets.torch.lockstep import computed
from tests.targets.torch.trained import builder_of


def run(plan: Plan, weights: Mapping[str, Array], data: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a program computes of one batch in evaluation; of a number alone, under the name y."""
    build = builder_of(emit(plan, target="torch"))
    shapes: dict[str, Sequence[int]] = {}

    def declare(program: Any) -> dict[str, Any]:
        found = build(program)
        found = found if isinstance(found, Mapping) else {"y": (found, ())}
        shapes.update({name: shape for name, (_, shape) in found.items()})
        return {name: tensor for name, (tensor, _) in found.items()}

    values = {
        name: torch.from_numpy(array.astype(np.int32 if array.dtype.kind == "i" else np.float64))
        for name, array in {**weights, **data}.items()
    }
    found = computed(declare, plan.num_devices, values, trains=False).outputs
    return {name: found[name].reshape(shape).numpy() for name, shape in shapes.items()}
