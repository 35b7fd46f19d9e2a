"""A sum that is divided by how many elements were added up is a mean."""

from dataclasses import replace
from math import prod

from pase.importers.ir import Identity, Node, Pointwise, Reduce, Reshape, Trace


def name_means(trace: Trace) -> Trace:
    """Return the trace with such sums as means; what divided them is no operator any more."""
    made: dict[str, Node] = {}
    for node in trace.nodes:
        if not isinstance(node.op, Pointwise) or node.op.functions != ("divide",) or len(node.inputs) != 1:
            continue
        maker = _sum_behind(trace, node)
        if maker is None or node.op.constant_first or node.op.constant is None:
            continue
        assert isinstance(maker.op, Reduce)
        shape = trace.shape(maker.inputs[0])
        if node.op.constant == prod(shape[i] for i in maker.op.over):
            made[maker.name] = replace(maker, op=replace(maker.op, function="mean"))
            made[node.name] = replace(node, op=Identity())
    return replace(trace, nodes=tuple(made.get(node.name, node) for node in trace.nodes)) if made else trace


def _sum_behind(trace: Trace, node: Node) -> Node | None:
    """Return the sum that a node alone reads, perhaps with dims of one element put back."""
    while True:
        value = node.inputs[0].value
        maker = trace.producer.get(value)
        if maker is None or len(trace.users[value]) != 1 or value in trace.outputs:
            return None
        if isinstance(maker.op, Reduce):
            return maker if maker.op.function == "sum" else None
        if not isinstance(maker.op, Reshape):
            return None
        node = maker
