"""`Writer`: builds the nodes of a program, with their origins and known values; `JaxCall`: one primitive."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pase.errors import ModelError
from pase.importers.ir import ops
from pase.importers.ir.call import Array, Call
from pase.importers.ir.trace import Leaf, Node, Origin, Use, Value, dtype_name

_WRAPPED = re.compile(r"^(?:jit|pjit|vmap|remat|checkpoint|rematted_computation|jvp|transpose|custom_\w+)\((.*)\)$")

_SCOPE = re.compile(r"[^\W_][\w.\-\[\]]*")
"""A name that somebody gave: not the equation of an einsum, nor a function without a name."""

MAX_KNOWN = 1 << 16
"""Maximum elements of an array whose values are stored or computed: indices that must be known are smaller."""


Place = tuple[int, ...]
"""Position of an equation: its number, after those of enclosing equations and, for loops, of iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An equation in its place. inputs, outputs: names of the values that it reads and gives."""

    primitive: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Writer:
    """Builds nodes and leaves while a program is read.

    Attributes:
        place: Place of the current equation.
        makers_at: Place of the equation of each value that a node writes, by name.
        known: Arrays of values that do not depend on weights or data: literals of the program, and small integers
            computed from them.
        makers: Operators that computed values.
        joined: Integers that were concatenated to a value, each with its values if known.
        arrays: Arrays in the program.
        weights: Paths of the weights behind values.
        turn: Current iteration of a loop that is unrolled: number of the loop, of the iteration.
    """

    def __init__(self, leaves: Sequence[Leaf], entry: str) -> None:
        self.nodes: list[Node] = []
        self.leaves = list(leaves)
        self.turn: tuple[int, int] | None = None
        self.place: Place = ()
        self.makers_at: dict[str, Place] = {}
        self.known: dict[str, Array] = {}
        self.arrays: dict[str, Any] = {}
        self.makers: dict[str, ops.Op] = {}
        self.joined: dict[str, tuple[tuple[Value, Any], ...]] = {}
        self.weights = {leaf.value.name: leaf.value.name for leaf in leaves if leaf.role == "parameter"}
        # The user's outermost function, which carries no information; the layer of the weight that was read last.
        self._entry, self._last = entry, ""
        self._taken = {leaf.value.name for leaf in leaves}
        self._counts: dict[str, int] = {}

    def value(self, wish: str, shape: Sequence[int], dtype: str) -> Value:
        """Return a value with a unique name."""
        name = wish
        while name == wish or name in self._taken:
            self._counts[wish] = self._counts.get(wish, 0) + 1
            name = f"{wish}_{self._counts[wish]}"
        self._taken.add(name)
        return Value(name=name, shape=tuple(shape), dtype=dtype)

    def constant(self, array: Any, aval: Any = None) -> Value:
        """Return the value of an array that the program holds."""
        aval = aval or array
        value = self.value("number" if not aval.shape else "constant", aval.shape, dtype_name(aval.dtype))
        self.arrays[value.name] = array
        is_number = not aval.shape and not str(aval.dtype).startswith(("key", "complex"))
        self.leaves.append(Leaf(value=value, role="constant", number=float(array) if is_number else None))
        is_small = not aval.shape or not value.is_float
        if is_small and int(np.prod(aval.shape)) <= MAX_KNOWN and not value.dtype.startswith("key"):
            self.known[value.name] = np.asarray(array)
        return value

    def call(
        self, equation: Any, inputs: Sequence[Value], outer: tuple[str, ...], results: Sequence[Value] | None = None
    ) -> "JaxCall":
        """Return an equation as a call; results: its results, if they differ from the equation's."""
        name = equation.primitive.name
        if results is None:
            results = [self.value(name, shape_of(v.aval, name), dtype_name(v.aval.dtype)) for v in equation.outvars]
        return JaxCall(
            name=name,
            arguments=equation.params,
            inputs=tuple(inputs),
            outputs=tuple(results),
            known=self.known,
            equation=equation,
            outer=outer,
            writer=self,
        )

    def node(self, call: "JaxCall", op: ops.Op, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Add a node of a call."""
        weight = next((self.weights[value.name] for value in inputs if value.name in self.weights), "")
        if len(inputs) == 1 and weight:
            # A value computed from a single weight still gives the scope of its reader.
            self.weights.update((value.name, weight) for value in outputs)
            weight = ""
        self.nodes.append(
            Node(
                name=outputs[0].name,
                op=op,
                inputs=tuple(Use(value=value.name) for value in inputs),
                outputs=tuple(outputs),
                origin=replace(self._origin(call.equation, call.name, call.outer, weight), turn=self.turn),
            )
        )
        self.makers.update((value.name, op) for value in outputs)
        self.makers_at.update((value.name, self.place) for value in outputs)

    def _origin(self, equation: Any, operator: str, outer: tuple[str, ...], weight: str) -> Origin:
        """Return the origin of an equation; equations are read in order.

        A named scope (a flax module) is the scope. Otherwise it is the path of the weight that is read, or else the
        user's function, next to the weight that was read last.

        Args:
            equation: The equation.
            operator: Name of its operator.
            outer: Scopes of enclosing equations; "@f" is an inlined function, "#2" an iteration of a loop.
            weight: Path of the weight that it reads, "" for none.
        """
        own = scopes(equation)
        plain = tuple(name for name in outer if name[0] not in "@#")
        # In the body of a loop a module gives its complete path again.
        stack = (*outer, *(own[len(plain) :] if plain and own[: len(plain)] == plain else own))
        if weight:
            self._last = _layer(weight)
        function = _function(equation)
        named = [name.removeprefix("#") for name in stack if not name.startswith("@")]
        inlined = [name.removeprefix("@") for name in stack if name.startswith("@")]
        if any(name[0] not in "@#" for name in stack):
            scope = ".".join((*named, *inlined[-1:]))
        elif weight:
            scope = self._last
        else:
            name = inlined[-1] if inlined else function if function not in ("", self._entry) else operator
            parent = self._last.rpartition(".")[0]
            scope = f"{parent}.{name}" if parent else name
        return Origin(operator=operator, scope=scope, line=line(equation))

    def amend(self, value: Value, op: ops.Op) -> None:
        """Have the node that computes a value compute something else."""
        place = max(i for i, node in enumerate(self.nodes) if node.outputs[0].name == value.name)
        self.nodes[place] = replace(self.nodes[place], op=op)
        self.makers[value.name] = op

    def learn(self, call: "JaxCall") -> None:
        """Store the integers that a primitive computes from known ones."""
        arrays = [self.known.get(value.name) for value in call.tensors]
        if call.name == "concatenate" and not call.result.is_float:
            self.joined[call.result.name] = tuple(zip(call.tensors, arrays, strict=True))
        if len(call.results) == 1 and all(array is not None for array in arrays):
            found = evaluate(call.name, call.arguments, arrays, call.result.shape, call.result.dtype)
            if found is not None:
                self.known[call.result.name] = found


@dataclass(frozen=True, kw_only=True)
class JaxCall(Call):
    """An equation with its inputs and results; outer: scopes of enclosing equations."""

    equation: Any
    outer: tuple[str, ...]
    writer: Writer

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a parameter that consists of integers, or nothing."""
        return whole(self.arguments[name] or ())

    def maker(self, value: Value) -> ops.Op | None:
        """Return the operator that computed an input."""
        return self.writer.makers.get(value.name)

    def write(self, op: ops.Op, inputs: Iterable[Value], outputs: Iterable[Value]) -> None:
        """Write a step as a node immediately, as steps of a loop's body are interleaved."""
        self.writer.node(self, op, tuple(inputs), tuple(outputs))

    def between(self, shape: Sequence[int], dtype: str = "", name: str = "") -> Value:
        """Return a new value between two steps."""
        return self.writer.value(f"{self.name}:{name or 'part'}", shape, dtype or self.result.dtype)


def whole(numbers: Any) -> tuple[int, ...]:
    """Convert integers of any type to Python's."""
    return tuple(int(number) for number in numbers)


def shape_of(aval: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an abstract value; ModelError where it has none, or a dim of unknown size."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        raise ModelError(f"operator {name} gives a {type(aval).__name__}, which is not an array; it cannot be imported")
    for extent in shape:
        if not isinstance(extent, int):
            raise ModelError(
                f"operator {name} gives a dim of unknown size, {extent}; trace the function with shapes that are whole "
                "numbers"
            )
    return whole(shape)


# -- where an equation comes from: the scope that names its vertex, and the line of the user's source


def scopes(equation: Any) -> tuple[str, ...]:
    """Return the named scopes of an equation, the outermost first, without those of transformations."""
    found = []
    for part in str(equation.source_info.name_stack).split("/"):
        wrapped = _WRAPPED.match(part)
        while wrapped is not None:
            part = wrapped.group(1)
            wrapped = _WRAPPED.match(part)
        if _SCOPE.fullmatch(part) and part not in _TRANSFORMED and not part.startswith(_OF_CLASSES):
            found.append(part)
    return tuple(found)


def _layer(weight: str) -> str:
    """Return the layer that a weight's path names: without a last part that only says which of its weights it is."""
    parts = weight.split(".")
    while len(parts) > 1 and _is_weight(parts[-1].lower()):
        parts.pop()
    return ".".join(parts)


def _is_weight(part: str) -> bool:
    return part in _LETTERS or part.startswith(_WEIGHTS)


def inlined(equation: Any) -> tuple[str, ...]:
    """Return the scope of an inlined function, marked as such; empty if its name is not informative."""
    name = str(equation.params.get("name", ""))
    return () if not name or name.startswith(("<", "_")) else (f"@{name}",)


def line(equation: Any) -> str:
    """Return "file.py:12" of the user's source; "" where it is unknown."""
    frame = _frame(equation)
    return "" if frame is None else f"{frame.file_name.rpartition('/')[2]}:{frame.start_line}"


def where(equation: Any) -> str:
    """Return " (file.py:12, in function)" for a message; "" where it is unknown."""
    found, function = line(equation), _function(equation)
    return f" ({found}, in {function})" if found and function else f" ({found})" if found else ""


def _function(equation: Any) -> str:
    frame = _frame(equation)
    name = "" if frame is None else frame.function_name.rpartition(".")[2]
    return "" if name.startswith(("<", "__")) else name


def _frame(equation: Any) -> Any:
    """Return the innermost frame of the user's code."""
    from jax._src import source_info_util

    return source_info_util.user_frame(equation.source_info.traceback)


_TRANSFORMED = frozenset(
    {"jit", "pjit", "vmap", "remat", "checkpoint", "rematted_computation", "while", "body", "cond"}
)
"""Parts of a name stack that describe transformations, not the computation."""

_OF_CLASSES = ("eqx.", "equinox.")
"""Prefixes of scopes that only name a module's class; paths of weights identify the module."""

_WEIGHTS = ("weight", "bias", "kernel", "scale", "offset", "gamma", "beta", "embedding", "value")
"""Prefixes of a path's last part that identify one of the weights of a layer."""

_LETTERS = frozenset("wbg")
"""The same, for single letters."""


# -- small integers that a program computes without data: positions, masks, indices of slices


def evaluate(name: str, params: Mapping[str, Any], inputs: Sequence[Any], shape: Sequence[int], dtype: str) -> Any:
    """Return the array that a primitive computes from known ones; None where it cannot be determined here.

    Only integers and truth values of at most MAX_KNOWN elements are computed.
    """
    if name not in _COMPUTE or dtype not in _DTYPES or int(np.prod(shape)) > MAX_KNOWN:
        return None
    with np.errstate(all="ignore"):
        found = np.asarray(_COMPUTE[name](params, *inputs))
    return found.astype(dtype) if found.shape == tuple(shape) else None


_DTYPES = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})


