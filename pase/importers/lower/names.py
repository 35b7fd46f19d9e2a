"""Names of vertices: the module or layer of the source, and what it does there where it does several things."""

from collections import Counter

from pase.importers.ir import (
    Attention,
    Concat,
    Contract,
    Convolve,
    Gather,
    Lookup,
    Node,
    Normalise,
    Pad,
    Pointwise,
    Pool,
    Recurrent,
    Reduce,
    Slice,
    Softmax,
    Trace,
)


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
    leaves = (trace.leaf.get(use.value) for use in node.inputs)
    return any(
        leaf is not None and leaf.role == "parameter" and leaf.value.name.startswith(node.origin.scope)
        for leaf in leaves
    )


def _does(node: Node) -> str:
    """Return a word for what a node does."""
    op = node.op
    if isinstance(op, Pointwise):
        return op.functions[-1] if op.functions else "identity"
    if isinstance(op, Reduce):
        return op.function
    if isinstance(op, Pool):
        return f"{op.function}_pool"
    if isinstance(op, Normalise):
        return op.kind if op.kind == "statistics" else f"{op.kind}_norm"
    return _WORDS.get(type(op), node.name)


_WORDS: dict[type, str] = {
    Attention: "attention",
    Concat: "concat",
    Contract: "product",
    Convolve: "convolution",
    Gather: "gather",
    Lookup: "lookup",
    Pad: "pad",
    Recurrent: "recurrent",
    Slice: "piece",
    Softmax: "softmax",
}
