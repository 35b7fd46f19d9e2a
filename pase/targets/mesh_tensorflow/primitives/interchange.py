"""Between plain Mesh-TensorFlow tensors, which lie evenly on a mesh and its replicas, and tensors with partitions."""

from collections.abc import Sequence
from typing import Any

from pase.errors import PrimitiveError
from pase.sharding.boxes import Partition, expect_cover, extents
from pase.sharding.layouts import Layout, PlainDim, layout_of, partition_layout
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.primitives.buffers import Distributed, expect_workers
from pase.targets.mesh_tensorflow.primitives.operations import LinearOperation
from pase.targets.mesh_tensorflow.primitives.pieces import run_map
from pase.targets.mesh_tensorflow.runtime.compat import mtf
from pase.targets.mesh_tensorflow.runtime.mesh import LayerMesh
from pase.targets.mesh_tensorflow.runtime.traffic import Account


class ToParts(LinearOperation):
    """A plain tensor goes to a partition's workers, each part from the nearest replica; the adjoint is `ToTensor`."""

    NAME = "to_parts"

    def __init__(self, x: Any, mesh: LayerMesh, parts: Partition) -> None:
        super().__init__(x, [extents(box) for box in _plain(x.mesh, x.shape).boxes], mesh, parts.extents)
        self._parts = parts

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the movement back, to every replica."""
        (x,) = self.inputs
        return ToTensor(grad_y, self._parts, x.mesh, x.shape)

    def taken(self, slices: list[Any]) -> list[Any]:
        """Return the slices: they are the parts."""
        return slices

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return what each worker of the partition gets."""
        (x,) = self.inputs
        hop = ReshardStep(_plain(x.mesh, x.shape), partition_layout(self._parts, self.mesh.devices.devices))
        return run_map(
            parts, hop, source_names=x.mesh.device_names, target_names=self.mesh.device_names, traffic=traffic
        )


class ToTensor(LinearOperation):
    """Parts come together as a plain tensor, on every replica; the adjoint is `ToParts`.

    The gradients of replicas are equal, and are not added: this is the runtime's convention for plain tensors.
    """

    NAME = "to_tensor"

    def __init__(self, x: Any, parts: Partition, mesh: LayerMesh, shape: Any) -> None:
        shape = mtf.ops.convert_to_shape(shape)
        super().__init__(x, parts.extents, mesh, [extents(box) for box in _plain(mesh, shape).boxes], shape=shape)
        self._parts = parts

    def adjoint(self, grad_y: Any) -> LinearOperation:
        """Return the movement back to the partition's workers."""
        return ToParts(grad_y, self.inputs[0].mesh, self._parts)

    def put(self, parts: list[Any]) -> list[Any]:
        """Return the parts: they are the slices."""
        return parts

    def moved(self, parts: list[Any], traffic: Account) -> list[Any]:
        """Return what each position of the mesh gets."""
        (x,), (y,) = self.inputs, self.outputs
        hop = ReshardStep(partition_layout(self._parts, x.mesh.devices.devices), _plain(self.mesh, y.shape))
        return run_map(
            parts, hop, source_names=x.mesh.device_names, target_names=self.mesh.device_names, traffic=traffic
        )


def to_parts(x: Any, mesh: LayerMesh, parts: Partition) -> Distributed:
    """Return a plain tensor in a partition, on any workers; PrimitiveError where that is not a cover."""
    expect_cover(parts, x.shape.to_integer_list, "to_parts")
    expect_workers(parts, mesh, "to_parts")
    return Distributed(ToParts(x, mesh, parts).outputs[0], parts)


def to_tensor(x: Distributed, mesh: LayerMesh, dims: Sequence[Any]) -> Any:
    """Return a partitioned tensor as a plain one, split by the mesh's axes of its dims' names.

    Raises PrimitiveError where x does not hold each element once, RuntimeFailure where a split does not divide its dim.
    """
    if not isinstance(x.held, Partition):
        raise PrimitiveError("to_tensor: the workers hold buffers with halos; take their windows or a partition first")
    expect_cover(x.held, [dim.size for dim in dims], "to_tensor")
    return ToTensor(x.tensor, x.held, mesh, list(dims)).outputs[0]


def _plain(mesh: LayerMesh, shape: Any) -> Layout:
    return layout_of(mesh.devices, [PlainDim(dim.name, dim.size) for dim in shape.dims], layer=mesh.layer)
