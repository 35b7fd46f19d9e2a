"""What a trace counts: FLOP of its products and trained values, from which a graph may not differ."""

from math import prod

from pase.importers.ir.ops import Attention, Contract, Convolve, Generic, Recurrent
from pase.importers.ir.trace import Node, Trace

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def product_flop(trace: Trace) -> float:
    """Return the FLOP of all products of one forward pass, a multiply-add counted as two."""
    return sum(node_product_flop(trace, node) for node in trace.nodes)


def node_product_flop(trace: Trace, node: Node) -> float:
    """Return the FLOP of a node's products; 0 for one that has none."""
    shapes = [trace.shape(use) for use in node.inputs]
    match node.op:
        case Contract(operands=operands, share=share):
            extents = dict(zip("".join(operands), (*shapes[0], *shapes[1]), strict=True))
            return 2.0 * prod(extents.values()) * share
        case Convolve(filters=filters, is_transposed=is_transposed):
            w = shapes[1]
            points = prod(shapes[0] if is_transposed else node.outputs[0].shape)
            return 2.0 * points * prod(w[i] for i in filters[1:])
        case Attention():
            (b, h, s, k), v = shapes[0], shapes[2]
            return 2.0 * b * h * s * v[2] * (k + v[3])
        case Recurrent():
            return recurrent_flop(node.op, shapes[0])
        case Generic(product_flop=flop):
            return flop
        case _:
            return 0.0


def recurrent_flop(op: Recurrent, x: tuple[int, ...]) -> float:
    """Return the FLOP of a recurrent network's products over a sequence of shape x."""
    directions = 2 if op.is_bidirectional else 1
    widths = [x[-1], *[op.units * directions] * (op.layers - 1)]
    return sum(2.0 * prod(x[:-1]) * directions * gates(op) * op.units * (width + op.units) for width in widths)


def gates(op: Recurrent) -> int:
    """Return how many gates a cell has, each of which is a product."""
    return _GATES[op.cell]


def live_parameters(trace: Trace) -> int:
    """Return the number of trained values that any node of a trace reads; tied weights count once."""
    read = {use.value for node in trace.nodes for use in node.inputs}
    sizes = {
        leaf.storage or leaf.value.name: prod(leaf.value.shape)
        for leaf in trace.leaves
        if leaf.role == "parameter" and leaf.value.name in read
    }
    return sum(sizes.values())
