"""Recurrent networks as vertices."""

from pase.graph.operators.recurrent import recurrent
from pase.importers.ir import Node, Recurrent, Trace
from pase.importers.ir.count import gates, recurrent_flop
from pase.importers.lower.draft import Draft, is_parameter
from pase.importers.lower.points import lower_generic
from pase.importers.passes.regions import is_activation


def lower_recurrent(trace: Trace, node: Node, name: str) -> Draft:
    """Return a recurrent network: its steps are not split, its units are."""
    op = node.op
    assert isinstance(op, Recurrent)
    x = node.inputs[0]
    weights = [use for use in node.inputs[1:] if is_parameter(trace, use)]
    states = [use for use in node.inputs[1:] if is_activation(trace, use)]
    if len(trace.shape(x)) != 3 or not is_activation(trace, x):
        return lower_generic(trace, node, name)
    operator = recurrent(
        name,
        trace.shape(x),
        weights=[trace.shape(use) for use in weights],
        states=[trace.shape(use) for use in states],
        outputs=[value.shape for value in node.outputs],
        units=op.units,
        gates=gates(op),
        layers=op.layers,
        directions=2 if op.is_bidirectional else 1,
        product_flop=recurrent_flop(op, trace.shape(x)),
        is_batch_first=op.is_batch_first,
        cell=op.cell,
    )
    return Draft(operator=operator, sources=(x, *weights, *states), orders=(None,) * len(node.outputs))
