"""Drop subgraphs that no float flows through: constants, positions, masks; and see through those of weights alone."""

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from math import exp, log, prod, sqrt
from types import MappingProxyType
from typing import Literal

from pase.importers.ir import ops
from pase.importers.ir.trace import Leaf, Node, Returned, Trace, Use, Value
from pase.importers.passes.views import composed, seen_by, without_dead_nodes

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
    of_weights: list[Node] = []
    dropped: list[Node] = []
    for node in trace.nodes:
        if _is_kept(node, depends):
            op = ops.Pointwise(functions=("cast",)) if isinstance(node.op, ops.Identity) else node.op
            nodes.append(_reading_behind(replace(node, op=op), computed))
            continue
        dropped.append(node)
        for value in node.outputs:
            if depends[value.name] in (Depends.PARAMETER, Depends.CHOICE):
                computed[value.name] = _sources(trace, node, value, computed, depends)
        if any(depends[value.name] in (Depends.PARAMETER, Depends.CHOICE) for value in node.outputs):
            of_weights.append(node)
    made = {value.name for node in (*nodes, *of_weights) for value in node.outputs}
    leaves = {leaf.value.name: leaf for leaf in trace.leaves}
    numbers, inputs = _numbers(trace, dropped, depends), _inputs(trace, dropped, depends)
    for use in (use for node in (*nodes, *of_weights) for use in node.inputs):
        name = use.value
        if name not in leaves and name not in made:
            value = trace.values[name]
            is_fed = depends[name] is Depends.INDEX and not value.is_float
            role: Literal["input", "constant"] = "input" if is_fed else "constant"
            leaves[name] = Leaf(value=value, role=role, number=numbers.get(name), computed_of=inputs.get(name))
    outputs: dict[str, None] = {}
    returned: list[Returned] = []
    for name in trace.outputs:
        if depends[name] >= Depends.CHOICE:
            outputs |= dict.fromkeys([use.value for use in computed.get(name, (Use(value=name),))])
            returned += _returned(trace, name, made)
    return without_dead_nodes(
        replace(
            trace,
            leaves=tuple(leaves.values()),
            nodes=tuple(nodes),
            outputs=tuple(outputs),
            of_weights=tuple(of_weights),
            returned=tuple(returned),
        )
    )


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


def _reading_behind(node: Node, computed: Mapping[str, tuple[Use, ...]]) -> Node:
    """Return a node that reads what is behind those inputs that are not computed any more, the first in their place."""
    inputs, more = [], list[Use]()
    for use in node.inputs:
        first, *others = computed.get(use.value, (use,))
        inputs.append(first)
        more += others
    told = {use.value for use in inputs}
    beside = [] if isinstance(node.op, ops.Concat) else [use for use in more if use.value not in told]
    return replace(node, inputs=(*inputs, *beside), beside=len(beside))


def _sources(
    trace: Trace,
    node: Node,
    value: Value,
    computed: Mapping[str, tuple[Use, ...]],
    depends: Mapping[str, Depends],
) -> tuple[Use, ...]:
    """Return the weights, or whole numbers, that a value is computed of, as they are read in its place."""
    reads: dict[str, Use] = {}
    of = value.name
    for use in node.inputs:
        if depends[use.value] in (Depends.PARAMETER, Depends.CHOICE):
            reads |= {read.value: read for read in computed.get(use.value, (use,))}
    uses = list(reads.values())
    if len(uses) == 1 and isinstance(node.op, ops.Identity | ops.Reshape | ops.Transpose | ops.Slice):
        seen = uses[0] if isinstance(node.op, ops.Identity) else seen_by(trace, replace(node, inputs=(uses[0],)))
        if seen is not None:
            return (replace(seen, of=of if seen.of else ""),)
    is_pointwise = isinstance(node.op, ops.Pointwise | ops.Identity)
    alike = [use for use in uses if is_pointwise and trace.shape(use) == value.shape]
    others = [Use(value=use.value, seen_as=value.shape, of=of) for use in uses if use not in alike]
    # One that lies as the value does comes first: it stands for the value.
    return (*(replace(use, of=of) for use in alike), *others)


