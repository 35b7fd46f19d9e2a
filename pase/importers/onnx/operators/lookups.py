"""What reads or writes elements by whole numbers."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.importers.ir import Generic, Lookup, Normalise, Pointwise, Reshape, Slice, Step, Transpose
from pase.importers.onnx.operators.call import Array, Call, Translation, generic, inner, node, place, step


def gather(call: Call) -> list[Step]:
    """Return rows of a table along a dim; those that constants tell and that lie side by side are a piece."""
    x, indices = call.value(0), call.value(1)
    rank = len(x.shape)
    axis = call.axis(0)
    found = call.constant(1)
    run = _run(found, x.shape[axis]) if found is not None else None
    if run is not None:
        return _piece(call, axis, *run)
    if axis == 0:
        return step(call, Lookup(), x, indices)
    if not x.is_float or found is not None:
        return generic(call, passes=_around(call, axis))
    order = (axis, *(i for i in range(rank) if i != axis))
    front = inner(call, "front", tuple(x.shape[i] for i in order), x.dtype)
    rows = inner(call, "rows", (*indices.shape, *front.shape[1:]))
    n = len(indices.shape)
    back = (*range(n, n + axis), *range(n), *range(n + axis, n + rank - 1))
    return [
        node(Transpose(order=order), (x,), front),
        node(Lookup(), (front, indices), rows),
        *step(call, Transpose(order=back), rows),
    ]


def _piece(call: Call, axis: int, start: int, size: int) -> list[Step]:
    x = call.x
    shape = tuple(size if i == axis else extent for i, extent in enumerate(x.shape))
    op = Slice(starts=tuple(start if i == axis else 0 for i in range(len(shape))), steps=(1,) * len(shape))
    if shape == call.out.shape:
        return step(call, op, x)
    cut = inner(call, "cut", shape)
    return [node(op, (x,), cut), *step(call, Reshape(), cut)]


def _run(indices: Array, extent: int) -> tuple[int, int] | None:
    """Return (start, size) of indices that follow one another; None where they do not."""
    flat = [int(i) + extent if i < 0 else int(i) for i in indices.ravel()]
    if not flat or flat != list(range(flat[0], flat[0] + len(flat))):
        return None
    if not 0 <= flat[0] <= flat[-1] < extent:
        raise IndexError(f"index {flat[-1]} lies outside of a dim of {extent}")
    return flat[0], len(flat)


def _around(call: Call, axis: int) -> tuple[tuple[int, int], ...]:
    """Return the dims that pass when one is replaced by those of the indices."""
    more = len(call.value(1).shape) - 1
    return tuple((i, i if i < axis else i + more) for i in range(len(call.x.shape)) if i != axis)


def gather_elements(call: Call) -> list[Step]:
    """Return elements by indices along one dim; indices of a dim that is read whole let it pass."""
    x, indices = call.value(0), call.value(1)
    axis = call.axis(0)
    passes = tuple((i, i) for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)) if i != axis and a == b)
    return [node(Generic(passes=passes), (x, indices), call.out)]


def gather_nd(call: Call) -> list[Step]:
    """Return slices by indices; the batch dims pass, and so do those that no index is for."""
    x, indices = call.value(0), call.value(1)
    batch = call.whole("batch_dims", 0)
    if not indices.shape:
        raise ValueError("GatherND needs indices of one dim or more")
    first = batch + indices.shape[-1]
    lead = tuple((i, i) for i in range(batch))
    rest = tuple((i, len(indices.shape) - 1 + i - first) for i in range(first, len(x.shape)))
    return [node(Generic(passes=lead + rest), (x, indices), call.out)]


def scatter(call: Call) -> list[Step]:
    """Return a tensor with elements put in by indices along one dim."""
    rank = len(call.x.shape)
    axis = place(call.whole("axis", 0), rank)
    is_whole = tuple(call.value(1).shape[i] == call.x.shape[i] for i in range(rank))
    passes = tuple((i, i) for i in range(rank) if i != axis and is_whole[i])
    return generic(call, passes=passes)


def scatter_nd(call: Call) -> list[Step]:
    """Return a tensor with slices put in by indices; the dims that no index is for pass."""
    depth = call.value(1).shape[-1]
    return generic(call, passes=tuple((i, i) for i in range(depth, len(call.x.shape))))


def embed_and_normalise(call: Call) -> list[Step]:
    """Return the normalised sum of the rows of words, positions and, where there are any, segments.

    Inputs: words, segments, the three tables, scale, shift. Positions are those from 0 on, unless they are given.
    """
    words, out = call.x, call.out
    rows = inner(call, "words", out.shape)
    steps = [node(Lookup(), (call.value(2), words), rows)]
    own = inner(call, "positions", (words.shape[1], out.shape[2]))
    if call.has(8):
        own = inner(call, "positions", out.shape)
        steps.append(node(Lookup(), (call.value(3), call.value(8)), own))
    else:
        steps.append(node(Slice(starts=(0, 0), steps=(1, 1)), (call.value(3),), own))
    added = [rows, own]
    if call.has(1):
        segments = inner(call, "segments", out.shape)
        steps.append(node(Lookup(), (call.value(4), call.value(1)), segments))
        added.append(segments)
    total = call.result(2) or inner(call, "sum", out.shape)
    steps.append(node(Pointwise(functions=("add",), flop_per_point=len(added) - 1), tuple(added), total))
    last = len(out.shape) - 1
    op = Normalise(kind="layer", over=(last,), channels=(last,), epsilon=call.number("epsilon", 1e-12))
    steps.append(node(op, (total, call.value(5), call.value(6)), out))
    mask = call.result(1)
    return steps if mask is None else [*steps, node(Generic(is_index=True), (words,), mask)]


LOOKUPS: Mapping[str, Translation] = MappingProxyType(
    {
        "Gather": gather,
        "GatherElements": gather_elements,
        "GatherND": gather_nd,
        **dict.fromkeys(("Scatter", "ScatterElements"), scatter),
        "ScatterND": scatter_nd,
    }
)
"""By the operator's name."""
