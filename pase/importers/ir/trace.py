"""`Trace`: a model as its source has it, operator by operator, with shapes and without any weight's values."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Literal

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.views import View

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float8"})


def dtype_name(dtype: object) -> str:
    """Return the name of a framework's type here; a complex number, which has a gradient too, counts as a float."""
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else "float64" if name.startswith("complex") else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor; dtype: "float32", "bfloat16", "int64", "bool", …."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype in FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor that no node computes.

    role: "input" (fed in every step), "parameter" or "constant" (buffers, literals). storage: what holds its values;
    tied weights have the same, others their own names. is_trained: of a parameter, whether training changes it.
    number: that all of its elements are, where it is known without reading weights. computed_of: where it was computed
    of an input of the model, the name and the shape of what holds its elements in their order: that input, or what is
    computed of it, which is an input itself.
    """

    value: Value
    role: Literal["input", "parameter", "constant"]
    storage: str = ""
    is_trained: bool = True
    number: float | None = None
    computed_of: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor: ``[start, start + size)`` of one of its dims, all of the others."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A tensor as a node reads it: by name, perhaps a piece of it, perhaps in another shape.

    seen_as: the shape in which it is read where that does not lie over its own in any known way (rows of a table that
    were looked up by constants): then it counts as needed whole. of: where a weight is read in place of a value that is
    computed of weights alone, or whole numbers in place of one that is computed of these, that value; the shape is its
    own then.
    """

    value: str
    piece: Piece | None = None
    view: View | None = None
    seen_as: tuple[int, ...] | None = None
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a node comes from.

    operator: its name in the source ("aten.linear.default", "Conv"). scope: the module or layer; line: "file.py:12" of
    the user's source; "" where they are not known. turn: in a loop that is written out, (number of the loop, of its
    turn).
    """

    operator: str
    scope: str = ""
    line: str = ""
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOperator:
    """The source's own call that a node is, for those of its framework.

    operator, arguments: as `graph.sources.SourceCall` has them, operands being the node's inputs by position. results:
    the names of all that it gives. passes: groups of dims along which each point depends on those of that point alone:
    (of each input, of each result), -1 where it has none. is_exact: whether the node computes just this; else what it
    costs alone.
    """

    operator: str
    arguments: str
    results: tuple[str, ...]
    passes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What a function that was folded into a node works out.

    flop: of the forward pass. backward_flop: where its argument has a gradient. argument: the value that it is applied
    to, "" for what the node itself computes.
    """

    flop: float
    backward_flop: float
    argument: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator.

    name: unique among nodes. epilogue: functions that are applied to the first output, point by point, before anyone
    reads it. folded: the work of what was folded into it, before or after its own. whole: (input, dim) that are needed
    whole by what was folded into it.
    beside: how many of the last inputs are weights that others before them are computed of.
    rate: of the points of the first output that are dropped while the network is trained; -1 where only some of those
    who read it read it so.
    computes: the nodes of the source that it stands for, in order; none where that is itself. What each of them reads
    is made by one of them, held by another node, or a leaf. The last one makes what the first output holds, which that
    may hold in another shape; an `Identity` among them is how a value lies in what another node holds.
    source: the source's own call, where it is one.
    """

    name: str
    op: ops.Op
    inputs: tuple[Use, ...]
    outputs: tuple[Value, ...]
    origin: Origin
    epilogue: tuple[str, ...] = ()
    folded: tuple[Folded, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    beside: int = 0
    rate: float = 0.0
    computes: "tuple[Node, ...]" = ()
    source: SourceOperator | None = None

    @property
    def elementary(self) -> "tuple[Node, ...]":
        """The nodes of the source that it stands for."""
        own = self.inputs[: len(self.inputs) - self.beside]
        return self.computes or (replace(self, inputs=own, beside=0),)


def computed_together(*parts: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes of the source that several stand for, in order; each value is made once."""
    found: dict[str, Node] = {}
    for node in chain(*parts):
        found.setdefault(node.outputs[0].name, node)
    return tuple(found.values())


