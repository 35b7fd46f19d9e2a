"""`Reshard`: every primitive as one Mesh-TensorFlow operation; its gradient is the same operation, its adjoint.

Every movement takes the sum of all the source's parts that overlap a target's box; its adjoint exchanges source and
target, which transposes that map exactly (section 3): where the forward operation copies, the adjoint adds.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pase.sharding.layouts import HOST
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.primitives.compat import mtf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import Shape, as_shape, from_slices, mesh_shape, run_step, to_slices
from pase.targets.mesh_tensorflow.primitives.traffic import Account

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
