"""Functions of the elements at one point."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from pase.importers.ir import Identity, Pointwise, Step, Value
from pase.importers.onnx.operators.call import Call, Translation, inner, node, step


def identity(call: Call) -> list[Step]:
    """Return the first input as it is."""
    return step(call, Identity(), call.x)


def dropout(call: Call) -> list[Step]:
    """Return the first input as it is; a mask that is read is one of constants."""
    mask = call.result(1)
    return [
        *step(call, Identity(), call.x),
        *([node(Pointwise(functions=("not_equal",)), (call.x,), mask)] if mask else []),
    ]


def unary(call: Call) -> list[Step]:
    """Return a function of the first input; bounds and the like are numbers of it, where they are known."""
    function = _UNARY[call.operator]
    if function == "gelu" and call.attributes.get("approximate") == "tanh":
        function = "gelu_tanh"
    return step(call, Pointwise(functions=(function,), numbers=_numbers(call)), call.x)


def prelu(call: Call) -> list[Step]:
    """Return a leaky function whose slopes are learnt."""
    return step(call, Pointwise(functions=("prelu",)), call.x, call.value(1))


def binary(call: Call) -> list[Step]:
    """Return a function of two inputs; of one and a number where the second, or either if they commute, is one."""
    function = _BINARY[call.operator]
    x, y = call.value(0), call.value(1)
    first, second = (_number(call, i) for i in (0, 1))
    if second is not None and x.shape == call.out.shape:
        return step(call, Pointwise(functions=(function,), constant=second), x)
    if first is not None and y.shape == call.out.shape:
        if function == "divide" and first == 1:
            return step(call, Pointwise(functions=("reciprocal",)), y)
        is_first = function not in _COMMUTATIVE
        return step(call, Pointwise(functions=(function,), constant=first, constant_first=is_first), y)
    return step(call, Pointwise(functions=(function,)), x, y)


def where(call: Call) -> list[Step]:
    """Return one of two inputs at each point."""
    return step(call, Pointwise(functions=("where",)), call.value(0), call.value(1), call.value(2))


def variadic(call: Call) -> list[Step]:
    """Return a function of any number of inputs, two by two."""
    function = _VARIADIC[call.operator]
    values = call.given
    if not values:
        return []
    if len(values) == 1:
        return step(call, Identity(), values[0])
    if len(values) == 2:
        return step(call, Pointwise(functions=(function,)), *values)
    flop = len(values) - 1
    return step(call, Pointwise(functions=(function,), flop_per_point=flop), *values)


def trilu(call: Call) -> list[Step]:
    """Return one triangle of a tensor, zeros in the other."""
    return step(call, Pointwise(functions=("trilu",)), call.x)


def rotary(call: Call) -> list[Step]:
    """Return a rotary embedding; sines and cosines are constants."""
    last = len(call.x.shape) - 1
    return step(call, Pointwise(functions=("rotary",), flop_per_point=3, mixes=(last,)), call.x)


def bias_function(call: Call) -> list[Step]:
    """Return a function of an input with a bias, which may be left out."""
    function = _FUSED[call.operator]
    biased = [call.value(1)] if call.has(1) else []
    if not biased:
        return step(call, Pointwise(functions=(function,)), call.x)
    total = inner(call, "biased", call.out.shape)
    return [
        node(Pointwise(functions=("add",)), (call.x, *biased), total),
        *step(call, Pointwise(functions=(function,)), total),
    ]


def _number(call: Call, position: int) -> float | None:
    """Return the one number that an input is, if it is known."""
    array = call.constant(position)
    value: Value = call.value(position)
    if array is None or array.size != 1 or not value.is_float or array.dtype.kind not in "fiu":
        return None
    return float(array.ravel()[0])


def _numbers(call: Call) -> tuple[float, ...]:
    """Return the numbers that a function takes besides its input; none where one of them is not known."""
    if call.operator != "Clip":
        return tuple(call.number(name, default) for name, default in _ATTRIBUTES.get(call.operator, ()))
    found = []
    for position, name, default in ((1, "min", -inf), (2, "max", inf)):
        array = call.constant(position)
        if call.has(position) and (array is None or array.size != 1):
            return ()
        found.append(call.number(name, default) if array is None else float(array.ravel()[0]))
    return tuple(found)


_ATTRIBUTES: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {
        "Celu": (("alpha", 1.0),),
        "Elu": (("alpha", 1.0),),
        "HardSigmoid": (("alpha", 0.2), ("beta", 0.5)),
        "LeakyRelu": (("alpha", 0.01),),
        "ThresholdedRelu": (("alpha", 1.0),),
        "QuickGelu": (("alpha", 1.702),),
        "Swish": (("alpha", 1.0),),
    }
)
"""Numbers of a function, and their defaults in ONNX."""

_COMMUTATIVE = frozenset({"add", "multiply"})

_UNARY: Mapping[str, str] = MappingProxyType(
    {
        name: name.lower()
        for name in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Bernoulli", "Ceil", "Celu", "Clip", "Cos"),
            *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "IsInf", "IsNaN", "Log", "Mish", "Not", "Reciprocal"),
            *("Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt"),
            *("Tan", "Tanh"),
        )
    }
    | {
        "BitwiseNot": "not",
        "HardSigmoid": "hard_sigmoid",
        "HardSwish": "hard_swish",
        "LeakyRelu": "leaky_relu",
        "Neg": "negate",
        "QuickGelu": "quick_gelu",
        "Swish": "quick_gelu",
        "ThresholdedRelu": "thresholded_relu",
    }
)

_BINARY: Mapping[str, str] = MappingProxyType(
    {name: name.lower() for name in ("And", "Equal", "Greater", "Less", "Or", "Xor")}
    | {
        "Add": "add",
        "BitShift": "shift",
        "BitwiseAnd": "and",
        "BitwiseOr": "or",
        "BitwiseXor": "xor",
        "Div": "divide",
        "GreaterOrEqual": "greater_equal",
        "LessOrEqual": "less_equal",
        "Mod": "remainder",
        "Mul": "multiply",
        "Pow": "power",
        "Sub": "subtract",
    }
)

_VARIADIC: Mapping[str, str] = MappingProxyType({"Sum": "add", "Max": "maximum", "Min": "minimum", "Mean": "average"})

_FUSED: Mapping[str, str] = MappingProxyType({"FastGelu": "gelu_tanh", "BiasGelu": "gelu"})

POINTWISE: Mapping[str, Translation] = MappingProxyType(
    {
        **dict.fromkeys(("Identity", "Cast", "CastLike"), identity),
        "Dropout": dropout,
        **dict.fromkeys(_UNARY, unary),
        "PRelu": prelu,
        **dict.fromkeys(_BINARY, binary),
        "Where": where,
        **dict.fromkeys(_VARIADIC, variadic),
        "Trilu": trilu,
        "RotaryEmbedding": rotary,
        **dict.fromkeys(_FUSED, bias_function),
    }
)
"""By the operator's name."""
