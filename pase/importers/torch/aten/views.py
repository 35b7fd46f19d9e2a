"""Views: the same elements in another shape or order, repeated, or as complex numbers."""

from pase.importers.ir import (
    Broadcast,
    Concat,
    Pointwise,
    Reshape,
    Step,
    Transpose,
    Value,
)
from pase.importers.torch.aten.call import (
    Call,
    as_list,
    generic,
    generic_along,
    identity,
    inner,
    reshaped,
    step,
    step_to,
    table,
)
from pase.importers.torch.aten.pieces import box


def reshape(call: Call) -> list[Step]:
    """Return the same elements in another shape."""
    return step(call, Reshape(), *call.tensors[:1])


def transpose(call: Call) -> list[Step]:
    """Return the dims in another order."""
    x = call.tensors[0]
    return step(call, Transpose(order=_ORDERS.get(call.function, _swapped)(call, len(x.shape))), x)


def _swapped(call: Call, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if rank:
        first, second = (
            call.get(key) for key in (("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1"))
        )
        order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return tuple(order)


def _permuted(call: Call, rank: int) -> tuple[int, ...]:
    return tuple(d % rank for d in call.get("dims"))


def _last_swapped(call: Call, rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2) if rank > 1 else tuple(range(rank))


def _reversed(call: Call, rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


def _moved(call: Call, rank: int) -> tuple[int, ...]:
    source, target = ([d % rank for d in as_list(call.get(key))] for key in ("source", "destination"))
    order = [d for d in range(rank) if d not in source]
    for place, dim in sorted(zip(target, source, strict=True)):
        order.insert(place, dim)
    return tuple(order)


_ORDERS = {
    "permute": _permuted,
    "permute_copy": _permuted,
    "t": _last_swapped,
    "t_copy": _last_swapped,
    "mT": _last_swapped,
    "mH": _last_swapped,
    "adjoint": _last_swapped,
    "numpy_T": _reversed,
    "movedim": _moved,
    "moveaxis": _moved,
}


def expand(call: Call) -> list[Step]:
    """Return a tensor repeated along dims of one element."""
    x, out = call.tensors[0], call.result.shape
    return step(call, Broadcast(places=tuple(range(len(out) - len(x.shape), len(out)))), x)


def repeat(call: Call) -> list[Step]:
    """Return a tensor laid end to end with itself: a dim [n] repeated r times is [r, n] put together."""
    x, out = call.tensors[0], call.result.shape
    shape = (1,) * (len(out) - len(x.shape)) + x.shape
    wide, places = list[int](), list[int]()
    for i, (old, new) in enumerate(zip(shape, out, strict=True)):
        wide += [new // old, old] if old else [new]
        if i >= len(out) - len(x.shape):
            places.append(len(wide) - 1)
    made = inner(call, "repeated", wide)
    return [step_to(Broadcast(places=tuple(places)), made, x), *step(call, Reshape(), made)]


def repeat_interleave(call: Call) -> list[Step]:
    """Return every element of a dim so many times; of a dim [n] that is [n, r] put together."""
    x, out = call.tensors[0], call.result.shape
    times, dim = call.get("repeats"), call.get("dim")
    if not isinstance(times, int) or len(call.tensors) != 1:
        return generic_along(call, range(0 if dim is None else dim % len(x.shape), len(x.shape)))
    steps: list[Step] = []
    if dim is None:
        size = 1
        for extent in x.shape:
            size *= extent
        steps, x = reshaped(call, x, (size,), "flat")
        dim = 0
    dim %= len(x.shape)
    made = inner(call, "repeated", (*x.shape[: dim + 1], times, *x.shape[dim + 1 :]))
    places = tuple(i if i <= dim else i + 1 for i in range(len(x.shape)))
    assert len(out) == len(x.shape)
    return [*steps, step_to(Broadcast(places=places), made, x), *step(call, Reshape(), made)]


def windows(call: Call) -> list[Step]:
    """Return windows along one dim, which becomes their number; their elements come last."""
    x = call.tensors[0]
    dim = call.get("dimension", 0) % max(1, len(x.shape))
    size, stride = call.get("size"), call.get("step")
    if size == stride and x.shape and x.shape[dim] % size == 0:
        apart = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
        first, seen = reshaped(call, x, apart, "apart")
        rest = [i for i in range(len(apart)) if i != dim + 1]
        return [*first, *step(call, Transpose(order=(*rest, dim + 1)), seen)]
    return generic_along(call, [dim], flop_per_point=0.0)


def diagonal(call: Call) -> list[Step]:
    """Return a diagonal of two dims, or a tensor that has one."""
    return generic(call)


def as_complex(call: Call) -> list[Step]:
    """Return pairs in the last dim as complex numbers: it is gone then."""
    x, out = call.tensors[0], call.result
    steps, parts = list[Step](), list[Value]()
    for i, name in enumerate(("real", "imaginary")):
        cut = inner(call, name, (*out.shape, 1), x.dtype)
        part = inner(call, f"{name} part", out.shape, x.dtype)
        steps += [step_to(box(len(x.shape), len(out.shape), i), cut, x), step_to(Reshape(), part, cut)]
        parts.append(part)
    return [*steps, *step(call, Pointwise(functions=("complex",)), *parts)]


def as_pairs(call: Call) -> list[Step]:
    """Return complex numbers as pairs in a new last dim."""
    x = call.tensors[0]
    steps, parts = list[Step](), list[Value]()
    for name in ("real", "imag"):
        part, seen = inner(call, name, x.shape), inner(call, f"{name} part", (*x.shape, 1))
        steps += [step_to(Pointwise(functions=(name,)), part, x), step_to(Reshape(), seen, part)]
        parts.append(seen)
    return [*steps, *step(call, Concat(dim=len(x.shape)), *parts)]


TRANSLATIONS = table(
    (reshape, "view reshape _unsafe_view unsqueeze squeeze flatten unflatten view_as reshape_as ravel view_copy"),
    (reshape, "unsqueeze_copy squeeze_copy _reshape_alias reshape_copy _reshape_copy atleast_1d atleast_2d atleast_3d"),
    (transpose, "transpose transpose_copy swapaxes swapdims numpy_T mT mH t t_copy adjoint permute permute_copy"),
    (transpose, "movedim moveaxis"),
    (expand, "expand expand_as expand_copy broadcast_to"),
    (repeat, "repeat tile"),
    (repeat_interleave, "repeat_interleave"),
    (windows, "unfold unfold_copy"),
    (diagonal, "diagonal diag diag_embed diagonal_copy as_strided as_strided_copy block_diag"),
    (as_complex, "view_as_complex"),
    (as_pairs, "view_as_real"),
    (identity, "view_dtype"),
)
"""Of views, by the operator's name."""
