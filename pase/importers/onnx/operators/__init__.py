"""ONNX's operators in the vocabulary of the intermediate form, one family in each module."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.errors import ModelError
from pase.importers.ir import Step
from pase.importers.onnx.operators.call import UNFIT, Call, Translation, generic
from pase.importers.onnx.operators.lookups import LOOKUPS, embed_and_normalise
from pase.importers.onnx.operators.moves import MOVES
from pase.importers.onnx.operators.normalisations import NORMALISATIONS
from pase.importers.onnx.operators.pointwise import POINTWISE
from pase.importers.onnx.operators.products import PRODUCTS
from pase.importers.onnx.operators.reductions import REDUCTIONS
from pase.importers.onnx.operators.sequences import SEQUENCES, multi_head_attention, packed_attention
from pase.importers.onnx.operators.windows import WINDOWS

TRANSLATIONS: Mapping[str, Translation] = MappingProxyType(
    {
        **POINTWISE,
        **PRODUCTS,
        **WINDOWS,
        **NORMALISATIONS,
        **REDUCTIONS,
        **MOVES,
        **LOOKUPS,
        **SEQUENCES,
    }
)
"""Of ONNX's own operators, and of those of the runtime that bear no other meaning there, by name."""

RUNTIME: Mapping[str, Translation] = MappingProxyType(
    {
        name: TRANSLATIONS[name]
        for name in (
            *("BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "LayerNormalization", "QuickGelu", "RotaryEmbedding"),
            *("SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
            *("TransposeMatMul", "Trilu"),
        )
    }
    | {
        "Attention": packed_attention,
        "EmbedLayerNormalization": embed_and_normalise,
        "MultiHeadAttention": multi_head_attention,
    }
)
"""Of the domain com.microsoft: what an optimiser of onnxruntime's puts together."""

_DOMAINS: Mapping[str, Mapping[str, Translation]] = MappingProxyType({"": TRANSLATIONS, "com.microsoft": RUNTIME})


def translate(call: Call, domain: str) -> list[Step]:
    """Return the nodes of an operator; one that nothing is known of passes the leading dim through, if any.

    Raises ModelError where the operator's inputs or attributes do not fit.
    """
    translation = _DOMAINS.get(domain, {}).get(call.operator, generic)
    try:
        return translation(call)
    except UNFIT as error:
        raise ModelError(
            f"operator {call.operator} {call.name!r} is not well formed: {error}; check the file with onnx.checker"
        ) from error


__all__ = ["RUNTIME", "TRANSLATIONS", "Call", "Step", "translate"]
