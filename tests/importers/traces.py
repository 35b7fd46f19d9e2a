"""Traces written by hand, and a NumPy interpreter of them: what a pass does to a trace is tested by running both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pase.importers.ir import ops
from pase.importers.ir.trace import Leaf, Node, Origin, Trace, Use, Value, check_trace
from pase.importers.ir.views import View

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass
class Tracer:
    """Collects nodes; every method returns the name of a value."""

    leaves: list[Leaf] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def leaf(
        self,
        name: str,
        shape: Shape,
        role: Literal["input", "parameter", "constant"] = "input",
        dtype: str = "float32",
        storage: str = "",
    ) -> str:
        self.leaves.append(Leaf(value=Value(name=name, shape=shape, dtype=dtype), role=role, storage=storage))
        self.shapes[name] = shape
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.leaf(name, shape, "parameter")

    def add(
        self, op: ops.Op, *inputs: str, shape: Shape, dtype: str = "float32", scope: str = "", name: str = ""
    ) -> str:
        name = name or f"{type(op).__name__.lower()}{len(self.nodes)}"
        self.nodes.append(
            Node(
                name=name,
                op=op,
                inputs=tuple(Use(value=value) for value in inputs),
                outputs=(Value(name=f"{name}.0", shape=shape, dtype=dtype),),
                origin=Origin(operator=type(op).__name__, scope=scope),
            )
        )
        self.shapes[f"{name}.0"] = shape
        return f"{name}.0"

    def point(self, function: str, *inputs: str, constant: float | None = None, scope: str = "") -> str:
        shape = np.broadcast_shapes(*(self.shapes[value] for value in inputs))
        return self.add(ops.Pointwise(functions=(function,), constant=constant), *inputs, shape=shape, scope=scope)

    def reduce(self, function: str, x: str, *over: int, keeps: bool = True) -> str:
        shape = self.shapes[x]
        kept = tuple(1 if i in over else e for i, e in enumerate(shape) if keeps or i not in over)
        return self.add(ops.Reduce(function=function, over=over, keeps_dims=keeps), x, shape=kept)

    def reshape(self, x: str, *shape: int) -> str:
        return self.add(ops.Reshape(), x, shape=shape)

    def transpose(self, x: str, *order: int) -> str:
        return self.add(ops.Transpose(order=order), x, shape=tuple(self.shapes[x][i] for i in order))

    def broadcast(self, x: str, *shape: int) -> str:
        offset = len(shape) - len(self.shapes[x])
        return self.add(ops.Broadcast(places=tuple(range(offset, len(shape)))), x, shape=shape)

    def slice(self, x: str, dim: int, start: int, size: int, step: int = 1) -> str:
        shape = self.shapes[x]
        starts = tuple(start if i == dim else 0 for i in range(len(shape)))
        steps = tuple(step if i == dim else 1 for i in range(len(shape)))
        out = tuple(size if i == dim else e for i, e in enumerate(shape))
        return self.add(ops.Slice(starts=starts, steps=steps), x, shape=out)

    def concat(self, dim: int, *inputs: str) -> str:
        shape = list(self.shapes[inputs[0]])
        shape[dim] = sum(self.shapes[x][dim] for x in inputs)
        return self.add(ops.Concat(dim=dim), *inputs, shape=tuple(shape))

    def einsum(self, equation: str, x: str, y: str, scope: str = "") -> str:
        operands, _, output = equation.partition("->")
        first, _, second = operands.partition(",")
        extents = dict(zip(first + second, self.shapes[x] + self.shapes[y], strict=True))
        op = ops.Contract(operands=(first, second), output=output)
        return self.add(op, x, y, shape=tuple(extents[c] for c in output), scope=scope)

    def linear(self, x: str, w: str, scope: str = "") -> str:
        lead = "abcdef"[: len(self.shapes[x]) - 1]
        return self.einsum(f"{lead}k,kn->{lead}n", x, w, scope=scope)

    def softmax(self, x: str) -> str:
        return self.add(ops.Softmax(dim=len(self.shapes[x]) - 1), x, shape=self.shapes[x])

    def trace(self, *outputs: str, name: str = "net") -> Trace:
        return check_trace(Trace(name=name, leaves=tuple(self.leaves), nodes=tuple(self.nodes), outputs=outputs))


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": lambda *a: sum(a[1:], a[0]),
    "average": lambda *a: sum(a[1:], a[0]) / len(a),
    "cast": lambda x: x,
    "clip": np.clip,
    "complex": lambda x, y: x + 1j * y,
    "divide": np.divide,
    "elu": lambda x, a: np.where(x > 0, x, a * (np.exp(x) - 1)),
    "exp": np.exp,
    "greater": np.greater,
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "imag": np.imag,
    "leaky_relu": lambda x, a: np.where(x > 0, x, a * x),
    "maximum": lambda *a: np.maximum.reduce(np.broadcast_arrays(*a)),
    "multiply": np.multiply,
    "negate": np.negative,
    "not_equal": np.not_equal,
    "power": np.power,
    "prelu": lambda x, a: np.where(x > 0, x, a * x),
    "quick_gelu": lambda x, a: x / (1 + np.exp(-a * x)),
    "real": np.real,
    "reciprocal": np.reciprocal,
    "relu": lambda x: np.maximum(x, 0),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 1e-3),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x, beta: np.logaddexp(0, beta * x) / beta,
    "sqrt": np.sqrt,
    "square": np.square,
    "subtract": np.subtract,
    "tanh": np.tanh,
    "where": np.where,
}
REDUCTIONS: Mapping[str, Callable[..., Array]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    # Of one point less, as PyTorch has it.
    "variance": lambda x, **more: np.var(x, ddof=1, **more),
    "argmax": lambda x, axis, keepdims: np.argmax(x, axis=axis[0], keepdims=keepdims),
}


def seen(view: View, base: Array) -> Array:
    """The elements of a base as a view has them, by NumPy alone."""
    factors = [factor for dim in view.dims for factor in dim]
    extents = {factor.base: factor.extent for factor in factors if factor.base is not None}
    apart = base.reshape([extents[i] for i in range(len(extents))])
    order = [factor.base for factor in factors if factor.base is not None]
    apart = apart.transpose(order) if order else apart
    spread = iter(apart.shape)
    ones = [1 if factor.base is None else next(spread) for factor in factors]
    full = [factor.extent for factor in factors]
    return np.broadcast_to(apart.reshape(ones), full).reshape(view.shape)


def read(use: Use, held: Mapping[str, Array]) -> Array:
    """What a node reads."""
    assert use.seen_as is None, f"{use.value} is read as something that is not told"
    array = held[use.value]
    if use.piece is not None:
        array = array[(slice(None),) * use.piece.dim + (slice(use.piece.start, use.piece.start + use.piece.size),)]
    return array if use.view is None else seen(use.view, array)


def evaluate(trace: Trace, given: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a trace, from those of its leaves."""
    held = dict(given)
    for node in trace.nodes:
        inputs = [read(use, held) for use in node.inputs]
        value = _applied(node, inputs)
        for function in node.epilogue:
            value = FUNCTIONS[function](value)
        assert value.shape == node.outputs[0].shape, f"{node.name}: {value.shape}, not {node.outputs[0].shape}"
        held[node.outputs[0].name] = value
    return held


