"""Moves along dims of which every device holds all points: nothing goes from device to device.

What takes the place of such a dim may be split: each device keeps its part, and what the others keep of it comes back
as a part of a sum.
"""

from collections.abc import Sequence
from typing import Any

from pase.sharding.named_dims import check_cut, not_joined, place_along
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise, begins
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange


def cut(x: Any, along: Any, part: Any, *, start: int = 0, step: int = 1) -> Any:
    """Return each `step`-th point of x along a dim, from `start`, as another dim."""
    place = _place(x, along)
    last = start + (part.size - 1) * step + 1
    check_cut(x.mesh.layer, along, start, step, last)
    index = (slice(None),) * place + (slice(start, last, step),)
    return _held(x, lambda local: local[index], [part if dim == along else dim for dim in x.shape.dims], [part], "cut")


def end_to_end(xs: Sequence[Any], dims: Sequence[Any], along: Any) -> Any:
    """Return tensors end to end as the dim `along`; dims: of each, the one that is its part."""
    if sum(dim.size for dim in dims) != along.size or len(xs) != len(dims):
        raise not_joined(xs[0].mesh.layer, (dim.size for dim in dims), along)
    place = _place(xs[0], dims[0])
    rest = [dim for dim in xs[0].shape.dims if dim != dims[0]]
    xs = [arrange(x, [*rest[:place], dim, *rest[place:]]) for x, dim in zip(xs, dims, strict=True)]
    shape = [*rest[:place], along, *rest[place:]]
    begin, size = _part(xs[0], along)

    def joined(first: int, *local: Any) -> Any:
        whole = tf.concat(local, place)
        return whole[(slice(None),) * place + (slice(first, first + size),)]

    return Shardwise(joined, xs, shape=shape, name="join", per_position=lambda: begin, is_move=True).outputs[0]


def view(x: Any, old: Sequence[Any], new: Sequence[Any]) -> Any:
    """Return x with dims `old`, row-major, seen as the dims `new`."""
    rest = [dim for dim in x.shape.dims if dim not in old]
    for dim in old:
        _place(x, dim)
    x = arrange(x, [*rest, *old])
    return _held(
        x,
        lambda local: tf.reshape(local, [*local.shape.as_list()[: len(rest)], *(d.size for d in new)]),
        [*rest, *new],
        new,
        "view",
    )


def select_rows(table: Any, places: Any, along: Any) -> Any:
    """Return rows of a table along a dim, by numbers that have no gradient: dims of these, then the other ones."""
    rest = [dim for dim in table.shape.dims if dim != along]
    _place(table, along)
    table = arrange(table, [along, *rest])
    return Shardwise(
        lambda local, places: tf.gather(local, tf.cast(tf.stop_gradient(places), tf.int32)),
        [table, places],
        shape=[*places.shape.dims, *rest],
        name="rows",
        is_move=True,
    ).outputs[0]


def _held(x: Any, function: Any, shape: Sequence[Any], new: Sequence[Any], name: str) -> Any:
    """Return a function of what each device holds, of which it keeps its part of the new dims."""
    parts = [_part(x, dim) for dim in new]
    assert parts, "a dim becomes one dim at least"
    places = [list(shape).index(dim) for dim in new]

    def compute(first: tuple[int, ...], local: Any) -> Any:
        index = [slice(None)] * len(shape)
        for place, begin, (_, size) in zip(places, first, parts, strict=True):
            index[place] = slice(begin, begin + size)
        return function(local)[tuple(index)]

    return Shardwise(
        compute,
        [x],
        shape=shape,
        name=name,
        per_position=lambda: list(zip(*(begin for begin, _ in parts), strict=True)),
        is_move=True,
    ).outputs[0]


def _part(x: Any, dim: Any) -> tuple[list[int], int]:
    """Return where each device's part of a dim begins, and how long it is."""
    return begins(x.mesh, dim), dim.size // x.mesh.devices.size(dim.name)


def _place(x: Any, dim: Any) -> int:
    """Return which dim of x one is, which must be whole."""
    return place_along(x.mesh.layer, x.shape.dims, x.mesh.devices, dim)
