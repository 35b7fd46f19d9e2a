"""What moves elements and computes nothing: views, orders, repetition, pieces and their replacement, look-ups."""

from math import prod

from pase.importers.ir import ops
from pase.importers.ir.call import Call, as_list, floats_first, table, with_extent
from pase.importers.ir.shared import concatenate, moved, repeat_each, run, swapped
from pase.importers.ir.trace import Value

# -- views


def transpose(call: Call) -> None:
    """Write the dims in another order."""
    x, rank = call.x, len(call.x.shape)
    match call.name:
        case "permute" | "permute_copy":
            order = tuple(dim % rank for dim in call.get("dims"))
        case "movedim" | "moveaxis":
            order = moved(rank, as_list(call.get("source")), as_list(call.get("destination")))
        case "numpy_T":
            order = tuple(reversed(range(rank)))
        case "t" | "t_copy" | "mT" | "mH" | "adjoint":
            order = swapped(rank, -2, -1) if rank > 1 else tuple(range(rank))
        case _:
            word = "dim" if "dim0" in call.arguments else "axis"
            order = swapped(rank, call.dim(name=f"{word}0"), call.dim(name=f"{word}1")) if rank else ()
    call.transpose(x, order, out=call.result)


def repeat(call: Call) -> None:
    """Write a tensor laid end to end with itself."""
    out = call.result.shape
    shape = (1,) * (len(out) - len(call.x.shape)) + call.x.shape
    call.repeat(call.x, [new // old if old else new for old, new in zip(shape, out, strict=True)], out=call.result)


def repeat_interleave(call: Call) -> None:
    """Write every element of a dim so many times; of a dim [n] that is [n, r] put together."""
    x, times, dim = call.x, call.get("repeats"), call.get("dim")
    if not isinstance(times, int) or len(call.tensors) != 1:
        return call.opaque(over=range(0 if dim is None else dim % len(x.shape), len(x.shape)))
    repeat_each(
        call, call.reshape(x, (prod(x.shape),)) if dim is None else x, {0 if dim is None else call.dim(): times}
    )
    return None


def windows(call: Call) -> None:
    """Write windows along one dim, which becomes their number; their elements come last."""
    x, dim = call.x, call.dim(name="dimension")
    size, stride = call.get("size"), call.get("step")
    if size != stride or not x.shape or x.shape[dim] % size:
        return call.opaque(over=[dim], flop_per_point=0.0)
    apart = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    order = [i for i in range(len(apart)) if i != dim + 1]
    call.transpose(call.reshape(x, apart), [*order, dim + 1], out=call.result)
    return None


def as_complex(call: Call) -> None:
    """Write pairs in the last dim as complex numbers: it is gone then."""
    x, last = call.x, len(call.x.shape) - 1
    call.point("complex", *(call.reshape(call.cut(x, last, i), x.shape[:-1]) for i in (0, 1)), out=call.result)


def as_pairs(call: Call) -> None:
    """Write complex numbers as pairs in a new last dim."""
    x, dtype = call.x, call.result.dtype
    parts = [call.reshape(call.point(name, x, dtype=dtype), (*x.shape, 1)) for name in ("real", "imag")]
    call.concat(parts, len(x.shape), out=call.result)


def rearrange(call: Call) -> None:
    """Write channels as pixels, pixels as channels, or channels of several groups in turn."""
    match call.name:
        case "pixel_shuffle":
            (*lead, c, h, w), r = call.x.shape, call.get("upscale_factor")
            apart, order = (*lead, c // r**2, r, r, h, w), (0, 3, 1, 4, 2)
        case "pixel_unshuffle":
            (*lead, c, h, w), r = call.x.shape, call.get("downscale_factor")
            apart, order = (*lead, c, h // r, r, w // r, r), (0, 2, 4, 1, 3)
        case _:
            (b, c, *rest), groups = call.x.shape, call.get("groups")
            lead, apart = [b], (b, groups, c // groups, *rest)
            order = (1, 0, *range(2, 2 + len(rest)))
    n = len(lead)
    call.rearrange(call.x, apart, (*range(n), *(n + i for i in order)), out=call.result)


# -- pieces


def _start(call: Call) -> tuple[int, int]:
    dim, start = call.dim(), call.get("start", 0)
    extent = call.x.shape[dim]
    return dim, max(0, start + extent) if start < 0 else min(start, extent)


def select(call: Call) -> None:
    """Write one element along a dim, without that dim."""
    dim, at = call.dim(), call.get("index", 0)
    if not isinstance(at, int):
        return call.opaque()
    call.reshape(call.cut(call.x, dim, at % max(1, call.x.shape[dim])), out=call.result)
    return None


def replace_piece(call: Call) -> None:
    """Write a tensor with a piece, or one element, along a dim replaced: before it, the piece, after it."""
    x, piece = call.tensors[:2]
    if call.name == "select_scatter":
        dim = call.dim()
        start = call.get("index", 0) % max(1, x.shape[dim])
        piece = call.reshape(piece, with_extent(x.shape, dim, 1))
    else:
        dim, start = _start(call)
        if call.get("step", 1) != 1:
            return call.opaque(over=[dim])
    end = start + piece.shape[dim]
    before = [call.cut(x, dim, 0, start)] if start else []
    after = [call.cut(x, dim, end, x.shape[dim] - end)] if end < x.shape[dim] else []
    call.concat([*before, piece, *after], dim, out=call.result)
    return None


def pad(call: Call) -> None:
    """Write a tensor with values around it, or cut."""
    pads = list(call.get("pad", call.get("padding", [])))
    before = [0] * len(call.x.shape)
    before[len(before) - len(pads) // 2 :] = pads[::2][::-1]
    call.add(ops.Pad(before=tuple(before)), call.x, out=call.result)


# -- look-ups


def index_select(call: Call) -> None:
    """Write rows by whole numbers along the first dim; along another one the other dims pass through."""
    (x, indices), dim = call.tensors, call.dim()
    if dim == 0 and len(indices.shape) == 1:
        _rows(call, x, indices)
    elif not _piece(call, x, indices, dim):
        call.opaque(over=[dim])


def _rows(call: Call, x: Value, indices: Value, frozen: int = -1) -> None:
    if not _piece(call, x, indices):
        call.add(ops.Lookup(frozen=frozen), x, indices, out=call.result)


def _piece(call: Call, x: Value, indices: Value, dim: int = 0) -> bool:
    """Write the piece of a tensor that known places in a dim read; False where they are not known, or are no run."""
    run = _run(call, indices, x.shape[dim])
    if run is None or (dim and len(indices.shape) != 1):
        return False
    call.reshape(call.cut(x, dim, *run), out=call.result)
    return True


def _run(call: Call, indices: Value, extent: int) -> tuple[int, int] | None:
    """Return (first, number) of known places in a dim that go up by one, all in the last dim; None for any other."""
    return run(call.known.get(indices.name), extent) if prod(indices.shape[:-1]) == 1 else None


def embedding_bag(call: Call) -> None:
    """Write sums or means of rows of a table; bags are taken to be of one size where they can be."""
    rows, indices, out = call.value("weight"), call.value("indices"), call.result
    bags = out.shape[0]
    if not bags or len(indices.shape) != 1 or indices.shape[0] % bags or call.maybe("per_sample_weights"):
        call.add(ops.Generic(), *floats_first(call.tensors), out=out)
    else:
        bagged = call.reshape(indices, (bags, indices.shape[0] // bags), name="bags")
        found = call.add(ops.Lookup(), rows, bagged, shape=(*bagged.shape, rows.shape[1]))
        call.reduce(("sum", "mean", "max")[int(call.get("mode", 0))], found, (1,), out=out)
    call.unread(call.results[1:])


def gather(call: Call) -> None:
    """Write elements at places along one dim; the tensor is cut first where it is longer than these in the others."""
    x, places = call.tensors[:2]
    if not isinstance(call.get("dim", -1), int) or len(x.shape) != len(places.shape) or not x.shape:
        return call.opaque()
    dim = call.dim(-1)
    box = with_extent(places.shape, dim, x.shape[dim])
    if any(new > old for new, old in zip(box, x.shape, strict=True)):
        return call.opaque(over=[dim])
    if box != x.shape:
        x = call.add(ops.Slice(starts=(0,) * len(box), steps=(1,) * len(box)), x, shape=box)
    call.gather(x, places, dim, out=call.result)
    return None


def index(call: Call) -> None:
    """Write x[indices]: rows of a table where the first dim alone is indexed; dims without an index pass through."""
    x = call.x
    indices = {i: item for i, item in enumerate(call.get("indices", [])) if isinstance(item, Value)}
    given, values = list(indices), list(indices.values())
    if any(value.dtype in ("bool", "uint8") for value in values):
        return call.opaque()
    if given == [0]:
        return _rows(call, x, values[0])
    if len(given) == 1 and _piece(call, x, values[0], given[0]):
        return None
    is_every = given == [0, 1] and values[0].shape == values[1].shape == x.shape[:1]
    if is_every and _run(call, values[0], x.shape[0]) == (0, x.shape[0]):
        # x[range(n), places]: one element, or row, of each row.
        box = with_extent(x.shape, 1, 1)
        at = call.reshape(values[1], (*values[1].shape, *(1,) * (len(box) - 1)), name="at")
        wide = call.add(ops.Broadcast(places=tuple(range(len(box)))), at, shape=box, name="wide")
        call.reshape(call.gather(x, wide, 1), out=call.result)
        return None
    rank = max((len(value.shape) for value in values), default=0)
    is_together = given == list(range(given[0], given[-1] + 1)) if given else True
    start = given[0] if given and is_together else 0
    rest = [i for i in range(len(x.shape)) if i not in indices]
    passes = [(i, at + rank * (at >= start)) for at, i in enumerate(rest)]
    return call.opaque(*floats_first((x, *values)), passes=passes)


def index_put(call: Call) -> None:
    """Write x with elements at places replaced; dims without an index pass through."""
    given = [i for i, item in enumerate(call.get("indices", [])) if isinstance(item, Value)]
    call.opaque(over=given or range(len(call.x.shape)))


_SAME_ELEMENTS = """
    view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as ravel view_copy unsqueeze_copy
    squeeze_copy _reshape_alias reshape_copy _reshape_copy atleast_1d atleast_2d atleast_3d
"""

TRANSLATIONS = table(
    (lambda call: call.reshape(call.x, out=call.result), _SAME_ELEMENTS),
    (transpose, "transpose transpose_copy swapaxes swapdims numpy_T mT mH t t_copy adjoint permute permute_copy"),
    (transpose, "movedim moveaxis"),
    (lambda call: call.broadcast(call.x, out=call.result), "expand expand_as expand_copy broadcast_to"),
    (repeat, "repeat tile"),
    (repeat_interleave, "repeat_interleave"),
    (windows, "unfold unfold_copy"),
    (Call.opaque, "diagonal diag diag_embed diagonal_copy as_strided as_strided_copy block_diag"),
    (as_complex, "view_as_complex"),
    (as_pairs, "view_as_real"),
    (rearrange, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    (
        lambda call: call.cut(call.x, *_start(call), stride=call.get("step", 1), out=call.result),
        "slice slice_copy narrow narrow_copy",
    ),
    (select, "select select_copy"),
    (
        lambda call: call.split(call.x, call.dim()),
        """
        split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes split_copy
        split_with_sizes_copy hsplit vsplit dsplit unbind unbind_copy
        """,
    ),
    (lambda call: concatenate(call, call.dim(rank=len(call.result.shape))), "cat concat concatenate _cat"),
    (lambda call: call.stack(call.tensors, call.dim(rank=len(call.result.shape)), out=call.result), "stack"),
    (replace_piece, "slice_scatter select_scatter"),
    (pad, "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"),
    (pad, "replication_pad2d replication_pad3d _pad_circular"),
    (
        lambda call: _rows(call, call.value("weight"), call.value("indices"), int(call.get("padding_idx", -1))),
        "embedding",
    ),
    (embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim"),
    (index, "index _unsafe_index"),
    (index_put, "index_put _unsafe_index_put _index_put_impl"),
)
"""Of what moves elements, by the operator's name."""
