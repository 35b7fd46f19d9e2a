"""Losses of `keras.ops`: cross-entropies, and elements of rows by whole numbers."""

from pase.importers.ir import Gather, Identity, Pointwise, Reduce, Softmax
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, Value

_CLIPPED = (1e-7, 1.0 - 1e-7)
"""What Keras keeps probabilities between before it takes their logarithm."""


def sparse_cross_entropy(call: Call) -> None:
    """Write the negative logarithm of the target's probability."""
    target, x, axis = _given(call)
    places = call.fresh(target.shape, "int32") if target.is_float else target
    if target.is_float:
        call.emit(Identity(), target, out=places)
    box = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    found = call.then(Gather(dim=axis), _logarithm(call, x, axis), call.reshaped(places, box), shape=box)
    call.emit(Pointwise(functions=("negate",)), call.reshaped(found, call.result.shape))


def cross_entropy(call: Call) -> None:
    """Write the cross-entropy of probabilities of all classes."""
    target, x, axis = _given(call)
    product = call.then(Pointwise(functions=("multiply",)), _logarithm(call, x, axis), target, shape=x.shape)
    total = call.then(Reduce(function="sum", over=(axis,)), product, shape=call.result.shape)
    call.emit(Pointwise(functions=("negate",)), total)


def binary_cross_entropy(call: Call) -> None:
    """Write the cross-entropy of each probability with its target."""
    target, x, _ = _given(call)
    steps = ("sigmoid",) if call.operation.from_logits else ()
    # Clipped, two logarithms, each times what it counts for, and their negative sum.
    call.emit(Pointwise(functions=(*steps, "binary_cross_entropy"), flop_per_point=8 + len(steps)), x, target)


def _given(call: Call) -> tuple[Value, Value, int]:
    """Return the target, the output, and the dim of the classes."""
    target, x = call.argument(0, "target"), call.argument(1, "output")
    if not isinstance(target, Value) or not isinstance(x, Value):
        raise UntranslatableError
    return target, x, getattr(call.operation, "axis", -1) % max(1, len(x.shape))


def _logarithm(call: Call, x: Value, axis: int) -> Value:
    """Return the logarithms of probabilities, which scores are made into first."""
    if call.operation.from_logits:
        return call.then(Softmax(dim=axis, is_log=True), x, shape=x.shape)
    total = call.then(
        Reduce(function="sum", over=(axis,), keeps_dims=True), x, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :])
    )
    shares = call.then(Pointwise(functions=("divide",)), x, total, shape=x.shape)
    clipped = call.then(Pointwise(functions=("clip",), numbers=_CLIPPED), shares, shape=x.shape)
    return call.then(Pointwise(functions=("log",)), clipped, shape=x.shape)


def take_along_axis(call: Call) -> None:
    """Write elements of rows; all other dims have to be of one extent."""
    x, places, axis = call.argument(0, "x"), call.argument(1, "indices"), call.operation.axis
    if not isinstance(x, Value) or not isinstance(places, Value) or axis is None:
        raise UntranslatableError
    dim = axis % len(x.shape)
    if any(i != dim and a != b for i, (a, b) in enumerate(zip(x.shape, places.shape, strict=True))):
        raise UntranslatableError
    call.emit(Gather(dim=dim), x, places)


LOSSES: dict[str, Translation] = {
    "BinaryCrossentropy": binary_cross_entropy,
    "CategoricalCrossentropy": cross_entropy,
    "SparseCategoricalCrossentropy": sparse_cross_entropy,
    "TakeAlongAxis": take_along_axis,
}
"""By the class's name."""
