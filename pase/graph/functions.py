"""The functions of body steps: one entry for each, with all of its properties for every framework and device.

To add a function, add an entry here and an implementation in each target that supports it.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from pase.graph.sources import TYPES

Option = str | int | float | bool | tuple[int, ...]

MANY = 1 << 20
"""No limit on the number of operands."""


class Kind(StrEnum):
    """What a function does with the points of its operands."""

    POINTWISE = "pointwise"
    """Each point of the result is computed of the same point of every operand."""
    REDUCTION = "reduction"
    """One tensor is reduced over some of its dims."""
    MOVE = "move"
    """Data are moved and nothing is computed."""
    WINDOWED = "windowed"
    """A tensor is read through windows."""
    LOSS = "loss"
    """The result is the loss: one number."""
    OTHER = "other"


class Saves(StrEnum):
    """Which tensors the gradient needs, so that they are saved for the backward pass."""

    OPERANDS = "operands"
    RESULT = "result"
    NOTHING = "nothing"


class TypeRule(StrEnum):
    """The number type in which a mixed-precision policy computes."""

    WIDEST = "widest of the operands"
    FIRST = "that of the first operand"
    FLOAT32 = "float32"
    PRODUCT = "the policy's low type"


class KernelClass(StrEnum):
    """What limits the speed of a separate kernel for the function."""

    MEMORY = "memory"
    """Bandwidth: it takes as long as a copy."""
    NORMS = "norms"
    """A normalisation, which reads its operand more than once."""
    FUNCTIONS = "functions"
    """Evaluation of the function at each point."""


class Arithmetic(StrEnum):
    """How FLOP of a function of several operands are counted."""

    SUM = "sum"
    """n - 1 of n operands; the gradient is a copy."""
    CHAIN = "chain"
    """n - 1 of n operands."""
    ONE = "one"
    """One for each point."""


class Function(NamedTuple):
    """Properties of a function.

    Attributes:
        operands: The least and the greatest number of operands.
        dims: Likewise of dims, where these are distinguished by position; None: any number.
        options: Further options of a step, by name: a type, or the possible values.
        kind: How it combines points.
        saves: Tensors that its gradient needs.
        types: Rule for the number type that it is computed in.
        kernel: Class of its kernel where it is one by itself.
        counts: Rule for counting its FLOP.
        keeps_zero: Whether it is 0 where its operand is.
        is_own: Whether it is a function of the framework that the model was written in.
    """

    operands: tuple[int, int]
    dims: tuple[int, int] | None = None
    options: Mapping[str, type | tuple[Option, ...]] = MappingProxyType({})
    kind: Kind = Kind.OTHER
    saves: Saves = Saves.OPERANDS
    types: TypeRule = TypeRule.WIDEST
    kernel: KernelClass = KernelClass.FUNCTIONS
    counts: Arithmetic = Arithmetic.ONE
    keeps_zero: bool = False
    is_own: bool = False


UNKNOWN = Function((0, MANY))
"""Assumed properties of a function without an entry."""

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
"""Pointwise functions whose result is a truth value."""

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Cells of recurrent layers."""

_RESULT, _NOTHING = Saves.RESULT, Saves.NOTHING
_FLOAT32, _PRODUCT, _FIRST = TypeRule.FLOAT32, TypeRule.PRODUCT, TypeRule.FIRST
_MEMORY, _NORMS = KernelClass.MEMORY, KernelClass.NORMS
_SUM, _CHAIN = Arithmetic.SUM, Arithmetic.CHAIN


def _point(few: int = 1, most: int | None = None, **known: Any) -> Function:
    return Function((few, most or few), kind=Kind.POINTWISE)._replace(**known)


_POINTWISE = {
    "abs": _point(kernel=_MEMORY, keeps_zero=True),
    "acos": _point(types=_FLOAT32),
    "acosh": _point(),
    "asin": _point(types=_FLOAT32),
    "asinh": _point(),
    "atan": _point(),
    "atanh": _point(),
    "ceil": _point(),
    "cos": _point(),
    "cosh": _point(types=_FLOAT32),
    "erf": _point(),
    "erfc": _point(),
    "exp": _point(saves=_RESULT, types=_FLOAT32),
    "expm1": _point(types=_FLOAT32),
    "floor": _point(),
    "gelu": _point(keeps_zero=True),
    "gelu_tanh": _point(keeps_zero=True),
    "hard_swish": _point(keeps_zero=True),
    "identity": _point(saves=_NOTHING, keeps_zero=True),
    "log": _point(types=_FLOAT32),
    "log1p": _point(types=_FLOAT32),
    "log_sigmoid": _point(),
    "mish": _point(keeps_zero=True),
    "negate": _point(saves=_NOTHING, kernel=_MEMORY, keeps_zero=True),
    "reciprocal": _point(saves=_RESULT, types=_FLOAT32),
    "relu": _point(saves=_RESULT, kernel=_MEMORY, keeps_zero=True),
    "relu6": _point(saves=_RESULT, kernel=_MEMORY, keeps_zero=True),
    "round": _point(),
    "rsqrt": _point(saves=_RESULT, types=_FLOAT32),
    "selu": _point(saves=_RESULT, keeps_zero=True),
    "sigmoid": _point(saves=_RESULT),
    "sign": _point(keeps_zero=True),
    "silu": _point(keeps_zero=True),
    "sin": _point(),
    "sinh": _point(types=_FLOAT32),
    "softsign": _point(keeps_zero=True),
    "sqrt": _point(saves=_RESULT, keeps_zero=True),
    "square": _point(types=_FLOAT32, kernel=_MEMORY, keeps_zero=True),
    "tan": _point(types=_FLOAT32),
    "tanh": _point(saves=_RESULT, keeps_zero=True),
    "tanh_shrink": _point(),
    "divide": _point(2),
    "leaky_relu": _point(2, kernel=_MEMORY, keeps_zero=True),
    "celu": _point(2),
    "elu": _point(2, keeps_zero=True),
    "power": _point(2, types=_FLOAT32),
    "prelu": _point(2),
    "subtract": _point(2, saves=_NOTHING, kernel=_MEMORY, counts=_SUM),
    "thresholded_relu": _point(2),
    "floor_divide": _point(2),
    **dict.fromkeys(COMPARISONS, _point(2, kernel=_MEMORY)),
    "add": _point(2, 64, saves=_NOTHING, kernel=_MEMORY, counts=_SUM),
    "maximum": _point(2, 64, kernel=_MEMORY, counts=_CHAIN),
    "minimum": _point(2, 64, kernel=_MEMORY, counts=_CHAIN),
    "multiply": _point(2, 64, kernel=_MEMORY, counts=_CHAIN, keeps_zero=True),
    "average": _point(2, 64, saves=_NOTHING, kernel=_MEMORY, counts=_CHAIN),
    "clip": _point(3, kernel=_MEMORY),
    "hard_sigmoid": _point(3),
    "quick_gelu": _point(2),
    "softplus": _point(1, 2, types=_FLOAT32),
    "where": _point(3, kernel=_MEMORY),
}

