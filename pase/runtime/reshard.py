"""`reshard`: a tensor taken from one layer's mesh to another's; its gradient is the adjoint movement."""

from collections.abc import Sequence
from typing import Any

from pase.runtime.assemble import run_hop
from pase.runtime.compat import mtf, tf
from pase.runtime.layouts import HOST, Layout, PlainDim, TensorDim, WindowDim, layout_of
from pase.runtime.mesh import LayerMesh
from pase.runtime.refine import Hop, hops


class Transport(mtf.Operation):
    """Takes a tensor along some hops; linear, and its gradient is a `Transport` along the adjoint hops.

    The movements are send, scatter, gather, broadcast, all-to-all and halo exchange of Hewett and Grady (2020);
    on the way back copies are not added (replicas of a gradient are equal), overlapping windows are.
    """

    def __init__(
        self, x: Any, steps: Sequence[Hop], *, mesh: LayerMesh, shape: Any, fill: float = 0.0, name: str = "reshard"
    ) -> None:
        super().__init__([x], mesh=mesh, name=name)
        self._steps = tuple(steps)
        self._fill = fill
        self._outputs = [mtf.Tensor(self, mtf.ops.convert_to_shape(shape), x.dtype)]

    def gradient(self, grad_ys: Sequence[Any]) -> Any:
        """Return the adjoint movement of the output's gradient."""
        (x,) = self.inputs
        steps = [hop.adjoint for hop in reversed(self._steps)]
        return Transport(grad_ys[0], steps, mesh=x.mesh, shape=x.shape, name="adjoint").outputs

    def lower(self, lowering: Any) -> None:
        """Slice on the devices that have the tensor, put together on those that need it."""
        (x,), (y,) = self.inputs, self.outputs
        slices = lowering.tensors[x].to_laid_out_tensor().tensor_list
        # The host's part is not counted: what is left of a movement from or to it is the layer's own.
        layers = [mesh.layer for mesh in (x.mesh, self.mesh) if HOST not in mesh.devices.devices]
        traffic = lowering.mesh_impl(self).traffic.coming_from(layers[0] if layers else self.mesh.layer)
        names = {
            device: name
            for mesh in (x.mesh, self.mesh)
            for device, name in zip(mesh.devices.devices, mesh.device_names, strict=True)
        }
        for hop in self._steps:
            slices = run_hop(
                slices,
                hop,
                source_names=[names[device] for device in hop.source.devices],
                target_names=[names[device] for device in hop.target.devices],
                fill=self._fill,
                traffic=traffic,
            )
        implementation = lowering.mesh_impl(self)
        slice_shape = implementation.slice_shape(y.shape)
        shaped = []
        for tensor, device in zip(slices, self.mesh.device_names, strict=True):
            with tf.device(device):
                same = tensor.shape.as_list() == slice_shape
                shaped.append(tensor if same else tf.reshape(tensor, slice_shape))
        lowering.set_tensor_lowering(y, implementation.LaidOutTensor(shaped))


def layout_of_tensor(x: Any) -> Layout:
    """Return how a tensor lies on its mesh."""
    return layout_of(x.mesh.devices, [PlainDim(dim.name, dim.size) for dim in x.shape.dims], layer=x.mesh.layer)


def reshard(x: Any, mesh: LayerMesh, dims: Sequence[Any], *, fill: float = 0.0, name: str = "") -> Any:
    """Return a tensor with other dims on another mesh, a reshape apart at most.

    dims: of the result; a `window` delivers to every part the points that its windows read, its halo and padding
    included (fill: the value of the padding). Its dim in the result holds the parts' points end to end; where the
    kernel is split too, a dim of the kernel's name stands before it. Raises RuntimeFailure where sizes differ or a
    split does not divide its dim. No data moves where every device already has what it needs.
    """
    wanted = [_tensor_dim(dim) for dim in dims]
    target = layout_of(mesh.devices, wanted, layer=mesh.layer)
    steps = hops(layout_of_tensor(x), target)
    shape = [dim for one in wanted for dim in _result_dims(one, mesh)]
    return Transport(x, steps, mesh=mesh, shape=shape, fill=fill, name=name or f"{mesh.name}/reshard").outputs[0]


def _tensor_dim(dim: Any) -> TensorDim:
    if isinstance(dim, WindowDim | PlainDim):
        return dim
    return PlainDim(dim.name, dim.size)


def _result_dims(dim: TensorDim, mesh: LayerMesh) -> list[Any]:
    if isinstance(dim, PlainDim):
        return [mtf.Dimension(dim.name, dim.extent)]
    parts, kernel_parts = mesh.devices.size(dim.out), mesh.devices.size(dim.kernel)
    points = mtf.Dimension(dim.out, parts * dim.reach(mesh.devices))
    return [points] if kernel_parts == 1 else [mtf.Dimension(dim.kernel, kernel_parts), points]
