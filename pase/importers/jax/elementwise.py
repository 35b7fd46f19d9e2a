"""Functions of points, casts, reductions over whole dims, and what works along one dim of each row."""

from dataclasses import replace

from pase.importers.ir import Identity, Pointwise, Pool, Reduce
from pase.importers.jax.call import JaxCall, Translation

_ALIKE = (
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz complex conj cos cosh "
    "digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag is_finite le lgamma log log1p lt ne "
    "nextafter not or polygamma population_count random_gamma_grad real regularized_incomplete_beta rem round rsqrt "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor zeta"
)
"""Functions that the vocabulary calls as JAX does."""

FUNCTIONS = {
    **{name: name for name in _ALIKE.split()},
    "add_any": "add",
    "integer_pow": "power",
    "logistic": "sigmoid",
    "max": "maximum",
    "min": "minimum",
    "mul": "multiply",
    "neg": "negate",
    "pow": "power",
    "sub": "subtract",
}
"""Primitives that compute every point from the same point of their inputs, and what the vocabulary calls them."""

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
    "reduce_xor": "any",
    "argmax": "argmax",
    "argmin": "argmin",
}


def pointwise(call: JaxCall, function: str = "") -> None:
    """Write a function of all inputs, point by point; of one input and a number where the others are numbers."""
    function = function or FUNCTIONS[call.name]
    if call.name == "integer_pow":
        call.give(Pointwise(functions=(function,), constant=float(call.params["y"])), call.x)
        return
    tensors = [value for value in call.inputs if value.shape or call.known(value) is None] or list(call.inputs)
    numbers = [call.number(i) for i, value in enumerate(call.inputs) if value not in tensors]
    is_one = len(tensors) == 1 and len(numbers) == 1
    op = Pointwise(
        functions=(function,),
        constant=numbers[0] if is_one else None,
        constant_first=is_one and call.x not in tensors,
    )
    call.give(op, *tensors)


def maximum(call: JaxCall) -> None:
    """Write the larger of two; of one and zero it is a rectifier."""
    others = [value for i, value in enumerate(call.inputs) if call.number(i) != 0.0 or value.shape]
    if len(others) == 1:
        call.point("relu", *others, out=call.result)
    else:
        pointwise(call)


def select(call: JaxCall) -> None:
    """Write the second or the third of two where a condition holds or does not; JAX has them the other way round."""
    if len(call.inputs) == 3 and call.x.dtype == "bool":
        which, otherwise, chosen = call.inputs
        call = replace(call, inputs=(which, chosen, otherwise))
    pointwise(call, "where")


def clamp(call: JaxCall) -> None:
    """Write the input between two bounds."""
    low, x, high = call.inputs
    bounds = call.number(0), call.number(2)
    if bounds[0] is None or bounds[1] is None:
        call.point("clip", x, low, high, out=call.result)
    else:
        call.point("clip", x, numbers=bounds, out=call.result)


def divide(call: JaxCall) -> None:
    """Write a quotient; that of sums over windows by how many elements they have is part of the pooling."""
    x, divisor = call.inputs
    # A sum over windows of ones is how many elements each of them has.
    is_count = call.known(divisor) is not None or isinstance(call.maker(divisor), Pool)
    if isinstance(call.maker(x), Pool) and is_count:
        call.give(Identity(), x)
    else:
        pointwise(call, "divide")


def cast(call: JaxCall) -> None:
    """Write the input in another type: as it is where both can have a gradient, or neither."""
    is_same = call.x.shape == call.result.shape and call.x.is_float == call.result.is_float
    call.give(Identity() if is_same else Pointwise(functions=("cast",)), call.x)


def same(call: JaxCall) -> None:
    """Write every input as it is."""
    for value, result in zip(call.inputs, call.results, strict=False):
        call.add(Identity(), value, out=result)


def reduction(call: JaxCall) -> None:
    """Write a reduction over some dims."""
    call.give(Reduce(function=REDUCTIONS[call.name], over=call.numbers("axes")), call.x)


def reduction_by(call: JaxCall) -> None:
    """Write a reduction by a function of the user's."""
    if len(call.results) == 1:
        call.give(Reduce(function="any", over=call.numbers("dimensions")), call.x)
    else:
        call.opaque(passes=())


def along(call: JaxCall) -> None:
    """Write what works along the dim that a parameter names: a running sum, a sort, the largest elements."""
    call.opaque(over=[int(call.params.get("dimension", call.params.get("axis", -1)))])


ELEMENTWISE: dict[str, Translation] = {
    **dict.fromkeys(FUNCTIONS, pointwise),
    "max": maximum,
    "select_n": select,
    "clamp": clamp,
    "div": divide,
    **dict.fromkeys(("convert_element_type", "bitcast_convert_type", "reduce_precision"), cast),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier", "device_put", "name"), same),
    **dict.fromkeys(("sharding_constraint", "mesh_cast", "reshard", "layout_constraint", "pvary", "ad_barrier"), same),
    **dict.fromkeys(REDUCTIONS, reduction),
    "reduce": reduction_by,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k"), along),
    "rev": lambda call: call.opaque(over=call.numbers("dimensions")),
    "fft": lambda call: call.opaque(over=range(-len(call.params["fft_lengths"]), 0)),
}
"""By the primitive's name."""