_ATTENTION = {"causal": bool, "scale": float}
_ONE, _TWO, _THREE = (1, 1), (2, 2), (3, 3)

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    _POINTWISE
    | {
        "mean": Function(_ONE, kind=Kind.REDUCTION),
        "sum": Function(_ONE, kind=Kind.REDUCTION, types=_FLOAT32),
        "max": Function(_ONE, kind=Kind.REDUCTION),
        "min": Function(_ONE, kind=Kind.REDUCTION),
        "softmax": Function(_ONE, types=_FLOAT32, kernel=_NORMS),
        "log_softmax": Function(_ONE, types=_FLOAT32, kernel=_NORMS),
        "padded": Function(_ONE, kind=Kind.MOVE),
        "piece": Function(_ONE, kind=Kind.MOVE),
        "copy": Function(_ONE, kind=Kind.MOVE, saves=_NOTHING),
        "fan_out": Function(_ONE),
        "attention": Function(_THREE, (5, 5), _ATTENTION, types=_PRODUCT),
        "batch_norm": Function((5, 5), None, {"epsilon": float, "momentum": float, "factor": float}, kernel=_NORMS),
        "cast": Function(_ONE, None, {"to": TYPES}, saves=_NOTHING, is_own=True),
        "causal": Function(_ONE, _TWO),
        "concat": Function((1, MANY), None, {"along": str}, kind=Kind.MOVE),
        "convolve": Function(_TWO, kind=Kind.WINDOWED, types=_PRODUCT),
        "convolve_transposed": Function(
            _TWO, (3, 9), {"strides": tuple, "dilations": tuple, "pads": tuple, "backwards": bool}, types=_PRODUCT
        ),
        "cut": Function(_ONE, _TWO, {"start": int, "step": int}),
        "dropout": Function(_ONE, None, {"rate": float}),
        "einsum": Function((2, 8), types=_PRODUCT),
        "embedding": Function(_TWO, None, {"frozen": int}, types=_FIRST),
        "grouped": Function(_THREE, (4, 4), types=_PRODUCT, is_own=True),
        "join": Function((1, MANY)),
        "keep": Function(_TWO, None, {"momentum": float, "initial": float}),
        "lstm": Function((4, 4), types=_PRODUCT),
        "masked_attention": Function((3, 64), (3, 64), {"truths": int, **_ATTENTION}, types=_PRODUCT),
        "normalise": Function((3, 5), None, {"epsilon": float}, types=_FLOAT32, kernel=_NORMS),
        "pick": Function(_TWO, _ONE, types=_FIRST),
        "pool": Function(_ONE, None, {"reduction": ("max", "mean"), "count_padding": bool}, kind=Kind.WINDOWED),
        "recurrent": Function(
            (3, MANY), (5, 5), {"cell": CELLS, "layers": int, "hidden": bool, "kept": bool}, types=_PRODUCT
        ),
        "repeat": Function(_ONE),
        "routed": Function(_TWO, (2, 3), {"rows": int}, types=_FIRST, is_own=True),
        "rows": Function(_TWO, _ONE, types=_FIRST),
        "softmax_loss": Function(_TWO, (1, 64), kind=Kind.LOSS, types=_FLOAT32, kernel=_NORMS),
        "source": Function(
            (1, 64),
            None,
            {"operator": str, "arguments": str, "layouts": str, "number": int, "is_index": bool},
            is_own=True,
        ),
        "view": Function(_ONE, None, {"replaced": int}),
        "whole": Function(_ONE, None, {"replaced": int}, is_own=True),
    }
)
"""All functions of steps, by name."""


def function_of(name: str) -> Function:
    """Return the entry of a function, `UNKNOWN` where it has none."""
    return FUNCTIONS.get(name, UNKNOWN)


def _of_kind(kind: Kind) -> tuple[str, ...]:
    return tuple(name for name, function in FUNCTIONS.items() if function.kind is kind)


POINTWISE: Mapping[str, Function] = MappingProxyType(_POINTWISE)
REDUCTIONS, MOVES, WINDOWED, LOSSES = map(_of_kind, (Kind.REDUCTION, Kind.MOVE, Kind.WINDOWED, Kind.LOSS))
OWN_FUNCTIONS = frozenset(name for name, function in FUNCTIONS.items() if function.is_own)
