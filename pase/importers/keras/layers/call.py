"""`Call`: a layer or an operation of Keras as it is applied to tensors, and what its translation writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pase.importers.ir import Generic, Identity, Leaf, Node, Op, Origin, Pointwise, Reshape, Softmax, Transpose, Use
from pase.importers.ir import Value as Value

Shape = tuple[int, ...]
Translation = Callable[["Call"], None]


class UntranslatableError(Exception):
    """Raised by a translation that does not cover a case: the layer is then looked into, or treated generically."""


class Applies(Protocol):
    """What a translation may ask of the reader of the model."""

    def apply(self, operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], scope: str) -> Any:
        """Translate an operation that is part of another one; return its results, values in its own structure."""
        ...

    def trace(self, function: Callable[..., Any], values: Sequence[Value], scope: str) -> list[Value]:
        """Translate what a function of the user's does with tensors."""
        ...


@dataclass(kw_only=True)
class Writer:
    """Leaves and nodes while a model is read; names of tensors are unique."""

    leaves: list[Leaf] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _given: list[str] = field(default_factory=list)
    _weights: dict[int, tuple[Any, Value]] = field(default_factory=dict)

    def name(self, wish: str) -> str:
        """Return the name, or with a number behind it where it is taken."""
        count = self._names.get(wish, 0)
        self._names[wish] = count + 1
        self._given.append(wish)
        return wish if count == 0 else self.name(f"{wish}~{count}")

    def weight(self, variable: Any, *, is_trained: bool) -> Value:
        """Return a variable as a leaf, the same one whoever reads it; named by its path."""
        known = self._weights.get(id(variable))
        if known is not None:
            return known[1]
        value = Value(name=self.name(variable.path), shape=tuple(variable.shape), dtype=str(variable.dtype))
        self._weights[id(variable)] = (variable, value)
        self.leaves.append(Leaf(value=value, role="parameter" if is_trained else "constant", storage=value.name))
        return value

    def leaf(self, wish: str, shape: Shape, dtype: str, role: Any) -> Value:
        """Return a tensor that nothing computes and that is no variable."""
        value = Value(name=self.name(wish), shape=shape, dtype=dtype)
        self.leaves.append(Leaf(value=value, role=role, storage=value.name))
        return value

    def node(self, op: Op, inputs: Sequence[Value], outputs: Sequence[Value], origin: Origin) -> None:
        """Add a node."""
        name = self.name(f"{origin.scope}#")
        uses = tuple(Use(value=value.name) for value in inputs)
        self.nodes.append(Node(name=name, op=op, inputs=uses, outputs=tuple(outputs), origin=origin))

    def reads(self, variable: Any) -> bool:
        """Return whether anything reads a variable."""
        return id(variable) in self._weights

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that are read, by the names of their leaves."""
        return {value.name: variable for variable, value in self._weights.values()}

    def mark(self) -> tuple[int, int, int, int]:
        """Return how much there is, to come back to."""
        return len(self.leaves), len(self.nodes), len(self._weights), len(self._given)

    def restore(self, mark: tuple[int, int, int, int]) -> None:
        """Forget everything since a mark."""
        num_leaves, num_nodes, num_weights, num_names = mark
        del self.leaves[num_leaves:], self.nodes[num_nodes:]
        while len(self._weights) > num_weights:
            self._weights.popitem()
        while len(self._given) > num_names:
            self._names[self._given.pop()] -= 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation with what it is applied to.

    arguments, keywords: as it is called, tensors being values. results: of all its tensors, in order.
    """

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[Value, ...]
    scope: str
    writer: Writer
    reader: Applies

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.operation).__name__

    @property
    def tensors(self) -> tuple[Value, ...]:
        """All tensors that it is applied to, in order."""
        return tuple(values_of((self.arguments, dict(self.keywords))))

    @property
    def x(self) -> Value:
        """The first of them."""
        return self.tensors[0]

    @property
    def result(self) -> Value:
        """The first result."""
        return self.results[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that is given by position or by name."""
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords.get(name, default)

    def parameter(self, variable: Any) -> Value:
        """Return a trained variable of the layer."""
        return self.writer.weight(variable, is_trained=True)

    def parameters(self, *variables: Any) -> list[Value]:
        """Return those of some variables that there are."""
        return [self.parameter(variable) for variable in variables if variable is not None]

    def statistic(self, variable: Any) -> Value:
        """Return a variable of the layer that is kept and not trained."""
        return self.writer.weight(variable, is_trained=False)

    def emit(self, op: Op, *inputs: Value, out: Value | None = None, part: str = "") -> Value:
        """Write a node, by default the one that gives the result; return its output."""
        out = self.result if out is None else out
        scope = f"{self.scope}/{part}" if part else self.scope
        self.writer.node(op, inputs, (out,), Origin(operator=self.kind, scope=scope))
        return out

    def emit_all(self, op: Op, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Write a node of several outputs."""
        self.writer.node(op, inputs, outputs, Origin(operator=self.kind, scope=self.scope))

    def fresh(self, shape: Sequence[int], dtype: str = "") -> Value:
        """Return a tensor between two nodes."""
        name = self.writer.name(f"{self.scope}:part")
        return Value(name=name, shape=tuple(shape), dtype=dtype or self.result.dtype)

    def then(self, op: Op, *inputs: Value, shape: Sequence[int], part: str = "") -> Value:
        """Write a node in the midst of the translation; return its output."""
        return self.emit(op, *inputs, out=self.fresh(shape, inputs[0].dtype), part=part)

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a tensor in another shape; itself where that is its own."""
        return value if value.shape == tuple(shape) else self.then(Reshape(), value, shape=shape)

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        """Return a tensor with its dims in another order."""
        return self.then(Transpose(order=tuple(order)), value, shape=[value.shape[i] for i in order])

    def emit_activated(self, op: Op, *inputs: Value, activation: Any) -> None:
        """Write the node of a layer and its activation, which gives the result."""
        if activation_name(activation) == "linear":
            self.emit(op, *inputs)
        else:
            self.activate(self.emit(op, *inputs, out=self.fresh(self.result.shape)), activation)

    def activate(self, value: Value, activation: Any) -> None:
        """Write an activation, which gives the result."""
        name = activation_name(activation)
        if name == "linear":
            self.emit(Identity(), value)
        elif name in _SOFTMAX:
            self.emit(Softmax(dim=len(value.shape) - 1, is_log=name == "log_softmax"), value, part=name)
        elif name in _MIXING or not is_keras(activation):
            (found,) = self.reader.trace(activation, [value], f"{self.scope}/{name}")
            self.emit(Identity(), found)
        else:
            self.emit(Pointwise(functions=(name,), numbers=_NUMBERS.get(name, ())), value, part=name)


_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "celu": (1.0,),
    "elu": (1.0,),
    "hard_sigmoid": (1 / 6, 0.5),
    "hard_tanh": (-1.0, 1.0),
    "leaky_relu": (0.2,),
}
"""Numbers of activations that are given by their names alone."""

_SOFTMAX = frozenset({"softmax", "log_softmax"})
_MIXING = frozenset({"glu", "sparsemax"})
"""Activations whose points read each other: what they do is looked into."""


def values_of(structure: Any) -> list[Value]:
    """Return the values in nested arguments, in order."""
    if isinstance(structure, Value):
        return [structure]
    if isinstance(structure, Mapping):
        return [value for key in structure for value in values_of(structure[key])]
    if isinstance(structure, list | tuple):
        return [value for item in structure for value in values_of(item)]
    return []


def activation_name(activation: Any) -> str:
    """Return the name of an activation function; "linear" for none."""
    return "linear" if activation is None else str(getattr(activation, "__name__", type(activation).__name__)).lower()


def is_keras(thing: Any) -> bool:
    """Return whether a class, a function or an object's class is Keras' own."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "keras"


def generic(call: Call, passes: Sequence[tuple[int, int]] | None = None, flop_per_point: float = 1.0) -> None:
    """Write a node of which the shapes are known, and the dims that pass through: by default the leading one."""
    floats = [value for value in call.tensors if value.is_float]
    inputs = [*floats, *(value for value in call.tensors if not value.is_float)]
    inputs += [call.parameter(variable) for variable in trained_of(call.operation)]
    is_index = not any(value.is_float for value in call.results)
    if passes is None:
        leading = {value.shape[:1] for value in (*inputs[:1], *(r for r in call.results if r.is_float or is_index))}
        passes = ((0, 0),) if inputs and len(leading) == 1 and leading != {()} else ()
    op = Generic(passes=tuple(passes), flop_per_point=flop_per_point, is_index=is_index)
    call.writer.node(op, inputs, call.results, Origin(operator=call.kind, scope=call.scope))


def for_all(translation: Translation, *names: str) -> dict[str, Translation]:
    """Return the translation for each of several classes, by name."""
    return dict.fromkeys(names, translation)


def trained_of(operation: Any) -> list[Any]:
    """Return the variables that training changes, of a layer and those in it, frozen or not; each once."""
    layers = operation._flatten_layers() if hasattr(operation, "_flatten_layers") else ()
    found = {id(v): v for layer in layers for v in layer._trainable_variables}
    return list(found.values())


def axes_of(axis: int | Sequence[int] | None, rank: int) -> Shape:
    """Return positions of dims, none negative; all where none is given."""
    if axis is None:
        return tuple(range(rank))
    return tuple(sorted({a % rank for a in ([axis] if isinstance(axis, int) else axis)}))


def each(value: int | Sequence[int], rank: int) -> Shape:
    """Return one number for each of so many dims."""
    return (value,) * rank if isinstance(value, int) else tuple(value)
