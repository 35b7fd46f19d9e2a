"""What passes folded into a node, told of its vertex: FLOP, names of functions, weights, dims that must stay whole."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from pase.graph import Access, Role, SliceOf, Work
from pase.graph.access import DimIndex
from pase.graph.operator import EPILOGUE
from pase.importers.ir import Folded, Node, Trace
from pase.importers.lower.draft import LoweredOperator, functions_text, is_parameter


def with_epilogue(trace: Trace, node: Node, draft: LoweredOperator) -> LoweredOperator:
    """Return the draft with what was folded into it, and with weights that its kind does not tell of."""
    told = {use.value for use in draft.sources}
    others = [(i, use) for i, use in enumerate(node.inputs) if is_parameter(trace, use) and use.value not in told]
    if not node.folded and not node.epilogue and not node.whole and not others:
        return draft
    operator = draft.operator
    write = operator.writes[0]
    # The dims of what is written, in the order that the trace has them in.
    order = draft.orders[0] or range(len(write.index_map))
    written = [(write.shape[i], write.index_map[i]) for i in order]
    points = tuple(dict.fromkeys(dim for axis in write.index_map for dim in _names(axis)))
    work = operator.work
    size = prod(operator.extents[dim] for dim in points)
    for folded in node.folded:
        work = (*work, *_work(points, size, folded, [use.value for use in draft.sources]))
    reads, sources = list(operator.reads), list(draft.sources)
    for position, use in others:
        shape = trace.shape(use)
        axes = _aligned(shape, written)
        named = {dim for axis in axes for dim in _names(axis)}
        summed = tuple(dim for dim in points if dim not in named)
        reads.append(
            Access(tensor=f"e{position}", shape=shape, index_map=axes, role=Role.PARAMETER, partial_over=summed)
        )
        sources.append(use)
    attributes = operator.attributes
    if node.epilogue:
        attributes = (*attributes, (EPILOGUE, functions_text(node.epilogue)))
    held = dict.fromkeys(dim for i, j in node.whole for dim in _names(operator.reads[i].index_map[j]))
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


def _names(axis: DimIndex) -> Iterable[str]:
    match axis:
        case str():
            return (axis,)
        case tuple():
            return axis
        case SliceOf():
            return (axis.dim,)
        case _:
            return ()
