"""Shapes of results that ONNX infers none of: those of onnxruntime's operators, and of two of its own."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pase.importers.ir import Value

Shape = tuple[int, ...]
Values = Sequence[Value | None]


def shape_of_result(operator: str, position: int, inputs: Values, attributes: Mapping[str, Any]) -> Shape | None:
    """Return the shape of an operator's result at a position; None where it is not known."""
    found = _FURTHER.get((operator, position)) if position else _SHAPES.get(operator)
    try:
        return found(inputs, attributes) if found is not None else None
    except (ValueError, IndexError):
        return None


def _shape(inputs: Values, position: int) -> Shape:
    value = inputs[position]
    if value is None:
        raise ValueError(f"input {position} is left out")
    return value.shape


def _first(inputs: Values, _: Mapping[str, Any]) -> Shape:
    return _shape(inputs, 0)


def _embedded(inputs: Values, _: Mapping[str, Any]) -> Shape:
    """Rows of the words' table for tokens."""
    return (*_shape(inputs, 0), _shape(inputs, 2)[1])


def _packed(inputs: Values, attributes: Mapping[str, Any]) -> Shape:
    """Attention of queries, keys and values that one product makes; they may have widths of their own."""
    sizes = attributes.get("qkv_hidden_sizes")
    return (*_shape(inputs, 0)[:-1], sizes[2] if sizes else _shape(inputs, 1)[1] // 3)


def _lengths(inputs: Values, _: Mapping[str, Any]) -> Shape:
    """Of each example, how many tokens are not masked."""
    return _shape(inputs, 0)[:1]


def _product(inputs: Values, attributes: Mapping[str, Any]) -> Shape:
    x, y = _shape(inputs, 0), _shape(inputs, 1)
    if attributes.get("transA"):
        x = (*x[:-2], x[-1], x[-2])
    if attributes.get("transB"):
        y = (*y[:-2], y[-1], y[-2])
    return (*np.broadcast_shapes(x[:-2], y[:-2]), x[-2], y[-1])


_SHAPES: Mapping[str, Callable[[Values, Mapping[str, Any]], Shape]] = MappingProxyType(
    {
        **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding", "MultiHeadAttention"), _first),
        **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"), _first),
        **dict.fromkeys(("SkipSimplifiedLayerNormalization", "GroupQueryAttention"), _first),
        **dict.fromkeys(("GroupNormalization", "MeanVarianceNormalization"), _first),
        "Attention": _packed,
        "EmbedLayerNormalization": _embedded,
        **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), _product),
    }
)
"""Of first results, by the operator's name."""

_FURTHER: Mapping[tuple[str, int], Callable[[Values, Mapping[str, Any]], Shape]] = MappingProxyType(
    {
        ("EmbedLayerNormalization", 1): _lengths,
        ("EmbedLayerNormalization", 2): _embedded,
        ("SkipLayerNormalization", 3): _first,
        ("SkipSimplifiedLayerNormalization", 3): _first,
    }
)
"""Of others, by name and position."""

WHOLE_RESULTS = frozenset({("EmbedLayerNormalization", 1)})
"""Results, by name and position, that are whole numbers."""