def _returned(trace: Trace, name: str, made: Container[str]) -> Iterator[Returned]:
    """Yield an output of the model as it is read of what a node computes, if it can be."""
    use: Use | None = Use(value=name)
    while use is not None and use.value not in made and use.value in trace.producer:
        node = trace.producer[use.value]
        behind = node.inputs[0] if isinstance(node.op, ops.Identity) else seen_by(trace, node)
        use = None if behind is None else composed(use, behind, trace.values[behind.value].shape)
    if use is not None:
        yield Returned(name=name, shape=trace.values[name].shape, use=use)


# -- what is known of values that are not computed any more


def _inputs(
    trace: Trace, dropped: Sequence[Node], depends: Mapping[str, Depends]
) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return the input of the model whose elements a value that is computed of it holds, in their order; or itself."""
    given = {leaf.value.name: leaf.value for leaf in trace.leaves}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for node in dropped:
        for value in node.outputs:
            behind = value.name
            if _is_counted_from_the_end(trace, node, depends):
                behind = node.inputs[2].value
            elif isinstance(node.op, ops.Identity | ops.Reshape):
                behind = node.inputs[0].value
            if depends[value.name] in (Depends.INDEX, Depends.CHOICE):
                held = given.get(behind, value)
                found[value.name] = held.name, held.shape
                given |= {value.name: held} if behind in given else {}
    return found


def _is_counted_from_the_end(trace: Trace, node: Node, depends: Mapping[str, Depends]) -> bool:
    """Whether a node is what JAX makes of indices, of which negative ones count from the end: data hold none."""
    if not isinstance(node.op, ops.Pointwise) or node.op.functions != ("where",) or len(node.inputs) != 3:
        return False
    test, _, index = (use.value for use in node.inputs)
    maker = trace.producer.get(test)
    if maker is None or not isinstance(maker.op, ops.Pointwise) or maker.op.functions != ("less",):
        return False
    return maker.op.constant == 0 and maker.inputs[0].value == index and depends[index] is Depends.INDEX


def _numbers(trace: Trace, dropped: Sequence[Node], depends: Mapping[str, Depends]) -> Mapping[str, float]:
    """Return the number that all elements of a value are, where they are one, for data of the model's vocabulary.

    Targets that a loss leaves out are negative numbers, which a program takes no data of: none is left out.
    """
    found = {leaf.value.name: leaf.number for leaf in trace.leaves if leaf.number is not None}
    for node in dropped:
        number = _number(trace, node, [found.get(use.value) for use in node.inputs], depends)
        if number is not None:
            found |= {value.name: number for value in node.outputs}
    return found


def _number(trace: Trace, node: Node, numbers: Sequence[float | None], depends: Mapping[str, Depends]) -> float | None:
    match node.op:
        case ops.Pointwise(functions=("not_equal",), constant=float(ignored)) if ignored < 0:
            return 1.0 if depends[node.inputs[0].value] is Depends.INDEX else None
        case ops.Identity() | ops.Reshape() | ops.Transpose() | ops.Broadcast() | ops.Pointwise(functions=("cast",)):
            return numbers[0]
        case ops.Generic() if node.origin.operator.split(".")[:2] in (["aten", "zeros"], ["aten", "zeros_like"]):
            return 0.0
        case ops.Reduce(function="sum") if numbers[0] is not None:
            return numbers[0] * prod(trace.shape(node.inputs[0])) / max(1, prod(node.outputs[0].shape))
        case ops.Pointwise(functions=("where",)) if numbers[0] is not None and len(numbers) == 3:
            return numbers[1] if numbers[0] else numbers[2]
        case ops.Pointwise(functions=(str(function),)) if function in _OF_NUMBERS and None not in numbers:
            own = [number for number in numbers if number is not None]
            if node.op.constant is not None:
                own = [node.op.constant, *own] if node.op.constant_first else [*own, node.op.constant]
            try:
                return float(_OF_NUMBERS[function](*own))
            except (ArithmeticError, TypeError, ValueError):
                return None
    return None


_OF_NUMBERS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "add": operator.add,
        "divide": operator.truediv,
        "exp": exp,
        "log": log,
        "multiply": operator.mul,
        "negate": operator.neg,
        "power": pow,
        "rsqrt": lambda x: 1 / sqrt(x),
        "sqrt": sqrt,
        "subtract": operator.sub,
    }
)
"""Functions of numbers that a source computes with beside its tensors."""
