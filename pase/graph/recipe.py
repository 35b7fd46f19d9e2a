"""`Recipe`: how the forward pass of a vertex is computed, step by step, as an operator of an imported model carries it.

Tensors have named dims, those of the operator's iteration space, so that a step says nothing of their order: what lacks
a dim is the same for all of its points.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pase.errors import GraphError, unknown_name
from pase.graph.names import short
from pase.graph.operator import Operator

Operand = str | float
"""A tensor by its name, or a number."""

ATTRIBUTE = "forward"
"""The operator's attribute that holds its recipe."""

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

FUNCTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    dict(POINTWISE)
    | dict.fromkeys((*REDUCTIONS, "softmax", "log_softmax", "causal", "pool", "padded", "piece", "copy"), (1, 1))
    | dict.fromkeys(("einsum", "convolve", "embedding"), (2, 2))
    | {"concat": (1, 1 << 20)}
)
"""All functions of steps, and how few and how many operands they take."""

EPILOGUE = "epilogue"
"""The attribute of an operator of an imported model that names the functions which are applied to what it computes."""


def functions_text(functions: Sequence[str]) -> str:
    """Return names of functions of any framework as an attribute holds them."""
    return ",".join(re.sub(r"[^a-z0-9_]", "_", function.lower())[:60] or "_" for function in functions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One tensor that is computed.

    function: of `POINTWISE`; of `REDUCTIONS`, "softmax" or "log_softmax" over `dims`; "einsum" of two tensors to
    `dims`; "causal": scores, of which `dims` are the queries' and the keys', without later keys; "convolve", "pool" and
    "embedding" as the kind of the operator has them; "concat", "padded", "piece" and "copy": data that are moved alone.
    of: operands.
    """

    name: str
    function: str
    of: tuple[Operand, ...] = ()
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor that is no parameter: kept statistics, positions, a mask. dims: iteration dims, [rank]."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """An input of the model that a read takes. read: its position; shape: of the whole input as the model has it."""

    read: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """An output of the model. dims: order in which the points of the result are its elements; shape: its own."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """steps: in order; the last one is what the operator writes. problem: why it cannot be computed, "" if it can."""

    steps: tuple[Step, ...] = ()
    constants: tuple[Constant, ...] = ()
    inputs: tuple[Fed, ...] = field(default=())
    outputs: tuple[Returned, ...] = field(default=())
    problem: str = ""

    def to_text(self) -> str:
        """Return the recipe as JSON, in one line."""
        document: dict[str, Any] = {
            "steps": [[s.name, s.function, list(s.of), list(s.dims)] for s in self.steps],
            "constants": [[c.name, list(c.dims)] for c in self.constants],
            "inputs": [[i.read, i.name, list(i.shape)] for i in self.inputs],
            "outputs": [[o.name, list(o.dims), list(o.shape)] for o in self.outputs],
            "problem": self.problem,
        }
        return json.dumps({key: value for key, value in document.items() if value}, separators=(",", ":"))


LAID_OUT = ("convolve", "pool")
"""Functions that read a tensor through windows."""


def is_before_layout(steps: Sequence[Step], tensor: str) -> bool:
    """Return whether steps compute functions of points of one tensor and of numbers alone, one after the other.

    They can be applied before the tensor is laid out, so that padding comes after them.
    """
    known = {tensor}
    for step in steps:
        if step.function not in POINTWISE or any(isinstance(o, str) and o not in known for o in step.of):
            return False
        known.add(step.name)
    return True


def recipe_of(operator: Operator) -> Recipe | None:
    """Return an operator's recipe, None where it has none; GraphError where it is not well-formed."""
    text = dict(operator.attributes).get(ATTRIBUTE, "")
    if text == "":
        return None
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is {text!r}; expected text")
        document = json.loads(text)
        recipe = Recipe(
            steps=tuple(
                Step(name=str(n), function=str(f), of=tuple(map(_operand, of)), dims=tuple(map(str, dims)))
                for n, f, of, dims in document.get("steps", ())
            ),
            constants=tuple(Constant(name=str(n), dims=tuple(map(str, d))) for n, d in document.get("constants", ())),
            inputs=tuple(
                Fed(read=int(r), name=str(n), shape=tuple(map(int, s))) for r, n, s in document.get("inputs", ())
            ),
            outputs=tuple(
                Returned(name=str(n), dims=tuple(map(str, d)), shape=tuple(map(int, s)))
                for n, d, s in document.get("outputs", ())
            ),
            problem=str(document.get("problem", "")),
        )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise GraphError(
            f"layer {operator.name!r}: its attribute {ATTRIBUTE!r} is no recipe ({error}); search the model again"
        ) from None
    _check(operator, recipe)
    return recipe


def _operand(value: object) -> Operand:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"operand {value!r} is no name and no number")


def _check(operator: Operator, recipe: Recipe) -> None:
    known = {access.tensor for access in operator.reads} | {constant.name for constant in recipe.constants}
    dims = {dim for constant in recipe.constants for dim in constant.dims}
    for step in recipe.steps:
        _check_step(operator, step)
        for operand in step.of:
            if isinstance(operand, str) and operand not in known:
                raise GraphError(
                    f"layer {operator.name!r}: a step of its recipe reads {operand!r}, which nothing makes"
                )
        known.add(step.name)
        dims.update(step.dims)
    dims.update(dim for output in recipe.outputs for dim in output.dims)
    unknown = sorted(dims - set(operator.extents))
    if unknown or any(not 0 <= fed.read < len(operator.reads) for fed in recipe.inputs):
        raise GraphError(f"layer {operator.name!r}: its recipe names dims or inputs that it has not: {unknown}")


def _check_step(operator: Operator, step: Step) -> None:
    where = f"layer {short(operator.name)!r}: a step of its recipe"
    if step.function not in FUNCTIONS:
        near = unknown_name("function", short(step.function), FUNCTIONS)
        raise GraphError(f"{where} is not known: {near}; search the model again")
    fewest, most = FUNCTIONS[step.function]
    if not fewest <= len(step.of) <= most:
        raise GraphError(f"{where}, {step.function!r}, has {len(step.of)} operands; expected {fewest} to {most}")
