"""`Body`: what an operator computes, as typed steps over the named dims of its iteration space.

Tensors have named dims, so that a step says nothing of their order in memory: what lacks a dim is the same for all of
its points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

from pase.errors import GraphError, unknown_name
from pase.graph.names import short

Operand = str | float
"""A tensor by its name, or a number."""

Option = str | int | float | bool

POINTWISE: Mapping[str, tuple[int, int]] = MappingProxyType(
    dict.fromkeys((
        "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1",
        "floor", "gelu", "gelu_tanh", "hard_swish", "identity", "log", "log1p", "log_sigmoid", "mish", "negate",
        "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softsign",
        "sqrt", "square", "tan", "tanh", "tanh_shrink",
    ), (1, 1))
    | dict.fromkeys((
        "divide", "leaky_relu", "celu", "elu", "power", "prelu", "subtract", "thresholded_relu", "floor_divide",
        "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    ), (2, 2))
    | dict.fromkeys(("add", "maximum", "minimum", "multiply", "average"), (2, 64))
    | {"clip": (3, 3), "hard_sigmoid": (3, 3), "quick_gelu": (2, 2), "softplus": (1, 2), "where": (3, 3)}
)  # fmt: skip
"""Functions of points, and how few and how many operands they take."""

REDUCTIONS = ("mean", "sum", "max", "min")
"""Functions that bring a tensor together over some of its dims."""

MOVES = ("concat", "padded", "piece", "copy")
"""Functions that move data alone, from the layouts in which their operands are."""

WINDOWED = ("convolve", "pool")
"""Functions that read a tensor through windows."""

FUNCTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    dict(POINTWISE)
    | dict.fromkeys((*REDUCTIONS, "softmax", "log_softmax", "causal", "pool", "padded", "piece", "copy"), (1, 1))
    | dict.fromkeys(("convolve", "embedding", "pick"), (2, 2))
    | {"einsum": (2, 8), "concat": (1, 1 << 20), "batch_norm": (3, 3)}
)
"""All functions of steps, and how few and how many operands they take."""

OPTIONS: Mapping[str, Mapping[str, type | tuple[Option, ...]]] = MappingProxyType(
    {
        "concat": {"along": str},
        "batch_norm": {"epsilon": float},
        "pool": {"reduction": ("max", "mean"), "count_padding": bool},
    }
)
"""What the steps of a function may have besides operands and dims: a type, or the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One tensor that is computed.

    function: of `POINTWISE`; of `REDUCTIONS`, "softmax" or "log_softmax" over `dims`; "einsum" of tensors to `dims`;
    "causal": scores, of which `dims` are the queries' and the keys', without later keys; "pick": elements of a tensor
    at places, along the one of `dims`; "batch_norm": a tensor without its mean, by its deviation, over `dims`, with the
    kept mean and variance that stand for these where the network is not trained; "convolve", "pool" and "embedding" as
    the accesses of the operator have them; "concat", "padded", "piece" and "copy": data that are moved alone.
    """

    result: str
    function: str
    operands: tuple[Operand, ...] = ()
    dims: tuple[str, ...] = ()
    options: tuple[tuple[str, Option], ...] = ()

    def option(self, name: str, default: Option) -> Option:
        """Return an option, or the default where the step does not have it."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor that is not trained: kept statistics, positions, a mask. dims: iteration dims, [rank]."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the model that a read takes. read: its position; shape: of the whole input as the model has it."""

    read: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model. dims: order in which the points of the result are its elements; shape: its own."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What an operator computes.

    steps: in order, each tensor computed once; the last one is what the operator writes. constants: that they read
    besides what the operator reads. inputs, outputs: of the model, that the operator reads and computes. problem: why
    it cannot be told as steps, "" if it can.
    """

    steps: tuple[Step, ...] = ()
    constants: tuple[Constant, ...] = ()
    inputs: tuple[ModelInput, ...] = ()
    outputs: tuple[ModelOutput, ...] = ()
    problem: str = ""


