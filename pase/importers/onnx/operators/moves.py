"""What moves elements and computes nothing: shapes, orders, pieces, repetition, padding, look-ups."""

from pase.importers.ir import Gather, Generic, Lookup, Normalise, Pad, Slice
from pase.importers.ir.steps import with_extent
from pase.importers.onnx.folding import Folding, clamped, slices_of
from pase.importers.onnx.operators import Array, OnnxCall, table


def transpose(call: OnnxCall) -> None:
    """Write the dims in another order, backwards where none is told."""
    rank = len(call.x.shape)
    order = call.wholes("perm") or tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise ValueError(f"perm is {order}; expected an order of {rank} dims")
    call.transpose(call.x, order, out=call.result)


def tile(call: OnnxCall) -> None:
    """Write a tensor laid end to end with itself."""
    before, after = call.x.shape, call.result.shape
    if 0 in before:
        call.opaque(passes=())
    else:
        call.repeat(call.x, [new // old for old, new in zip(before, after, strict=True)], out=call.result)


def slice_(call: OnnxCall) -> None:
    """Write a box of a tensor; one that is read backwards passes the other dims alone."""
    x, rank = call.x, len(call.x.shape)
    folding = Folding(
        operator="Slice", inputs=call.constants, attributes=call.attributes, num_outputs=1, opset=call.opset
    )
    try:
        starts, ends, axes, steps = slices_of(folding, rank)
    except ValueError:
        return call.opaque(over=())
    if any(each < 0 for each in steps):
        return call.opaque(x, over=axes)
    first, by = [0] * rank, [1] * rank
    for start, end, axis, each in zip(starts, ends, axes, steps, strict=True):
        first[axis], _ = clamped(start, end, each, x.shape[axis])
        by[axis] = each
    call.add(Slice(starts=tuple(first), steps=tuple(by)), x, out=call.result)
    return None


def split(call: OnnxCall) -> None:
    """Write pieces that make up a tensor."""
    axis, at = call.axis(0), 0
    for result in call.outputs:
        if result is None:
            raise ValueError("a piece of a split has no name, so that its extent is not known")
        call.cut(call.x, axis, at, out=result)
        at += result.shape[axis]


def concat(call: OnnxCall) -> None:
    """Write tensors end to end; those without elements are left out."""
    axis = call.axis(1)
    values = [value for value in call.tensors if value.shape[axis]]
    call.concat(values or call.tensors[:1], axis, out=call.result)


def pad(call: OnnxCall) -> None:
    """Write a tensor with values around it, or without some of its own."""
    rank, given, axes = len(call.x.shape), call.wholes("pads", 1), call.constant(3)
    if given is None:
        return call.opaque(over=())
    before = [0] * rank
    for i, dim in enumerate(range(rank) if axes is None else [int(axis) % rank for axis in axes.ravel()]):
        before[dim] = given[i]
    call.add(Pad(before=tuple(before)), call.x, out=call.result)
    return None


def blocks(call: OnnxCall) -> None:
    """Write channels laid out as blocks of the spatial dims, or these as channels."""
    (b, c, h, w), size = call.x.shape, call.whole("blocksize", 1)
    if call.operator == "SpaceToDepth":
        call.rearrange(call.x, (b, c, h // size, size, w // size, size), (0, 3, 5, 1, 2, 4), out=call.result)
    elif call.text("mode", "DCR") == "DCR":
        call.rearrange(call.x, (b, size, size, c // size**2, h, w), (0, 3, 4, 1, 5, 2), out=call.result)
    else:
        call.rearrange(call.x, (b, c // size**2, size, size, h, w), (0, 1, 4, 2, 5, 3), out=call.result)


def resize(call: OnnxCall) -> None:
    """Write a tensor in other extents; the dims that keep theirs pass."""
    changed = sum(a != b for a, b in zip(call.x.shape, call.result.shape, strict=True))
    is_nearest = "nearest" in call.text("mode", "nearest")
    call.opaque(call.x, over=(), flop_per_point=1.0 if is_nearest else 2.0 ** (changed + 1))


# -- look-ups


def gather(call: OnnxCall) -> None:
    """Write rows of a table along a dim; those that constants tell and that lie side by side are a piece."""
    x, indices, found = call.value(0), call.value(1), call.constant(1)
    rank, axis, n = len(x.shape), call.axis(0), len(indices.shape)
    run = _run(found, x.shape[axis]) if found is not None else None
    if run is not None:
        shape = with_extent(x.shape, axis, run[1])
        if shape == call.result.shape:
            call.cut(x, axis, *run, out=call.result)
        else:
            call.reshape(call.cut(x, axis, *run), out=call.result)
    elif axis == 0:
        call.add(Lookup(), x, indices, out=call.result)
    elif not x.is_float or found is not None:
        call.opaque(passes=[(i, i if i < axis else i + n - 1) for i in range(rank) if i != axis])
    else:
        front = call.transpose(x, (axis, *(i for i in range(rank) if i != axis)))
        rows = call.add(Lookup(), front, indices, shape=(*indices.shape, *front.shape[1:]))
        call.transpose(rows, (*range(n, n + axis), *range(n), *range(n + axis, n + rank - 1)), out=call.result)


def _run(indices: Array, extent: int) -> tuple[int, int] | None:
    """Return (start, size) of indices that follow one another; None where they do not."""
    flat = [int(i) + extent if i < 0 else int(i) for i in indices.ravel()]
    if not flat or flat != list(range(flat[0], flat[0] + len(flat))):
        return None
    if not 0 <= flat[0] <= flat[-1] < extent:
        raise IndexError(f"index {flat[-1]} lies outside of a dim of {extent}")
    return flat[0], len(flat)


def by_elements(call: OnnxCall) -> None:
    """Write elements read, or put in, by indices along one dim; a dim that the indices have whole passes."""
    x, indices, axis = call.value(0), call.value(1), call.axis(0)
    passes = [(i, i) for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)) if i != axis and a == b]
    if call.operator == "GatherElements" and len(passes) == len(x.shape) - 1 and x.is_float and not indices.is_float:
        call.add(Gather(dim=axis), x, indices, out=call.result)
        return
    call.opaque(*([x, indices] if call.operator == "GatherElements" else []), passes=passes)


def gather_nd(call: OnnxCall) -> None:
    """Write slices by indices; the batch dims pass, and so do those that no index is for."""
    x, indices = call.value(0), call.value(1)
    batch = call.whole("batch_dims", 0)
    if not indices.shape:
        raise ValueError("GatherND needs indices of one dim or more")
    first = batch + indices.shape[-1]
    rest = [(i, len(indices.shape) - 1 + i - first) for i in range(first, len(x.shape))]
    call.opaque(x, indices, passes=[*((i, i) for i in range(batch)), *rest])


def scatter_nd(call: OnnxCall) -> None:
    """Write a tensor with slices put in by indices; the dims that no index is for pass."""
    depth = call.value(1).shape[-1]
    call.opaque(passes=[(i, i) for i in range(depth, len(call.x.shape))])


def embed_and_normalise(call: OnnxCall) -> None:
    """Write the normalised sum of the rows of words, positions and, where there are any, segments.

    Inputs: words, segments, the three tables, scale, shift. Positions are those from 0 on, unless they are given.
    """
    words, out = call.x, call.result
    added = [call.add(Lookup(), call.value(2), words, shape=out.shape)]
    if call.has(8):
        added.append(call.add(Lookup(), call.value(3), call.value(8), shape=out.shape))
    else:
        own = (words.shape[1], out.shape[2])
        added.append(call.add(Slice(starts=(0, 0), steps=(1, 1)), call.value(3), shape=own))
    if call.has(1):
        added.append(call.add(Lookup(), call.value(4), call.value(1), shape=out.shape))
    total = call.point("add", *added, flop_per_point=len(added) - 1, out=call.further(2))
    last = len(out.shape) - 1
    op = Normalise(kind="layer", over=(last,), channels=(last,), epsilon=call.number("epsilon", 1e-12))
    call.add(op, total, call.value(5), call.value(6), out=out)
    mask = call.further(1)
    if mask is not None:
        call.write(Generic(is_index=True), (words,), (mask,))


TRANSLATIONS = table(
    (lambda call: call.reshape(call.x, out=call.result), "Reshape Squeeze Unsqueeze Flatten"),
    (transpose, "Transpose"),
    (lambda call: call.broadcast(call.x, out=call.result), "Expand"),
    (tile, "Tile"),
    (slice_, "Slice"),
    (split, "Split"),
    (concat, "Concat"),
    (pad, "Pad"),
    (blocks, "DepthToSpace SpaceToDepth"),
    (resize, "Resize Upsample"),
    (gather, "Gather"),
    (by_elements, "GatherElements Scatter ScatterElements"),
    (gather_nd, "GatherND"),
    (scatter_nd, "ScatterND"),
)
"""By the operator's name."""
