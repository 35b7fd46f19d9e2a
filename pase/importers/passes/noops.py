"""Drop what changes nothing: casts, copies, dropout outside training, reshapes to the same shape."""

from pase.importers.ir import Broadcast, Identity, Node, Pointwise, Reshape, Slice, Trace, Transpose, Use
from pase.importers.passes.uses import redirected, without_dead_nodes


def drop_noops(trace: Trace) -> Trace:
    """Return the trace without operators that give what they are given."""
    aliases: dict[str, Use] = {}
    dropped: set[str] = set()
    for node in trace.nodes:
        if not _is_noop(trace, node):
            continue
        dropped.add(node.name)
        if node.inputs and node.outputs:
            aliases[node.outputs[0].name] = node.inputs[0]
    return without_dead_nodes(redirected(trace, aliases, without=frozenset(dropped)))


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
        case Identity():
            # A cast to whole numbers is none: the result has no gradient.
            return before.is_float == after.is_float
        case Reshape() | Broadcast():
            return True
        case Slice(steps=steps):
            # Backwards it is a flip.
            return all(step == 1 for step in steps)
        case Transpose(order=order):
            return order == tuple(range(len(order)))
        case Pointwise(functions=functions):
            return not functions
        case _:
            return False
