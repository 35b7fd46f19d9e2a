"""`keras.ops` that move data alone: views, pieces, concatenations, rows by whole numbers."""

from pase.importers.ir import Broadcast, Concat, Generic, Identity, Lookup, Pad, Reshape, Transpose
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, Value, generic
from pase.importers.keras.layers.shapes import repeat_each, sliced


def reshape(call: Call) -> None:
    """Write the same elements in another shape."""
    call.emit(Reshape(), call.x)


def transpose(call: Call) -> None:
    """Write the dims in another order."""
    rank = len(call.x.shape)
    axes = call.operation.axes
    order = tuple(range(rank))[::-1] if axes is None else tuple(a % rank for a in axes)
    call.emit(Transpose(order=order), call.x)


def swapaxes(call: Call) -> None:
    """Write a tensor with two dims in each other's place."""
    order = list(range(len(call.x.shape)))
    a, b = call.operation.axis1, call.operation.axis2
    order[a], order[b] = order[b], order[a]
    call.emit(Transpose(order=tuple(order)), call.x)


def moveaxis(call: Call) -> None:
    """Write a tensor with some dims in other places."""
    rank = len(call.x.shape)
    source, target = ([d % rank for d in dims] for dims in (call.operation.source, call.operation.destination))
    order = [d for d in range(rank) if d not in source]
    for place, dim in sorted(zip(target, source, strict=True)):
        order.insert(place, dim)
    call.emit(Transpose(order=tuple(order)), call.x)


def broadcast(call: Call) -> None:
    """Write a tensor repeated along dims of one element."""
    offset = len(call.result.shape) - len(call.x.shape)
    call.emit(Broadcast(places=tuple(range(offset, len(call.result.shape)))), call.x)


def repeat(call: Call) -> None:
    """Write each element so many times in a row."""
    times, axis = call.operation.repeats, call.operation.axis
    if not isinstance(times, int) or axis is None:
        raise UntranslatableError
    repeat_each(call, {axis % len(call.x.shape): times})


def tile(call: Call) -> None:
    """Write a tensor end to end with itself: dims of one element are repeated."""
    out = call.result.shape
    seen = call.reshaped(call.x, ((1,) * (len(out) - len(call.x.shape))) + call.x.shape)
    if any(a not in (1, b) for a, b in zip(seen.shape, out, strict=True)):
        passes = tuple((i, i) for i, (a, b) in enumerate(zip(seen.shape, out, strict=True)) if a == b)
        call.emit(Generic(passes=passes, flop_per_point=0.0), seen)
    else:
        call.emit(Broadcast(places=tuple(range(len(out)))), seen)


def get_item(call: Call) -> None:
    """Write x[key]: pieces, single elements and new dims; rows where it is indexed by whole numbers alone."""
    x, key = call.x, call.argument(1, "key")
    keys = list(key) if isinstance(key, list | tuple) else [key]
    if len(keys) == 1 and isinstance(keys[0], Value) and not keys[0].is_float and keys[0].dtype != "bool":
        call.emit(Lookup(), x, keys[0])
        return
    if any(isinstance(item, Value) for item in keys):
        raise UntranslatableError
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        given = sum(item is not None and item is not Ellipsis for item in keys)
        keys[at : at + 1] = [slice(None)] * (len(x.shape) - given)
    value, dim = x, 0
    for item in keys:
        if item is None:
            continue
        extent = x.shape[dim]
        if isinstance(item, slice):
            start, stop, step = item.indices(extent)
            if step < 0:
                raise UntranslatableError
            size = len(range(start, stop, step))
            if size < extent:
                value = sliced(call, value, dim, start, size, step)
        else:
            value = sliced(call, value, dim, int(item) % extent, 1)
        dim += 1
    call.emit(Reshape(), value)


def slice_operation(call: Call) -> None:
    """Write a box of a tensor whose corner is known."""
    starts = call.argument(1, "start_indices")
    if any(not isinstance(start, int) for start in starts):
        raise UntranslatableError
    value = call.x
    for dim, (start, size) in enumerate(zip(starts, call.result.shape, strict=True)):
        if size != value.shape[dim]:
            value = sliced(call, value, dim, start, size)
    call.emit(Identity(), value)


def split(call: Call) -> None:
    """Write pieces that make up a tensor."""
    dim = call.operation.axis % len(call.x.shape)
    at = 0
    for result in call.results:
        size = 1 if call.kind == "Unstack" else result.shape[dim]
        call.emit(Reshape(), sliced(call, call.x, dim, at, size), out=result)
        at += size


def concatenate(call: Call) -> None:
    """Write tensors end to end; those without elements are left out."""
    dim = call.operation.axis % len(call.result.shape)
    tensors = [value for value in call.tensors if value.shape[dim]]
    call.emit(Concat(dim=dim) if len(tensors) > 1 else Identity(), *tensors)


def stack(call: Call) -> None:
    """Write tensors side by side along a new dim."""
    dim = call.operation.axis % len(call.result.shape)
    parts = [call.reshaped(value, (*value.shape[:dim], 1, *value.shape[dim:])) for value in call.tensors]
    call.emit(Concat(dim=dim) if len(parts) > 1 else Identity(), *parts)


def pad(call: Call) -> None:
    """Write a tensor with values around it."""
    width = call.operation.pad_width
    rank = len(call.x.shape)
    call.emit(Pad(before=tuple(int(first) for first, _ in (width * rank if len(width) == 1 else width))), call.x)


def take(call: Call) -> None:
    """Write rows by whole numbers along the first dim; along another one it is brought to the front."""
    x, indices, axis = call.x, call.argument(1, "indices"), call.operation.axis
    if not isinstance(indices, Value) or axis is None or indices.is_float:
        raise UntranslatableError
    axis %= len(x.shape)
    if axis == 0:
        call.emit(Lookup(), x, indices)
        return
    generic(call, passes=tuple((i, i) for i in range(axis)))


def patches(call: Call) -> None:
    """Write pieces of an image that do not overlap, each as one vector; those that do overlap are not known."""
    owner, x, out = call.operation, call.x, call.result
    size = tuple(owner.size)
    dilation = owner.dilation_rate
    is_plain = tuple(owner.strides) == size if not isinstance(owner.strides, int) else set(size) == {owner.strides}
    if len(x.shape) != 4 or len(size) != 2 or not is_plain or owner.data_format != "channels_last" or dilation != 1:
        raise UntranslatableError
    (b, _, _, c), (rows, columns) = x.shape, out.shape[1:3]
    if x.shape[1:3] != (rows * size[0], columns * size[1]):
        raise UntranslatableError
    apart = call.reshaped(x, (b, rows, size[0], columns, size[1], c))
    call.emit(Reshape(), call.transposed(apart, (0, 1, 3, 2, 4, 5)))


VIEWS: dict[str, Translation] = {
    **dict.fromkeys(("Reshape", "Ravel", "ExpandDims", "Squeeze", "View"), reshape),
    **dict.fromkeys(("Split", "ArraySplit", "Unstack"), split),
    "BroadcastTo": broadcast,
    "Concatenate": concatenate,
    "ExtractPatches": patches,
    "GetItem": get_item,
    "Moveaxis": moveaxis,
    "Pad": pad,
    "Repeat": repeat,
    "Slice": slice_operation,
    "Stack": stack,
    "Swapaxes": swapaxes,
    "Take": take,
    "Tile": tile,
    "Transpose": transpose,
}
"""By the class's name."""
