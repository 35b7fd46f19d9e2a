"""Activations, noise, and what prepares inputs: layers that work point by point, or in training alone."""

from math import prod

from pase.importers.ir import Identity, Pointwise, Reshape, Softmax
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, axes_of, for_all


def identity(call: Call) -> None:
    """Write the tensor as it is."""
    if call.x.shape != call.result.shape:
        raise UntranslatableError
    call.emit(Identity(), call.x)


def activation(call: Call) -> None:
    """Write the function that the layer is given."""
    call.activate(call.x, call.operation.activation)


def prelu(call: Call) -> None:
    """Write a leaky ReLU whose slopes are trained."""
    call.emit(Pointwise(functions=("prelu",)), call.x, call.parameter(call.operation.alpha))


def softmax(call: Call) -> None:
    """Write a softmax over one dim, or over several that lie side by side and are one for it."""
    axes = axes_of(call.operation.axis, len(call.x.shape))
    first, last = axes[0], axes[-1] + 1
    if axes != tuple(range(first, last)):
        raise UntranslatableError
    shape = call.x.shape
    flat = call.reshaped(call.x, (*shape[:first], prod(shape[first:last]), *shape[last:]))
    if flat is call.x:
        call.emit(Softmax(dim=first), flat)
    else:
        call.emit(Reshape(), call.then(Softmax(dim=first), flat, shape=flat.shape))


def relu(call: Call) -> None:
    """Write max(x, 0), perhaps with a largest value, or with a slope below 0."""
    layer = call.operation
    slope, top, least = float(layer.negative_slope or 0), layer.max_value, float(layer.threshold or 0)
    if least or (slope and top is not None):
        call.emit(Pointwise(functions=("bounded_relu",)), call.x)
    elif slope:
        call.emit(Pointwise(functions=("leaky_relu",), numbers=(slope,)), call.x)
    elif top is not None:
        call.emit(Pointwise(functions=("clip",), numbers=(0.0, float(top))), call.x)
    else:
        call.emit(Pointwise(functions=("relu",)), call.x)


def rescaling(call: Call) -> None:
    """Write x · scale + offset."""
    scale, offset = call.operation.scale, call.operation.offset
    if not isinstance(scale, int | float) or not isinstance(offset, int | float):
        call.emit(Pointwise(functions=("multiply", "add"), flop_per_point=2), call.x)
        return
    scaled = call.then(Pointwise(functions=("multiply",), constant=float(scale)), call.x, shape=call.x.shape)
    call.emit(Pointwise(functions=("add",), constant=float(offset)), scaled)


def normalization(call: Call) -> None:
    """Write (x - mean) / deviation, of statistics that are given or that were counted before training."""
    x = call.x
    kept = [axis % len(x.shape) for axis in getattr(call.operation, "_keep_axis", ())]
    shape = [extent if i in kept else 1 for i, extent in enumerate(x.shape)]
    mean, deviation = (
        call.writer.leaf(f"{call.scope}/{name}", tuple(shape), x.dtype, "constant") for name in ("mean", "deviation")
    )
    centred = call.then(Pointwise(functions=("subtract",)), x, mean, shape=x.shape)
    call.emit(Pointwise(functions=("divide",)), centred, deviation)


def _pointwise(*functions: str, number: str = "") -> Translation:
    def translation(call: Call) -> None:
        numbers = (float(getattr(call.operation, number)),) if number else ()
        call.emit(Pointwise(functions=functions, flop_per_point=len(functions), numbers=numbers), call.x)

    return translation


_IDENTITIES = (
    *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "Identity"),
    *("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"),
    # Augmentation, which is done in training alone.
    *("AugMix", "AutoContrast", "CutMix", "Equalization", "MaxNumBoundingBoxes", "MixUp", "RandAugment"),
    *("RandomBrightness", "RandomColorDegeneration", "RandomColorJitter", "RandomContrast", "RandomElasticTransform"),
    *("RandomErasing", "RandomFlip", "RandomGaussianBlur", "RandomGrayscale", "RandomHue", "RandomInvert"),
    *("RandomPerspective", "RandomPosterization", "RandomRotation", "RandomSaturation", "RandomSharpness"),
    *("RandomShear", "RandomTranslation", "RandomZoom"),
)

POINTS: dict[str, Translation] = for_all(identity, *_IDENTITIES) | {
    "Activation": activation,
    "ELU": _pointwise("elu", number="alpha"),
    "LeakyReLU": _pointwise("leaky_relu", number="negative_slope"),
    "Masking": _pointwise("multiply"),
    "Normalization": normalization,
    "PReLU": prelu,
    "ReLU": relu,
    "Rescaling": rescaling,
    "Softmax": softmax,
    "Solarization": _pointwise("where"),
}
"""Layers."""
