"""Parts of a tensor: cut where they are, put together where they are needed; `Reshard`: every primitive so carried out.

Mesh-TensorFlow wants slices of one shape. A part stands at the beginning of a slice as large as the largest part, with
zeros behind it; where all parts are alike nothing is added. Operations on each element may be used on such a tensor
(`Distributed`); what stands behind a part is never read, and has no gradient.

Every movement takes the sum of all the source's parts that overlap a target's box; its adjoint exchanges source and
target, which transposes that map exactly (section 3): where the forward operation copies, the adjoint adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.errors import PrimitiveError
from pase.sharding.boxes import Box, Partition, extents, offsets, whole
from pase.sharding.halos import Buffers
from pase.sharding.layouts import HOST
from pase.sharding.reshard import ReshardStep, pieces, point_to_point
from pase.targets.mesh_tensorflow.primitives.compat import mtf, placement, tf
from pase.targets.mesh_tensorflow.primitives.mesh import Account, LayerMesh, numbers

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
    slices = []
    for part, shape, name in zip(parts, shapes, mesh.device_names, strict=True):
        with tf.device(name):
            slices.append(to_slice(part, shape, largest, len(mesh.devices.axes)))
    return slices


def to_slice(part: Any, shape: Shape, largest: Shape, num_axes: int) -> Any:
    """Return the slice of a mesh of that many axes that a worker's part, of a shape, stands in."""
    if shape != largest:
        own = part if tuple(part.shape.as_list()) == shape else tf.reshape(part, shape)
        part = _padded(own, whole(shape), whole(largest), 0)
    return tf.reshape(part, [*[1] * num_axes, *largest])


def from_slices(slices: Sequence[Any], shapes: Sequence[Shape], mesh: LayerMesh) -> list[Any]:
    """Return [workers] what stands at the beginning of each slice."""
    parts = []
    for tensor, shape, name in zip(slices, shapes, mesh.device_names, strict=True):
        with tf.device(name):
            parts.append(from_slice(tensor, shape))
    return parts


def from_slice(tensor: Any, shape: Shape) -> Any:
    """Return a worker's part, of a shape, from its slice."""
    largest = tensor.shape.as_list()[-len(shape) :]
    flat = tf.reshape(tensor, largest)
    return flat if list(shape) == largest else tf.slice(flat, [0] * len(shape), shape)


# -- carrying out a movement


_Placed = tuple[Box, Any]
"""A tensor and the box that it fills."""


def run_step(
    slices: Sequence[Any],
    step: ReshardStep,
    *,
    source_names: Sequence[str],
    target_names: Sequence[str],
    fill: float,
    traffic: Account,
) -> list[Any]:
    """Return [target positions] the tensors of a layout, made from the slices of another.

    slices: [source positions], in any shape with as many points as their boxes. fill: what stands where a box
    sticks out of the tensor. Pieces that overlap are added, in the order of the source's parts.
    """
    # A scope of its own for each movement: what crosses devices is told apart by it.
    with tf.name_scope("move") as scope:
        local = [
            as_shape(x, extents(box), name, is_own=traffic.keeps_alive)
            for x, box, name in zip(slices, step.source.boxes, source_names, strict=True)
        ]
        cuts: dict[tuple[int, Box], Any] = {}
        results = []
        every = pieces(step)
        for position, taken in enumerate(every):
            box, device = step.target.boxes[position], step.target.devices[position]
            placed: list[_Placed] = []
            for piece in taken:
                key = (piece.source, piece.box)
                if key not in cuts:
                    held = step.source.boxes[piece.source]
                    cuts[key] = _cut(local[piece.source], held, piece.box, source_names[piece.source])
                placed.append((piece.box, cuts[key]))
            with tf.device(target_names[position]):
                whole = assembled(placed, box, fill, slices[0].dtype)
                is_sent = len(placed) == 1 and whole is placed[0][1] and step.source.devices[taken[0].source] != device
                # Brought here once, whoever uses it.
                results.append(tf.identity(whole) if is_sent else whole)
        traffic.add(scope.rstrip("/"), sum(point_to_point(step, every).values()) * slices[0].dtype.size)
        traffic.keep(results)
    return results


def assembled(placed: Sequence[_Placed], box: Box, fill: float, dtype: Any) -> Any:
    """Return the tensor of a box made of pieces, added where they overlap; `fill` where none is."""
    if not placed:
        return tf.fill(extents(box), tf.constant(fill, dtype))
    if _form_grid([part for part, _ in placed]):
        for dim in reversed(range(len(box))):
            rows: dict[Box, list[_Placed]] = {}
            for part, tensor in sorted(placed, key=lambda item: item[0]):
                rows.setdefault(part[:dim] + part[dim + 1 :], []).append((part, tensor))
            placed = [_joined(row, dim) for row in rows.values()]
        ((part, tensor),) = placed
        return _padded(tensor, part, box, fill)
    total = tf.add_n([_padded(tensor, part, box, 0) for part, tensor in placed])
    if not fill:
        return total
    is_filled = np.ones(extents(box), dtype=np.bool_)
    for part, _ in placed:
        low = offsets(part, box)
        is_filled[tuple(slice(a, a + n) for a, n in zip(low, extents(part), strict=True))] = False
    return tf.where(tf.constant(is_filled), tf.fill(extents(box), tf.constant(fill, dtype)), total)


def _form_grid(boxes: Sequence[Box]) -> bool:
    """Return whether boxes are all products of some ranges of each dim, which lie end to end."""
    along = [sorted(set(column)) for column in zip(*boxes, strict=True)]
    touch = all(one[1] == other[0] for ranges in along for one, other in pairwise(ranges))
    return touch and len(set(boxes)) == len(boxes) == prod(map(len, along))


