"""Functions of points, merges, reductions, softmax, normalisations and cross-entropies."""

from collections.abc import Sequence
from math import prod
from typing import Any

from pase.importers.ir import Value, ops
from pase.importers.ir.call import table
from pase.importers.ir.shared import FUNCTIONS, glu, reduction, snake
from pase.importers.keras.call import KerasCall, UntranslatableError


def _identity(call: KerasCall) -> None:
    """Write the tensor as it is; what changes its shape in training alone is not known."""
    if call.x.shape != call.result.shape:
        raise UntranslatableError
    rate = getattr(call.operation, "rate", None) if type(call.operation).__name__ == "Dropout" else None
    call.give(ops.Identity(rate=float(rate or 0.0)), call.x)


# -- layers that work point by point


def softmax_layer(call: KerasCall) -> None:
    """Write a softmax over one dim, or over several that lie side by side and are one for it."""
    axes, shape = call.axes(), call.x.shape
    first, last = axes[0], axes[-1] + 1
    if axes != tuple(range(first, last)):
        raise UntranslatableError
    flat = call.reshape(call.x, (*shape[:first], prod(shape[first:last]), *shape[last:]))
    call.reshape(call.softmax(flat, first), out=call.result)


def relu(call: KerasCall) -> None:
    """Write max(x, 0), perhaps with a largest value, or with a slope below 0."""
    layer = call.operation
    slope, top = float(layer.negative_slope or 0), layer.max_value
    if float(layer.threshold or 0) or (slope and top is not None):
        return call.pointwise("bounded_relu")
    if top is not None:
        return call.pointwise("clip", numbers=(0.0, float(top)))
    return call.pointwise("leaky_relu", numbers=(slope,)) if slope else call.pointwise("relu")


def rescaling(call: KerasCall) -> None:
    """Write x · scale + offset."""
    scale, offset = call.operation.scale, call.operation.offset
    if isinstance(scale, int | float) and isinstance(offset, int | float):
        call.point(
            "add", call.point("multiply", call.x, constant=float(scale)), constant=float(offset), out=call.result
        )
    else:
        call.pointwise("multiply", "add")


def normalization(call: KerasCall) -> None:
    """Write (x - mean) / deviation, of statistics that are given or that were counted before training."""
    x = call.x
    kept = [axis % len(x.shape) for axis in getattr(call.operation, "_keep_axis", ())]
    shape = tuple(extent if i in kept else 1 for i, extent in enumerate(x.shape))
    mean, deviation = (
        call.writer.leaf(f"{call.scope}/{name}", shape, x.dtype, "constant") for name in ("mean", "deviation")
    )
    call.point("divide", call.point("subtract", x, mean), deviation, out=call.result)


def merge(call: KerasCall) -> None:
    """Write a function of all tensors; those of fewer dims get dims of one element after the batch."""
    functions, tensors = _MERGES[call.name], call.tensors
    if len(tensors) == 1:
        call.give(ops.Identity(), *tensors)
        return
    rank = max(len(value.shape) for value in tensors)
    seen = [
        call.reshape(value, (*value.shape[:1], *(1,) * (rank - len(value.shape)), *value.shape[1:]))
        for value in tensors
    ]
    call.give(ops.Pointwise(functions=functions, flop_per_point=len(tensors) - 2 + len(functions)), *seen)


_MERGES = {
    "Add": ("add",),
    "Average": ("add", "divide"),
    "Maximum": ("maximum",),
    "Minimum": ("minimum",),
    "Multiply": ("multiply",),
    "Subtract": ("subtract",),
}

# -- normalisations


def batch_normalisation(call: KerasCall) -> None:
    """Write batch normalisation; the moving statistics are no parameters."""
    layer, channels = call.operation, call.axes()
    over = [i for i in range(len(call.x.shape)) if i not in channels]
    statistics = [call.writer.weight(v, is_trained=False) for v in (layer.moving_mean, layer.moving_variance)]
    _normalise(call, "batch", over, channels, statistics=statistics, momentum=1 - float(layer.momentum))


def layer_normalisation(call: KerasCall) -> None:
    """Write layer normalisation, or by the root of the mean square."""
    _normalise(call, "rms" if getattr(call.operation, "rms_scaling", False) else "layer", call.axes(), call.axes())


def group_normalisation(call: KerasCall) -> None:
    """Write normalisation over groups of channels; one for each channel is instance normalisation."""
    groups, (channel,) = call.operation.groups, call.axes()
    spatial = [i for i in range(1, len(call.x.shape)) if i != channel]
    if groups in (-1, call.x.shape[channel]):
        _normalise(call, "instance", spatial, (channel,))
    else:
        _normalise(call, "group", sorted((channel, *spatial)), (channel,), groups=groups)


