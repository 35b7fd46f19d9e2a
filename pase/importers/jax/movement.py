"""What moves data alone: views, pieces, concatenations, padding, positions, look-ups by whole numbers."""

from itertools import pairwise
from math import prod
from typing import Any

from pase.importers.ir import Broadcast, Generic, Lookup, Pad, Reshape, Value
from pase.importers.jax.call import JaxCall, Translation, whole


def broadcast(call: JaxCall) -> None:
    """Write a tensor repeated to a shape; one that is repeated nowhere is a reshape."""
    is_same = prod(call.x.shape) == prod(call.result.shape)
    call.give(Reshape() if is_same else Broadcast(places=call.numbers("broadcast_dimensions")), call.x)


def dynamic_slice(call: JaxCall) -> None:
    """Write a box of a tensor; one that begins where the data says can be split along the dims that it has whole."""
    x, out = call.x.shape, call.result.shape
    starts = [(0,) if x[i] == out[i] else call.integers(1 + i) for i in range(len(x))]
    if None in starts:
        call.opaque(passes=_alike(call.x, call.result))
        return
    # A box that would reach beyond the tensor is moved back into it.
    begin = [min(max(start[0], 0), a - b) for start, a, b in zip(starts, x, out, strict=True) if start is not None]
    call.box(call.x, begin, out, out=call.result)


def _alike(x: Value, y: Value) -> list[tuple[int, int]]:
    """Return the dims that two tensors have of one extent."""
    return [(i, i) for i, (old, new) in enumerate(zip(x.shape, y.shape, strict=True)) if old == new]


def tile(call: JaxCall) -> None:
    """Write a tensor laid end to end with itself: each dim is repeated as a whole."""
    repeats = call.numbers("reps")
    if len(repeats) != len(call.x.shape):
        call.opaque(passes=())
    else:
        call.repeat(call.x, repeats, out=call.result)


def pad(call: JaxCall) -> None:
    """Write a tensor with values around it, or, where all that is asked for is negative, a box of it.

    Where it is asked for values between the elements, it can be split along the dims that stay as they are.
    """
    config = [whole(one) for one in call.params["padding_config"]]
    is_within = any(inner for *_, inner in config)
    if not is_within and all(low >= 0 and high >= 0 for low, high, _ in config):
        call.give(Pad(before=tuple(low for low, *_ in config)), call.x)
    elif not is_within and all(low <= 0 and high <= 0 for low, high, _ in config):
        call.box(call.x, [-low for low, *_ in config], call.result.shape, out=call.result)
    else:
        call.opaque(passes=[(i, i) for i, one in enumerate(config) if one == (0, 0, 0)])


def concatenate(call: JaxCall) -> None:
    """Write tensors end to end; those without elements are left out."""
    full = [value for value in call.inputs if 0 not in value.shape]
    call.concat(full or call.inputs[:1], int(call.params["dimension"]), out=call.result)


def positions(call: JaxCall) -> None:
    """Write numbers that no input tells."""
    call.give(Generic(is_index=not call.result.is_float), *call.inputs)


# -- look-ups


def gather(call: JaxCall) -> None:
    """Write rows of a table by whole numbers along one dim; a piece where the numbers are known and run up by one.

    Of any other, the dims that are read whole pass through.
    """
    spec = call.params["dimension_numbers"]
    axes, sizes = whole(spec.start_index_map), call.numbers("slice_sizes")
    if _is_row(call, spec, axes, sizes):
        if not _piece(call, spec, axes[0]):
            _rows(call, spec, axes[0])
    elif not _of_rows(call, spec, axes) and not _of_every_row(call, spec, axes):
        gone = {*spec.collapsed_slice_dims, *spec.operand_batching_dims}
        kept = [i for i in range(len(call.x.shape)) if i not in gone]
        passes = [
            (i, int(place)) for i, place in zip(kept, spec.offset_dims, strict=True) if sizes[i] == call.x.shape[i]
        ]
        # Batch dims stand among those of the indices, which are the result's dims that are no offsets.
        others = [i for i in range(len(call.result.shape)) if i not in spec.offset_dims]
        batch = zip(spec.operand_batching_dims, spec.start_indices_batching_dims, strict=True)
        call.opaque(passes=sorted([*passes, *((int(dim), others[int(place)]) for dim, place in batch)]))


def scatter(call: JaxCall) -> None:
    """Write a tensor with some of its elements replaced or added to: dims that the updates have whole pass through."""
    x, _, updates = call.inputs[:3]
    spec = call.params["dimension_numbers"]
    gone = {*spec.inserted_window_dims, *spec.operand_batching_dims}
    kept = zip((i for i in range(len(x.shape)) if i not in gone), spec.update_window_dims, strict=True)
    moved = spec.scatter_dims_to_operand_dims
    call.opaque(passes=[(i, i) for i, place in kept if updates.shape[place] == x.shape[i] and i not in moved])