def _joined(row: list[_Placed], dim: int) -> _Placed:
    """Return pieces that lie end to end along one dim as one."""
    if len(row) == 1:
        return row[0]
    first, last = row[0][0], row[-1][0]
    whole_row = (*first[:dim], (first[dim][0], last[dim][1]), *first[dim + 1 :])
    return whole_row, tf.concat([tensor for _, tensor in row], dim)


def _padded(tensor: Any, part: Box, box: Box, fill: float) -> Any:
    if part == box:
        return tensor
    before = offsets(part, box)
    after = [high - last for (_, last), (_, high) in zip(part, box, strict=True)]
    return tf.pad(tensor, list(zip(before, after, strict=True)), constant_values=tf.constant(fill, tensor.dtype))


def _cut(tensor: Any, held: Box, wanted: Box, device: str) -> Any:
    if held == wanted:
        return tensor
    with tf.device(device):
        return tf.slice(tensor, numbers(offsets(wanted, held)), numbers(extents(wanted)))


def as_shape(tensor: Any, shape: Shape, device: str, *, is_own: bool = False) -> Any:
    """Return a tensor in a shape; is_own: as one of its own, so that TensorFlow does not send it for several uses."""
    if tuple(tensor.shape.as_list()) == shape:
        if not is_own:
            return tensor
        with tf.device(device):
            return tf.identity(tensor)
    with tf.device(device):
        return tf.reshape(tensor, numbers(shape))


ADJOINTS: Mapping[str, str] = MappingProxyType(
    {
        one: other
        for pair in (
            ("scatter", "gather"),
            ("broadcast", "sum_reduce"),
            ("halo_exchange", "halo_adjoint"),
            ("to_parts", "to_tensor"),
        )
        for one, other in (pair, pair[::-1])
    }
)
"""The adjoint of each primitive that is not its own."""


class Reshard(mtf.Operation):
    """Takes a tensor along some steps, adding parts that overlap; the adjoint goes back along the adjoint steps.

    These are all primitives and the re-sharding of plain tensors. Replicas of a plain tensor count once: the gradients
    of these are equal, and are not added.

    Args:
        x: the Mesh-TensorFlow tensor.
        steps: the movements, one after the other.
        mesh: the workers of the result.
        primitive: the name of what is done.
        source: [workers] shapes of the parts of a `Distributed` x; None for a plain tensor.
        target: the same of the result.
        shape: of a plain result.
        fill: what stands where a window sticks out of the tensor; it has no gradient.
        name: of the operation, by default the primitive's.
    """

    def __init__(
        self,
        x: Any,
        steps: Sequence[ReshardStep],
        *,
        mesh: LayerMesh,
        primitive: str = "reshard",
        source: Sequence[Shape] | None = None,
        target: Sequence[Shape] | None = None,
        shape: Any = None,
        fill: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__([x], mesh=mesh, name=name or f"{mesh.name}/{primitive}")
        self.primitive = primitive
        self.steps = tuple(steps)
        self._source, self._target, self._fill = source, target, fill
        shape = mtf.ops.convert_to_shape(shape) if target is None else mesh_shape(mesh, target)
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the adjoint of the operation, applied to the output's gradient."""
        return [*self.adjoint(grad_ys[0]).outputs]

    def adjoint(self, grad_y: Any) -> "Reshard":
        """Return the movement back to the input's workers, of a tensor like the output."""
        (x,) = self.inputs
        return Reshard(
            grad_y,
            [step.adjoint for step in reversed(self.steps)],
            mesh=x.mesh,
            primitive=ADJOINTS.get(self.primitive, self.primitive),
            source=self._target,
            target=self._source,
            shape=x.shape,
        )

    def lower(self, lowering: Any) -> None:
        """Take the parts out of their slices, move them, put what arrives into slices."""
        (x,) = self.inputs
        parts = lowering.tensors[x].to_laid_out_tensor().tensor_list
        if self._source is not None:
            parts = from_slices(parts, self._source, x.mesh)
        # The host's part is not counted: what is left of a movement from or to it is the layer's own.
        layers = [mesh.layer for mesh in (x.mesh, self.mesh) if HOST not in mesh.devices.devices]
        traffic = lowering.mesh_impl(self).traffic.coming_from(layers[0] if layers else self.mesh.layer)
        for step in self.steps:
            parts = self.carried(parts, step, traffic)
        lowering.set_tensor_lowering(self.outputs[0], self.laid_out(lowering, parts))

    def carried(self, parts: Sequence[Any], step: ReshardStep, traffic: Account) -> list[Any]:
        """Return what one step delivers."""
        (x,) = self.inputs
        names = {
            device: name
            for mesh in (x.mesh, self.mesh)
            for device, name in zip(mesh.devices.devices, mesh.device_names, strict=True)
        }
        return run_step(
            parts,
            step,
            source_names=[names[device] for device in step.source.devices],
            target_names=[names[device] for device in step.target.devices],
            fill=self._fill,
            traffic=traffic,
        )

    def laid_out(self, lowering: Any, parts: Sequence[Any]) -> Any:
        """Return the workers' parts as Mesh-TensorFlow lays a tensor out."""
        implementation = lowering.mesh_impl(self)
        if self._target is not None:
            return implementation.LaidOutTensor(to_slices(parts, self._target, self.mesh))
        shape = tuple(implementation.slice_shape(self.outputs[0].shape))
        shaped = zip(parts, self.mesh.device_names, strict=True)
        return implementation.LaidOutTensor([as_shape(tensor, shape, device) for tensor, device in shaped])
