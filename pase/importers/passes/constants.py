"""Drop subgraphs that no float flows through: constants, positions, masks; and see through those of weights alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod

from pase.importers.ir import Leaf, Node, Trace, Use, Value, ops
from pase.importers.passes.views import seen_by, without_dead_nodes

_PRODUCTS = ops.Contract | ops.Convolve | ops.Attention | ops.Recurrent
"""Work that counts wherever it is done, also on weights alone (two factors of a matrix)."""


class Depends(IntEnum):
    """What a value depends on, the most telling last."""

    CONSTANT = 0
    INDEX = 1
    """Whole numbers of the input: tokens, a mask."""
    PARAMETER = 2
    CHOICE = 3
    """Whole numbers that were computed of activations (the experts that a token goes to), and what follows of them."""
    ACTIVATION = 4


def drop_constants(trace: Trace) -> Trace:
    """Return the trace with constants as leaves, and weights read as they are by what computes with them.

    Whole numbers that are computed from the input (positions, masks) become inputs of their own where a table is looked
    up by them, and vanish elsewhere. Floats of no weight and no float input (a causal mask, sines of positions) vanish.
    What follows of whole numbers alone that were computed of activations is read as these numbers.
    """
    depends = dependencies(trace)
    computed: dict[str, tuple[Use, ...]] = {}
    nodes: list[Node] = []
    for node in trace.nodes:
        if _is_kept(node, depends):
            op = ops.Pointwise(functions=("cast",)) if isinstance(node.op, ops.Identity) else node.op
            nodes.append(replace(node, op=op, inputs=_behind(trace, node, computed)))
            continue
        for value in node.outputs:
            if depends[value.name] in (Depends.PARAMETER, Depends.CHOICE):
                computed[value.name] = _sources(trace, node, value, computed, depends)
    made = {value.name for node in nodes for value in node.outputs}
    leaves = {leaf.value.name: leaf for leaf in trace.leaves}
    for use in (use for node in nodes for use in node.inputs):
        if use.value not in leaves and use.value not in made:
            value = trace.values[use.value]
            is_fed = depends[use.value] is Depends.INDEX and not value.is_float
            leaves[use.value] = Leaf(value=value, role="input" if is_fed else "constant")
    outputs: dict[str, None] = {}
    for name in trace.outputs:
        if depends[name] >= Depends.CHOICE:
            outputs |= dict.fromkeys([use.value for use in computed.get(name, (Use(value=name),))])
    return without_dead_nodes(replace(trace, leaves=tuple(leaves.values()), nodes=tuple(nodes), outputs=tuple(outputs)))


def dependencies(trace: Trace) -> Mapping[str, Depends]:
    """Return what each value depends on."""
    found: dict[str, Depends] = {}
    for leaf in trace.leaves:
        match leaf.role:
            case "constant":
                found[leaf.value.name] = Depends.CONSTANT
            case "parameter":
                found[leaf.value.name] = Depends.PARAMETER
            case _:
                found[leaf.value.name] = Depends.ACTIVATION if leaf.value.is_float else Depends.INDEX
    for node in trace.nodes:
        kinds = {found[use.value] for use in node.inputs}
        kind = max(kinds, default=Depends.CONSTANT)
        # Rows of a table, looked up by the tokens of the input; a product of two weights.
        is_computed = Depends.PARAMETER in kinds and not kinds.isdisjoint((Depends.INDEX, Depends.CHOICE))
        if is_computed or (kind is Depends.PARAMETER and isinstance(node.op, _PRODUCTS)):
            kind = Depends.ACTIVATION
        for value in node.outputs:
            found[value.name] = _of_value(value, kind)
    return found


def _of_value(value: Value, kind: Depends) -> Depends:
    if prod(value.shape) == 0:
        return Depends.CONSTANT
    if value.is_float:
        return kind
    return {Depends.PARAMETER: Depends.CONSTANT, Depends.ACTIVATION: Depends.CHOICE}.get(kind, kind)


def _is_kept(node: Node, depends: Mapping[str, Depends]) -> bool:
    """Whether a node computes anything of activations."""
    if all(depends[value.name] is Depends.CONSTANT for value in node.outputs):
        return False
    return any(depends[value.name] is Depends.ACTIVATION for value in node.outputs) or any(
        depends[use.value] is Depends.ACTIVATION for use in node.inputs
    )


def _behind(trace: Trace, node: Node, computed: Mapping[str, tuple[Use, ...]]) -> tuple[Use, ...]:
    """Return a node's inputs with what is behind those that are not computed any more; the first takes their place."""
    inputs, more = [], list[Use]()
    for use in node.inputs:
        first, *others = computed.get(use.value, (use,))
        inputs.append(first)
        more += others
    told = {use.value for use in inputs}
    return (*inputs, *(() if isinstance(node.op, ops.Concat) else (use for use in more if use.value not in told)))


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a value is read in place of what is computed of it."""

    use: Use
    is_alike: bool


def _sources(
    trace: Trace,
    node: Node,
    value: Value,
    computed: Mapping[str, tuple[Use, ...]],
    depends: Mapping[str, Depends],
) -> tuple[Use, ...]:
    """Return the weights, or whole numbers, that a value is computed of, as they are read in its place."""
    reads: dict[str, Use] = {}
    for use in node.inputs:
        if depends[use.value] in (Depends.PARAMETER, Depends.CHOICE):
            reads |= {read.value: read for read in computed.get(use.value, (use,))}
    uses = list(reads.values())
    if len(uses) == 1 and isinstance(node.op, ops.Reshape | ops.Transpose | ops.Slice):
        seen = seen_by(trace, replace(node, inputs=(uses[0],)))
        if seen is not None:
            return (seen,)
    is_pointwise = isinstance(node.op, ops.Pointwise | ops.Identity)
    found = [_Seen(use, is_pointwise and trace.shape(use) == value.shape) for use in uses]
    # One that lies as the value does comes first: it stands for the value.
    found.sort(key=lambda seen: not seen.is_alike)
    return tuple(seen.use if seen.is_alike else Use(value=seen.use.value, seen_as=value.shape) for seen in found)
