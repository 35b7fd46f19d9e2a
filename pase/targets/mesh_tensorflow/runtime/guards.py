"""Checks of a program before it is lowered: what Mesh-TensorFlow would compute wrongly without a word."""

from collections.abc import Sequence
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.runtime.compat import mtf
from pase.targets.mesh_tensorflow.runtime.reshard import FanOut

_OF_MESH_TENSORFLOW = (mtf.ops.EinsumOperation, mtf.ops.BinaryOpWithBroadcasting)
"""Operations that people write out and that check nothing; ours check themselves (a window's dim has two extents)."""


def check_operations(graph: Any, meshes: Sequence[LayerMesh]) -> None:
    """Raise RuntimeFailure for an operation on two meshes, a dim of two extents, an axis that splits nothing."""
    names: dict[LayerMesh, set[str]] = {mesh: set() for mesh in meshes}
    for operation in graph.operations:
        tensors = [*operation.inputs, *operation.outputs]
        for tensor in tensors:
            names[tensor.mesh] |= set(tensor.shape.dimension_names)
        if isinstance(operation, FanOut):
            names[operation.mesh] |= operation.named
        if isinstance(operation, _OF_MESH_TENSORFLOW):
            _check_one_mesh(operation)
            _check_extents(operation, tensors)
    for mesh in meshes:
        for axis, size in mesh.devices.axes[: _num_splits(mesh)]:
            if axis not in names[mesh]:
                raise RuntimeFailure(
                    f"layer {mesh.layer!r} has {size} parts along {axis!r}, which is a dim of none of its tensors; "
                    "use the names of its dims as axes"
                )


def _num_splits(mesh: LayerMesh) -> int:
    return len(mesh.devices.axes) - mesh.devices.has_replicas


def _check_one_mesh(operation: Any) -> None:
    for x in operation.inputs:
        if x.mesh is not operation.mesh:
            raise RuntimeFailure(
                f"operation {operation.name!r} reads tensors of two meshes, those of layers {operation.mesh.layer!r} "
                f"and {x.mesh.layer!r}; reshard one of them"
            )


def _check_extents(operation: Any, tensors: Sequence[Any]) -> None:
    extents: dict[str, int] = {}
    for tensor in tensors:
        for dim in tensor.shape.dims:
            if extents.setdefault(dim.name, dim.size) != dim.size:
                raise RuntimeFailure(
                    f"operation {operation.name!r} of layer {operation.mesh.layer!r} has dim {dim.name} with extents "
                    f"{extents[dim.name]} and {dim.size}; give it one"
                )
