"""Look-ups: rows of tables, elements at places."""

from math import prod

from pase.importers.ir import Broadcast, Gather, Generic, Lookup, Reduce, Reshape, Slice, Step, Value
from pase.importers.torch.aten.call import Call, floats_first, generic, generic_along, inner, step, step_to, table
from pase.importers.torch.aten.pieces import box


def embedding(call: Call) -> list[Step]:
    """Return rows of a table: a piece of it where they are known and follow one another."""
    return _piece(call, call.value("weight"), call.value("indices")) or step(
        call, Lookup(), call.value("weight"), call.value("indices")
    )


def _piece(call: Call, x: Value, indices: Value, dim: int = 0) -> list[Step] | None:
    """Return the piece of a tensor that known places in a dim read; None where they are not known, or are no run."""
    first = call.first_of_run(indices, x.shape[dim])
    if first is None or (dim and len(indices.shape) != 1):
        return None
    cut = inner(call, "piece", (*x.shape[:dim], prod(indices.shape), *x.shape[dim + 1 :]), x.dtype)
    return [step_to(box(len(x.shape), dim, first), cut, x), *step(call, Reshape(), cut)]


def embedding_bag(call: Call) -> list[Step]:
    """Return sums or means of rows of a table; bags are taken to be of one size where they can be."""
    table_, indices = call.value("weight"), call.value("indices")
    out = call.result
    bags = out.shape[0]
    rest = [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]
    if not bags or len(indices.shape) != 1 or indices.shape[0] % bags or call.maybe("per_sample_weights"):
        ordered = floats_first(call.tensors)
        return [step_to(Generic(), out, *ordered), *rest]
    bagged = inner(call, "bags", (bags, indices.shape[0] // bags), indices.dtype)
    rows = inner(call, "rows", (*bagged.shape, table_.shape[1]))
    function = ("sum", "mean", "max")[int(call.get("mode", 0))]
    return [
        step_to(Reshape(), bagged, indices),
        step_to(Lookup(), rows, table_, bagged),
        step_to(Reduce(function=function, over=(1,)), out, rows),
        *rest,
    ]


def index_select(call: Call) -> list[Step]:
    """Return rows by whole numbers along the first dim; along another one the other dims pass through."""
    x = call.tensors[0]
    dim = call.get("dim", 0) % max(1, len(x.shape))
    if dim == 0 and len(call.tensors[1].shape) == 1:
        return _piece(call, x, call.tensors[1]) or step(call, Lookup(), x, call.tensors[1])
    return _piece(call, x, call.tensors[1], dim) or generic_along(call, [dim])


def gather(call: Call) -> list[Step]:
    """Return elements at places along one dim; the tensor is cut first where it is longer than these in the others."""
    x, places = call.tensors[:2]
    dim = call.get("dim", -1)
    if not isinstance(dim, int) or len(x.shape) != len(places.shape) or not x.shape:
        return generic(call)
    dim %= len(x.shape)
    box = tuple(x.shape[i] if i == dim else extent for i, extent in enumerate(places.shape))
    if any(new > old for new, old in zip(box, x.shape, strict=True)):
        return generic_along(call, [dim])
    if box == x.shape:
        return step(call, Gather(dim=dim), x, places)
    cut = inner(call, "cut", box, x.dtype)
    whole = Slice(starts=(0,) * len(box), steps=(1,) * len(box))
    return [step_to(whole, cut, x), *step(call, Gather(dim=dim), cut, places)]


def index(call: Call) -> list[Step]:
    """Return x[indices]: rows of a table where the first dim alone is indexed; dims without an index pass through."""
    x = call.tensors[0]
    indices = list(call.get("indices") or [])
    given = [i for i, item in enumerate(indices) if isinstance(item, Value)]
    values = [indices[i] for i in given]
    if any(value.dtype in ("bool", "uint8") for value in values):
        return generic(call)
    if given == [0]:
        return _piece(call, x, *values) or step(call, Lookup(), x, *values)
    piece = _piece(call, x, values[0], given[0]) if len(given) == 1 else None
    if piece is not None:
        return piece
    is_every = given == [0, 1] and values[0].shape == values[1].shape == x.shape[:1]
    if is_every and call.first_of_run(values[0], x.shape[0]) == 0:
        # x[range(n), places]: one element, or row, of each row.
        return _taken(call, x, values[1])
    rank = max((len(value.shape) for value in values), default=0)
    is_together = given == list(range(given[0], given[-1] + 1)) if given else True
    start = given[0] if given and is_together else 0
    passes, at = list[tuple[int, int]](), 0
    for i in range(len(x.shape)):
        if at == start:
            at += rank
        if i in given:
            continue
        passes.append((i, at))
        at += 1
    floats = any(value.is_float for value in call.results)
    return step(call, Generic(passes=tuple(passes), is_index=not floats), *floats_first((x, *values)))


def _taken(call: Call, x: Value, places: Value) -> list[Step]:
    box_ = (*x.shape[:1], 1, *x.shape[2:])
    at, wide, found = (
        inner(call, "at", (*places.shape, *(1,) * (len(box_) - 1)), places.dtype),
        inner(call, "wide", box_, places.dtype),
        inner(call, "found", box_, x.dtype),
    )
    return [
        step_to(Reshape(), at, places),
        step_to(Broadcast(places=tuple(range(len(box_)))), wide, at),
        step_to(Gather(dim=1), found, x, wide),
        *step(call, Reshape(), found),
    ]


def index_put(call: Call) -> list[Step]:
    """Return x with elements at places replaced; dims without an index pass through."""
    indices = list(call.get("indices") or [])
    given = [i for i, item in enumerate(indices) if isinstance(item, Value)]
    return generic_along(call, given or range(len(call.tensors[0].shape)))


TRANSLATIONS = table(
    (embedding, "embedding"),
    (embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (index_select, "index_select"),
    (gather, "gather take_along_dim"),
    (index, "index _unsafe_index"),
    (index_put, "index_put _unsafe_index_put _index_put_impl"),
)
"""Of look-ups, by the operator's name."""
