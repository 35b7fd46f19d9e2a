"""`keras.ops` in a model: functions, reductions, products, and layers that are called as an operation."""

from pase.importers.ir import Attention, Identity, Pointwise, Reduce, Softmax, Transpose
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, Value, axes_of, generic
from pase.importers.keras.layers.convolutions import convolution_operation, depthwise_operation
from pase.importers.keras.layers.losses import LOSSES
from pase.importers.keras.layers.normalisations import operation as normalisation
from pase.importers.keras.layers.pooling import adaptive_pool, pool
from pase.importers.keras.layers.products import dot_operation, einsum, matmul, tensordot
from pase.importers.keras.layers.shapes import sliced
from pase.importers.keras.layers.views import VIEWS


def identity(call: Call) -> None:
    """Write the tensor as it is."""
    call.emit(Identity(), call.x)


def pointwise(call: Call) -> None:
    """Write a function of all tensors, and perhaps of one number."""
    name = FUNCTIONS[call.kind]
    owner, given = call.operation, (*call.arguments, *call.keywords.values())
    attributes = [getattr(owner, attribute, None) for attribute in _ATTRIBUTES.get(call.kind, ())]
    own = tuple(float(value) for value in attributes if isinstance(value, int | float))
    numbers = [] if attributes else [a for a in given if isinstance(a, int | float) and not isinstance(a, bool)]
    if call.kind == "Gelu" and getattr(owner, "approximate", True):
        name = "gelu_tanh"
    constant = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    op = Pointwise(
        functions=(name,),
        constant=constant,
        constant_first=constant is not None and isinstance(given[0], int | float),
        numbers=_OF_OPERATIONS.get(call.kind, own),
    )
    call.emit(op, *call.tensors)


def reduce(call: Call) -> None:
    """Write a reduction over some dims, or all."""
    owner, x = call.operation, call.x
    keeps = bool(getattr(owner, "keepdims", False))
    op = Reduce(function=_REDUCTIONS[call.kind], over=axes_of(owner.axis, len(x.shape)), keeps_dims=keeps)
    call.emit(op, x)


def softmax(call: Call) -> None:
    """Write a softmax or its logarithm."""
    axis = call.operation.axis
    if not isinstance(axis, int):
        raise UntranslatableError
    call.emit(Softmax(dim=axis % len(call.x.shape), is_log=call.kind == "LogSoftmax"), call.x)


def attention(call: Call) -> None:
    """Write attention of [b, s, h, k]; queries may have more heads than keys and values."""
    q, k, v = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    heads = [call.transposed(value, (0, 2, 1, 3)) for value in (q, k, v)]
    masks = [mask for i, name in ((3, "bias"), (4, "mask")) if isinstance(mask := call.argument(i, name), Value)]
    op = Attention(is_causal=bool(call.operation.is_causal), scale=call.argument(5, "scale"))
    shape = (*heads[0].shape[:3], v.shape[-1])
    found = call.then(op, *heads, *masks, shape=shape)
    call.emit(Transpose(order=(0, 2, 1, 3)), found)


def glu(call: Call) -> None:
    """Write the first half of a dim, times the sigmoid of the second."""
    dim = call.operation.axis % len(call.x.shape)
    size = call.result.shape[dim]
    value, gate = (sliced(call, call.x, dim, start, size) for start in (0, size))
    call.emit(Pointwise(functions=("sigmoid", "multiply"), flop_per_point=2), gate, value)


def along_last(call: Call) -> None:
    """Write an operator that works along its last dim, or along one that it names, and on each row alone."""
    rank = len(call.x.shape)
    axis = getattr(call.operation, "axis", -1)
    dims = axes_of(-1 if axis is None else axis, rank)
    lead = [i for i in range(rank) if i not in dims and i < min(len(result.shape) for result in call.results)]
    passes = [(i, i) for i in lead if all(result.shape[i] == call.x.shape[i] for result in call.results)]
    generic(call, passes=passes)


