"""See reshapes, transposes, broadcasts and slices as the way in which a tensor is read."""

from dataclasses import replace
from math import prod

from pase.importers.ir import Broadcast, Node, Piece, Reshape, Slice, Trace, Transpose, Use, View
from pase.importers.passes.uses import composed, without_dead_nodes


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
        node = replace(node, inputs=tuple(inputs))
        # The values of the new node's inputs are those of the old trace: only how they are read has changed.
        found = seen_by(trace, node) if len(node.outputs) == 1 else None
        if found is not None and not _is_returned(trace, node, found):
            aliases[node.outputs[0].name] = found, node
        else:
            nodes.append(node)
    outputs = tuple(aliases[name][0].value if name in aliases else name for name in trace.outputs)
    return without_dead_nodes(replace(trace, nodes=tuple(nodes), outputs=outputs))


def seen_by(trace: Trace, node: Node) -> Use | None:
    """Return the first output of a view as a use of its input; None where it is none."""
    use, output = node.inputs[0], node.outputs[0]
    shape = trace.shape(use)
    if use.seen_as is not None or prod(shape) == 0 or prod(output.shape) == 0:
        return None
    view: View | None = View.plain(shape)
    piece = None
    match node.op:
        case Reshape():
            view = View.plain(shape).reshaped(output.shape)
        case Transpose(order=order):
            view = View.plain(shape).transposed(order)
        case Broadcast(places=places):
            view = View.plain(shape).broadcast(output.shape, places)
        case Slice(starts=starts, steps=steps):
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
