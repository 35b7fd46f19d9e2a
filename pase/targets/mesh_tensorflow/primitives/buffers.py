"""Tensors whose workers hold parts of different shapes, as Mesh-TensorFlow tensors: `Distributed`.

Mesh-TensorFlow wants slices of one shape. A part stands at the beginning of a slice as large as the largest part, with
zeros behind it; where all parts are alike nothing is added. Operations on each element may be used on such a tensor;
what stands behind a part is never read, and has no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, extents, intersection, offsets, whole
from pase.sharding.halos import Buffers
from pase.targets.mesh_tensorflow.runtime.assemble import assembled
from pase.targets.mesh_tensorflow.runtime.compat import mtf, placement, tf
from pase.targets.mesh_tensorflow.runtime.mesh import LayerMesh

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Distributed:
    """A Mesh-TensorFlow tensor and what each worker, a position of its mesh, holds of it.

    tensor: [one dim for each axis of the mesh, extents of the largest part]. held: a partition, or buffers with halos.
    """

    tensor: Any
    held: Partition | Buffers

    @property
    def mesh(self) -> LayerMesh:
        """The workers."""
        mesh: LayerMesh = self.tensor.mesh
        return mesh


def expect_workers(parts: Partition, mesh: LayerMesh, name: str) -> None:
    """Raise PrimitiveError, on behalf of a primitive, unless a mesh has a worker for each part."""
    if len(parts.boxes) != len(mesh.device_names):
        raise PrimitiveError(
            f"{name}: {len(parts.boxes)} parts for the {len(mesh.device_names)} workers of {mesh.layer!r}; "
            "give each worker one"
        )


def mesh_shape(mesh: LayerMesh, parts: Sequence[Shape]) -> Any:
    """Return the Mesh-TensorFlow shape of a tensor with these parts."""
    axes = [mtf.Dimension(name, size) for name, size in mesh.devices.axes]
    largest = capacity(parts)
    return mtf.Shape([*axes, *(mtf.Dimension(f"part_dim{i}", n) for i, n in enumerate(largest))])


def capacity(parts: Sequence[Shape]) -> Shape:
    """Return the shape of a slice that holds any of these parts; every extent is at least 1."""
    return tuple(max(1, *column) for column in zip(*parts, strict=True))


def from_parts(mesh: LayerMesh, held: Partition | Buffers, parts: Sequence[Any]) -> Distributed:
    """Return the tensor whose workers hold these TensorFlow tensors; PrimitiveError where a part has another shape."""
    if not len(parts) == len(held.extents) == len(mesh.device_names):
        raise PrimitiveError(
            f"{len(parts)} parts of a partition for {len(held.extents)} workers on mesh {mesh.layer!r}, which has "
            f"{len(mesh.device_names)}; give each worker one"
        )
    for i, (part, wanted) in enumerate(zip(parts, held.extents, strict=True)):
        if tuple(part.shape.as_list()) != wanted:
            raise PrimitiveError(f"worker {i} holds a part of shape {list(wanted)}, not {part.shape.as_list()}")
    shape = mesh_shape(mesh, held.extents)
    laid_out = placement.PlacementMeshImpl.LaidOutTensor(to_slices(parts, held.extents, mesh))
    imported = mtf.import_laid_out_tensor(mesh, laid_out, shape, name=f"{mesh.name}/parts")
    return Distributed(imported, held)


def part_tensors(lowering: Any, x: Distributed) -> list[Any]:
    """Return [workers] the TensorFlow tensors of a lowered tensor, each in its own shape."""
    slices = lowering.tensors[x.tensor].to_laid_out_tensor().tensor_list
    return from_slices(slices, x.held.extents, x.mesh)


def to_slices(parts: Sequence[Any], shapes: Sequence[Shape], mesh: LayerMesh) -> list[Any]:
    """Return [workers] slices of one shape, zeros behind each part."""
    largest = capacity(shapes)
    leading = [1] * len(mesh.devices.axes)
    slices = []
    for part, shape, name in zip(parts, shapes, mesh.device_names, strict=True):
        with tf.device(name):
            padded = part if shape == largest else assembled([(whole(shape), part)], whole(largest), 0, part.dtype)
            slices.append(tf.reshape(padded, [*leading, *largest]))
    return slices


def from_slices(slices: Sequence[Any], shapes: Sequence[Shape], mesh: LayerMesh) -> list[Any]:
    """Return [workers] what stands at the beginning of each slice."""
    largest = capacity(shapes)
    parts = []
    for tensor, shape, name in zip(slices, shapes, mesh.device_names, strict=True):
        with tf.device(name):
            flat = tf.reshape(tensor, largest)
            parts.append(flat if shape == largest else tf.slice(flat, [0] * len(shape), shape))
    return parts


def framed(part: Any, shape: Shape, frame: Box, device: str, fill: float = 0.0) -> Any:
    """Return what a box in a part's own coordinates holds, `fill` where it sticks out of the part."""
    inside = intersection(whole(shape), frame)
    with tf.device(device):
        if inside is None:
            return tf.fill(extents(frame), tf.constant(fill, part.dtype))
        cut = part if inside == whole(shape) else tf.slice(part, offsets(inside, whole(shape)), extents(inside))
        return assembled([(inside, cut)], frame, fill, part.dtype)
