"""`reshard`: a tensor taken from one layer's mesh to another's; its gradient is the adjoint movement."""

from collections.abc import Sequence
from typing import Any

from pase.sharding.layouts import HOST, Layout, PlainDim, TensorDim, WindowDim, layout_of
from pase.sharding.reshard import ReshardStep, reshard_steps
from pase.sharding.sums import SumEnd, joint_steps
from pase.targets.mesh_tensorflow.runtime.assemble import run_hop
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.fan_out import FanOut
from pase.targets.mesh_tensorflow.runtime.mesh import LayerMesh


class Transport(mtf.Operation):
    """Takes a tensor along some steps; linear, and its gradient is a `Transport` along the adjoint steps.

    The movements are send, scatter, gather, broadcast, all-to-all and halo exchange of Hewett and Grady (2020);
    on the way back copies are not added (replicas of a gradient are equal), overlapping windows are. dims: of the
    tensor where it goes, if a `FanOut` hands it there, which may sum the gradient.
    """

    def __init__(
        self,
        x: Any,
        steps: Sequence[ReshardStep],
        *,
        mesh: LayerMesh,
        shape: Any,
        fill: float = 0.0,
        name: str = "reshard",
        dims: Sequence[TensorDim] = (),
    ) -> None:
        super().__init__([x], mesh=mesh, name=name)
        self._steps = tuple(steps)
        self._fill = fill
        self._dims = tuple(dims)
        self._outputs = [mtf.Tensor(self, mtf.ops.convert_to_shape(shape), x.dtype)]

    def gradient(self, grad_ys: Sequence[Any]) -> Any:
        """Return the adjoint movement of the output's gradient."""
        (x,) = self.inputs
        steps = [hop.adjoint for hop in reversed(self._steps)]
        if self._dims:
            return _Return(grad_ys[0], steps, x, self._dims).outputs
        return Transport(grad_ys[0], steps, mesh=x.mesh, shape=x.shape, name="adjoint").outputs

    def lower(self, lowering: Any) -> None:
        """Slice on the devices that have the tensor, put together on those that need it."""
        slices = lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list
        for hop in self._steps:
            slices = self._moved(lowering, slices, hop)
        lowering.set_tensor_lowering(self.outputs[0], self._shaped(lowering, slices))

    def _moved(self, lowering: Any, slices: Sequence[Any], hop: ReshardStep) -> list[Any]:
        (x,) = self.inputs
        # The host's part is not counted: what is left of a movement from or to it is the layer's own.
        layers = [mesh.layer for mesh in (x.mesh, self.mesh) if HOST not in mesh.devices.devices]
        names = {
            device: name
            for mesh in (x.mesh, self.mesh)
            for device, name in zip(mesh.devices.devices, mesh.device_names, strict=True)
        }
        return run_hop(
            slices,
            hop,
            source_names=[names[device] for device in hop.source.devices],
            target_names=[names[device] for device in hop.target.devices],
            fill=self._fill,
            traffic=lowering.mesh_impl(self).traffic.coming_from(layers[0] if layers else self.mesh.layer),
        )

    def _shaped(self, lowering: Any, slices: Sequence[Any]) -> Any:
        implementation = lowering.mesh_impl(self)
        slice_shape = implementation.slice_shape(self.outputs[0].shape)
        shaped = []
        for tensor, device in zip(slices, self.mesh.device_names, strict=True):
            with tf.device(device):
                same = tensor.shape.as_list() == slice_shape
                shaped.append(tensor if same else tf.reshape(tensor, slice_shape))
        return implementation.LaidOutTensor(shaped)


class _Return(Transport):
    """The way of a gradient back to a `FanOut`, in parts where that sums them; dims: of the tensor as it was read."""

    def __init__(self, dy: Any, steps: Sequence[ReshardStep], x: Any, dims: Sequence[TensorDim]) -> None:
        super().__init__(dy, steps, mesh=x.mesh, shape=x.shape, name="adjoint")
        self._read_as = tuple(dims)
        self._over = x.operation.over

    def lower(self, lowering: Any) -> None:
        """Leave the sum to the fan-out where it takes it; otherwise as every movement."""
        (dy,) = self.inputs
        gradient = lowering.tensors[dy]
        is_lazy = isinstance(gradient, mtf.ops.LazyAllreduceSum)
        axes = [name for name, _ in dy.mesh.devices.axes]
        over = frozenset(axes[i] for i in gradient.mesh_axes) if is_lazy else frozenset[str]()
        own = tuple(_tensor_dim(dim) for dim in self.outputs[0].shape.dims)
        giver = SumEnd(self.mesh.devices, own, self._over)
        joint = joint_steps(giver, SumEnd(dy.mesh.devices, self._read_as, over))
        if joint is None:
            super().lower(lowering)
            return
        parts = (gradient.laid_out_input if is_lazy else gradient.to_laid_out_tensor()).tensor_list
        held = dict(zip(dy.mesh.devices.devices, parts, strict=True))
        found: dict[int, Any] = {}
        for hop in joint:
            results = self._moved(lowering, [held[device] for device in hop.source.devices], hop)
            found |= zip(hop.target.devices, results, strict=True)
        shaped = self._shaped(lowering, [found[device] for device in self.mesh.devices.devices])
        names = [name for name, _ in self.mesh.devices.axes]
        lazy = mtf.ops.LazyAllreduceSum(lowering.mesh_impl(self), shaped, [names.index(name) for name in giver.axes])
        lowering.set_tensor_lowering(self.outputs[0], lazy)


def layout_of_tensor(x: Any) -> Layout:
    """Return how a tensor lies on its mesh."""
    return layout_of(x.mesh.devices, [PlainDim(dim.name, dim.size) for dim in x.shape.dims], layer=x.mesh.layer)


def reshard(x: Any, mesh: LayerMesh, dims: Sequence[Any], *, fill: float = 0.0, name: str = "") -> Any:
    """Return a tensor with other dims on another mesh, a reshape apart at most.

    dims: of the result; a `window` delivers to every part the points that its windows read, its halo and padding
    included (fill: the value of the padding). Its dim in the result holds the parts' points end to end; where the
    kernel is split too, a dim of the kernel's name stands before it. Raises RuntimeFailure where sizes differ or a
    split does not divide its dim. No data moves where every device already has what it needs. What comes from a
    `FanOut` gets an output of its own of it.
    """
    is_handed = isinstance(x.operation, FanOut)
    if is_handed:
        x = x.operation.new_output()
    wanted = [_tensor_dim(dim) for dim in dims]
    target = layout_of(mesh.devices, wanted, layer=mesh.layer)
    steps = reshard_steps(layout_of_tensor(x), target)
    shape = [dim for one in wanted for dim in _result_dims(one, mesh)]
    dims = wanted if is_handed else ()
    name = name or f"{mesh.name}/reshard"
    return Transport(x, steps, mesh=mesh, shape=shape, fill=fill, name=name, dims=dims).outputs[0]


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
