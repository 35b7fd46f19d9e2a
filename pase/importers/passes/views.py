"""Remove no-ops and nodes without float inputs, and express views and functions of weights as ways to read a tensor.

Reshapes, transposes, broadcasts and slices become views of the tensors that they read. Values computed from only
weights are read as these weights.
"""

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from math import exp, log, prod, sqrt
from types import MappingProxyType
from typing import Literal

from pase.importers.ir import ops
from pase.importers.ir.trace import Leaf, Node, Piece, Returned, Trace, Use, Value, lying, piece_shape
from pase.importers.ir.views import View


def composed(outer: Use, inner: Use, shape: tuple[int, ...]) -> Use | None:
    """Compose two uses: a use of a value that is itself a use of another value; None where that is impossible.

    shape: of the value behind `inner`.
    """
    if inner.seen_as is not None or outer.seen_as is not None:
        return None
    held = piece_shape(shape, inner.piece)
    view = inner.view or View.plain(held)
    piece = inner.piece
    if outer.piece is not None:
        cut = view.sliced(outer.piece.dim, outer.piece.start, outer.piece.size)
        if cut is None:
            return None
        (dim, start, size), view = cut
        if piece is None:
            piece = Piece(dim=dim, start=start, size=size)
        elif piece.dim == dim:
            piece = Piece(dim=dim, start=piece.start + start, size=size)
        elif size != held[dim]:
            return None
    if outer.view is not None:
        seen = outer.view.of(view)
        if seen is None:
            return None
        view = seen
    if piece is not None and piece.size == shape[piece.dim]:
        piece = None
    return Use(value=inner.value, piece=piece, view=None if view.is_plain else view, of=inner.of)


def seen_through(trace: Trace, use: Use, view: View | None) -> Use | None:
    """Return a use through one more view, of the shape in which it reads; None where that is impossible."""
    return None if view is None else composed(Use(value=use.value, view=view), use, trace.values[use.value].shape)


def reading(node: Node, value: str, behind: Use, shape: tuple[int, ...]) -> Node | None:
    """Return a node that reads the tensor behind a value instead of it; None where it cannot.

    shape: of the value that `behind` is a use of.
    """
    inputs = [composed(use, behind, shape) if use.value == value else use for use in node.inputs]
    told = tuple(use for use in inputs if use is not None)
    return replace(node, inputs=told) if len(told) == len(inputs) else None


def without_dead_nodes(trace: Trace) -> Trace:
    """Return the trace without nodes whose results are not read."""
    wanted = set(trace.outputs)
    kept: list[Node] = []
    for node in reversed(trace.nodes):
        if any(value.name in wanted for value in node.outputs):
            kept.append(node)
            wanted.update(use.value for use in node.inputs)
    return replace(trace, nodes=tuple(reversed(kept)))


# -- no-ops: casts, copies, dropout outside training, reshapes to the same shape


def drop_noops(trace: Trace) -> Trace:
    """Return the trace without operators that return their input."""
    aliases: dict[str, str] = {}
    dropped: set[str] = set()
    rates: dict[str, float] = {}
    for node in trace.nodes:
        if not _is_noop(trace, node):
            continue
        dropped.add(node.name)
        if node.inputs and node.outputs:
            aliases[node.outputs[0].name] = aliases.get(node.inputs[0].value, node.inputs[0].value)
        if isinstance(node.op, ops.Identity) and node.op.rate:
            _note_rate(rates, trace, node, node.op.rate, aliases)
    nodes = [
        replace(
            _dropping(node, rates),
            inputs=tuple(replace(use, value=aliases.get(use.value, use.value)) for use in node.inputs),
        )
        for node in trace.nodes
        if node.name not in dropped
    ]
    outputs = tuple(aliases.get(name, name) for name in trace.outputs)
    return without_dead_nodes(replace(trace, nodes=tuple(nodes), outputs=outputs))


def _note_rate(rates: dict[str, float], trace: Trace, node: Node, rate: float, aliases: Container[str]) -> None:
    """Record the dropout rate of the value behind a node's input: -1 where it is also read without dropout."""
    is_alone = True
    while True:
        value = node.inputs[0].value
        is_alone &= len(trace.users[value]) == 1 and value not in trace.outputs
        if value not in aliases:
            break
        node = trace.producer[value]
    rates[value] = rate if is_alone and value not in rates else -1.0


def _dropping(node: Node, rates: Mapping[str, float]) -> Node:
    """Return a node with the dropout rate of its first output, if any."""
    name = node.outputs[0].name if node.outputs else ""
    if name not in rates:
        return node
    if node.computes:
        return replace(node, computes=(*node.computes[:-1], replace(node.computes[-1], rate=rates[name])))
    return replace(node, rate=-1.0 if node.rate else rates[name])


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
        case ops.Identity():
            # A cast to integers is not a no-op: the result has no gradient.
            return before.is_float == after.is_float
        case ops.Reshape() | ops.Broadcast():
            return True
        case ops.Slice(steps=steps):
            # Backwards it is a flip.
            return all(step == 1 for step in steps)
        case ops.Transpose(order=order):
            return order == tuple(range(len(order)))
        case ops.Pointwise(functions=functions):
            return not functions
        case _:
            return False


# -- views