def _applied(node: Node, inputs: Sequence[Array]) -> Array:
    output = node.outputs[0].shape
    match node.op:
        case ops.Identity():
            return inputs[0]
        case ops.Reshape():
            return inputs[0].reshape(output)
        case ops.Transpose(order=order):
            return inputs[0].transpose(order)
        case ops.Broadcast(places=places):
            shape = [1] * len(output)
            for place, extent in zip(places, inputs[0].shape, strict=True):
                shape[place] = extent
            return np.broadcast_to(inputs[0].reshape(shape), output)
        case ops.Slice(starts=starts, steps=steps):
            ends = [a + s * n for a, s, n in zip(starts, steps, output, strict=True)]
            cut = tuple(slice(a, None if end < 0 else end, s) for a, end, s in zip(starts, ends, steps, strict=True))
            return inputs[0][cut]
        case ops.Concat(dim=dim):
            return np.concatenate(inputs, axis=dim)
        case ops.Pad(before=before):
            after = [o - b - e for o, b, e in zip(output, before, inputs[0].shape, strict=True)]
            return np.pad(inputs[0], list(zip(before, after, strict=True)))
        case ops.Pointwise(functions=(function,), constant=constant, numbers=numbers):
            # A number is of the type of what it meets.
            kind = next((x.dtype for x in inputs if x.dtype.kind in "fc"), np.dtype(float))
            own = [np.asarray(number, kind) for number in numbers]
            first = [] if constant is None else [np.asarray(constant, kind)]
            given = [*first, *inputs] if node.op.constant_first else [*inputs, *first]
            return np.broadcast_to(FUNCTIONS[function](*given, *own), output)
        case ops.Reduce(function=function, over=over, keeps_dims=keeps):
            return REDUCTIONS[function](inputs[0], axis=over, keepdims=keeps)
        case ops.Contract(operands=operands, output=letters, has_bias=has_bias):
            found = np.einsum(f"{operands[0]},{operands[1]}->{letters}", *inputs[:2])
            return found + inputs[2] if has_bias else found
        case ops.Gather(dim=dim):
            # A place that is none (of a target that is ignored) holds nothing that counts.
            x, places = inputs[0], inputs[1].reshape(output)
            held = np.take_along_axis(x, places % x.shape[dim], axis=dim)
            return np.where((places >= 0) & (places < x.shape[dim]), held, 1e30)
        case ops.Softmax(dim=dim, is_log=is_log):
            powers = np.exp(inputs[0] - inputs[0].max(axis=dim, keepdims=True))
            shares = powers / powers.sum(axis=dim, keepdims=True)
            return np.log(shares) if is_log else shares
        case ops.Lookup():
            return inputs[0][inputs[1].astype(int)]
        case ops.Attention():
            return _attended(node.op, *inputs)
        case ops.Normalise():
            return _normalised(node.op, *inputs)
        case _:
            raise AssertionError(f"{node.op} cannot be interpreted")