def lying(value: Value, use: Use) -> Node:
    """Return the node by which a value of the source is how another one is read."""
    return Node(
        name=f"{value.name}:held", op=ops.Identity(), inputs=(use,), outputs=(value,), origin=Origin(operator="")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node of what a front end makes of an operator, whose own results are outputs of some of the steps."""

    op: ops.Op
    inputs: tuple[Use, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a model returns. name, shape: its own; use: of what a node computes."""

    name: str
    shape: tuple[int, ...]
    use: Use


def frozen_notes(weights: Iterable[tuple[int, bool]]) -> Iterator[str]:
    """Yield what is to be said of frozen weights; weights: of each how many values, and whether it is trained."""
    sizes = {True: 0, False: 0}
    for size, is_trained in weights:
        sizes[is_trained] += size
    if sizes[False]:
        known = "they have no gradients" if sizes[True] else "as all are, costs are those of training them"
        yield f"{sizes[False]:,} parameters are frozen in the model: {known}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Nodes in topological order. outputs: names of the values that the model returns.

    of_weights: nodes that compute values of weights, or of whole numbers, alone, which are read in place of these.
    returned: what the model returns, in terms of what nodes compute. has_calls: whether the source's own calls can be
    run by a target. notes: what was assumed. num_source_operators: as the source counts its own, one of which may be
    several nodes. call: how the model was called, as its front end writes it. untrained: why what it traces, which is
    outside training, is not what the model computes in training, "" if it is.
    """

    name: str
    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    of_weights: tuple[Node, ...] = ()
    returned: tuple[Returned, ...] = ()
    has_calls: bool = False
    notes: tuple[str, ...] = field(default=())
    num_source_operators: int = 0
    call: str = ""
    untrained: str = ""

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name."""
        found = {leaf.value.name: leaf.value for leaf in self.leaves}
        return found | {value.name: value for node in (*self.of_weights, *self.nodes) for value in node.outputs}

    @cached_property
    def leaf(self) -> dict[str, Leaf]:
        """Leaves by name."""
        return {leaf.value.name: leaf for leaf in self.leaves}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of weights that are not trained; none where that is all: then what training takes is asked."""
        weights = [leaf for leaf in self.leaves if leaf.role == "parameter"]
        trained = {leaf.storage or leaf.value.name for leaf in weights if leaf.is_trained}
        rest = (leaf.value.name for leaf in weights if (leaf.storage or leaf.value.name) not in trained)
        return frozenset(rest if trained else ())

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that computes a value, by the value's name."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read a value, by the value's name; each once."""
        found: dict[str, dict[str, Node]] = {}
        for node in self.nodes:
            for use in node.inputs:
                found.setdefault(use.value, {})[node.name] = node
        return {name: tuple(nodes.values()) for name, nodes in found.items()}

    def shape(self, use: Use) -> tuple[int, ...]:
        """Return the shape in which a node reads a value."""
        if use.seen_as is not None:
            return use.seen_as
        if use.view is not None:
            return use.view.shape
        return piece_shape(self.values[use.value].shape, use.piece)

    def is_parameter(self, use: Use) -> bool:
        """Return whether a use reads a weight."""
        leaf = self.leaf.get(use.value)
        return leaf is not None and leaf.role == "parameter"

    def is_activation(self, use: Use) -> bool:
        """Return whether floats that depend on the input flow through a use."""
        leaf = self.leaf.get(use.value)
        return leaf is None or (leaf.role == "input" and leaf.value.is_float)

    @property
    def num_parameters(self) -> int:
        """Values of weights; tied ones count once."""
        return _num_weights(self.leaves)


def piece_shape(shape: Sequence[int], piece: Piece | None) -> tuple[int, ...]:
    """Return the shape of a piece of a tensor; of the tensor itself where there is none."""
    if piece is None:
        return tuple(shape)
    return (*shape[: piece.dim], piece.size, *shape[piece.dim + 1 :])


def check_trace(trace: Trace) -> Trace:
    """Return the trace; ModelError where names are not unique, a value is read too early or shapes disagree."""
    known: dict[str, Value] = {}
    names: set[str] = set()

    def fail(text: str) -> ModelError:
        return ModelError(f"model {trace.name!r}: {text}; this is a defect of the importer or of the file")

    def define(value: Value) -> None:
        if value.name in known:
            raise fail(f"two tensors are named {value.name!r}")
        if any(not isinstance(extent, int) or extent < 0 for extent in value.shape):
            raise fail(f"tensor {value.name!r} has shape {value.shape}; expected whole numbers")
        known[value.name] = value

    for leaf in trace.leaves:
        define(leaf.value)
    for node in trace.nodes:
        if node.name in names:
            raise fail(f"two operators are named {node.name!r}")
        names.add(node.name)
        for use in node.inputs:
            if use.value not in known:
                raise fail(f"operator {node.name!r} reads {use.value!r}, which nothing before it makes")
            shape = piece_shape(known[use.value].shape, use.piece)
            if use.view is not None and use.view.base != shape:
                raise fail(f"operator {node.name!r} reads {use.value!r} of shape {shape} as a view of {use.view.base}")
        for value in node.outputs:
            define(value)
        ranks = [len(known[use.value].shape if use.view is None else use.view.shape) for use in node.inputs]
        # A normalisation is of its first tensor; others may reduce, repeat or reshape what they read.
        counted = ranks[:1] if isinstance(node.op, ops.Normalise) else [*ranks, *(len(v.shape) for v in node.outputs)]
        rank = max(counted, default=0)
        beyond = [dim for dim in _dims_named(node.op) if not 0 <= dim < max(rank, 1)]
        if beyond:
            raise fail(f"operator {node.name!r} is over dim {beyond[0]} of tensors of {rank} dims")
    for name in trace.outputs:
        if name not in known:
            raise fail(f"its output {name!r} is not computed by any operator")
    return trace


def _dims_named(op: ops.Op) -> Iterator[int]:
    """Yield the dims that an operator is over, by the fields that hold such."""
    for name in ("over", "channels", "spatial", "mixes", "dim", "order"):
        found = getattr(op, name, ())
        yield from found if isinstance(found, tuple) else (found,)


class Names:
    """Names that are unique. separator: what stands before a number behind one that is taken."""

    def __init__(self, separator: str = "_") -> None:
        self._separator = separator
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def new(self, wish: str) -> str:
        """Return the name, or with a number behind it where it is taken."""
        name, count = wish, self._counts.get(wish, 1)
        while name in self._taken:
            count += 1
            name = f"{wish}{self._separator}{count}"
        self._counts[wish] = count
        self._taken.add(name)
        return name


# -- what a trace counts: FLOP of its products and trained values, from which a graph may not differ


_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def product_flop(trace: Trace) -> float:
    """Return the FLOP of all products of one forward pass, a multiply-add counted as two."""
    return sum(node_product_flop(trace, node) for node in trace.nodes)


def node_product_flop(trace: Trace, node: Node) -> float:
    """Return the FLOP of a node's products; 0 for one that has none."""
    shapes = [trace.shape(use) for use in node.inputs]
    match node.op:
        case ops.Contract(operands=operands, share=share):
            extents = dict(zip("".join(operands), (*shapes[0], *shapes[1]), strict=True))
            return 2.0 * prod(extents.values()) * share
        case ops.Convolve(filters=filters, is_transposed=is_transposed):
            w = shapes[1]
            points = prod(shapes[0] if is_transposed else node.outputs[0].shape)
            return 2.0 * points * prod(w[i] for i in filters[1:])
        case ops.Attention():
            (b, h, s, k), v = shapes[0], shapes[2]
            return 2.0 * b * h * s * v[2] * (k + v[3])
        case ops.Recurrent():
            return recurrent_flop(node.op, shapes[0])
        case ops.Generic(product_flop=flop):
            return flop
        case _:
            return 0.0


def recurrent_flop(op: ops.Recurrent, x: tuple[int, ...]) -> float:
    """Return the FLOP of a recurrent network's products over a sequence of shape x."""
    directions = 2 if op.is_bidirectional else 1
    widths = [x[-1], *[op.units * directions] * (op.layers - 1)]
    return sum(2.0 * prod(x[:-1]) * directions * gates(op) * op.units * (width + op.units) for width in widths)


def gates(op: ops.Recurrent) -> int:
    """Return how many gates a cell has, each of which is a product."""
    return _GATES[op.cell]


def live_parameters(trace: Trace) -> int:
    """Return the number of trained values that any node of a trace reads; tied weights count once."""
    read = {use.value for node in trace.nodes for use in node.inputs}
    return _num_weights(leaf for leaf in trace.leaves if leaf.value.name in read)


def _num_weights(leaves: Iterable[Leaf]) -> int:
    sizes = {leaf.storage or leaf.value.name: prod(leaf.value.shape) for leaf in leaves if leaf.role == "parameter"}
    return sum(sizes.values())
