"""Attention as one operator of its source."""

from math import prod

from pase.importers.ir import Attention, Generic, Reshape, Step, Value
from pase.importers.torch.aten.call import Call, generic, inner, reshaped, step, step_to, table


def attention(call: Call) -> list[Step]:
    """Return scaled dot-product attention; queries may have more heads than keys and values.

    Tensors of three dims, or more than four, have their leading dims put together.
    """
    q, k, v = (call.value(name) for name in ("query", "key", "value"))
    masks = (*call.maybe("attn_mask"), *call.maybe("attn_bias"))
    op = Attention(is_causal=bool(call.get("is_causal", False)), is_fused=True, scale=call.get("scale"))
    rest = [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]
    if all(len(value.shape) == 4 for value in (q, k, v)):
        return [step_to(op, call.result, q, k, v, *masks), *rest]
    steps, flat = list[Step](), list[Value]()
    for name, value in (("query", q), ("key", k), ("value", v)):
        lead = value.shape[:-2]
        more, seen = reshaped(call, value, (prod(lead[:-1]), (*lead, 1)[len(lead) - 1], *value.shape[-2:]), name)
        steps += more
        flat.append(seen)
    made = inner(call, "flat", (*flat[0].shape[:3], v.shape[-1]))
    return [*steps, step_to(op, made, *flat, *masks), step_to(Reshape(), call.result, made), *rest]


def flexible_attention(call: Call) -> list[Step]:
    """Return attention whose scores pass through a function of the source's: that is taken to cost nothing."""
    tensors = call.tensors
    if len(tensors) < 3 or any(len(value.shape) != 4 for value in tensors[:3]):
        return generic(call)
    rest = [Step(op=Generic(is_index=True), inputs=(), outputs=(value,)) for value in call.results[1:]]
    return [step_to(Attention(is_fused=True), call.result, *tensors[:3]), *rest]


def attention_layer(call: Call) -> list[Step]:
    """Return a whole layer of attention that its source has as one operator: only the batch passes through."""
    return step(call, Generic(passes=((0, 0),)), *call.tensors)


TRANSLATIONS = table(
    (attention, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"),
    (attention, "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"),
    (attention, "_scaled_dot_product_attention_math_for_mps"),
    (flexible_attention, "flex_attention"),
    (attention_layer, "_native_multi_head_attention _transformer_encoder_layer_fwd"),
)
"""Of attention, by the operator's name."""
