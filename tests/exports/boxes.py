"""Which box of a tensor each device holds: as the plan has it, and as a named mesh says it."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from pase.graph import Access, DimIndex, Operator, Role, SliceOf, Window
from pase.planning.plan import Plan
from pase.sharding.boxes import Box, Range
from pase.sharding.edges import layer_mesh
from pase.targets.named_mesh import NamedMesh, NamedTensor

Boxes = dict[int, tuple[Range | None, ...]]
"""By device; None for a dim of which no one range is held."""


def plan_boxes(plan: Plan, operator: Operator, access: Access) -> Boxes:
    """Counted from the points themselves: of what a window reads, the even share of the part that reads it."""
    mesh = layer_mesh(plan, operator.name)
    splits = plan[operator.name].splits
    return {
        device: tuple(
            _range(operator, axis, extent, splits, point)
            for axis, extent in zip(access.index_map, access.shape, strict=True)
        )
        for device, point in zip(mesh.devices, mesh.coordinates, strict=True)
    }


def _range(
    operator: Operator, axis: DimIndex, extent: int, splits: dict[str, int], point: dict[str, int]
) -> Range | None:
    match axis:
        case None:
            return 0, extent
        case str():
            return _share(extent, splits[axis], point.get(axis, 0))
        case Window():
            return _share(extent, splits[axis.out], point.get(axis.out, 0))
        case SliceOf():
            if splits[axis.dim] == 1 or extent == 1:
                return 0, extent
            return _share(extent, splits[axis.dim], point[axis.dim]) if extent == operator.extents[axis.dim] else None
        case _:
            sizes = [operator.extents[name] for name in axis]
            held = np.arange(prod(sizes)).reshape(sizes)
            for number, name in enumerate(axis):
                low, high = _share(sizes[number], splits[name], point.get(name, 0)) or (0, 0)
                held = held.take(range(low, high), axis=number)
            first, last = int(held.min()), int(held.max()) + 1
            return (first, last) if held.size == last - first else None


def _share(extent: int, parts: int, number: int) -> Range | None:
    return None if extent % parts else (number * extent // parts, (number + 1) * extent // parts)


def named_boxes(mesh: NamedMesh, tensor: NamedTensor) -> dict[int, Box]:
    """What JAX documents of a PartitionSpec: the axes of a dim number its parts, the first of them counting most."""
    size = dict(zip(mesh.names, mesh.sizes, strict=True))
    found = {}
    for device, point in zip(mesh.devices, np.ndindex(*mesh.sizes), strict=True):
        at = dict(zip(mesh.names, point, strict=True))
        box = []
        for dim in tensor.dims:
            part = 0
            for axis in dim.axes:
                part = part * size[axis] + at[axis]
            points = dim.extent // prod(size[axis] for axis in dim.axes)
            box.append((part * points, (part + 1) * points))
        found[device] = tuple(box)
    return found


def pairs(plan: Plan, mesh: NamedMesh) -> list[tuple[Operator, Access, NamedTensor]]:
    """Every tensor of every layer as the plan and as the mesh know it."""
    found = []
    for operator, layer in zip(plan.graph.operators, mesh.layers, strict=True):
        inputs = [read for read in operator.reads if read.role is not Role.PARAMETER]
        accesses = [*inputs, *operator.parameters, *operator.writes]
        found += [(operator, *both) for both in zip(accesses, layer.tensors, strict=True)]
    return found


def assert_held(plan: Plan, mesh: NamedMesh, held: Iterable[Mapping[int, Sequence[Range]]]) -> None:
    """Devices have the plan's boxes of all `pairs`, in the dims that the mesh says; others, where layers are there."""
    kept = {layer.name: layer.keeps_devices for layer in mesh.layers}
    for (operator, access, tensor), own in zip(pairs(plan, mesh), held, strict=True):
        said = [number for number, dim in enumerate(tensor.dims) if not dim.reason]
        both = (own, plan_boxes(plan, operator, access))
        ours, theirs = ({device: [boxes[device][n] for n in said] for device in boxes} for boxes in both)
        if kept[operator.name]:
            assert ours == theirs, (operator.name, access.tensor)
        else:
            assert sorted(ours.values()) == sorted(theirs.values()), (operator.name, access.tensor)


def named_tensors(plan: Plan) -> list[tuple[str, str, int | str, tuple[int, ...]]]:
    """The tensors of `pairs` as exported modules have them: layer, group, which of it, shape."""
    found: list[tuple[str, str, int | str, tuple[int, ...]]] = []
    for operator in plan.graph.operators:
        inputs = [read for read in operator.reads if read.role is not Role.PARAMETER]
        found += [(operator.name, "inputs", number, read.shape) for number, read in enumerate(inputs)]
        found += [(operator.name, "parameters", read.tensor, read.shape) for read in operator.parameters]
        found += [(operator.name, "outputs", number, write.shape) for number, write in enumerate(operator.writes)]
    return found
