"""`Trace`: a model as its source has it, operator by operator, with shapes and without the values of weights."""

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

    Attributes:
        role: "input" (fed in every step), "parameter" or "constant" (buffers, literals).
        storage: Name of its storage; equal for tied weights, otherwise unique.
        is_trained: Whether training changes the parameter.
        number: Value of all of its elements, if it is known without reading weights.
        computed_of: For a value computed from an input of the model, name and shape of the tensor with its elements in
            the same order: that input, or a value computed from it that is an input of the program.
    """

    value: Value
    role: Literal["input", "parameter", "constant"]
    storage: str = ""
    is_trained: bool = True
    number: float | None = None
    computed_of: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice of a tensor: ``[start, start + size)`` of one of its dims, all of the others."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A tensor as a node reads it: by name, optionally a slice of it, optionally in another shape.

    Attributes:
        seen_as: Shape in which it is read, if its dims do not align with the tensor's (rows of a table gathered by
            constants): it then counts as needed completely.
        of: The value that is computed from only weights, or only integers, and in place of which the weight or integer
            tensor is read; the shape is the tensor's own then.
    """

    value: str
    piece: Piece | None = None
    view: View | None = None
    seen_as: tuple[int, ...] | None = None
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a node comes from.

    Attributes:
        operator: Name of its operator in the source ("aten.linear.default", "Conv").
        scope: Module or layer, "" if unknown.
        line: "file.py:12" of the user's source, "" if unknown.
        turn: In an unrolled loop, (number of the loop, number of the iteration).
    """

    operator: str
    scope: str = ""
    line: str = ""
    turn: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOperator:
    """The source's own operator call that a node represents, for targets of its framework.

    Attributes:
        operator, arguments: As in `graph.sources.SourceCall`; operands are the node's inputs by position.
        results: Names of all of its results.
        passes: Groups of dims along which each point only depends on the same point: (of each input, of each result),
            -1 for none.
        is_exact: Whether the node computes exactly this; otherwise the call only gives its cost.
    """

    operator: str
    arguments: str
    results: tuple[str, ...]
    passes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Work of a function that was folded into a node.

    Attributes:
        flop: FLOP of the forward pass.
        backward_flop: FLOP of the backward pass, if its argument has a gradient.
        argument: Value that it is applied to, "" for the node's own result.
    """

    flop: float
    backward_flop: float
    argument: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator.

    Attributes:
        name: Name, unique among nodes.
        epilogue: Elementwise functions that are applied to the first output before it is read.
        folded: Work of folded functions, before or after its own.
        whole: (input, dim) pairs that must not be split because of folded functions.
        beside: Number of last inputs that are weights from which other inputs are computed.
        rate: Dropout rate of the first output during training; -1 where only some consumers read the dropped version.
        computes: The source's nodes that it represents, in order; empty if it is one itself. Their inputs are computed
            by one of them, stored by another node, or leaves. The last one computes the first output, possibly in
            another shape; an `Identity` among them expresses the layout of a value in another node's tensor.
        source: The source's own operator call, if it is one.
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
        """The source's nodes that it represents."""
        own = self.inputs[: len(self.inputs) - self.beside]
        return self.computes or (replace(self, inputs=own, beside=0),)


def computed_together(*parts: Iterable[Node]) -> tuple[Node, ...]:
    """Return the source's nodes that several nodes represent, in order, without repetition."""
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
    """One step of an operator's translation; the operator's results are outputs of some of the steps."""

    op: ops.Op
    inputs: tuple[Use, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """An output of the model: its name and shape, and its use of a node's result."""

    name: str
    shape: tuple[int, ...]
    use: Use


def frozen_notes(weights: Iterable[tuple[int, bool]]) -> Iterator[str]:
    """Yield notes about frozen weights; weights: number of elements, and whether it is trained, of each."""
    sizes = {True: 0, False: 0}
    for size, is_trained in weights:
        sizes[is_trained] += size
    if sizes[False]:
        known = "they have no gradients" if sizes[True] else "as all are, costs are those of training them"
        yield f"{sizes[False]:,} parameters are frozen in the model: {known}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model as nodes in topological order.

    Attributes:
        outputs: Names of the values that the model returns.
        of_weights: Nodes that compute values from only weights, or only integers, which are read instead of these
            values.
        returned: Outputs of the model, in terms of nodes' results.
        has_calls: Whether a target can run the source's own calls.
        notes: Assumptions that were made.
        num_source_operators: Number of operators in the source, each of which may be several nodes.
        call: Arguments of the model call, in the front end's format.
        untrained: Why the traced computation, which is outside training, differs from that in training, "" if not.
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
        """Names of frozen weights; empty if all are frozen: the trained model is then of interest."""
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
    """Return the shape of a slice of a tensor, or of the tensor itself without a slice."""
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
        # A normalisation belongs to its first tensor; other inputs may be reduced, repeated or reshaped.
        counted = ranks[:1] if isinstance(node.op, ops.Normalise) else [*ranks, *(len(v.shape) for v in node.outputs)]
        rank = max(counted, default=0)
        invalid = [dim for dim in _dims_named(node.op) if not 0 <= dim < max(rank, 1)]
        if invalid:
            raise fail(f"operator {node.name!r} is over dim {invalid[0]} of tensors of {rank} dims")
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
    """Generates unique names; separator: precedes the number that is appended to a name already taken."""

    def __init__(self, separator: str = "_") -> None:
        self._separator = separator
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def new(self, wish: str) -> str:
        """Return the name, with a number appended if it is taken."""
        name, count = wish, self._counts.get(wish, 1)
        while name in self._taken:
            count += 1
            name = f"{wish}{self._separator}{count}"
        self._counts[wish] = count
        self._taken.add(name)
        return name


# -- counts of a trace, which its graph must match: FLOP of products, and trained values


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
