"""What moves data alone: views, pieces, concatenations, padding, repetition, resampling, rows by whole numbers."""

from collections.abc import Sequence
from typing import Any

from pase.importers.ir import Identity, Lookup, Pad, Reshape, Value
from pase.importers.ir.call import each, table
from pase.importers.ir.shared import concatenate, moved, repeat_each, swapped
from pase.importers.keras.call import KerasCall, UntranslatableError
from pase.importers.keras.products import layout


def reshape(call: KerasCall) -> None:
    """Write the same elements in another shape."""
    call.give(Reshape(), call.x)


# -- layers


def flatten(call: KerasCall) -> None:
    """Write one dim after the batch; channels come last in it whatever the layout."""
    x, rank = call.x, len(call.x.shape)
    if call.operation.data_format == "channels_first" and rank > 2:
        x = call.transpose(x, (0, *range(2, rank), 1))
    call.give(Reshape(), x)


def repeat_vector(call: KerasCall) -> None:
    """Write [b, d] again and again, as [b, n, d]."""
    x = call.x
    call.broadcast(call.reshape(x, (x.shape[0], 1, x.shape[1])), out=call.result)


def crop(call: KerasCall) -> None:
    """Write a box of the spatial dims."""
    _cut(call, [first for first, _ in _pairs(call.operation.cropping)])


def center_crop(call: KerasCall) -> None:
    """Write the box in the middle; a tensor that is smaller is resized."""
    _, spatial = layout(call.operation.data_format, 2)
    spare = [call.x.shape[i] - call.result.shape[i] for i in spatial] if len(call.x.shape) == 4 else [-1]
    if min(spare) < 0:
        resample(call)
    else:
        _cut(call, [extent // 2 for extent in spare])


def _cut(call: KerasCall, starts: Sequence[int]) -> None:
    begin = [0] * len(call.x.shape)
    for place, start in zip(_spatial(call), starts, strict=True):
        begin[place] = start
    call.identity(_box(call, begin, call.result.shape), out=call.result)


def _box(call: KerasCall, starts: Sequence[int], shape: Sequence[int], strides: Sequence[int] = ()) -> Value:
    """Return a box of the first tensor, which is cut along one dim after the other."""
    value, rank = call.x, len(shape)
    for dim, start, size, stride in zip(range(rank), starts, shape, strides or (1,) * rank, strict=True):
        if size != value.shape[dim]:
            value = call.cut(value, dim, start, size, stride=stride)
    return value


def zero_padding(call: KerasCall) -> None:
    """Write zeros around the spatial dims."""
    before = [0] * len(call.x.shape)
    for place, (first, _) in zip(_spatial(call), _pairs(call.operation.padding), strict=True):
        before[place] = first
    call.give(Pad(before=tuple(before)), call.x)


def upsample(call: KerasCall) -> None:
    """Write each point again and again; points in between that are interpolated are resampled."""
    if getattr(call.operation, "interpolation", "nearest") != "nearest":
        resample(call)
        return
    spatial = _spatial(call)
    repeat_each(call, call.x, dict(zip(spatial, each(call.operation.size, len(spatial)), strict=True)))


def resample(call: KerasCall) -> None:
    """Write a tensor of another size whose points are weighted sums of four others; channels and batch pass through."""
    x, out = call.x.shape, call.result.shape
    passes = [(i, i) for i, (a, b) in enumerate(zip(x, out, strict=True)) if a == b]
    call.part("resample").opaque(passes=passes, flop_per_point=7.0)


def _spatial(call: KerasCall) -> tuple[int, ...]:
    if len(call.x.shape) == 3:
        # Layers of one spatial dim have steps before features, save padding that is told otherwise.
        return (2,) if getattr(call.operation, "data_format", None) == "channels_first" else (1,)
    return layout(call.operation.data_format, len(call.x.shape) - 2)[1]


def _pairs(amounts: Any) -> list[tuple[int, int]]:
    """Return (before, after) for each dim; a single pair is that of the only one."""
    pairs = [amounts] if isinstance(amounts[0], int) else amounts
    return [(int(first), int(last)) for first, last in pairs]


MOVEMENT_LAYERS = table(
    (center_crop, "CenterCrop"),
    (lambda call: concatenate(call, call.axis(len(call.result.shape))), "Concatenate"),
    (flatten, "Flatten"),
    (lambda call: call.transpose(call.x, (0, *call.operation.dims), out=call.result), "Permute"),
    (repeat_vector, "RepeatVector"),
    (reshape, "Reshape"),
    (resample, "Resizing"),
    (crop, "Cropping1D Cropping2D Cropping3D"),
    (zero_padding, "ZeroPadding1D ZeroPadding2D ZeroPadding3D"),
    (upsample, "UpSampling1D UpSampling2D UpSampling3D"),
)
"""Layers."""


# -- operations


def transpose(call: KerasCall) -> None:
    """Write the dims in another order: as they are told, backwards, two of them swapped or some in other places."""
    owner, rank = call.operation, len(call.x.shape)
    if call.name == "Swapaxes":
        order = swapped(rank, owner.axis1, owner.axis2)
    elif call.name == "Moveaxis":
        order = moved(rank, owner.source, owner.destination)
    else:
        order = tuple(range(rank)[::-1] if owner.axes is None else (axis % rank for axis in owner.axes))
    call.transpose(call.x, order, out=call.result)


def repeat(call: KerasCall) -> None:
    """Write each element so many times in a row."""
    times = call.operation.repeats
    if not isinstance(times, int):
        raise UntranslatableError
    repeat_each(call, call.x, {call.axis(): times})


def tile(call: KerasCall) -> None:
    """Write a tensor end to end with itself: dims of one element are repeated."""
    out = call.result.shape
    seen = call.reshape(call.x, (1,) * (len(out) - len(call.x.shape)) + call.x.shape)
    if all(a in (1, b) for a, b in zip(seen.shape, out, strict=True)):
        call.broadcast(seen, out=call.result)
    else:
        passes = [(i, i) for i, (a, b) in enumerate(zip(seen.shape, out, strict=True)) if a == b]
        call.opaque(seen, passes=passes, flop_per_point=0.0)


def get_item(call: KerasCall) -> None:
    """Write x[key]: pieces, single elements and new dims; rows where it is indexed by whole numbers alone."""
    x, key = call.x, call.argument(1, "key")
    keys = list(key) if isinstance(key, list | tuple) else [key]
    if len(keys) == 1 and isinstance(keys[0], Value) and not keys[0].is_float and keys[0].dtype != "bool":
        call.give(Lookup(), x, keys[0])
        return
    if any(isinstance(item, Value) for item in keys):
        raise UntranslatableError
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        given = sum(item is not None and item is not Ellipsis for item in keys)
        keys[at : at + 1] = [slice(None)] * (len(x.shape) - given)
    starts, shape, steps = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    for dim, item in enumerate(item for item in keys if item is not None):
        if isinstance(item, slice):
            starts[dim], stop, steps[dim] = item.indices(shape[dim])
            shape[dim] = len(range(starts[dim], stop, steps[dim]))
            if steps[dim] < 0:
                raise UntranslatableError
        else:
            starts[dim], shape[dim] = int(item) % shape[dim], 1
    call.reshape(_box(call, starts, shape, steps), out=call.result)


def slice_operation(call: KerasCall) -> None:
    """Write a box of a tensor whose corner is known."""
    starts = call.argument(1, "start_indices")
    if any(not isinstance(start, int) for start in starts):
        raise UntranslatableError
    call.identity(_box(call, starts, call.result.shape), out=call.result)


def pad(call: KerasCall) -> None:
    """Write a tensor with values around it."""
    width = call.operation.pad_width
    width = width * len(call.x.shape) if len(width) == 1 else width
    call.give(Pad(before=tuple(int(first) for first, _ in width)), call.x)


def take(call: KerasCall) -> None:
    """Write rows by whole numbers along the first dim; along another one, the dims before it pass through."""
    indices = call.tensor(1, "indices")
    if indices.is_float:
        raise UntranslatableError
    axis = call.axis()
    if axis == 0:
        call.give(Lookup(), call.x, indices)
    else:
        call.opaque(passes=[(i, i) for i in range(axis)])


def take_along_axis(call: KerasCall) -> None:
    """Write elements of rows; all other dims have to be of one extent."""
    x, indices, dim = call.tensor(0, "x"), call.tensor(1, "indices"), call.axis()
    if any(i != dim and a != b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True))):
        raise UntranslatableError
    call.gather(x, indices, dim, out=call.result)


