"""Functions of points, casts and copies."""

from dataclasses import replace

from pase.importers.ir import Identity, Pointwise, Pool
from pase.importers.jax.lax.call import Call, Step, Translation, pointwise, step

_FUNCTIONS = {
    **{
        name: name
        for name in (
            *("abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"),
            *("cos", "cosh", "digamma", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt"),
            *("igamma", "igammac", "imag", "is_finite", "le", "lgamma", "log", "log1p", "lt", "ne", "nextafter", "not"),
            *("or", "real", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor"),
            *(
                "bessel_i0e",
                "bessel_i1e",
                "conj",
                "population_count",
                "clz",
                "complex",
                "polygamma",
                "random_gamma_grad",
            ),
            *("shift_left", "shift_right_arithmetic", "shift_right_logical", "regularized_incomplete_beta", "zeta"),
        )
    },
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


def function(call: Call) -> list[Step]:
    """Return a function of the inputs, point by point."""
    return pointwise(call, _FUNCTIONS[call.name])


def integer_power(call: Call) -> list[Step]:
    """Return x to the power of a whole number."""
    return step(call, Pointwise(functions=("power",), constant=float(call.params["y"])), *call.inputs)


def maximum(call: Call) -> list[Step]:
    """Return the larger of two; of one and zero it is a rectifier."""
    zeros = [value for i, value in enumerate(call.inputs) if call.number(i) == 0.0 and not value.shape]
    others = [value for value in call.inputs if value not in zeros]
    if zeros and len(others) == 1:
        return step(call, Pointwise(functions=("relu",)), *others)
    return pointwise(call, "maximum")


def select(call: Call) -> list[Step]:
    """Return the second or the third of two where a condition holds or does not; JAX has them the other way round."""
    if len(call.inputs) != 3 or call.inputs[0].dtype != "bool":
        return pointwise(call, "where")
    which, otherwise, chosen = call.inputs
    return pointwise(replace(call, inputs=(which, chosen, otherwise)), "where")


def clamp(call: Call) -> list[Step]:
    """Return the input between two bounds."""
    low, x, high = call.inputs
    bounds = call.number(0), call.number(2)
    if bounds[0] is None or bounds[1] is None:
        return step(call, Pointwise(functions=("clip",)), x, low, high)
    return step(call, Pointwise(functions=("clip",), numbers=(bounds[0], bounds[1])), x)


def divide(call: Call) -> list[Step]:
    """Return a quotient; that of sums over windows by how many elements they have is part of the pooling."""
    x, divisor = call.inputs
    is_mean = isinstance(call.makers.get(x.name), Pool) and (
        divisor.name in call.known or _is_count(call, divisor.name)
    )
    return step(call, Identity(), x) if is_mean else pointwise(call, "divide")


def cast(call: Call) -> list[Step]:
    """Return the input in another type: as it is where both can have a gradient, or neither."""
    (x, *_), result = call.inputs, call.results[0]
    if x.shape != result.shape:
        return pointwise(call, "cast")
    return step(call, Identity() if x.is_float == result.is_float else Pointwise(functions=("cast",)), x)


def same(call: Call) -> list[Step]:
    """Return every input as it is."""
    return [
        Step(op=Identity(), inputs=(value.name,), outputs=(result,))
        for value, result in zip(call.inputs, call.results, strict=False)
    ]


def _is_count(call: Call, name: str) -> bool:
    """Whether an input is itself a sum over windows: of ones, how many elements each window has."""
    return isinstance(call.makers.get(name), Pool)


POINTS: dict[str, Translation] = {
    **dict.fromkeys(_FUNCTIONS, function),
    "integer_pow": integer_power,
    "max": maximum,
    "select_n": select,
    "clamp": clamp,
    "div": divide,
    **dict.fromkeys(("convert_element_type", "bitcast_convert_type", "reduce_precision"), cast),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier", "device_put", "name"), same),
    **dict.fromkeys(("sharding_constraint", "mesh_cast", "reshard", "layout_constraint", "pvary", "ad_barrier"), same),
}
