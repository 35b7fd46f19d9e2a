"""Attention layers: projections are products of their own, what is between them is one operator."""

from math import prod
from typing import Any

from pase.importers.ir import Attention, Contract, Identity, Pointwise, Softmax, Transpose
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, Value, values_of


def multi_head(call: Call) -> None:
    """Write attention of several heads; those of the queries may share ones of keys and values."""
    layer = call.operation
    query, value = call.argument(0, "query"), call.argument(1, "value")
    key = call.argument(2, "key") or value
    has_gate = getattr(layer, "use_gate", getattr(layer, "_use_gate", False))
    gate = _projected(call, layer._gate_dense, query) if has_gate else None
    q, k, v = (
        _projected(call, dense, given)
        for dense, given in ((layer._query_dense, query), (layer._key_dense, key), (layer._value_dense, value))
    )
    axes = getattr(layer, "_attention_axes", None)
    if axes is not None and tuple(axes) != tuple(range(1, len(q.shape) - 2)):
        raise UntranslatableError
    mask = call.argument(6, "attention_mask")
    masks = [mask] if isinstance(mask, Value) else []
    is_causal = bool(call.argument(9, "use_causal_mask", False))
    if len(call.results) > 1:
        found = _with_scores(call, q, k, v)
    else:
        heads = [_heads_first(call, given) for given in (q, k, v)]
        shape = (*heads[0].shape[:3], v.shape[-1])
        found = call.then(Attention(is_causal=is_causal), *heads, *masks, shape=shape, part="attention")
    steps_first = call.transposed(found, (0, 2, 1, 3))
    joined = call.reshaped(steps_first, (*q.shape[:-1], v.shape[-1]))
    if gate is not None:
        joined = call.then(Pointwise(functions=("multiply",)), joined, gate, shape=joined.shape)
    call.emit(Identity(), _projected(call, layer._output_dense, joined))


def additive(call: Call) -> None:
    """Write attention whose scores are sums of a hyperbolic tangent of queries and keys."""
    layer = call.operation
    query, value, *more = call.tensors
    key = more[0] if more and more[0].is_float else value
    (batch, steps, width), sources = query.shape, key.shape[1]
    wide = (batch, steps, sources, width)
    rows = call.reshaped(query, (batch, steps, 1, width))
    columns = call.reshaped(key, (batch, 1, sources, width))
    both = call.then(Pointwise(functions=("add", "tanh"), flop_per_point=2), rows, columns, shape=wide, part="scores")
    if layer.scale is None:
        raise UntranslatableError
    scale = call.parameter(layer.scale)
    scores = call.then(Contract(operands=("bqkd", "d"), output="bqk"), both, scale, shape=wide[:3], part="scores")
    weights = call.then(Softmax(dim=2), scores, shape=wide[:3], part="softmax")
    call.emit(Contract(operands=("bqk", "bkd"), output="bqd"), weights, value)
    if len(call.results) > 1:
        call.emit(Identity(), weights, out=call.results[1])


def _with_scores(call: Call, q: Value, k: Value, v: Value) -> Value:
    """Write attention step by step, the weights being a result of their own; return [b, h, s, e]."""
    if len(q.shape) != 4 or q.shape[2] != k.shape[2]:
        raise UntranslatableError
    b, s, h, _ = q.shape
    square = (b, h, s, k.shape[1])
    scores = call.then(Contract(operands=("bshk", "bthk"), output="bhst"), q, k, shape=square, part="scores")
    call.emit(Softmax(dim=3), scores, out=call.results[1], part="softmax")
    product = Contract(operands=("bhst", "bthe"), output="bhse")
    return call.then(product, call.results[1], v, shape=(b, h, s, v.shape[-1]), part="attention")


def _projected(call: Call, dense: Any, value: Value) -> Value:
    (found,) = values_of(call.reader.apply(dense, (value,), {}, f"{call.scope}/{dense.name}"))
    return found


def _heads_first(call: Call, value: Value) -> Value:
    """Return [b, steps…, h, k] as [b, h, steps, k]."""
    *_, heads, width = value.shape
    flat = call.reshaped(value, (value.shape[0], prod(value.shape[1:-2]), heads, width))
    return call.then(Transpose(order=(0, 2, 1, 3)), flat, shape=(flat.shape[0], heads, flat.shape[1], width))


ATTENTION: dict[str, Translation] = {
    "AdditiveAttention": additive,
    "GroupedQueryAttention": multi_head,
    "MultiHeadAttention": multi_head,
}
"""Layers."""
