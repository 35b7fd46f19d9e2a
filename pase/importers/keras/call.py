"""`KerasCall`: a layer or an operation of Keras as it is applied to tensors, and what its translation writes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pase.importers.ir import Identity, Leaf, Node, Op, Origin, Pointwise, Softmax, Use, Value
from pase.importers.ir.call import Call, Shape, floats_first, place, places, values_of


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
        role: Literal["parameter", "constant"] = "parameter" if is_trained else "constant"
        self.leaves.append(Leaf(value=value, role=role, storage=value.name, is_trained=bool(variable.trainable)))
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
class KerasCall(Call):
    """An operation, named by its class, with what it is applied to.

    Attributes:
        positional: What it is called with by position, tensors being values; what is told by name are its arguments.
        scope: Path of the layer.
    """

    operation: Any
    positional: tuple[Any, ...]
    scope: str
    writer: Writer
    reader: Applies

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that is given by position or by name."""
        return self.positional[position] if position < len(self.positional) else self.arguments.get(name, default)

    def tensor(self, position: int, name: str) -> Value:
        """Return an argument that is a tensor; UntranslatableError where it is none."""
        found = self.argument(position, name)
        if not isinstance(found, Value):
            raise UntranslatableError
        return found

    def axis(self, rank: int = 0) -> int:
        """Return the operation's one dim, counted from 0, of a tensor of some rank: by default of the first input."""
        if not isinstance(self.operation.axis, int):
            raise UntranslatableError
        return place(self.operation.axis, rank or len(self.x.shape))

    def axes(self, name: str = "axis") -> Shape:
        """Return the operation's dims, each counted from 0; all where none is given."""
        return places(getattr(self.operation, name, -1), len(self.x.shape))

    def parameters(self, *variables: Any) -> list[Value]:
        """Return trained variables of the layer, those of some that there are."""
        return [self.writer.weight(variable, is_trained=True) for variable in variables if variable is not None]

    def apply(self, layer: Any, *values: Value) -> Value:
        """Translate a layer that is part of this one; return its result."""
        (found,) = values_of(self.reader.apply(layer, values, {}, f"{self.scope}/{layer.name}"))
        return found

    def write(self, op: Op, inputs: Iterable[Value], outputs: Iterable[Value]) -> None:
        """Write a step, as a node at once: what layers within this one do comes between its steps."""
        self.writer.node(op, tuple(inputs), tuple(outputs), Origin(operator=self.name, scope=self.scope))

    def between(self, shape: Sequence[int], dtype: str = "", name: str = "") -> Value:
        """Return a new value between two steps."""
        name = self.writer.name(f"{self.scope}:{name or 'part'}")
        return Value(name=name, shape=tuple(shape), dtype=dtype or self.result.dtype)

    def part(self, name: str) -> "KerasCall":
        """Return the call, whose next step is a part with a name of its own."""
        return replace(self, scope=f"{self.scope}/{name}")

    def pointwise(self, *functions: str, numbers: Sequence[float] = ()) -> None:
        """Write functions of all tensors, point by point, one after the other."""
        self.give(Pointwise(functions=functions, flop_per_point=len(functions), numbers=tuple(numbers)), *self.tensors)

    def emit_activated(self, op: Op, *inputs: Value) -> None:
        """Write the node of a layer and its activation, which gives the result."""
        activation = self.operation.activation
        if activation_name(activation) == "linear":
            self.give(op, *inputs)
        else:
            self.activate(self.add(op, *inputs, shape=self.result.shape, dtype=self.result.dtype), activation)

    def activate(self, value: Value, activation: Any) -> None:
        """Write an activation, which gives the result."""
        name = activation_name(activation)
        if name == "linear":
            self.give(Identity(), value)
        elif name in _SOFTMAX:
            self.part(name).give(Softmax(dim=len(value.shape) - 1, is_log=name == "log_softmax"), value)
        elif name in _MIXING or not is_keras(activation):
            (found,) = self.reader.trace(activation, [value], f"{self.scope}/{name}")
            self.give(Identity(), found)
        else:
            self.part(name).give(Pointwise(functions=(name,), numbers=_NUMBERS.get(name, ())), value)


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


def activation_name(activation: Any) -> str:
    """Return the name of an activation function; "linear" for none."""
    return "linear" if activation is None else str(getattr(activation, "__name__", type(activation).__name__)).lower()


def is_keras(thing: Any) -> bool:
    """Return whether a class, a function or an object's class is Keras' own."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "keras"


def unknown(call: KerasCall) -> None:
    """Write an operation of which only the shapes are known, with the weights that it has."""
    inputs = (*floats_first(call.tensors), *call.parameters(*trained_of(call.operation)))
    leading = {value.shape[:1] for value in (*inputs[:1], *call.results)}
    is_index = not any(value.is_float for value in call.results)
    call.opaque(*inputs, passes=[(0, 0)] if is_index and len(leading) == 1 and leading != {()} else None)


def trained_of(operation: Any) -> list[Any]:
    """Return the variables that training changes, of a layer and those in it, frozen or not; each once."""
    layers = operation._flatten_layers() if hasattr(operation, "_flatten_layers") else ()
    found = {id(v): v for layer in layers for v in layer._trainable_variables}
    return list(found.values())