def patches(call: KerasCall) -> None:
    """Write pieces of an image that do not overlap, each as one vector; those that do overlap are not known."""
    owner, x, out = call.operation, call.x, call.result
    size = tuple(owner.size)
    is_plain = tuple(each(owner.strides, len(size))) == size and owner.dilation_rate == 1
    if len(x.shape) != 4 or len(size) != 2 or not is_plain or owner.data_format != "channels_last":
        raise UntranslatableError
    (b, _, _, c), (rows, columns) = x.shape, out.shape[1:3]
    if x.shape[1:3] != (rows * size[0], columns * size[1]):
        raise UntranslatableError
    call.rearrange(x, (b, rows, size[0], columns, size[1], c), (0, 1, 3, 2, 4, 5), out=call.result)


MOVEMENT_OPERATIONS = table(
    (reshape, "Reshape Ravel ExpandDims Squeeze View"),
    (lambda call: call.split(call.x, call.axis()), "Split ArraySplit Unstack"),
    (transpose, "Moveaxis Swapaxes Transpose"),
    (lambda call: call.give(Identity(), call.x), "Cast SaturateCast StopGradient Copy ConvertToTensor"),
    (lambda call: call.broadcast(call.x, out=call.result), "BroadcastTo"),
    (lambda call: concatenate(call, call.axis(len(call.result.shape))), "Concatenate"),
    (patches, "ExtractPatches"),
    (get_item, "GetItem"),
    (pad, "Pad"),
    (repeat, "Repeat"),
    (slice_operation, "Slice"),
    (lambda call: call.stack(call.tensors, call.axis(len(call.result.shape)), out=call.result), "Stack"),
    (take, "Take"),
    (take_along_axis, "TakeAlongAxis"),
    (tile, "Tile"),
)
"""Of `keras.ops`."""