def _normalise(call: KerasCall, kind: str, over: Sequence[int], channels: Sequence[int], **details: Any) -> None:
    """Write the normalisation that a layer is, with the scale and the shift that it has."""
    layer = call.operation
    scale, shift = (call.parameters(getattr(layer, name, None)) for name in ("gamma", "beta"))
    call.normalise(kind, call.x, over, channels, scale=scale, shift=shift, epsilon=float(layer.epsilon), **details)


def rms_normalisation(call: KerasCall) -> None:
    """Write normalisation by the root of the mean square."""
    axes, epsilon = call.axes(), float(call.operation.epsilon or 1e-6)
    call.normalise("rms", call.x, axes, axes, scale=call.parameters(call.operation.scale), epsilon=epsilon)


def normalisation_operation(call: KerasCall) -> None:
    """Write a normalisation without weights of its own: the tensor, then scale and shift where there are any."""
    is_layer = call.name == "LayerNorm" and not getattr(call.operation, "rms_scaling", False)
    kind, axes = "layer" if is_layer else "rms", call.axes()
    call.normalise(kind, call.x, axes, axes, scale=call.tensors[1:2], shift=call.tensors[2:3])


ELEMENTWISE_LAYERS = table(
    (lambda call: call.activate(call.x, call.operation.activation), "Activation"),
    (batch_normalisation, "BatchNormalization"),
    (lambda call: call.pointwise("elu", numbers=(float(call.operation.alpha),)), "ELU"),
    (group_normalisation, "GroupNormalization"),
    (layer_normalisation, "LayerNormalization"),
    (lambda call: call.pointwise("leaky_relu", numbers=(float(call.operation.negative_slope),)), "LeakyReLU"),
    (lambda call: call.pointwise("multiply"), "Masking"),
    (normalization, "Normalization"),
    (lambda call: call.point("prelu", call.x, *call.parameters(call.operation.alpha), out=call.result), "PReLU"),
    (rms_normalisation, "RMSNormalization"),
    (relu, "ReLU"),
    (rescaling, "Rescaling"),
    (softmax_layer, "Softmax"),
    (lambda call: call.pointwise("where"), "Solarization"),
    # The kernel of the layer within is divided by one number that is computed of itself.
    (lambda call: call.give(ops.Identity(), call.apply(call.operation.layer, call.x)), "SpectralNormalization"),
    (normalisation_operation, "UnitNormalization"),
    (merge, " ".join(_MERGES)),
    (
        _identity,
        """
        ActivityRegularization AlphaDropout Dropout GaussianDropout GaussianNoise Identity SpatialDropout1D
        SpatialDropout2D SpatialDropout3D
        """,
    ),
    # Augmentation, which is done in training alone.
    (
        _identity,
        """
        AugMix AutoContrast CutMix Equalization MaxNumBoundingBoxes MixUp RandAugment RandomBrightness
        RandomColorDegeneration RandomColorJitter RandomContrast RandomElasticTransform RandomErasing RandomFlip
        RandomGaussianBlur RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation
        RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom
        """,
    ),
)
"""Layers."""


# -- operations


def pointwise(call: KerasCall) -> None:
    """Write a function of all tensors, and perhaps of one number."""
    name = FUNCTIONS[snake(call.name)]
    owner, given = call.operation, (*call.positional, *call.arguments.values())
    attributes = [getattr(owner, attribute, None) for attribute in _ATTRIBUTES.get(call.name, ())]
    own = tuple(float(value) for value in attributes if isinstance(value, int | float))
    numbers = [] if attributes else [a for a in given if isinstance(a, int | float) and not isinstance(a, bool)]
    if call.name == "Gelu" and getattr(owner, "approximate", True):
        name = "gelu_tanh"
    constant = float(numbers[0]) if len(call.tensors) == 1 and numbers else None
    op = ops.Pointwise(
        functions=(name,),
        constant=constant,
        constant_first=constant is not None and isinstance(given[0], int | float),
        numbers=_OF_OPERATIONS.get(call.name, own),
    )
    call.give(op, *call.tensors)


_ATTRIBUTES = {
    "Celu": ("alpha",),
    "Clip": ("x_min", "x_max"),
    "Elu": ("alpha",),
    "LeakyRelu": ("negative_slope",),
}
"""Where operations keep the numbers of their functions."""

_OF_OPERATIONS = {"HardSigmoid": (1 / 6, 0.5), "HardTanh": (-1.0, 1.0)}


