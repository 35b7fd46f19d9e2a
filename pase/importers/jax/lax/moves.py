"""What moves data alone: views, pieces, concatenations, padding, positions."""

from pase.importers.ir import Broadcast, Concat, Generic, Identity, Pad, Reshape, Slice, Transpose
from pase.importers.jax.lax.call import Call, Step, Translation, cut, generic, step


def reshape(call: Call) -> list[Step]:
    """Return the same elements in another shape."""
    return step(call, Reshape(), call.inputs[0])


def transpose(call: Call) -> list[Step]:
    """Return the dims in another order."""
    return step(call, Transpose(order=tuple(int(i) for i in call.params["permutation"])), call.inputs[0])


def broadcast(call: Call) -> list[Step]:
    """Return a tensor repeated to a shape; one that is repeated nowhere is a reshape."""
    x, result = call.inputs[0], call.results[0]
    if _size(x.shape) == _size(result.shape):
        return step(call, Reshape(), x)
    return step(call, Broadcast(places=tuple(int(i) for i in call.params["broadcast_dimensions"])), x)


def slice_(call: Call) -> list[Step]:
    """Return a box of a tensor."""
    return cut(call, call.inputs[0], _whole(call.params["start_indices"]), _whole(call.params["strides"] or ()) or None)


def split(call: Call) -> list[Step]:
    """Return pieces that make up a tensor."""
    x, axis = call.inputs[0], int(call.params["axis"])
    steps, at = [], 0
    for result in call.results:
        starts = tuple(at if i == axis else 0 for i in range(len(x.shape)))
        op = Slice(starts=starts, steps=(1,) * len(x.shape))
        steps.append(Step(op=op, inputs=(x.name,), outputs=(result,)))
        at += result.shape[axis]
    return steps


def dynamic_slice(call: Call) -> list[Step]:
    """Return a box of a tensor; one that begins where the data says can be split along the dims that it has whole."""
    x, result = call.inputs[0], call.results[0]
    whole = [i for i, (old, new) in enumerate(zip(x.shape, result.shape, strict=True)) if old == new]
    starts = []
    for i in range(len(x.shape)):
        start = call.integers(1 + i) if i not in whole else (0,)
        if start is None:
            return generic(call, [(i, i) for i in whole])
        # A box that would reach beyond the tensor is moved back into it.
        starts.append(min(max(start[0], 0), x.shape[i] - result.shape[i]))
    return cut(call, x, starts)


def update_slice(call: Call) -> list[Step]:
    """Return a tensor with a box of it replaced: it can be split along the dims that the box has whole."""
    x, update = call.inputs[:2]
    whole = [(i, i) for i, (old, new) in enumerate(zip(x.shape, update.shape, strict=True)) if old == new]
    return generic(call, whole)


def concatenate(call: Call) -> list[Step]:
    """Return tensors end to end; those without elements are left out."""
    tensors = [value for value in call.inputs if _size(value.shape)] or list(call.inputs[:1])
    if len(tensors) == 1:
        return step(call, Identity(), *tensors)
    return step(call, Concat(dim=int(call.params["dimension"])), *tensors)


def stack(call: Call) -> list[Step]:
    """Return tensors side by side along a new dim."""
    axis, shape = int(call.params["axis"]), call.results[0].shape
    steps: list[Step] = []
    parts = []
    for i, value in enumerate(call.inputs):
        part = call.inner(str(i), [1 if j == axis else extent for j, extent in enumerate(shape)])
        steps.append(Step(op=Reshape(), inputs=(value.name,), outputs=(part,)))
        parts.append(part)
    return [*steps, *step(call, Concat(dim=axis) if len(parts) > 1 else Identity(), *parts)]


def unstack(call: Call) -> list[Step]:
    """Return the pieces of one element each along a dim, without that dim."""
    x, axis = call.inputs[0], int(call.params["axis"])
    box = [1 if i == axis else extent for i, extent in enumerate(x.shape)]
    steps = []
    for at, result in enumerate(call.results):
        piece = call.inner(str(at), box)
        op = Slice(starts=tuple(at if i == axis else 0 for i in range(len(box))), steps=(1,) * len(box))
        steps.append(Step(op=op, inputs=(x.name,), outputs=(piece,)))
        steps.append(Step(op=Reshape(), inputs=(piece.name,), outputs=(result,)))
    return steps


def tile(call: Call) -> list[Step]:
    """Return a tensor laid end to end with itself: each dim is repeated as a whole."""
    x, repeats = call.inputs[0], _whole(call.params["reps"])
    if len(repeats) != len(x.shape):
        return generic(call, ())
    apart = call.inner("apart", [extent for own in x.shape for extent in (1, own)])
    wide = call.inner("wide", [extent for pair in zip(repeats, x.shape, strict=True) for extent in pair])
    return [
        Step(op=Reshape(), inputs=(x.name,), outputs=(apart,)),
        Step(op=Broadcast(places=tuple(range(len(wide.shape)))), inputs=(apart.name,), outputs=(wide,)),
        *step(call, Reshape(), wide),
    ]


def pad(call: Call) -> list[Step]:
    """Return a tensor with values around it, or, where all that is asked for is negative, a box of it.

    Where it is asked for values between the elements, it can be split along the dims that stay as they are.
    """
    x = call.inputs[0]
    config = [(int(low), int(high), int(inner)) for low, high, inner in call.params["padding_config"]]
    kept = [(i, i) for i, one in enumerate(config) if one == (0, 0, 0)]
    if any(inner for *_, inner in config):
        return generic(call, kept)
    if all(low >= 0 and high >= 0 for low, high, _ in config):
        return step(call, Pad(before=tuple(low for low, *_ in config)), x)
    if all(low <= 0 and high <= 0 for low, high, _ in config):
        return cut(call, x, [-low for low, *_ in config])
    return generic(call, kept)


def positions(call: Call) -> list[Step]:
    """Return numbers that no input tells."""
    return step(call, Generic(is_index=not call.results[0].is_float), *call.inputs)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _whole(numbers: object) -> tuple[int, ...]:
    assert isinstance(numbers, list | tuple)
    return tuple(int(number) for number in numbers)


MOVES: dict[str, Translation] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), reshape),
    "transpose": transpose,
    "broadcast_in_dim": broadcast,
    "slice": slice_,
    "split": split,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": update_slice,
    "concatenate": concatenate,
    "pad": pad,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    **dict.fromkeys(("iota", "zeros_like", "empty"), positions),
}
