"""Tensors taken from mesh to mesh (`reshard`), for several readers (`fan_out`), put together, cut and seen otherwise.

The gradient of a `reshard` is the adjoint movement. The gradients of a fan-out's readers are added, parts of sums
before these are summed: Hewett and Grady (2020) call it the broadcast, whose adjoint is the sum.

Along dims of which every device holds all points nothing goes from device to device. What takes the place of such a dim
may be split: each device keeps its part, and what the others keep of it comes back as a part of a sum.
"""

from collections.abc import Sequence
from typing import Any

from pase.sharding.boxes import extents
from pase.sharding.layouts import (
    Layout,
    PlainDim,
    TensorDim,
    WindowDim,
    check_split,
    layout_of,
    not_joined,
    place_of_piece,
    shifted,
)
from pase.sharding.reshard import ReshardStep, SumEnd, joint_steps, reshard_steps
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import Reshard, run_step
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange


class FanOut(mtf.Operation):
    """Gives each reader of a tensor an output of its own, so that all gradients come together in one place.

    over: names of the dims of the mesh whose parts have parts of the gradient; by default all that the tensor lacks.
    """

    def __init__(self, x: Any, over: Sequence[str] | None = None) -> None:
        super().__init__([x], name="fan_out")
        self.named = frozenset(over or ())
        axes = x.mesh.devices.axes
        lacking = [name for name, _ in axes[: len(axes) - x.mesh.devices.has_replicas]]
        names = self.named if over is not None else frozenset(lacking) - frozenset(x.shape.dimension_names)
        self.over = frozenset(names)
        self._outputs: list[Any] = []

    def new_output(self) -> Any:
        """Return the tensor for another reader."""
        (x,) = self.inputs
        self._outputs.append(mtf.Tensor(self, x.shape, x.dtype, index=len(self._outputs)))
        return self._outputs[-1]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the sum of the readers' gradients."""
        found = [dy for dy in grad_ys if dy is not None]
        return found if len(found) == 1 else _Sum(found).outputs

    def lower(self, lowering: Any) -> None:
        """Give every reader what is there."""
        for y in self.outputs:
            lowering.set_tensor_lowering(y, lowering.tensors[self.inputs[0]])


class _Sum(mtf.Operation):
    """The sum of some tensors: partial sums over the same axes of the mesh are added before they are summed, once."""

    def __init__(self, xs: Sequence[Any]) -> None:
        super().__init__(list(xs), name="sum_of_gradients")
        self._outputs = [mtf.Tensor(self, xs[0].shape, xs[0].dtype)]

    def lower(self, lowering: Any) -> None:
        """Add on each device, sum over each group of axes, add the results."""
        implementation = lowering.mesh_impl(self)
        terms: dict[tuple[int, ...], list[Any]] = {(): []}
        for x in self.inputs:
            found = lowering.tensors[x]
            is_lazy = isinstance(found, mtf.ops.LazyAllreduceSum)
            axes = tuple(sorted(found.mesh_axes)) if is_lazy else ()
            terms.setdefault(axes, []).append(found.laid_out_input if is_lazy else found)

        def added(xs: Sequence[Any]) -> Any:
            return xs[0] if len(xs) == 1 else implementation.slicewise(lambda *own: tf.add_n(own), *xs)

        whole = terms.pop(())
        sums = [implementation.allreduce(added(parts), list(axes), "SUM") for axes, parts in terms.items()]
        lowering.set_tensor_lowering(self.outputs[0], added([*sums, *whole]))


def fan_out(x: Any, over: Sequence[Any]) -> Any:
    """Return x for its readers, whose gradients are summed once.

    over: the dims of its mesh that its gradient is summed over: what a reader leaves in as many parts is added first.
    """
    return FanOut(x, [dim.name for dim in over]).new_output()


class _Handed(Reshard):
    """The way of a tensor from a `FanOut` to a reader; dims: of the tensor as it is read."""

    def __init__(self, x: Any, steps: Any, dims: Sequence[TensorDim], **options: Any) -> None:
        super().__init__(x, steps, **options)
        self._dims = tuple(dims)

    def adjoint(self, grad_y: Any) -> Reshard:
        """Return the way of the gradient back, in parts where the fan-out sums them."""
        (x,) = self.inputs
        return _Return(grad_y, [step.adjoint for step in reversed(self.steps)], self._dims, x)


