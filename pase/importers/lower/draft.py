"""`LoweredOperator`: a vertex as its kind defines it; its name, where its tensors are from, what was folded into it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, pairwise
from math import prod

from pase.graph import Access, AllReduce, AllToAll, Dim, Exchange, Operator, Relayout, Role, SliceOf, Window, Work
from pase.graph.body import Body, Step
from pase.graph.operator import EPILOGUE, DimIndex, axis_dims
from pase.graph.verify import IMPORTED_FUNCTIONS, OTHER_FUNCTION
from pase.importers.ir import ops
from pase.importers.ir.trace import Folded, Node, Trace, Use
from pase.importers.ir.views import View
from pase.importers.passes.views import seen_through


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredOperator:
    """operator: reads and writes in the shapes of its kind. sources: [reads] what each one reads, in that very shape.

    orders: [writes] for each dim of the value in the trace, the dim of the write; None where they are alike.
    approximations: what is not charged as it is, in words.
    """

    operator: Operator
    sources: tuple[Use, ...]
    orders: tuple[tuple[int, ...] | None, ...] = (None,)
    approximations: tuple[str, ...] = field(default=())


def moving(operator: Operator, function: str) -> Operator:
    """Return an operator whose body moves the first tensor that it reads."""
    step = Step(result="moved", function=function, operands=(operator.reads[0].tensor,))
    return replace(operator, body=Body(steps=(step,)))


def functions_text(functions: Sequence[str]) -> str:
    """Return names of functions as an attribute holds them; what is in no vocabulary has one name for all."""
    return ",".join(name if name in IMPORTED_FUNCTIONS else OTHER_FUNCTION for name in functions)


def shaped(trace: Trace, use: Use, shape: tuple[int, ...]) -> Use:
    """Return a use in another shape of the same size."""
    if trace.shape(use) == shape:
        return use
    view = View.plain(trace.shape(use)).reshaped(shape) if use.seen_as is None else None
    seen = seen_through(trace, use, view)
    return seen or replace(use, piece=None, view=None, seen_as=shape)


def spare(taken: Sequence[str], num: int, letters: str) -> tuple[str, ...]:
    """Return so many names of dims that are not taken, the letters first."""
    names = chain(letters, (f"i{number}" for number in count(1)))
    return tuple(islice((name for name in names if name not in taken), num))


def repeated(trace: Trace, use: Use, heads: int) -> Use:
    """Return a use of [b, g, t, k] with each of the g heads repeated to give so many."""
    shape = trace.shape(use)
    if use.seen_as is not None:
        return replace(use, seen_as=(shape[0], heads, *shape[2:]))
    plain = View.plain(shape)
    apart = plain.reshaped((*shape[:2], 1, *shape[2:]))
    assert apart is not None
    wide = apart.broadcast((*shape[:2], heads // shape[1], *shape[2:]), range(5))
    view = wide.reshaped((shape[0], heads, *shape[2:]))
    assert view is not None
    seen = seen_through(trace, use, view)
    return seen or replace(use, piece=None, view=None, seen_as=view.shape)


def reordered(trace: Trace, use: Use, order: Sequence[int]) -> Use:
    """Return a use with its dims in another order."""
    shape = trace.shape(use)
    if tuple(order) == tuple(range(len(shape))):
        return use
    if use.seen_as is not None:
        return replace(use, seen_as=tuple(shape[i] for i in order))
    view = View.plain(shape).transposed(order)
    seen = seen_through(trace, use, view)
    assert seen is not None, "dims can always be put in another order"
    return seen


def shapes(trace: Trace, node: Node) -> list[tuple[int, ...]]:
    """Return the shapes in which a node reads its inputs."""
    return [trace.shape(use) for use in node.inputs]


# -- names of vertices: the module or layer of the source, and what it does there where it does several things


def suggested_names(trace: Trace) -> dict[str, str]:
    """Return what the vertex of each node had best be named, by the node's name; not unique yet.

    A module that does one thing gives its name to it. Of several things that it does, those with weights of its own do.
    """
    count = Counter(node.origin.scope for node in trace.nodes)
    found = {}
    for node in trace.nodes:
        scope = node.origin.scope
        if not scope:
            found[node.name] = node.name
        elif count[scope] == 1 or _has_own_weights(trace, node):
            found[node.name] = scope
        else:
            found[node.name] = f"{scope}/{_does(node)}"
    return found


def _has_own_weights(trace: Trace, node: Node) -> bool:
    return any(trace.is_parameter(use) and use.value.startswith(node.origin.scope) for use in node.inputs)


def _does(node: Node) -> str:
    """Return a word for what a node does."""
    op = node.op
    if isinstance(op, ops.Pointwise):
        return op.functions[-1] if op.functions else "identity"
    if isinstance(op, ops.Reduce):
        return op.function
    if isinstance(op, ops.Pool):
        return f"{op.function}_pool"
    if isinstance(op, ops.Normalise):
        return op.kind if op.kind == "statistics" else f"{op.kind}_norm"
    return _WORDS.get(type(op), node.name)


_WORDS: dict[type, str] = {
    ops.Attention: "attention",
    ops.Concat: "concat",
    ops.Contract: "product",
    ops.Convolve: "convolution",
    ops.Gather: "gather",
    ops.Lookup: "lookup",
    ops.Pad: "pad",
    ops.Recurrent: "recurrent",
    ops.Slice: "piece",
    ops.Softmax: "softmax",
}


# -- what passes folded into a node: FLOP, names of functions, weights, dims that must stay whole


def with_epilogue(trace: Trace, node: Node, draft: LoweredOperator) -> LoweredOperator:
    """Return the draft with what was folded into it, and with weights that its kind does not tell of."""
    told = {use.value for use in draft.sources}
    others = [(i, use) for i, use in enumerate(node.inputs) if trace.is_parameter(use) and use.value not in told]
    if not node.folded and not node.epilogue and not node.whole and not others:
        return draft
    operator = draft.operator
    write = operator.writes[0]
    # The dims of what is written, in the order that the trace has them in.
    order = draft.orders[0] or range(len(write.index_map))
    written = [(write.shape[i], write.index_map[i]) for i in order]
    points = tuple(dict.fromkeys(dim for axis in write.index_map for dim in axis_dims(axis)))
    work = operator.work
    size = prod(operator.extents[dim] for dim in points)
    for folded in node.folded:
        work = (*work, *_work(points, size, folded, [use.value for use in draft.sources]))
    reads, sources = list(operator.reads), list(draft.sources)
    for position, use in others:
        shape = trace.shape(use)
        axes = _aligned(shape, written)
        named = {dim for axis in axes for dim in axis_dims(axis)}
        summed = tuple(dim for dim in points if dim not in named)
        reads.append(
            Access(tensor=f"e{position}", shape=shape, index_map=axes, role=Role.PARAMETER, partial_over=summed)
        )
        sources.append(use)
    attributes = operator.attributes
    if node.epilogue:
        attributes = (*attributes, (EPILOGUE, functions_text(node.epilogue)))
    held = dict.fromkeys(dim for i, j in node.whole for dim in axis_dims(operator.reads[i].index_map[j]))
    operator = replace(
        operator,
        work=work,
        reads=tuple(reads),
        attributes=attributes,
        unsplittable=tuple(dict.fromkeys((*operator.unsplittable, *held))),
    )
    return replace(draft, operator=operator, sources=tuple(sources))


def _work(points: tuple[str, ...], size: int, folded: Folded, reads: Sequence[str]) -> tuple[Work, ...]:
    """Return the work of what was folded into an operator that reads these values."""
    own = tuple(i for i, value in enumerate(reads) if value == folded.argument)
    argument = own or tuple(range(len(reads)))
    # As often again, backward, as each of its factors has a gradient: in part once more than the rest.
    times = int(folded.backward_flop // folded.flop) if folded.flop else 0
    more = folded.backward_flop - times * folded.flop
    works = (
        Work(dims=points, flop_per_point=(folded.flop - more) / size, inputs=(argument,) * times),
        Work(dims=points, flop_per_point=more / size, inputs=(argument,) * (times + 1)),
    )
    return tuple(work for work in works if work.flop_per_point)


def _aligned(shape: tuple[int, ...], written: list[tuple[int, DimIndex]]) -> tuple[DimIndex, ...]:
    """Return the axes of a tensor that is broadcast to what is written; None for the dims that are not alike."""
    if len(shape) > len(written):
        return (None,) * len(shape)
    last = written[len(written) - len(shape) :]
    return tuple(
        axis if isinstance(axis, str | tuple) and extent == full and extent > 1 else None
        for extent, (full, axis) in zip(shape, last, strict=True)
    )


# -- a read fitted to the tensor behind its view: the iteration dims are told in the dims of the producer's tensor
#
# A dim of the operator that the view puts together from several places of the tensor (heads and channels, gathered to
# one dim after a transpose) is refined: it becomes as many iteration dims. What cannot be told so is None, and the view
# stays a vertex that moves the data.


Pieces = Mapping[str, tuple[str, ...]]
"""What a refined dim has become."""


def fitted(operator: Operator, views: Sequence[View | None]) -> Operator | None:
    """Return the operator with every read that has a view in the shape of that view's base; None where it cannot.

    views: [reads], each of the very shape of the read.
    """
    cuts: dict[str, set[int]] = {}
    for access, view in zip(operator.reads, views, strict=True):
        if view is not None and not view.is_reshape:
            found = _cuts(access, view)
            if found is None:
                return None
            for dim, inner in found.items():
                cuts.setdefault(dim, set()).update(inner)
    refined = _refined(operator, cuts)
    if refined is None:
        return None
    operator = refined
    reads = []
    for access, view in zip(operator.reads, views, strict=True):
        new = access if view is None else _on_base(access, view, operator.extents)
        if new is None:
            return None
        reads.append(new)
    return replace(operator, reads=tuple(reads))


def _cuts(access: Access, view: View) -> dict[str, set[int]] | None:
    """Return where the dims of an operator must be cut: for each, the extents that lie within a cut."""
    runs = view.runs()
    found: dict[str, set[int]] = {}
    for dim, (axis, factors) in enumerate(zip(access.index_map, view.dims, strict=True)):
        starts = {own[0] for run_dim, own in runs if run_dim == dim}
        # A cut before each factor that begins a run or is broadcast, and after each that ends one.
        bounds: set[int] = set()
        for i, factor in enumerate(factors):
            begins = factor in starts and factor.base is not None
            is_apart = factor.base is None or (i > 0 and factors[i - 1].base is None)
            if i > 0 and (begins or is_apart):
                bounds.add(prod(f.extent for f in factors[i:]))
        if not bounds:
            continue
        match axis:
            case str():
                found.setdefault(axis, set()).update(bounds)
            case _:
                return None
    return found


def _refined(operator: Operator, cuts: Mapping[str, set[int]]) -> Operator | None:
    pieces: dict[str, tuple[str, ...]] = {}
    extents: dict[str, int] = {}
    for dim, bounds in cuts.items():
        whole = operator.extents[dim]
        chain = [whole, *sorted((b for b in bounds if 1 < b < whole), reverse=True), 1]
        if any(outer % inner for outer, inner in pairwise(chain)):
            return None
        if len(chain) == 2:
            continue
        names = _parts(dim, len(chain) - 1, operator.extents)
        pieces[dim] = names
        extents |= {name: chain[i] // chain[i + 1] for i, name in enumerate(names)}
    if not pieces:
        return operator
    used: list[Sequence[DimIndex]] = [access.index_map for access in (*operator.reads, *operator.writes)]
    used += [work.dims for work in operator.work]
    if any(isinstance(a, Window | SliceOf) and not {*_named(a)}.isdisjoint(pieces) for axes in used for a in axes):
        return None

    def expanded(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for name in names for part in pieces.get(name, (name,)))

    def points(dims: Sequence[str | SliceOf]) -> tuple[str | SliceOf, ...]:
        return tuple(new for dim in dims for new in ((dim,) if isinstance(dim, SliceOf) else expanded([dim])))

    def axes(old: tuple[DimIndex, ...]) -> tuple[DimIndex, ...]:
        return tuple(_axis(axis, pieces) for axis in old)

    def access(old: Access) -> Access:
        over = None if old.partial_over is None else expanded(old.partial_over)
        return replace(old, index_map=axes(old.index_map), partial_over=over)

    def exchange(old: Exchange) -> Exchange | None:
        match old:
            case AllReduce() | AllToAll():
                return replace(old, index_map=axes(old.index_map), over=expanded(old.over))
            case Relayout():
                return replace(old, index_map=axes(old.index_map), read=axes(old.read))
            case _:
                return None

    exchanges = [exchange(old) for old in operator.exchanges]
    if any(new is None for new in exchanges):
        return None
    dims = tuple(
        Dim(part, extents.get(part, dim.extent)) for dim in operator.dims for part in pieces.get(dim.name, (dim.name,))
    )
    return replace(
        operator,
        dims=dims,
        reads=tuple(access(old) for old in operator.reads),
        writes=tuple(access(old) for old in operator.writes),
        work=tuple(replace(work, dims=points(work.dims)) for work in operator.work),
        unsplittable=expanded(operator.unsplittable),
        exchanges=tuple(new for new in exchanges if new is not None),
        intermediates=tuple(replace(old, index_map=axes(old.index_map)) for old in operator.intermediates),
    )


def _named(axis: Window | SliceOf) -> tuple[str, ...]:
    return (axis.out, axis.kernel) if isinstance(axis, Window) else (axis.dim,)


def _axis(axis: DimIndex, pieces: Pieces) -> DimIndex:
    match axis:
        case str():
            parts = pieces.get(axis, (axis,))
            return parts[0] if len(parts) == 1 else parts
        case tuple():
            return tuple(part for name in axis for part in pieces.get(name, (name,)))
        case _:
            return axis


def _parts(dim: str, num: int, taken: Mapping[str, int]) -> tuple[str, ...]:
    names = (f"{dim}{number}" for number in count(1))
    return tuple(islice((name for name in names if name not in taken), num))


def _on_base(access: Access, view: View, extents: Mapping[str, int]) -> Access | None:
    """Return a read in the shape of the tensor behind its view."""
    if view.is_reshape:
        return access
    shape: list[int] = []
    axes: list[DimIndex] = []
    done: dict[int, int] = {}
    for dim, factors in view.runs():
        size = prod(factor.extent for factor in factors)
        axis = access.index_map[dim]
        match axis:
            case None:
                found: DimIndex = None
            case Window() | SliceOf():
                if size != access.shape[dim]:
                    return None
                found = axis
            case _:
                names = (axis,) if isinstance(axis, str) else axis
                own = _covered(names, extents, view.dims[dim], factors)
                if own is None:
                    return None
                found = own[0] if len(own) == 1 else own
        shape.append(size)
        axes.append(found)
        done[dim] = done.get(dim, 0) + 1
    for dim, factors in enumerate(view.dims):
        # Of one element: where it stands does not matter.
        if not factors and isinstance(access.index_map[dim], str | Window):
            shape.append(1)
            axes.append(access.index_map[dim])
    return replace(access, shape=tuple(shape), index_map=tuple(axes))


def _covered(
    names: tuple[str, ...], extents: Mapping[str, int], every: Sequence[object], factors: Sequence[object]
) -> tuple[str, ...] | None:
    """Return those of the dims that a run of a view's factors covers; None where they do not end where it does."""
    start = every.index(factors[0])
    before = prod(factor.extent for factor in every[:start])  # type: ignore[attr-defined]
    size = prod(factor.extent for factor in factors)  # type: ignore[attr-defined]
    outer, found, at = 1, list[str](), 1
    for name in names:
        if outer == before and at < size:
            found.append(name)
            at *= extents[name]
        elif outer < before:
            outer *= extents[name]
    return tuple(found) if at == size and outer == before else None