def _attended(op: ops.Attention, q: Array, k: Array, v: Array, *masks: Array) -> Array:
    times = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, times, axis=1), np.repeat(v, times, axis=1)
    scores = np.einsum("bhsk,bhtk->bhst", q, k) * (op.scale or q.shape[-1] ** -0.5)
    if op.is_causal:
        scores = np.where(np.tri(*scores.shape[2:]), scores, -np.inf)
    weights = np.exp(scores + sum(masks) - (scores + sum(masks)).max(-1, keepdims=True))
    return np.einsum("bhst,bhte->bhse", weights / weights.sum(-1, keepdims=True), v)


def _normalised(op: ops.Normalise, x: Array, *rest: Array) -> Array:
    shape = [extent if i in op.channels else 1 for i, extent in enumerate(x.shape)]
    affine = [array.reshape(shape) for array in rest[: op.has_scale + op.has_shift]]
    statistics = rest[op.has_scale + op.has_shift :]
    groups = x.reshape(x.shape[0], op.groups, -1, *x.shape[2:]) if op.groups > 1 else x
    over = tuple(range(2, groups.ndim)) if op.groups > 1 else op.over
    if op.kind == "rms":
        found = x / np.sqrt((x**2).mean(over, keepdims=True) + op.epsilon)
    else:
        mean, variance = groups.mean(over, keepdims=True), groups.var(over, keepdims=True)
        if op.num_statistics:
            mean, variance = (array.reshape(shape) for array in statistics)
        found = ((groups - mean) / np.sqrt(variance + op.epsilon)).reshape(x.shape)
    found = found * affine[0] if op.has_scale else found
    return found + affine[-1] if op.has_shift else found


def values_of(trace: Trace, seed: int = 0) -> dict[str, Array]:
    """Random values of a trace's leaves."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for leaf in trace.leaves:
        shape = leaf.value.shape
        found[leaf.value.name] = rng.standard_normal(shape) if leaf.value.is_float else rng.integers(0, 2, shape)
    return found