def _camel(name: str) -> str:
    """Return the usual name of a class in camel case."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


_PLAIN = (
    *("Absolute", "Abs", "Add", "Arccos", "Arccosh", "Arcsin", "Arcsinh", "Arctan", "Arctan2", "Arctanh", "Ceil"),
    *("Clip", "Cos", "Cosh", "Divide", "DivideNoNan", "Equal", "Erf", "Erfc", "Exp", "Exp2", "Expm1", "Floor"),
    *("FloorDivide", "Fmod", "Greater", "GreaterEqual", "Hypot", "Isfinite", "Isinf", "Isnan", "Less", "LessEqual"),
    *("Log", "Log10", "Log1p", "Log2", "Logaddexp", "LogicalAnd", "LogicalNot", "LogicalOr", "LogicalXor"),
    *("Maximum", "Minimum", "Mod", "Multiply", "NanToNum", "NotEqual", "Power", "Reciprocal", "Round", "Rsqrt"),
    *("Sign", "Sin", "Sinh", "Sqrt", "Square", "Subtract", "Tan", "Tanh", "Trunc", "Where", "BitwiseAnd", "BitwiseOr"),
    *("Relu", "Relu6", "Sigmoid", "SparseSigmoid", "Softplus", "Softsign", "SoftShrink", "SparsePlus", "Silu"),
    *("Squareplus", "LogSigmoid", "LeakyRelu", "HardSigmoid", "HardSilu", "Elu", "Selu", "Gelu", "Celu", "TanhShrink"),
    *("HardTanh", "HardShrink", "Threshold", "OnesLike", "ZerosLike", "Erfinv", "Heaviside", "Signbit", "Real", "Cbrt"),
)
FUNCTIONS: dict[str, str] = {name: _camel(name) for name in _PLAIN} | {
    "Absolute": "abs",
    "FloorDivide": "floor_divide",
    "TrueDivide": "divide",
    "Negative": "negate",
    "LogicalAnd": "and",
    "LogicalNot": "not",
    "LogicalOr": "or",
    "NanToNum": "nan_to_num",
}
"""Functions point by point, and their names in the intermediate form."""

_ATTRIBUTES = {
    "Celu": ("alpha",),
    "Clip": ("x_min", "x_max"),
    "Elu": ("alpha",),
    "LeakyRelu": ("negative_slope",),
}
"""Where operations keep the numbers of their functions."""

_OF_OPERATIONS = {"HardSigmoid": (1 / 6, 0.5), "HardTanh": (-1.0, 1.0)}

_REDUCTIONS = {
    "Amax": "max",
    "Amin": "min",
    "CountNonzero": "count",
    "Nanmax": "max",
    "Nanmean": "mean",
    "Nanmin": "min",
    "Nansum": "sum",
    "Std": "deviation",
    "Var": "variance",
} | {
    name: name.lower() for name in ("Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "Argmax", "Argmin", "Logsumexp")
}

_SAME = ("Cast", "SaturateCast", "StopGradient", "Copy", "ConvertToTensor")
_ALONG = (
    *("Argsort", "Cumprod", "Cumsum", "Diff", "FFT", "Flip", "OneHot", "RFFT", "Roll", "Sort", "Sparsemax"),
    "TopK",
)

OPERATIONS: dict[str, Translation] = {
    **VIEWS,
    **LOSSES,
    **dict.fromkeys(FUNCTIONS, pointwise),
    **dict.fromkeys(_REDUCTIONS, reduce),
    **dict.fromkeys(_SAME, identity),
    **dict.fromkeys(_ALONG, along_last),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(("MaxPool", "AveragePool"), pool),
    **dict.fromkeys(("AdaptiveMaxPool", "AdaptiveAveragePool"), adaptive_pool),
    **dict.fromkeys(("LayerNorm", "RMSNorm", "Normalize"), normalisation),
    "Conv": convolution_operation,
    "DepthwiseConv": depthwise_operation,
    "Dot": dot_operation,
    "DotProductAttention": attention,
    "Einsum": einsum,
    "Glu": glu,
    "Matmul": matmul,
    "Tensordot": tensordot,
}
"""By the class's name."""
