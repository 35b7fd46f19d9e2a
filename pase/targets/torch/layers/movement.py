"""Declarations of dims, and data movement: concatenation, slices, zero padding."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional

from pase.sharding.boxes import extents
from pase.sharding.layouts import (
    Layout,
    PlainDim,
    check_cut,
    layout_of,
    not_joined,
    place_along,
    place_of_piece,
    shifted,
)
from pase.sharding.reshard import ReshardStep
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, local, reshard, resolved


def dims(*named: tuple[str, int], **sizes: int) -> tuple[Dim, ...]:
    """Return dims: ``b, n = dims(b=64, n=10)``, or ``dims(("b", 64))`` where a name is not an identifier."""
    return tuple(Dim(name, size) for name, size in (*named, *sizes.items()))


def concat(
    xs: Sequence[Tensor],
    mesh: LayerMesh,
    dims: Sequence[Dim],
    *,
    along: Dim,
    orders: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Return tensors concatenated along a dim, with dims `dims` on a mesh; each rank receives its part.

    The tensors may be on any meshes; their other extents are those of `dims`. orders: where a tensor's dims are in
    another order, the position of each in `dims`. Raises ProgramError where the extents do not sum to `along`.
    """
    position = list(dims).index(along)
    num_others = along.size and prod(dim.size for dim in dims) // along.size
    lengths = [x.size // num_others for x in xs]
    if sum(lengths) != along.size or any(x.size % num_others for x in xs):
        raise not_joined(mesh.layer, lengths, along)
    target = _layout(mesh, dims)
    parts, offset = [], 0
    for i, (x, length) in enumerate(zip(xs, lengths, strict=True)):
        own = [*dims[:position], Dim(f"{along.name}_{i}", length), *dims[position + 1 :]]
        order = orders[i] if orders else ()
        if order:
            x = arrange(reshard(x, mesh, [own[place] for place in order]), own)
        sizes = [dim.size for dim in own]
        longer = [dim for dim in x.dims if dim.size > 1]
        if not x.mesh.is_host and list(x.shape) != sizes and [dim.size for dim in longer] == sizes:
            x = arrange(x, longer)
        # A tensor of another shape, or an input of the model, is redistributed to this mesh first.
        is_here = list(x.shape) == sizes and not x.mesh.is_host
        x = resolved(x if is_here else reshard(x, mesh, own))
        source = shifted(x.layout, target.shape, position, offset)
        step = ReshardStep(source, target).clipped(position)
        made = extents(step.target.by_device[mesh.program.rank])
        value = mesh.program.move(x, mesh, [step], made=made)
        # A rank without a part of the result may still send, and receives its gradient.
        parts.append(value)
        offset += length
    value = parts[0] if len(parts) == 1 else torch.cat(parts, position)
    return Tensor(value=value, mesh=mesh, dims=tuple(dims), is_index=all(x.is_index for x in xs))


def _layout(mesh: LayerMesh, dims: Sequence[Dim]) -> Layout:
    return layout_of(mesh.devices, [PlainDim(dim.name, dim.size) for dim in dims], layer=mesh.layer)


def piece(x: Tensor, along: str, start: int, size: int) -> Tensor:
    """Return ``[start, start + size)`` of a dim of x on x's mesh; the dim of the result is not split."""
    position = place_of_piece(x.mesh.layer, x.dims, along, start, size)
    x = resolved(x)
    own = list(x.dims)
    own[position] = Dim(f"{along}[{start}:{start + size}]", size)
    target = shifted(_layout(x.mesh, own), x.layout.shape, position, start)
    made = tuple(map(x.mesh.part, own))
    value = x.mesh.program.move(x, x.mesh, [ReshardStep(x.layout, target)], made=made)
    # A single point is passed on within its layer; slices of more are taken by the layer that reads them.
    value.node.meta["is_piece"] = size > 1
    return Tensor(value=value, mesh=x.mesh, dims=tuple(own), is_index=x.is_index)


def padded(
    x: Tensor,
    mesh: LayerMesh,
    dims: Sequence[Dim],
    before: Sequence[int],
    shape: Sequence[int],
    order: Sequence[int] = (),
) -> Tensor:
    """Return x in the midst of zeros on a mesh.

    Args:
        x: A tensor on any mesh.
        mesh: That of the result.
        dims: Of the result.
        before: For each of `dims`, the number of zeros before x.
        shape: For each of `dims`, the extent of x.
        order: Where the dims of x come in another order, which of `dims` each of them is.
    """
    x = resolved(x)
    own = [
        dim if dim.size == extent else Dim(f"{dim.name}_inside", extent)
        for dim, extent in zip(dims, shape, strict=True)
    ]
    if order:
        x = resolved(arrange(reshard(x, mesh, [own[place] for place in order]), own))
    elif x.shape != tuple(shape) or x.mesh.is_host:
        x = reshard(x, mesh, own)
    source, target = x.layout, _layout(mesh, dims)
    for position, offset in enumerate(before):
        source = shifted(source, target.shape, position, offset)
    value = mesh.program.move(x, mesh, [ReshardStep(source, target)], made=tuple(map(mesh.part, dims)))
    return Tensor(value=value, mesh=mesh, dims=tuple(dims), is_index=x.is_index)


# -- operations along dims of which every rank has all points: no communication

# The dim that replaces such a dim may be split: each rank keeps its part, and what the others keep of it comes back
# as a part of a sum.


def cut(x: Tensor, along: Dim, part: Dim, *, start: int = 0, step: int = 1) -> Tensor:
    """Return each `step`-th point of x along a dim, from `start`, as another dim."""
    place = _place(x, along)
    last = start + (part.size - 1) * step + 1
    check_cut(x.mesh.layer, along, start, step, last)
    begin, size = x.mesh.begin(part), x.mesh.part(part)
    first = start + begin * step
    index = (slice(None),) * place + (slice(first, first + (size - 1) * step + 1, step),)
    dims = [part if dim == along else dim for dim in x.dims]
    return local(lambda shard: shard[index], [x], dims, is_linear=True, is_index=x.is_index)


def end_to_end(xs: Sequence[Tensor], dims: Sequence[Dim], along: Dim) -> Tensor:
    """Return tensors end to end as the dim `along`; dims: of each, the one that is its part."""
    if sum(dim.size for dim in dims) != along.size or len(xs) != len(dims):
        raise not_joined(xs[0].mesh.layer, (dim.size for dim in dims), along)
    place = _place(xs[0], dims[0])
    rest = [dim for dim in xs[0].dims if dim != dims[0]]
    xs = [arrange(x, [*rest[:place], dim, *rest[place:]]) for x, dim in zip(xs, dims, strict=True)]
    begin, size = xs[0].mesh.begin(along), xs[0].mesh.part(along)

    def joined(*shards: Any) -> Any:
        whole = torch.cat(shards, place)
        return whole if size == along.size else whole.narrow(place, begin, size)

    shape = [*rest[:place], along, *rest[place:]]
    return local(joined, xs, shape, is_index=all(x.is_index for x in xs))


def view(x: Tensor, old: Sequence[Dim], new: Sequence[Dim]) -> Tensor:
    """Return x with dims `old`, row-major, seen as the dims `new`."""
    rest = [dim for dim in x.dims if dim not in old]
    for dim in old:
        _place(x, dim)
    x = arrange(x, [*rest, *old])
    shape = [*map(x.mesh.part, rest), *(dim.size for dim in new)]
    parts = [(len(rest) + i, x.mesh.begin(dim), x.mesh.part(dim)) for i, dim in enumerate(new)]

    def seen(shard: Any) -> Any:
        shard = shard.reshape(shape)
        for place, begin, size in parts:
            shard = shard if size == shape[place] else shard.narrow(place, begin, size)
        return shard

    return local(seen, [x], [*rest, *new], is_linear=True, is_index=x.is_index)


def select_rows(table: Tensor, places: Tensor, along: Dim) -> Tensor:
    """Return rows of a table along a dim, by numbers that have no gradient: dims of these, then the other ones."""
    rest = [dim for dim in table.dims if dim != along]
    _place(table, along)
    table = arrange(table, [along, *rest])
    shape = tuple(map(table.mesh.part, rest))

    def selected(table: Any, places: Any) -> Any:
        found = functional.embedding(places.long(), table.reshape((along.size, prod(shape))))
        return found.reshape((*own, *shape))

    own = places.shard
    return local(selected, [table, places], [*places.dims, *rest], is_index=table.is_index)


def _place(x: Tensor, dim: Dim) -> int:
    """Return the position of a dim of x, which must be unsplit."""
    return place_along(x.mesh.layer, x.dims, x.mesh.devices, dim)