class _Return(Reshard):
    """The way of a gradient back to a `FanOut`, in parts where that sums them; dims: of the tensor as it was read."""

    def __init__(self, dy: Any, steps: Any, dims: Sequence[TensorDim], x: Any) -> None:
        super().__init__(dy, steps, mesh=x.mesh, shape=x.shape)
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
        traffic = lowering.mesh_impl(self).traffic.coming_from(dy.mesh.layer)
        for step in joint:
            results = self.carried([held[device] for device in step.source.devices], step, traffic)
            found |= zip(step.target.devices, results, strict=True)
        shaped = self.laid_out(lowering, [found[device] for device in self.mesh.devices.devices])
        names = [name for name, _ in self.mesh.devices.axes]
        lazy = mtf.ops.LazyAllreduceSum(lowering.mesh_impl(self), shaped, [names.index(name) for name in giver.axes])
        lowering.set_tensor_lowering(self.outputs[0], lazy)


def layout_of_tensor(x: Any) -> Layout:
    """Return how a tensor lies on its mesh."""
    return even_layout(x.mesh, [PlainDim(dim.name, dim.size) for dim in x.shape.dims])


def even_layout(mesh: LayerMesh, dims: Sequence[TensorDim]) -> Layout:
    """Return how a tensor of these dims lies on a mesh; ProgramError where a split does not divide its dim."""
    check_split(mesh.layer, mesh.devices, [axis for dim in dims for axis in dim.axes])
    return layout_of(mesh.devices, dims, layer=mesh.layer)


def reshard(x: Any, mesh: LayerMesh, dims: Sequence[Any], *, fill: float = 0.0) -> Any:
    """Return a tensor with other dims on another mesh, a reshape apart at most.

    dims: of the result; a `window` delivers to every part the points that its windows read, its halo and padding
    included (fill: the value of the padding). Its dim in the result holds the parts' points end to end; where the
    kernel is split too, a dim of the kernel's name stands before it. Raises ProgramError where sizes differ or a
    split does not divide its dim. No data moves where every device already has what it needs. What comes from a
    `FanOut` gets an output of its own of it.
    """
    is_handed = isinstance(x.operation, FanOut)
    if is_handed:
        x = x.operation.new_output()
    wanted = [_tensor_dim(dim) for dim in dims]
    target = even_layout(mesh, wanted)
    steps = reshard_steps(layout_of_tensor(x), target)
    shape = [dim for one in wanted for dim in _result_dims(one, mesh)]
    if is_handed:
        return _Handed(x, steps, wanted, mesh=mesh, shape=shape, fill=fill).outputs[0]
    return Reshard(x, steps, mesh=mesh, shape=shape, fill=fill).outputs[0]


def _tensor_dim(dim: Any) -> TensorDim:
    if isinstance(dim, WindowDim | PlainDim):
        return dim
    return PlainDim(dim.name, dim.size)


def _result_dims(dim: TensorDim, mesh: LayerMesh) -> list[Any]:
    if isinstance(dim, PlainDim):
        return [mtf.Dimension(dim.name, dim.extent)]
    parts, kernel_parts = mesh.devices.size(dim.out), mesh.devices.size(dim.kernel)
    points = mtf.Dimension(dim.out, parts * dim.reach(mesh.devices, {}))
    return [points] if kernel_parts == 1 else [mtf.Dimension(dim.kernel, kernel_parts), points]


def dims(*named: tuple[str, int], **extents: int) -> tuple[Any, ...]:
    """Return dimensions: ``b, n = dims(b=64, n=10)``, or ``dims(("b", 64))`` where a name is no identifier."""
    return tuple(mtf.Dimension(name, extent) for name, extent in (*named, *extents.items()))