def elementary(body: Body, *, trains: bool) -> Body:
    """Return a body with steps in place of those that a network which is trained computes otherwise.

    Args:
        body: of any operator.
        trains: whether normalisations are by the moments of the batch, not by those that were kept.
    """
    steps: list[Step] = []
    taken = {step.result for step in body.steps}
    for step in body.steps:
        if step.function != "batch_norm":
            steps.append(step)
            continue
        x, mean, variance = step.operands
        epsilon = float(step.option("epsilon", 0.0))

        def add(function: str, *operands: Operand, dims: tuple[str, ...] = (), name: str = "", of: Step = step) -> str:
            letters = (f"{of.result}_{number}" for number in count(1))
            result = name or next(letter for letter in letters if letter not in taken)
            taken.add(result)
            steps.append(Step(result=result, function=function, operands=operands, dims=dims))
            return result

        if trains:
            mean = add("mean", x, dims=step.dims)
        centred = add("subtract", x, mean)
        if trains:
            variance = add("mean", add("square", centred), dims=step.dims)
        add("multiply", centred, add("rsqrt", add("add", variance, epsilon)), name=step.result)
    return replace(body, steps=tuple(steps))


def is_before_layout(steps: Sequence[Step], tensor: str) -> bool:
    """Return whether steps compute functions of points of one tensor and of numbers alone, one after the other.

    They can be applied before the tensor is laid out, so that padding comes after them.
    """
    known = {tensor}
    for step in steps:
        if step.function not in POINTWISE or any(isinstance(o, str) and o not in known for o in step.operands):
            return False
        known.add(step.result)
    return True


def verify_body(body: Body, *, layer: str, reads: Sequence[str], dims: Sequence[str]) -> None:
    """Raise GraphError where a body names what its operator does not have, or a function that is not known.

    Args:
        body: what the operator computes.
        layer: the operator's name, for messages.
        reads: the tensors that it reads.
        dims: the names of its iteration dims.
    """
    where = f"layer {short(layer)!r}"
    known = {*reads, *(constant.name for constant in body.constants)}
    named = {dim for constant in body.constants for dim in constant.dims}
    named |= {dim for output in body.outputs for dim in output.dims}
    for step in body.steps:
        _verify_step(step, dims, f"{where}: a step of its body")
        for operand in step.operands:
            if isinstance(operand, str) and operand not in known:
                raise GraphError(f"{where}: a step of its body reads {short(operand)!r}, which nothing makes")
        if step.result in known:
            raise GraphError(f"{where}: two steps of its body make {short(step.result)!r}; expected a name for each")
        known.add(step.result)
        named.update(step.dims)
    unknown = sorted(named - set(dims))
    if unknown or any(not 0 <= item.read < len(reads) for item in body.inputs):
        raise GraphError(f"{where}: its body names dims or inputs that it has not: {[short(dim) for dim in unknown]}")


def _verify_step(step: Step, dims: Sequence[str], where: str) -> None:
    if step.function not in FUNCTIONS:
        near = unknown_name("function", short(step.function), FUNCTIONS)
        raise GraphError(f"{where} is not known: {near}; search the model again")
    fewest, most = FUNCTIONS[step.function]
    if not fewest <= len(step.operands) <= most:
        raise GraphError(f"{where}, {step.function!r}, has {len(step.operands)} operands; expected {fewest} to {most}")
    known = OPTIONS.get(step.function, {})
    for name, value in step.options:
        expected = known.get(name, ())
        fits = type(value) is expected if isinstance(expected, type) else value in expected
        if name == "along" and value not in dims:
            fits = False
        if not fits:
            shown = f"{short(name)} = {short(repr(value))}"
            raise GraphError(f"{where}, {step.function!r}, has option {shown}; it has {', '.join(known) or 'none'}")
