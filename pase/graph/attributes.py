"""What attributes each kind of operator may have, and of what type: a line here for each kind that has any.

Kinds that are not here are others' own: no program is written of them, and of their attributes nothing is known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from pase.common.names import listed, short
from pase.errors import GraphError
from pase.graph.body import FUNCTIONS as BODY_FUNCTIONS
from pase.graph.operator import EPILOGUE, SCANNED, Operator, Scalar
from pase.graph.operators.pointwise import ACTIVATIONS, FUNCTIONS
from pase.graph.operators.windows import POOLINGS


@dataclass(frozen=True, slots=True)
class Attribute:
    """What an attribute may hold: expected, for people; fits: whether a value of some operator does."""

    expected: str
    fits: Callable[[Operator, Scalar], bool]


def _one_of(*words: str) -> Attribute:
    shown = ", ".join(repr(word) for word in words)
    return Attribute(f"one of {shown}", lambda _, value: isinstance(value, str) and value in words)


def _whole(fewest: int) -> Attribute:
    return Attribute(
        f"a whole number of {fewest} or more",
        lambda _, value: isinstance(value, int) and not isinstance(value, bool) and value >= fewest,
    )


def _is_number(_: Operator, value: Scalar) -> bool:
    return isinstance(value, float) and isfinite(value)


def _is_dim(operator: Operator, value: Scalar) -> bool:
    return isinstance(value, str) and value in operator.extents


def _are_functions(_: Operator, value: Scalar) -> bool:
    return isinstance(value, str) and (not value or all(name in IMPORTED_FUNCTIONS for name in value.split(",")))


def _is_label(_: Operator, value: Scalar) -> bool:
    return isinstance(value, str) and value == short(value)


_FLAG = Attribute("true or false", lambda _, value: isinstance(value, bool))
_RATE = Attribute("a number from 0.0 to below 1.0", lambda _, value: isinstance(value, float) and 0 <= value < 1)
_NUMBER = Attribute("a number with a decimal point", _is_number)
_DIM = Attribute("one of its dims", _is_dim)
_LABEL = Attribute("a line of at most 60 characters", _is_label)
_NAMES = Attribute("names of functions that front ends have, with commas between them", _are_functions)

OTHER_FUNCTION = "other"
"""What a front end's function is called that has no name in IMPORTED_FUNCTIONS."""

_FURTHER_FUNCTIONS = """
    add_of_multiple addcdiv addcmul all and angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax
    argmin atan2 bernoulli bessel_i0e bessel_i1e binary_cross_entropy bitwise_and bitwise_or bounded_relu cast cbrt
    clz complex conj copysign count deg2rad deviation digamma divide_no_nan eq erf_inv erfinv exp2 exponential flip
    fliplr flipud float_power fmax fmin fmod frac ge gt hard_shrink hard_silu hard_tanh hardsigmoid hardswish
    hardtanh heaviside hypot i0 igamma igammac imag is_finite isclose isfinite isinf isnan le lerp lgamma log10 log2
    logaddexp logaddexp2 logical_xor logit logsum logsumexp lt masked_fill mod nan_to_num ne nextafter norm not
    ones_like or polar polygamma population_count prod rad2deg random_gamma_grad real regularized_incomplete_beta
    rem remainder roll rotary rrelu sgn shift shift_left shift_right_arithmetic shift_right_logical shrink signbit
    sinc soft_shrink sparse_plus sparse_sigmoid squareplus subtract_of_multiple sum_of_squares threshold tril trilu
    triu trunc variance xlogy xor zeros_like zeta
"""

IMPORTED_FUNCTIONS = frozenset({*BODY_FUNCTIONS, OTHER_FUNCTION, *_FURTHER_FUNCTIONS.split()})
"""Names of functions of points and of reductions that front ends give to what they import."""

_ACTIVATED = {"activation": _one_of("", *ACTIVATIONS)}
_CONVOLUTION = {**_ACTIVATED, "groups": _whole(1)}
_POOLING = {"reduction": _one_of(*POOLINGS), "count_padding": _FLAG}
_NORMALISATION = {"epsilon": _NUMBER, "groups": _whole(1)}

ATTRIBUTES: Mapping[str, Mapping[str, Attribute]] = MappingProxyType(
    {
        "add_parameter": {},
        "attention": {"causal": _FLAG},
        "batch_norm": {**_ACTIVATED, **_NORMALISATION},
        "concat": {"along": _DIM},
        "contract": {},
        "conv1d": _CONVOLUTION,
        "conv2d": _CONVOLUTION,
        "conv3d": _CONVOLUTION,
        "dense": _ACTIVATED,
        "dropout": {"rate": _RATE},
        "elementwise": {"function": _one_of(*FUNCTIONS), **_ACTIVATED},
        "embedding": {},
        "experts": {},
        "fan_out": {},
        "gather": {"along": _DIM},
        "global_pool": {},
        "group_norm": _NORMALISATION,
        "instance_norm": _NORMALISATION,
        "layer_norm": {**_ACTIVATED, **_NORMALISATION},
        "lstm": {"layers": _whole(1), "units": _whole(1)},
        "opaque": {"function": _LABEL},
        "outputs": {},
        "padded": {},
        "piece": {},
        "pointwise": {"function": _NAMES},
        "pool1d": _POOLING,
        "pool2d": _POOLING,
        "pool3d": _POOLING,
        "recurrent": {
            "cell": _one_of("", "lstm", "gru", "rnn"),
            "layers": _whole(1),
            "units": _whole(1),
            "directions": _whole(1),
        },
        "reduction": {"function": _NAMES},
        "reorder": {},
        "response_norm": _NORMALISATION,
        "rms_norm": _NORMALISATION,
        "softmax": {"over": _DIM, "is_log": _FLAG},
        "softmax_loss": {},
        "statistics": _NORMALISATION,
        "transposed_convolution": {"groups": _whole(1)},
    }
)
"""Of each kind, what its attributes may hold, by name; any of them may be left out."""

IMPORTED: Mapping[str, Attribute] = MappingProxyType(
    {
        EPILOGUE: _NAMES,
        SCANNED: _LABEL,
    }
)
"""What operators of every kind may have besides, where a front end made them."""


def check_attributes(operator: Operator) -> None:
    """Raise GraphError where an attribute is none of the operator's kind, or holds what it may not."""
    own = ATTRIBUTES.get(operator.kind)
    for name, value in operator.attributes:
        attribute = IMPORTED.get(name) or (own or {}).get(name)
        where = f"layer {short(operator.name)!r} ({short(operator.kind)}): attribute {short(name)!r}"
        if attribute is None and own is not None:
            known = listed(tuple(own), most=len(own)) or "none"
            raise GraphError(f"{where} is none that its kind has; expected {known}")
        if attribute is not None and not attribute.fits(operator, value):
            raise GraphError(f"{where} is {short(repr(value))}; expected {attribute.expected}")
