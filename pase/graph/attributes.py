"""What attributes each kind of operator may have, and of what type: a line here for each kind that has any.

Kinds that are not here are others' own: no program is written of them, and of their attributes nothing is known.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from pase.errors import GraphError
from pase.graph.names import listed, short
from pase.graph.operator import EPILOGUE, SCANNED, Operator, Scalar
from pase.graph.operators.activations import ACTIVATIONS
from pase.graph.operators.elementwise import FUNCTIONS
from pase.graph.operators.pooling import REDUCTIONS


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
    return isinstance(value, str) and re.fullmatch(r"([a-z0-9_]{1,60}(,(?!$))?)*", value) is not None


def _is_label(_: Operator, value: Scalar) -> bool:
    return isinstance(value, str) and value == short(value)


_FLAG = Attribute("true or false", lambda _, value: isinstance(value, bool))
_RATE = Attribute("a number from 0.0 to below 1.0", lambda _, value: isinstance(value, float) and 0 <= value < 1)
_NUMBER = Attribute("a number with a decimal point", _is_number)
_DIM = Attribute("one of its dims", _is_dim)
_LABEL = Attribute("a line of at most 60 characters", _is_label)
_NAMES = Attribute("names of functions, of small letters, digits and _, with commas between them", _are_functions)
"""Of a front end's: there are as many as frameworks have. Programs are not written by them."""

_ACTIVATED = {"activation": _one_of("", *ACTIVATIONS)}
_CONVOLUTION = {**_ACTIVATED, "groups": _whole(1)}
_POOLING = {"reduction": _one_of(*REDUCTIONS), "count_padding": _FLAG}
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
