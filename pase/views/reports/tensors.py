"""How a layer's tensors lie over the devices: for each of their dims, which splits of the layer part it."""

from collections.abc import Mapping
from math import prod
from typing import Any

from pase.graph import Axis, Operator, Part, Window


def layer_tensors(operator: Operator, splits: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the tensors that an operator reads and writes, with the parts that its splits make of each dim.

    A dim has `parts` parts, numbered by the digits of the iteration dims in `by` (their positions), row-major.
    """
    position = {name: number for number, name in enumerate(operator.extents)}
    named = [*((read, str(read.role)) for read in operator.reads), *((write, "output") for write in operator.writes)]
    return [
        {
            "name": access.tensor,
            "role": role,
            "dims": [
                _dim(axis, extent, splits, position) for axis, extent in zip(access.axes, access.shape, strict=True)
            ],
        }
        for access, role in named
    ]


def _dim(axis: Axis, extent: int, splits: Mapping[str, int], position: Mapping[str, int]) -> dict[str, Any]:
    label, dims = _indexed_by(axis)
    by = [dim for dim in dims if splits[dim] > 1]
    return {
        "label": label,
        "extent": extent,
        "parts": prod(splits[dim] for dim in by),
        "by": [position[dim] for dim in by],
    }


def _indexed_by(axis: Axis) -> tuple[str, tuple[str, ...]]:
    """Return how a tensor dim is called, and the iteration dims whose splits part it."""
    match axis:
        case None:
            return "", ()
        case str():
            return axis, (axis,)
        case Window():
            return f"{axis.out} (window {axis.kernel})", (axis.out,)
        case Part():
            return f"{axis.dim} [{axis.offset}:{axis.offset + axis.extent}]", (axis.dim,)
        case _:
            return "·".join(axis), axis
