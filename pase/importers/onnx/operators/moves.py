"""What moves elements and computes nothing: shapes, orders, pieces, repetition, padding."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.importers.ir import Broadcast, Concat, Generic, Identity, Pad, Reshape, Slice, Step, Transpose, Value
from pase.importers.onnx.folding import Folding, clamped, slices_of
from pase.importers.onnx.operators.call import Call, Translation, generic, inner, node, step


def reshape(call: Call) -> list[Step]:
    """Return the same elements in another shape."""
    return step(call, Reshape(), call.x)


def transpose(call: Call) -> list[Step]:
    """Return the dims in another order, backwards where none is told."""
    rank = len(call.x.shape)
    order = call.wholes("perm") or tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise ValueError(f"perm is {order}; expected an order of {rank} dims")
    return step(call, Transpose(order=order), call.x)


def expand(call: Call) -> list[Step]:
    """Return a tensor repeated along dims of one element."""
    rank = len(call.out.shape)
    return step(call, Broadcast(places=tuple(range(rank - len(call.x.shape), rank))), call.x)


def tile(call: Call) -> list[Step]:
    """Return a tensor laid end to end with itself."""
    x, out = call.x, call.out
    if 0 in x.shape:
        return generic(call, passes=())
    repeats = [after // before for before, after in zip(x.shape, out.shape, strict=True)]
    apart = tuple(extent for before in x.shape for extent in (1, before))
    wide = tuple(extent for count, before in zip(repeats, x.shape, strict=True) for extent in (count, before))
    single, many = inner(call, "apart", apart), inner(call, "wide", wide)
    places = tuple(range(len(apart)))
    return [
        node(Reshape(), (x,), single),
        node(Broadcast(places=places), (single,), many),
        *step(call, Reshape(), many),
    ]


def slice_(call: Call) -> list[Step]:
    """Return a box of a tensor; one that is read backwards passes the other dims alone."""
    x, rank = call.x, len(call.x.shape)
    folding = Folding(
        operator="Slice", inputs=call.constants, attributes=call.attributes, num_outputs=1, opset=call.opset
    )
    changed = tuple((i, i) for i in range(rank) if x.shape[i] == call.out.shape[i])
    try:
        starts, ends, axes, steps = slices_of(folding, rank)
    except ValueError:
        return generic(call, passes=changed)
    first, by = [0] * rank, [1] * rank
    for start, end, axis, each in zip(starts, ends, axes, steps, strict=True):
        if each < 0:
            return [node(Generic(passes=tuple(p for p in changed if p[0] not in axes)), (x,), call.out)]
        first[axis], _ = clamped(start, end, each, x.shape[axis])
        by[axis] = each
    return step(call, Slice(starts=tuple(first), steps=tuple(by)), x)


def split(call: Call) -> list[Step]:
    """Return pieces that make up a tensor; each is one node."""
    x, axis = call.x, call.axis(0)
    found, at = [], 0
    for result in call.results:
        if result is None:
            raise ValueError("a piece of a split has no name, so that its extent is not known")
        starts = tuple(at if i == axis else 0 for i in range(len(x.shape)))
        found.append(node(Slice(starts=starts, steps=(1,) * len(starts)), (x,), result))
        at += result.shape[axis]
    return found


def concat(call: Call) -> list[Step]:
    """Return tensors end to end; those without elements are left out."""
    axis = call.axis(1)
    values = [value for value in call.given if value.shape[axis]] or list(call.given[:1])
    if len(values) == 1:
        return step(call, Identity(), *values)
    return step(call, Concat(dim=axis), *values)


def pad(call: Call) -> list[Step]:
    """Return a tensor with values around it, or without some of its own."""
    x, rank = call.x, len(call.x.shape)
    given = call.wholes("pads", 1)
    if given is None:
        return generic(call, passes=tuple((i, i) for i in range(rank) if x.shape[i] == call.out.shape[i]))
    before = [0] * rank
    axes = call.constant(3)
    places = range(rank) if axes is None else [int(axis) % rank for axis in axes.ravel()]
    for i, dim in enumerate(places):
        before[dim] = given[i]
    return step(call, Pad(before=tuple(before)), x)


def depth_to_space(call: Call) -> list[Step]:
    """Return channels laid out as blocks of the spatial dims."""
    b, c, h, w = call.x.shape
    size = call.whole("blocksize", 1)
    if call.text("mode", "DCR") == "DCR":
        apart, order = (b, size, size, c // size**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        apart, order = (b, c // size**2, size, size, h, w), (0, 1, 4, 2, 5, 3)
    return _rearranged(call, apart, order)


def space_to_depth(call: Call) -> list[Step]:
    """Return blocks of the spatial dims laid out as channels."""
    b, c, h, w = call.x.shape
    size = call.whole("blocksize", 1)
    return _rearranged(call, (b, c, h // size, size, w // size, size), (0, 3, 5, 1, 2, 4))


def _rearranged(call: Call, apart: tuple[int, ...], order: tuple[int, ...]) -> list[Step]:
    """Return the input seen in a shape, its dims in another order, in the shape of the output."""
    seen, turned = inner(call, "apart", apart), inner(call, "turned", tuple(apart[i] for i in order))
    return [
        node(Reshape(), (call.x,), seen),
        node(Transpose(order=order), (seen,), turned),
        *step(call, Reshape(), turned),
    ]


def resize(call: Call) -> list[Step]:
    """Return a tensor in other extents; the dims that keep theirs pass."""
    x: Value = call.x
    passes = tuple((i, i) for i, (a, b) in enumerate(zip(x.shape, call.out.shape, strict=True)) if a == b)
    flop = 1.0 if "nearest" in call.text("mode", "nearest") else 2.0 ** (len(x.shape) - len(passes) + 1)
    return [node(Generic(passes=passes, flop_per_point=flop), (x,), call.out)]


MOVES: Mapping[str, Translation] = MappingProxyType(
    {
        **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Flatten"), reshape),
        "Transpose": transpose,
        "Expand": expand,
        "Tile": tile,
        "Slice": slice_,
        "Split": split,
        "Concat": concat,
        "Pad": pad,
        "DepthToSpace": depth_to_space,
        "SpaceToDepth": space_to_depth,
        **dict.fromkeys(("Resize", "Upsample"), resize),
    }
)
"""By the operator's name."""