def _broadcast(params: Mapping[str, Any], x: Any, *_: Any) -> Any:
    shape = whole(params["shape"])
    seen = [1] * len(shape)
    for dim, place in enumerate(params["broadcast_dimensions"]):
        seen[int(place)] = x.shape[dim]
    return np.broadcast_to(np.reshape(x, seen), shape)


def _iota(params: Mapping[str, Any], *_: Any) -> Any:
    shape, axis = whole(params["shape"]), int(params["dimension"])
    seen = [shape[axis] if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(seen), shape)


def _slice(params: Mapping[str, Any], x: Any) -> Any:
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, whole(params["start_indices"]), whole(params["limit_indices"]), whole(steps)))]


def _nonzero(y: Any) -> Any:
    return np.where(y == 0, 1, y)


_UFUNCS = """
    abs:abs add:add and:bitwise_and eq:equal ge:greater_equal gt:greater le:less_equal lt:less max:maximum min:minimum
    mul:multiply ne:not_equal neg:negative not:invert or:bitwise_or sign:sign sub:subtract xor:bitwise_xor
"""
_PLAIN: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, own) for name, _, own in (pair.partition(":") for pair in _UFUNCS.split())},
    "rem": lambda x, y: np.fmod(x, _nonzero(y)),
    "div": lambda x, y: np.trunc(x / _nonzero(y)),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient"), lambda x: x),
}
"""Primitives that depend on their inputs only."""

_COMPUTE: dict[str, Callable[..., Any]] = {
    **{name: (lambda _, *inputs, function=function: function(*inputs)) for name, function in _PLAIN.items()},
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "concatenate": lambda params, *parts: np.concatenate(parts, params["dimension"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "reduce_sum": lambda params, x: np.sum(x, axis=tuple(params["axes"])),
    "reduce_max": lambda params, x: np.max(x, axis=tuple(params["axes"])),
    "reduce_min": lambda params, x: np.min(x, axis=tuple(params["axes"])),
    "cumsum": lambda params, x: np.cumsum(x, axis=params["axis"]),
}
"""Of the parameters and the inputs."""
