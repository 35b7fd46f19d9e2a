"""Products that write their dims in the order in which they are read."""

from dataclasses import replace

from pase.importers.ir import Contract, Node, Trace, Transpose


def order_products(trace: Trace) -> Trace:
    """Return the trace with a transposition that alone reads a product as part of that product.

    JAX writes the dims of a product in a fixed order and transposes it then, where a function is mapped over a batch or
    an einsum asks for another one.
    """
    nodes: dict[str, Node] = {}
    merged: dict[str, str] = {}
    for node in trace.nodes:
        maker = trace.producer.get(node.inputs[0].value) if isinstance(node.op, Transpose) else None
        maker = nodes.get(merged.get(maker.name, maker.name)) if maker is not None else None
        if (
            maker is None
            or not isinstance(node.op, Transpose)
            or not isinstance(maker.op, Contract)
            or len(trace.users[node.inputs[0].value]) != 1
            or node.inputs[0].value in trace.outputs
        ):
            nodes[node.name] = node
            continue
        output = "".join(maker.op.output[i] for i in node.op.order)
        merged[node.name] = maker.name
        nodes[maker.name] = replace(maker, op=replace(maker.op, output=output), outputs=node.outputs)
    return replace(trace, nodes=tuple(nodes.values())) if merged else trace
