"""`recognise`: what JAX writes as several primitives, and is one operator: means, products, batch normalisation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from pase.importers.ir import Contract, Identity, Node, Normalise, Pointwise, Reduce, Reshape, Trace, Transpose, Use
from pase.importers.passes.uses import without_dead_nodes


def recognise(trace: Trace, statistics: Iterable[str]) -> Trace:
    """Return the trace with such operators as one.

    Args:
        trace: a node for each primitive.
        statistics: names of the constants that running means and variances are.
    """
    return recover_batch_norm(name_means(order_products(trace)), statistics)


def order_products(trace: Trace) -> Trace:
    """Return the trace with a transposition that alone reads a product as part of that product.

    JAX writes the dims of a product in a fixed order and transposes it then, where a function is mapped over a batch or
    an einsum asks for another one.
    """
    nodes: dict[str, Node] = {}
    merged: dict[str, str] = {}
    for node in trace.nodes:
        maker = _only_read_by(trace, node) if isinstance(node.op, Transpose) else None
        maker = nodes.get(merged.get(maker.name, maker.name)) if maker is not None else None
        if maker is None or not isinstance(node.op, Transpose) or not isinstance(maker.op, Contract):
            nodes[node.name] = node
            continue
        output = "".join(maker.op.output[i] for i in node.op.order)
        merged[node.name] = maker.name
        nodes[maker.name] = replace(maker, op=replace(maker.op, output=output), outputs=node.outputs)
    return replace(trace, nodes=tuple(nodes.values())) if merged else trace


def _only_read_by(trace: Trace, node: Node) -> Node | None:
    """Return the node that computes a node's first input, where nothing else reads that."""
    value = node.inputs[0].value
    return None if len(trace.users[value]) != 1 or value in trace.outputs else trace.producer.get(value)


def name_means(trace: Trace) -> Trace:
    """Return the trace with sums that are divided by how many elements were added up as means."""
    made: dict[str, Node] = {}
    for node in trace.nodes:
        is_quotient = isinstance(node.op, Pointwise) and node.op.functions == ("divide",) and len(node.inputs) == 1
        maker = _only_read_by(trace, node) if is_quotient else None
        while maker is not None and isinstance(maker.op, Reshape):  # dims of one element that are put back
            maker = _only_read_by(trace, maker)
        if maker is None or not isinstance(maker.op, Reduce) or maker.op.function != "sum":
            continue
        assert isinstance(node.op, Pointwise)
        shape = trace.shape(maker.inputs[0])
        if not node.op.constant_first and node.op.constant == prod(shape[i] for i in maker.op.over):
            made[maker.name] = replace(maker, op=replace(maker.op, function="mean"))
            made[node.name] = replace(node, op=Identity())
    return replace(trace, nodes=tuple(made.get(node.name, node) for node in trace.nodes)) if made else trace


def recover_batch_norm(trace: Trace, statistics: Iterable[str]) -> Trace:
    """Return the trace with ``(x - mean) / √(variance + ε) · scale + shift`` as one operator.

    statistics: names of the constants that the mean and the variance are; what is trained with is that operator, which
    computes them of the batch.
    """
    kept = frozenset(statistics)
    if not kept:
        return trace
    sources = _sources(trace)
    made = {}
    for node in trace.nodes:
        if isinstance(node.op, Pointwise) and node.op.functions == ("subtract",) and len(node.inputs) == 2:
            found = _normalisation(trace, node, sources, kept)
            if found is not None:
                made[found.name] = found
    nodes = tuple(made.get(node.name, node) for node in trace.nodes)
    return without_dead_nodes(replace(trace, nodes=nodes)) if made else trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """What a value is computed of: leaves, and the functions on the way."""

    leaves: frozenset[str]
    functions: frozenset[str]


def _sources(trace: Trace) -> Mapping[str, _Sources]:
    """Return the sources of every value that depends on no input."""
    found = {
        leaf.value.name: _Sources(leaves=frozenset([leaf.value.name]), functions=frozenset())
        for leaf in trace.leaves
        if leaf.role != "input"
    }
    for node in trace.nodes:
        parts = [found.get(use.value) for use in node.inputs]
        if any(part is None for part in parts):
            continue
        told = [part for part in parts if part is not None]
        own = node.op.functions if isinstance(node.op, Pointwise) else ()
        both = _Sources(
            leaves=frozenset().union(*(part.leaves for part in told)),
            functions=frozenset(own).union(*(part.functions for part in told)),
        )
        found.update((value.name, both) for value in node.outputs)
    return found


def _normalisation(
    trace: Trace, node: Node, sources: Mapping[str, _Sources], statistics: frozenset[str]
) -> Node | None:
    """Return the normalisation that begins with the subtraction of a mean, as the node that ends it."""
    x, mean = node.inputs
    if x.value in sources or mean.value not in sources or not sources[mean.value].leaves & statistics:
        return None
    shape = trace.values[x.value].shape
    own = trace.values[mean.value].shape
    channels = [len(shape) - len(own) + i for i, extent in enumerate(own) if extent > 1]
    if len(channels) != 1 or len(shape) < 2:
        return None
    (channel,) = channels
    roles: dict[str, list[str]] = {"scale": [], "shift": []}
    is_scaled, current = False, node
    last: Node | None = None
    while True:
        users = trace.users.get(current.outputs[0].name, ())
        if len(users) != 1 or current.outputs[0].name in trace.outputs:
            break
        (current,) = users
        if isinstance(current.op, Identity):
            continue
        others = [sources[use.value] for use in current.inputs if use.value in sources]
        functions = current.op.functions if isinstance(current.op, Pointwise) else ()
        role = _ROLES.get(functions[0]) if len(functions) == 1 else None
        if role is None or len(current.inputs) != 2 or len(others) != 1:
            break
        roles[role] += [leaf for leaf in others[0].leaves if trace.leaf[leaf].role == "parameter"]
        is_scaled |= bool(others[0].leaves & statistics) and not others[0].functions.isdisjoint(_ROOTS)
        last = current
        if role == "shift":
            break
    weights = [*roles["scale"], *roles["shift"]]
    extent = (shape[channel],)
    if last is None or not is_scaled or any(trace.values[name].shape != extent for name in weights):
        return None
    if any(len(names) > 1 for names in roles.values()):
        return None
    op = Normalise(
        kind="batch",
        over=tuple(i for i in range(len(shape)) if i != channel),
        channels=(channel,),
        has_scale=bool(roles["scale"]),
        has_shift=bool(roles["shift"]),
    )
    return replace(last, op=op, inputs=(x, *(Use(value=name) for name in weights)))


_ROLES = {"multiply": "scale", "divide": "scale", "add": "shift"}
_ROOTS = frozenset({"rsqrt", "sqrt"})
