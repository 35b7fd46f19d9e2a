"""What is said of dims, and data that are moved alone: tensors end to end, a piece of one, zeros around it."""

from collections.abc import Sequence
from typing import Any

from pase.sharding.boxes import extents
from pase.sharding.layouts import PlainDim, shifted
from pase.sharding.named_dims import not_joined, place_of_piece
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.operations import Reshard
from pase.targets.mesh_tensorflow.primitives.parts import run_step
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange
from pase.targets.mesh_tensorflow.runtime.reshard import even_layout, layout_of_tensor, reshard


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


def padded(x: Any, mesh: LayerMesh, dims: Sequence[Any], before: Sequence[int], shape: Sequence[int]) -> Any:
    """Return x, of a shape, in the midst of zeros on a mesh, with dims `dims`; before: zeros before it in each dim."""
    if x.shape.to_integer_list != list(shape):
        own = [
            dim if dim.size == extent else mtf.Dimension(f"{dim.name}_inside", extent)
            for dim, extent in zip(dims, shape, strict=True)
        ]
        x = reshard(x, mesh, own)
    target = even_layout(mesh, [PlainDim(dim.name, dim.size) for dim in dims])
    source = layout_of_tensor(x)
    for position, offset in enumerate(before):
        source = shifted(source, target.shape, position, offset)
    return Reshard(x, [ReshardStep(source, target)], mesh=mesh, shape=list(dims), name=f"{mesh.name}/padded").outputs[0]
