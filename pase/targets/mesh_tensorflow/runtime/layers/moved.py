"""Data that are moved alone, for the forward pass of imported models: a piece of a tensor, zeros around it, a copy."""

from collections.abc import Sequence
from typing import Any

from pase.errors import RuntimeFailure
from pase.sharding.layouts import PlainDim, layout_of, shifted
from pase.sharding.reshard import ReshardStep
from pase.targets.mesh_tensorflow.runtime.compat import mtf
from pase.targets.mesh_tensorflow.runtime.mesh import LayerMesh
from pase.targets.mesh_tensorflow.runtime.reshard import Transport, layout_of_tensor, reshard


def piece(x: Any, along: str, start: int, size: int) -> Any:
    """Return ``[start, start + size)`` of a dim of x on x's mesh; the dim of the result is not split."""
    names = x.shape.dimension_names
    if along not in names or not 0 <= start < start + size <= x.shape.dims[names.index(along)].size:
        raise RuntimeFailure(
            f"layer {x.mesh.layer!r}: {x.shape.to_string} has no [{start}, {start + size}) of {along}; "
            "correct the piece"
        )
    position = names.index(along)
    own = list(x.shape.dims)
    own[position] = mtf.Dimension(f"{along}[{start}:{start + size}]", size)
    source = layout_of_tensor(x)
    target = layout_of(x.mesh.devices, [PlainDim(dim.name, dim.size) for dim in own], layer=x.mesh.layer)
    hop = ReshardStep(source, shifted(target, source.shape, position, start))
    return Transport(x, [hop], mesh=x.mesh, shape=own, name=f"{x.mesh.name}/piece").outputs[0]


def padded(x: Any, mesh: LayerMesh, dims: Sequence[Any], before: Sequence[int], shape: Sequence[int]) -> Any:
    """Return x, of a shape, in the midst of zeros on a mesh, with dims `dims`; before: zeros before it in each dim."""
    if x.shape.to_integer_list != list(shape):
        own = [mtf.Dimension(f"{dim.name}_inside", extent) for dim, extent in zip(dims, shape, strict=True)]
        x = reshard(x, mesh, own)
    target = layout_of(mesh.devices, [PlainDim(dim.name, dim.size) for dim in dims], layer=mesh.layer)
    source = layout_of_tensor(x)
    for position, offset in enumerate(before):
        source = shifted(source, target.shape, position, offset)
    return Transport(x, [ReshardStep(source, target)], mesh=mesh, shape=list(dims), name=f"{mesh.name}/padded").outputs[
        0
    ]