def concat(
    xs: Sequence[Any],
    mesh: LayerMesh,
    dims: Sequence[Any],
    *,
    along: Any,
    orders: Sequence[Sequence[int]] = (),
) -> Any:
    """Return tensors joined along a dim, with dims `dims` on a mesh; each device gets what its part needs.

    The tensors may lie on any meshes; their other extents are those of `dims`. orders: where a tensor's dims come in
    another order, which of `dims` each of them is. Raises ProgramError where they
    do not add up to `along`.
    """
    position = list(dims).index(along)
    num_others = along.size and _size(dims) // along.size
    lengths = [x.shape.size // num_others for x in xs]
    if sum(lengths) != along.size or any(x.shape.size % num_others for x in xs):
        raise not_joined(mesh.layer, lengths, along)
    inputs = []
    for i, (x, length) in enumerate(zip(xs, lengths, strict=True)):
        own = [*dims[:position], mtf.Dimension(f"{along.name}_{i}", length), *dims[position + 1 :]]
        order = orders[i] if orders else ()
        if order:
            x = arrange(reshard(x, mesh, [own[place] for place in order]), own)
        sizes = [dim.size for dim in own]
        longer = [dim for dim in x.shape.dims if dim.size > 1]
        if x.shape.to_integer_list != sizes and [dim.size for dim in longer] == sizes:
            x = arrange(x, longer)
        # A tensor that comes in another shape is brought to this mesh first.
        inputs.append(x if x.shape.to_integer_list == sizes else reshard(x, mesh, own))
    return _Concat(inputs, mesh, dims, position).outputs[0]


def _size(dims: Sequence[Any]) -> int:
    return int(mtf.Shape(list(dims)).size)


class _Concat(mtf.Operation):
    def __init__(self, xs: Sequence[Any], mesh: LayerMesh, dims: Sequence[Any], position: int) -> None:
        super().__init__(list(xs), mesh=mesh, name=f"{mesh.name}/concat")
        self._position = position
        self._outputs = [mtf.Tensor(self, mtf.Shape(list(dims)), xs[0].dtype)]
        target = even_layout(mesh, [PlainDim(dim.name, dim.size) for dim in dims])
        self._hops = []
        offset = 0
        for x in xs:
            length = x.shape.to_integer_list[position]
            self._hops.append(ReshardStep(shifted(layout_of_tensor(x), target.shape, position, offset), target))
            offset += length

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return each input's piece of the output's gradient."""
        return [
            Reshard(grad_ys[0], [hop.adjoint], mesh=x.mesh, shape=x.shape, name="concat_adjoint").outputs[0]
            for x, hop in zip(self.inputs, self._hops, strict=True)
        ]

    def lower(self, lowering: Any) -> None:
        """Bring each input's share to the devices that need it, then lay the shares end to end."""
        implementation = lowering.mesh_impl(self)
        shares: list[list[Any]] = [[] for _ in self.mesh.device_names]
        for x, hop in zip(self.inputs, self._hops, strict=True):
            clipped = hop.clipped(self._position)
            results = run_step(
                lowering.tensors[x].to_laid_out_tensor().tensor_list,
                clipped,
                source_names=x.mesh.device_names,
                target_names=self.mesh.device_names,
                fill=0.0,
                traffic=implementation.traffic.coming_from(x.mesh.layer),
            )
            for share, box, result in zip(shares, clipped.target.boxes, results, strict=True):
                if 0 not in extents(box):
                    share.append(result)
        joined = []
        for share, device in zip(shares, self.mesh.device_names, strict=True):
            with tf.device(device):
                joined.append(share[0] if len(share) == 1 else tf.concat(share, self._position))
        lowering.set_tensor_lowering(self.outputs[0], implementation.LaidOutTensor(joined))


def piece(x: Any, along: str, start: int, size: int) -> Any:
    """Return ``[start, start + size)`` of a dim of x on x's mesh; the dim of the result is not split."""
    position = place_of_piece(x.mesh.layer, x.shape.dims, along, start, size)
    own = list(x.shape.dims)
    own[position] = mtf.Dimension(f"{along}[{start}:{start + size}]", size)
    source = layout_of_tensor(x)
    target = even_layout(x.mesh, [PlainDim(dim.name, dim.size) for dim in own])
    hop = ReshardStep(source, shifted(target, source.shape, position, start))
    return Reshard(x, [hop], mesh=x.mesh, shape=own, name=f"{x.mesh.name}/piece").outputs[0]


def padded(
    x: Any,
    mesh: LayerMesh,
    dims: Sequence[Any],
    before: Sequence[int],
    shape: Sequence[int],
    order: Sequence[int] = (),
) -> Any:
    """Return x in the midst of zeros on a mesh.

    Args:
        x: A tensor on any mesh.
        mesh: That of the result.
        dims: Of the result.
        before: For each of `dims`, the number of zeros before x.
        shape: For each of `dims`, the extent of x.
        order: Where the dims of x come in another order, which of `dims` each of them is.
    """
    own = [
        dim if dim.size == extent else mtf.Dimension(f"{dim.name}_inside", extent)
        for dim, extent in zip(dims, shape, strict=True)
    ]
    if order:
        x = arrange(reshard(x, mesh, [own[place] for place in order]), own)
    elif x.shape.to_integer_list != list(shape):
        x = reshard(x, mesh, own)
    target = even_layout(mesh, [PlainDim(dim.name, dim.size) for dim in dims])
    source = layout_of_tensor(x)
    for position, offset in enumerate(before):
        source = shifted(source, target.shape, position, offset)
    return Reshard(x, [ReshardStep(source, target)], mesh=mesh, shape=list(dims), name=f"{mesh.name}/padded").outputs[0]
