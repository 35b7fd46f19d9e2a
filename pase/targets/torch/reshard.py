"""`reshard`: a tensor taken from one layer's mesh to another's; `fan_out`: a tensor for several readers.

The gradient of a `reshard` is the adjoint movement. What a fan-out, or a weight that several layers share, hands to its
readers has one sum of its gradient, to which readers may leave parts of theirs (`join_sums`).
"""

from collections.abc import Sequence
from dataclasses import replace

from pase.sharding.layouts import PlainDim, TensorDim, WindowDim, layout_of
from pase.sharding.reshard import reshard_steps
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, resolved


def reshard(x: Tensor, mesh: LayerMesh, dims: Sequence[Dim | WindowDim], *, fill: float = 0.0) -> Tensor:
    """Return a tensor with other dims on another mesh, a reshape apart at most.

    Args:
        x: the tensor; an input of the model is on no layer's mesh yet.
        mesh: of the layer that reads it.
        dims: of the result; a `window` delivers the points that this rank's windows read, its halo and padding
            included. Its dim in the result holds the parts' points end to end; where the kernel is split too, a dim of
            the kernel's name stands before it.
        fill: the value of the padding.

    Raises:
        ProgramError: sizes differ, or a dim has more parts than points.
    """
    x = resolved(x)
    wanted = [dim if isinstance(dim, WindowDim) else PlainDim(dim.name, dim.size) for dim in dims]
    own = tuple(dim for one in wanted for dim in _result_dims(one, mesh))
    target = layout_of(mesh.devices, wanted, layer=mesh.layer)
    program = mesh.program
    if x.mesh.is_host:
        return Tensor(value=program.take(x, target, own, mesh, fill), mesh=mesh, dims=own, is_index=x.is_index)
    steps = reshard_steps(x.layout, target)
    shape = tuple(map(mesh.part, own))
    value = program.move(x, mesh, steps, made=shape, fill=fill, read=tuple(wanted))
    return Tensor(value=value, mesh=mesh, dims=own, is_index=x.is_index)


def _result_dims(dim: TensorDim, mesh: LayerMesh) -> list[Dim]:
    if isinstance(dim, PlainDim):
        return [Dim(dim.name, dim.extent)]
    parts, kernel_parts = mesh.devices.size(dim.out), mesh.devices.size(dim.kernel)
    # Of a kernel that is split, this rank's part decides.
    kernel = mesh.point.get(dim.kernel, 0)
    reaches = tuple(dim.reach(mesh.devices, {dim.out: number, dim.kernel: kernel}) for number in range(parts))
    points = Dim(dim.out, sum(reaches), reaches if len(set(reaches)) > 1 else ())
    return [points] if kernel_parts == 1 else [Dim(dim.kernel, kernel_parts), points]


def fan_out(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return x for its readers, whose gradients are summed once.

    over: the dims of its mesh that its gradient is summed over: what a reader leaves in as many parts is added first.
    """
    return replace(resolved(x), over=x.mesh.split(dim.name for dim in over), spreads={})