def reduce(call: KerasCall) -> None:
    """Write a reduction over some dims, or all."""
    keeps = bool(getattr(call.operation, "keepdims", False))
    call.give(ops.Reduce(function=reduction(call.name), over=call.axes(), keeps_dims=keeps), call.x)


def along(call: KerasCall) -> None:
    """Write an operator that works along its last dim, or along one that it names, and on each row alone."""
    axis = getattr(call.operation, "axis", None)
    call.opaque(over=[-1] if axis is None else call.axes())


# -- cross-entropies

_CLIPPED = (1e-7, 1.0 - 1e-7)
"""What Keras keeps probabilities between before it takes their logarithm."""


def sparse_cross_entropy(call: KerasCall) -> None:
    """Write the negative logarithm of the target's probability."""
    target, x = call.tensor(0, "target"), call.tensor(1, "output")
    axis = call.axis(len(x.shape))
    places = call.add(ops.Identity(), target, shape=target.shape, dtype="int32") if target.is_float else target
    box = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    found = call.gather(_logarithm(call, x, axis), call.reshape(places, box), axis)
    call.point("negate", call.reshape(found, call.result.shape), out=call.result)


def cross_entropy(call: KerasCall) -> None:
    """Write the cross-entropy of probabilities of all classes."""
    target, x = call.tensor(0, "target"), call.tensor(1, "output")
    axis = call.axis(len(x.shape))
    total = call.reduce("sum", call.point("multiply", _logarithm(call, x, axis), target), (axis,))
    call.point("negate", total, out=call.result)


def binary_cross_entropy(call: KerasCall) -> None:
    """Write the cross-entropy of each probability with its target."""
    target, x = call.tensor(0, "target"), call.tensor(1, "output")
    steps = ("sigmoid",) if call.operation.from_logits else ()
    # Clipped, two logarithms, each times what it counts for, and their negative sum.
    call.give(ops.Pointwise(functions=(*steps, "binary_cross_entropy"), flop_per_point=8 + len(steps)), x, target)


def _logarithm(call: KerasCall, x: Value, axis: int) -> Value:
    """Return the logarithms of probabilities, which scores are made into first."""
    if call.operation.from_logits:
        return call.softmax(x, axis, is_log=True)
    shares = call.point("divide", x, call.reduce("sum", x, (axis,), keeps_dims=True))
    return call.point("log", call.point("clip", shares, numbers=_CLIPPED))


_POINTWISE = """
    Abs Absolute Add Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh BitwiseAnd BitwiseOr Cbrt Ceil Celu Clip Cos
    Cosh Divide DivideNoNan Elu Equal Erf Erfc Erfinv Exp Exp2 Expm1 Floor FloorDivide Fmod Gelu Greater GreaterEqual
    HardShrink HardSigmoid HardSilu HardTanh Heaviside Hypot Isfinite Isinf Isnan LeakyRelu Less LessEqual Log Log10
    Log1p Log2 LogSigmoid Logaddexp LogicalAnd LogicalNot LogicalOr LogicalXor Maximum Minimum Mod Multiply NanToNum
    Negative NotEqual OnesLike Power Real Reciprocal Relu Relu6 Round Rsqrt Selu Sigmoid Sign Signbit Silu Sin Sinh
    SoftShrink Softplus Softsign SparsePlus SparseSigmoid Sqrt Square Squareplus Subtract Tan Tanh TanhShrink Threshold
    TrueDivide Trunc Where ZerosLike
"""
_REDUCTIONS = """
    All Amax Amin Any Argmax Argmin CountNonzero Logsumexp Max Mean Min Nanmax Nanmean Nanmin Nansum Prod Std Sum Var
"""

ELEMENTWISE_OPERATIONS = table(
    (pointwise, _POINTWISE),
    (reduce, _REDUCTIONS),
    (along, "Argsort Cumprod Cumsum Diff FFT Flip OneHot RFFT Roll Sort Sparsemax TopK"),
    (normalisation_operation, "LayerNorm RMSNorm Normalize"),
    (binary_cross_entropy, "BinaryCrossentropy"),
    (cross_entropy, "CategoricalCrossentropy"),
    (lambda call: glu(call, call.axis()), "Glu"),
    (lambda call: call.softmax(call.x, call.axis(), is_log=call.name == "LogSoftmax", out=call.result), "LogSoftmax"),
    (lambda call: call.softmax(call.x, call.axis(), out=call.result), "Softmax"),
    (sparse_cross_entropy, "SparseCategoricalCrossentropy"),
)
"""Of `keras.ops`."""
