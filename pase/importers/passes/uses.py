"""Uses put together: what a node reads, told of the tensor behind a view of a view."""

from collections.abc import Mapping
from dataclasses import replace

from pase.importers.ir import Node, Piece, Trace, Use, View


def composed(outer: Use, inner: Use, shape: tuple[int, ...]) -> Use | None:
    """Return a use of a value that is itself a use of another one, as a use of that one; None where it is none.

    shape: of the value behind `inner`.
    """
    if inner.seen_as is not None or outer.seen_as is not None:
        return None
    held = _of(shape, inner.piece)
    view = inner.view or View.plain(held)
    piece = inner.piece
    if outer.piece is not None:
        cut = view.sliced(outer.piece.dim, outer.piece.start, outer.piece.size)
        if cut is None:
            return None
        (dim, start, size), view = cut
        if piece is None:
            piece = Piece(dim=dim, start=start, size=size)
        elif piece.dim == dim:
            piece = Piece(dim=dim, start=piece.start + start, size=size)
        elif size != held[dim]:
            return None
    if outer.view is not None:
        seen = outer.view.of(view)
        if seen is None:
            return None
        view = seen
    if piece is not None and piece.size == shape[piece.dim]:
        piece = None
    return Use(value=inner.value, piece=piece, view=None if view.is_plain else view)


def redirected(trace: Trace, aliases: Mapping[str, Use], *, without: frozenset[str]) -> Trace:
    """Return the trace with values replaced by plain uses of others, and without some nodes, by name."""

    def follow(use: Use) -> Use:
        while use.value in aliases:
            other = aliases[use.value]
            assert other == Use(value=other.value), "only plain aliases can be followed"
            use = replace(use, value=other.value)
        return use

    nodes = tuple(
        replace(node, inputs=tuple(follow(use) for use in node.inputs))
        for node in trace.nodes
        if node.name not in without
    )
    outputs = tuple(follow(Use(value=name)).value for name in trace.outputs)
    return replace(trace, nodes=nodes, outputs=outputs)


def without_dead_nodes(trace: Trace) -> Trace:
    """Return the trace without nodes whose results nobody reads."""
    wanted = set(trace.outputs)
    kept: list[Node] = []
    for node in reversed(trace.nodes):
        if any(value.name in wanted for value in node.outputs):
            kept.append(node)
            wanted.update(use.value for use in node.inputs)
    return replace(trace, nodes=tuple(reversed(kept)))


def _of(shape: tuple[int, ...], piece: Piece | None) -> tuple[int, ...]:
    if piece is None:
        return shape
    return (*shape[: piece.dim], piece.size, *shape[piece.dim + 1 :])
