"""Moves along dims of which every rank holds all points: nothing goes from rank to rank.

What takes the place of such a dim may be split: each rank keeps its part, and what the others keep of it comes back as
a part of a sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from pase.sharding.named_dims import check_cut, not_joined, place_along
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, Tensor, local


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
    flat = 1
    for extent in shape:
        flat *= extent

    def selected(table: Any, places: Any) -> Any:
        found = functional.embedding(places.long(), table.reshape((along.size, flat)))
        return found.reshape((*own, *shape))

    own = places.shard
    return local(selected, [table, places], [*places.dims, *rest], is_index=table.is_index)


def _place(x: Tensor, dim: Dim) -> int:
    """Return which dim of x one is, which must be whole."""
    return place_along(x.mesh.layer, x.dims, x.mesh.devices, dim)