def see_views(trace: Trace) -> Trace:
    """Return the trace without views: consumers read the tensor behind a view, in the view's shape.

    Views that do not align with the tensor's dims (6 elements as 4 of a dim of 12 …) remain operators.
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
        seen_here = {use.value: aliases[use.value][0] for use in node.inputs if use.value in aliases}
        layouts = [lying(trace.values[name], use) for name, use in seen_here.items()] if node.computes else ()
        node = replace(node, inputs=tuple(inputs), computes=(*layouts, *node.computes))
        # The new node's inputs are values of the old trace: only the way that they are read has changed.
        found = seen_by(trace, node) if len(node.outputs) == 1 else None
        if found is not None and not _is_returned(trace, node, found):
            aliases[node.outputs[0].name] = found, node
        else:
            nodes.append(node)
    outputs = tuple(aliases[name][0].value if name in aliases else name for name in trace.outputs)
    returned: list[Returned] = []
    for output in trace.returned:
        read: Use | None = output.use
        if output.use.value in aliases:
            behind = aliases[output.use.value][0]
            read = composed(output.use, behind, trace.values[behind.value].shape)
        returned += [] if read is None else [replace(output, use=read)]
    rates: dict[str, float] = {}
    for name, (_, view) in aliases.items():
        if view.rate:
            _note_rate(rates, trace, trace.producer[name], view.rate, aliases)
    nodes = [_dropping(node, rates) for node in nodes]
    return without_dead_nodes(replace(trace, nodes=tuple(nodes), outputs=outputs, returned=tuple(returned)))


def seen_by(trace: Trace, node: Node) -> Use | None:
    """Return the first output of a view as a use of its input; None where that is impossible."""
    use, output = node.inputs[0], node.outputs[0]
    shape = trace.shape(use)
    if use.seen_as is not None or prod(shape) == 0 or prod(output.shape) == 0:
        return None
    view: View | None = View.plain(shape)
    piece = None
    match node.op:
        case ops.Reshape():
            view = View.plain(shape).reshaped(output.shape)
        case ops.Transpose(order=order):
            view = View.plain(shape).transposed(order)
        case ops.Broadcast(places=places):
            view = View.plain(shape).broadcast(output.shape, places)
        case ops.Slice(starts=starts, steps=steps):
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
    """Return whether a view of an input is an output of the model."""
    return found.value in trace.leaf and node.outputs[0].name in trace.outputs


# -- constants: subgraphs without float inputs, and functions of only weights


_PRODUCTS = ops.Contract | ops.Convolve | ops.Attention | ops.Recurrent
"""Work that counts wherever it is done, including on only weights (two factors of a matrix)."""


class Depends(IntEnum):
    """What a value depends on, in increasing order of importance."""

    CONSTANT = 0
    INDEX = 1
    """Integers of the input: tokens, a mask."""
    PARAMETER = 2
    CHOICE = 3
    """Integers computed from activations (the experts of a token), and values derived from them."""
    ACTIVATION = 4


def drop_constants(trace: Trace) -> Trace:
    """Return the trace with constants as leaves, and weights read directly by their consumers.

    Integers computed from the input (positions, masks) become inputs of their own where a table is looked up by them,
    and are dropped elsewhere. Floats that depend on neither weights nor float inputs (a causal mask, sines of
    positions) are dropped. Values derived from only integers that were computed from activations are read as these
    integers.
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
    """Return a node that reads the sources of inputs that are no longer computed, the first in their place."""
    inputs, more = [], list[Use]()
    for use in node.inputs:
        first, *others = computed.get(use.value, (use,))
        inputs.append(first)
        more += others
    known = {use.value for use in inputs}
    weights = [] if isinstance(node.op, ops.Concat) else [use for use in more if use.value not in known]
    return replace(node, inputs=(*inputs, *weights), beside=len(weights))


def _sources(
    trace: Trace,
    node: Node,
    value: Value,
    computed: Mapping[str, tuple[Use, ...]],
    depends: Mapping[str, Depends],
) -> tuple[Use, ...]:
    """Return the weights, or integers, from which a value is computed, as they are read in its place."""
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
    aligned = [use for use in uses if is_pointwise and trace.shape(use) == value.shape]
    others = [Use(value=use.value, seen_as=value.shape, of=of) for use in uses if use not in aligned]
    # One with the same layout as the value comes first: it represents the value.
    return (*(replace(use, of=of) for use in aligned), *others)


def _returned(trace: Trace, name: str, made: Container[str]) -> Iterator[Returned]:
    """Yield an output of the model in terms of a node's result, if possible."""
    use: Use | None = Use(value=name)
    while use is not None and use.value not in made and use.value in trace.producer:
        node = trace.producer[use.value]
        behind = node.inputs[0] if isinstance(node.op, ops.Identity) else seen_by(trace, node)
        use = None if behind is None else composed(use, behind, trace.values[behind.value].shape)
    if use is not None:
        yield Returned(name=name, shape=trace.values[name].shape, use=use)


# -- properties of values that are no longer computed


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
    """Return whether a node is JAX's normalisation of indices, which may be negative; those in data are not."""
    if not isinstance(node.op, ops.Pointwise) or node.op.functions != ("where",) or len(node.inputs) != 3:
        return False
    test, _, index = (use.value for use in node.inputs)
    maker = trace.producer.get(test)
    if maker is None or not isinstance(maker.op, ops.Pointwise) or maker.op.functions != ("less",):
        return False
    return maker.op.constant == 0 and maker.inputs[0].value == index and depends[index] is Depends.INDEX


def _numbers(trace: Trace, dropped: Sequence[Node], depends: Mapping[str, Depends]) -> Mapping[str, float]:
    """Return the constant value of tensors whose elements are all equal, for data within the model's vocabulary.

    Targets that a loss ignores are negative numbers, which data of a program do not have: none is ignored.
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
"""Functions of scalars that a source computes in addition to its tensors."""
