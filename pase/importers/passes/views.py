"""Drop what changes nothing, and see reshapes, transposes, broadcasts and slices as ways to read a tensor."""

from collections.abc import Container, Mapping
from dataclasses import replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.trace import Node, Piece, Returned, Trace, Use, lying, piece_shape
from pase.importers.ir.views import View


def composed(outer: Use, inner: Use, shape: tuple[int, ...]) -> Use | None:
    """Return a use of a value that is itself a use of another one, as a use of that one; None where it is none.

    shape: of the value behind `inner`.
    """
    if inner.seen_as is not None or outer.seen_as is not None:
        return None
    held = piece_shape(shape, inner.piece)
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
    return Use(value=inner.value, piece=piece, view=None if view.is_plain else view, of=inner.of)


def seen_through(trace: Trace, use: Use, view: View | None) -> Use | None:
    """Return a use through one more view, of the shape in which it reads; None where it cannot be told so."""
    return None if view is None else composed(Use(value=use.value, view=view), use, trace.values[use.value].shape)


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


# -- what changes nothing: casts, copies, dropout outside training, reshapes to the same shape


def drop_noops(trace: Trace) -> Trace:
    """Return the trace without operators that give what they are given."""
    aliases: dict[str, Use] = {}
    dropped: set[str] = set()
    rates: dict[str, float] = {}
    for node in trace.nodes:
        if not _is_noop(trace, node):
            continue
        dropped.add(node.name)
        if node.inputs and node.outputs:
            aliases[node.outputs[0].name] = node.inputs[0]
        if isinstance(node.op, ops.Identity) and node.op.rate:
            value, is_alone = _behind(trace, node, aliases)
            rates[value] = node.op.rate if is_alone and value not in rates else -1.0
    trace = replace(trace, nodes=tuple(_dropping(node, rates) for node in trace.nodes))
    return without_dead_nodes(redirected(trace, aliases, without=frozenset(dropped)))


def _behind(trace: Trace, node: Node, aliases: Container[str]) -> tuple[str, bool]:
    """Return the value behind what a node reads, and whether nothing else reads it, or what is between."""
    is_alone = True
    while True:
        value = node.inputs[0].value
        is_alone &= len(trace.users[value]) == 1 and value not in trace.outputs
        if value not in aliases:
            return value, is_alone
        node = trace.producer[value]


def _dropping(node: Node, rates: Mapping[str, float]) -> Node:
    """Return a node with the rate at which points of its first output are dropped, where there is one."""
    name = node.outputs[0].name if node.outputs else ""
    if name not in rates:
        return node
    if node.computes:
        return replace(node, computes=(*node.computes[:-1], replace(node.computes[-1], rate=rates[name])))
    return replace(node, rate=-1.0 if node.rate else rates[name])


def _is_noop(trace: Trace, node: Node) -> bool:
    if not node.outputs:
        return True
    if not node.inputs or len(node.outputs) != 1:
        return False
    read = node.inputs[0]
    if read.piece is not None or read.view is not None:
        return False
    before, after = trace.values[read.value], node.outputs[0]
    if before.shape != after.shape:
        return False
    match node.op:
        case ops.Identity():
            # A cast to whole numbers is none: the result has no gradient.
            return before.is_float == after.is_float
        case ops.Reshape() | ops.Broadcast():
            return True
        case ops.Slice(steps=steps):
            # Backwards it is a flip.
            return all(step == 1 for step in steps)
        case ops.Transpose(order=order):
            return order == tuple(range(len(order)))
        case ops.Pointwise(functions=functions):
            return not functions
        case _:
            return False


# -- views


def see_views(trace: Trace) -> Trace:
    """Return the trace without views: who reads one reads the tensor behind it, in that shape.

    What lies across the tensor's own dims (6 seen as 4 of a dim of 12 …) stays an operator.
    """
    aliases: dict[str, tuple[Use, Node]] = {}
    nodes: list[Node] = []
    for node in trace.nodes:
        inputs = []
        for use in node.inputs:
            if use.value not in aliases:
                inputs.append(use)
                continue
            behind, view = aliases[use.value]
            seen = composed(use, behind, trace.values[behind.value].shape)
            if seen is None:
                # This reader cannot see through it, so that the view is an operator, for all that come after, too.
                nodes.append(view)
                del aliases[use.value]
            inputs.append(seen or use)
        seen_here = {use.value: aliases[use.value][0] for use in node.inputs if use.value in aliases}
        lies = [lying(trace.values[name], use) for name, use in seen_here.items()] if node.computes else ()
        node = replace(node, inputs=tuple(inputs), computes=(*lies, *node.computes))
        # The values of the new node's inputs are those of the old trace: only how they are read has changed.
        found = seen_by(trace, node) if len(node.outputs) == 1 else None
        if found is not None and not _is_returned(trace, node, found):
            aliases[node.outputs[0].name] = found, node
        else:
            nodes.append(node)
    outputs = tuple(aliases[name][0].value if name in aliases else name for name in trace.outputs)
    returned: list[Returned] = []
    for output in trace.returned:
        read: Use | None = output.use
        if output.use.value in aliases:
            behind = aliases[output.use.value][0]
            read = composed(output.use, behind, trace.values[behind.value].shape)
        returned += [] if read is None else [replace(output, use=read)]
    rates: dict[str, float] = {}
    for name, (_, view) in aliases.items():
        if view.rate:
            value, is_alone = _behind(trace, trace.producer[name], aliases)
            rates[value] = view.rate if is_alone and value not in rates else -1.0
    nodes = [_dropping(node, rates) for node in nodes]
    return without_dead_nodes(replace(trace, nodes=tuple(nodes), outputs=outputs, returned=tuple(returned)))


def seen_by(trace: Trace, node: Node) -> Use | None:
    """Return the first output of a view as a use of its input; None where it is none."""
    use, output = node.inputs[0], node.outputs[0]
    shape = trace.shape(use)
    if use.seen_as is not None or prod(shape) == 0 or prod(output.shape) == 0:
        return None
    view: View | None = View.plain(shape)
    piece = None
    match node.op:
        case ops.Reshape():
            view = View.plain(shape).reshaped(output.shape)
        case ops.Transpose(order=order):
            view = View.plain(shape).transposed(order)
        case ops.Broadcast(places=places):
            view = View.plain(shape).broadcast(output.shape, places)
        case ops.Slice(starts=starts, steps=steps):
            cut = [i for i, (old, new) in enumerate(zip(shape, output.shape, strict=True)) if old != new]
            if len(cut) != 1 or any(steps[i] != 1 for i in cut):
                return None
            (dim,) = cut
            piece = Piece(dim=dim, start=starts[dim], size=output.shape[dim])
            view = View.plain(output.shape)
        case _:
            return None
    if view is None:
        return None
    outer = Use(value=use.value, piece=piece, view=None if view.is_plain else view)
    return composed(outer, use, trace.values[use.value].shape)


def _is_returned(trace: Trace, node: Node, found: Use) -> bool:
    """Whether a view of an input is what the model returns."""
    return found.value in trace.leaf and node.outputs[0].name in trace.outputs
