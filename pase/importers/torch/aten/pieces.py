"""Pieces: of a tensor, of several put together, of one that are replaced by another's."""

from pase.importers.ir import Concat, Identity, Pad, Reshape, Slice, Step, Value
from pase.importers.torch.aten.call import Call, generic, generic_along, inner, reshaped, step, step_to, table


def slice_(call: Call) -> list[Step]:
    """Return a piece along one dim."""
    x = call.tensors[0]
    dim, start = _start(call, x)
    return step(call, box(len(x.shape), dim, start, call.get("step", 1)), x)


def _start(call: Call, x: Value) -> tuple[int, int]:
    dim = call.get("dim", 0) % len(x.shape)
    extent, start = x.shape[dim], call.get("start", 0)
    return dim, max(0, start + extent) if start < 0 else min(start, extent)


def box(rank: int, dim: int, start: int, stride: int = 1) -> Slice:
    """Return a piece that starts somewhere along one dim and has all of the others."""
    return Slice(
        starts=tuple(start if i == dim else 0 for i in range(rank)),
        steps=tuple(stride if i == dim else 1 for i in range(rank)),
    )


def shape_with(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    """Return a shape with one extent replaced."""
    return (*shape[:dim], extent, *shape[dim + 1 :])


def select(call: Call) -> list[Step]:
    """Return one element along a dim, without that dim."""
    x = call.tensors[0]
    dim = call.get("dim", 0) % len(x.shape)
    at = call.get("index", 0)
    if isinstance(at, Value) or not isinstance(at, int):
        return generic(call)
    cut = inner(call, "cut", shape_with(x.shape, dim, 1), x.dtype)
    piece = box(len(x.shape), dim, at % max(1, x.shape[dim]))
    return [step_to(piece, cut, x), *step(call, Reshape(), cut)]


def split(call: Call) -> list[Step]:
    """Return pieces that make up a tensor; those that nobody reads are left out."""
    x = call.tensors[0]
    rank = len(x.shape)
    dim = call.get("dim", 0) % rank
    found, at = list[Step](), 0
    is_unbound = call.function.startswith("unbind")
    for result in call.results:
        if is_unbound:
            cut = Value(name=f"{result.name}:cut", shape=shape_with(x.shape, dim, 1), dtype=x.dtype)
            found.append(step_to(box(rank, dim, at), cut, x))
            found.append(step_to(Reshape(), result, cut))
            at += 1
            continue
        found.append(step_to(box(rank, dim, at), result, x))
        at += result.shape[dim]
    return found


def concat(call: Call) -> list[Step]:
    """Return tensors end to end; those without elements are left out."""
    rank = len(call.result.shape)
    dim = call.get("dim", 0) % max(1, rank)
    return _concat(call, [value for value in call.tensors if len(value.shape) == rank and value.shape[dim]], dim)


def _concat(call: Call, tensors: list[Value], dim: int) -> list[Step]:
    if len(tensors) == 1:
        return step(call, Identity(), *tensors)
    return step(call, Concat(dim=dim), *tensors)


def stack(call: Call) -> list[Step]:
    """Return tensors side by side along a new dim."""
    out = call.result
    dim = call.get("dim", 0) % len(out.shape)
    steps, parts = list[Step](), list[Value]()
    for i, value in enumerate(call.tensors):
        seen = Value(name=f"{out.name}:{i}", shape=shape_with(out.shape, dim, 1), dtype=value.dtype)
        steps.append(step_to(Reshape(), seen, value))
        parts.append(seen)
    return [*steps, *_concat(call, parts, dim)]


def slice_scatter(call: Call) -> list[Step]:
    """Return a tensor with a piece along one dim replaced: what is before it, the piece, what is after it."""
    x, piece = call.tensors[:2]
    dim, start = _start(call, x)
    if call.get("step", 1) != 1:
        return generic_along(call, [dim])
    return _replaced(call, x, piece, dim, start)


def select_scatter(call: Call) -> list[Step]:
    """Return a tensor with one element along a dim replaced."""
    x, piece = call.tensors[:2]
    dim = call.get("dim", 0) % len(x.shape)
    first, told = reshaped(call, piece, shape_with(x.shape, dim, 1), "piece")
    return [*first, *_replaced(call, x, told, dim, call.get("index", 0) % max(1, x.shape[dim]))]


def _replaced(call: Call, x: Value, piece: Value, dim: int, start: int) -> list[Step]:
    extent, size = x.shape[dim], piece.shape[dim]
    steps, parts = list[Step](), list[Value]()
    for name, at, count in (
        ("before", 0, start),
        ("piece", start, size),
        ("after", start + size, extent - start - size),
    ):
        if name == "piece":
            parts.append(piece)
        elif count:
            cut = inner(call, name, shape_with(x.shape, dim, count), x.dtype)
            steps.append(step_to(box(len(x.shape), dim, at), cut, x))
            parts.append(cut)
    return [*steps, *_concat(call, parts, dim)]


def pad(call: Call) -> list[Step]:
    """Return a tensor with values around it, or cut."""
    x = call.tensors[0]
    pads = list(call.get("pad", call.get("padding", [])))
    rank = len(x.shape)
    before = [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i] = pads[2 * i]
    return step(call, Pad(before=tuple(before)), x)


TRANSLATIONS = table(
    (slice_, "slice slice_copy narrow narrow_copy"),
    (select, "select select_copy"),
    (split, "split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes"),
    (split, "split_copy split_with_sizes_copy unbind_copy hsplit vsplit dsplit"),
    (concat, "cat concat concatenate _cat"),
    (stack, "stack"),
    (slice_scatter, "slice_scatter"),
    (select_scatter, "select_scatter"),
    (pad, "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"),
    (pad, "replication_pad2d replication_pad3d _pad_circular"),
)
"""Of pieces, by the operator's name."""
