"""Gathers and scatters: look-ups of rows, pieces at known places, and what is left of them."""

from itertools import pairwise
from math import prod
from typing import Any

from pase.importers.ir import Gather, Lookup, Reshape, Value
from pase.importers.jax.lax.call import Call, Step, Translation, cut, generic, reshaped, step, transposed


def gather(call: Call) -> list[Step]:
    """Return rows of a table by whole numbers along one dim; a piece where the numbers are known and run up by one.

    Of any other, the dims that are read whole pass through.
    """
    numbers = call.params["dimension_numbers"]
    table = call.inputs[0]
    axes = tuple(int(i) for i in numbers.start_index_map)
    if len(axes) == 1 and not numbers.operand_batching_dims and _is_row(call, numbers, axes[0]):
        return _piece(call, numbers, axes[0]) or _rows(call, numbers, axes[0])
    found = _of_rows(call, numbers, axes) or _of_every_row(call, numbers, axes)
    if found:
        return found
    kept = [
        i
        for i in range(len(table.shape))
        if i not in numbers.collapsed_slice_dims and i not in numbers.operand_batching_dims
    ]
    sizes = call.params["slice_sizes"]
    passes = [
        (dim, int(place))
        for dim, place in zip(kept, numbers.offset_dims, strict=True)
        if int(sizes[dim]) == table.shape[dim]
    ]
    # Batch dims stand among those of the indices, which are the result's dims that are no offsets.
    others = [i for i in range(len(call.results[0].shape)) if i not in numbers.offset_dims]
    for dim, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        passes.append((int(dim), others[int(place)]))
    return generic(call, sorted(passes))


def scatter(call: Call) -> list[Step]:
    """Return a tensor with some of its elements replaced or added to: dims that the updates have whole pass through."""
    x, _, updates = call.inputs[:3]
    numbers = call.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(x.shape)) if i not in gone]
    passes = [
        (dim, dim)
        for dim, place in zip(kept, numbers.update_window_dims, strict=True)
        if updates.shape[place] == x.shape[dim] and dim not in numbers.scatter_dims_to_operand_dims
    ]
    return generic(call, passes)


def _is_row(call: Call, numbers: Any, axis: int) -> bool:
    """Whether each index reads one element along an axis and everything along the others."""
    table = call.inputs[0]
    sizes = call.params["slice_sizes"]
    is_one = int(sizes[axis]) == 1 and tuple(numbers.collapsed_slice_dims) == (axis,)
    return is_one and all(int(sizes[i]) == extent for i, extent in enumerate(table.shape) if i != axis)


def _piece(call: Call, numbers: Any, axis: int) -> list[Step] | None:
    """Return the piece that known indices read; None where they are not known, or are none."""
    table, result = call.inputs[0], call.results[0]
    found = call.integers(1)
    if not found or any(b - a != 1 for a, b in pairwise(found)) or found[0] < 0:
        return None
    if found[-1] >= table.shape[axis] or len(call.inputs[1].shape) > 2:
        return None
    box = tuple(len(found) if i == axis else extent for i, extent in enumerate(table.shape))
    starts = [found[0] if i == axis else 0 for i in range(len(box))]
    piece = call.inner("piece", box, table.dtype)
    (whole,) = cut(call, table, starts)
    steps = [Step(op=whole.op, inputs=whole.inputs, outputs=(piece,))]
    if len(call.inputs[1].shape) == 1:
        return [*steps, *step(call, Reshape(), piece)]
    rest = [i for i in range(len(box)) if i != axis]
    order = [axis] * len(box)
    for dim, place in zip(rest, numbers.offset_dims, strict=True):
        order[int(place)] = dim
    return _ended(steps, *transposed(call, piece, order, "turned"), result)


def _rows(call: Call, numbers: Any, axis: int) -> list[Step]:
    table, indices = call.inputs[:2]
    result = call.results[0]
    rank, count = len(table.shape), len(indices.shape) - 1
    first, rows = transposed(call, table, (axis, *(i for i in range(rank) if i != axis)), "table")
    second, places = reshaped(call, indices, indices.shape[:-1], "places")
    found = call.inner("found", (*places.shape, *rows.shape[1:]), table.dtype)
    steps = [*first, *second, Step(op=Lookup(), inputs=(rows.name, places.name), outputs=(found,))]
    offsets = [int(i) for i in numbers.offset_dims]
    lead = iter(range(count))
    order = [count + offsets.index(i) if i in offsets else next(lead) for i in range(len(result.shape))]
    return _ended(steps, *transposed(call, found, order, "turned"), result)


def _of_rows(call: Call, numbers: Any, axes: tuple[int, ...]) -> list[Step] | None:
    """Return elements along one axis, at places that the other dims have each its own; None where it is none of that.

    `jnp.take_along_axis` is that, and so are cross-entropies with the numbers of classes.
    """
    table, indices = call.inputs[:2]
    (result,) = call.results
    if len(axes) != 1 or tuple(numbers.collapsed_slice_dims) != axes or len(numbers.offset_dims):
        return None
    (axis,) = axes
    others = tuple(i for i in range(len(table.shape)) if i != axis)
    if tuple(numbers.operand_batching_dims) != others:
        return None
    places = tuple(int(i) for i in numbers.start_indices_batching_dims)
    count = prod(result.shape) // max(1, prod(table.shape[i] for i in others))
    if places not in (others, tuple(range(len(others)))) or (count > 1 and places != others):
        return None
    box = tuple(count if i == axis else extent for i, extent in enumerate(table.shape))
    first, at = reshaped(call, indices, box, "places")
    taken = call.inner("taken", box, table.dtype)
    steps = [*first, Step(op=Gather(dim=axis), inputs=(table.name, at.name), outputs=(taken,))]
    return _ended(steps, *reshaped(call, taken, result.shape, "seen"), result)


def _of_every_row(call: Call, numbers: Any, axes: tuple[int, ...]) -> list[Step] | None:
    """Return an element of each row of a table, ``x[arange(n), places]``; None where it is none of that."""
    table, indices = call.inputs[:2]
    (result,) = call.results
    joined = call.joined.get(indices.name, ())
    is_plain = axes == tuple(numbers.collapsed_slice_dims) == (0, 1) and not numbers.operand_batching_dims
    if not is_plain or len(table.shape) != 2 or len(joined) != 2:
        return None
    (_, rows), (places, _) = joined
    count = table.shape[0]
    if rows is None or places.shape != (count, 1) or rows.reshape(-1).tolist() != list(range(count)):
        return None
    taken = call.inner("taken", (count, 1), table.dtype)
    steps = [Step(op=Gather(dim=1), inputs=(table.name, places.name), outputs=(taken,))]
    return _ended(steps, *reshaped(call, taken, result.shape, "seen"), result)


def _ended(steps: list[Step], more: list[Step], last: Value, result: Value) -> list[Step]:
    """Return steps of which the last gives the primitive's result under its own name."""
    assert last.shape == result.shape, f"a gather gives {result.shape}, not {last.shape}"
    *before, end = [*steps, *more]
    return [*before, Step(op=end.op, inputs=end.inputs, outputs=(result,))]


GATHERS: dict[str, Translation] = {
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter-sub", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), scatter),
    **dict.fromkeys(("scatter-min", "scatter_min", "scatter-max", "scatter_max", "scatter_apply"), scatter),
}