def _is_row(call: JaxCall, spec: Any, axes: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether each index reads one element along an axis and everything along the others."""
    if len(axes) != 1 or spec.operand_batching_dims or tuple(spec.collapsed_slice_dims) != axes:
        return False
    return all(size == (1 if i in axes else call.x.shape[i]) for i, size in enumerate(sizes))


def _piece(call: JaxCall, spec: Any, axis: int) -> bool:
    """Write the piece that known indices read; False where they are not known, or are none."""
    table, indices = call.inputs[:2]
    found = call.integers(1)
    if not found or any(b - a != 1 for a, b in pairwise(found)) or found[0] < 0:
        return False
    if found[-1] >= table.shape[axis] or len(indices.shape) > 2:
        return False
    piece = call.cut(table, axis, found[0], len(found))
    if len(indices.shape) == 1:
        call.reshape(piece, out=call.result)
        return True
    order = [axis] * len(piece.shape)
    for dim, place in zip((i for i in range(len(order)) if i != axis), spec.offset_dims, strict=True):
        order[int(place)] = dim
    call.transpose(piece, order, out=call.result)
    return True


def _rows(call: JaxCall, spec: Any, axis: int) -> None:
    table, indices = call.inputs[:2]
    count = len(indices.shape) - 1
    rows = call.transpose(table, (axis, *(i for i in range(len(table.shape)) if i != axis)))
    places = call.reshape(indices, indices.shape[:-1])
    found = call.add(Lookup(), rows, places, shape=(*places.shape, *rows.shape[1:]))
    offsets, lead = whole(spec.offset_dims), iter(range(count))
    order = [count + offsets.index(i) if i in offsets else next(lead) for i in range(len(call.result.shape))]
    call.transpose(found, order, out=call.result)


def _of_rows(call: JaxCall, spec: Any, axes: tuple[int, ...]) -> bool:
    """Write elements along one axis, at places that the other dims have each its own; False where it is none of that.

    `jnp.take_along_axis` is that, and so are cross-entropies with the numbers of classes.
    """
    table, indices = call.inputs[:2]
    if len(axes) != 1 or tuple(spec.collapsed_slice_dims) != axes or len(spec.offset_dims):
        return False
    (axis,) = axes
    others = tuple(i for i in range(len(table.shape)) if i != axis)
    if tuple(spec.operand_batching_dims) != others:
        return False
    places = whole(spec.start_indices_batching_dims)
    count = prod(call.result.shape) // max(1, prod(table.shape[i] for i in others))
    if places not in (others, tuple(range(len(others)))) or (count > 1 and places != others):
        return False
    box = (*table.shape[:axis], count, *table.shape[axis + 1 :])
    taken = call.gather(table, call.reshape(indices, box), axis)
    call.reshape(taken, out=call.result)
    return True


def _of_every_row(call: JaxCall, spec: Any, axes: tuple[int, ...]) -> bool:
    """Write an element of each row of a table, ``x[arange(n), places]``; False where it is none of that."""
    table, indices = call.inputs[:2]
    joined = call.writer.joined.get(indices.name, ())
    is_plain = axes == tuple(spec.collapsed_slice_dims) == (0, 1) and not spec.operand_batching_dims
    if not is_plain or len(table.shape) != 2 or len(joined) != 2:
        return False
    (_, rows), (places, _) = joined
    count = table.shape[0]
    if rows is None or places.shape != (count, 1) or rows.reshape(-1).tolist() != list(range(count)):
        return False
    taken = call.gather(table, places, 1)
    call.reshape(taken, out=call.result)
    return True


MOVEMENT: dict[str, Translation] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), lambda call: call.reshape(call.x, out=call.result)),
    "transpose": lambda call: call.transpose(call.x, call.numbers("permutation"), out=call.result),
    "broadcast_in_dim": broadcast,
    "slice": lambda call: call.box(
        call.x, call.numbers("start_indices"), call.result.shape, call.numbers("strides"), out=call.result
    ),
    **dict.fromkeys(("split", "unstack"), lambda call: call.split(call.x, int(call.params["axis"]))),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": lambda call: call.opaque(passes=_alike(call.x, call.inputs[1])),
    "concatenate": concatenate,
    "pad": pad,
    "stack": lambda call: call.stack(call.inputs, int(call.params["axis"]), out=call.result),
    "tile": tile,
    **dict.fromkeys(("iota", "zeros_like", "empty"), positions),
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter-sub", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), scatter),
    **dict.fromkeys(("scatter-min", "scatter_min", "scatter-max", "scatter_max", "scatter_apply"), scatter),
}
"""By the primitive's name."""
