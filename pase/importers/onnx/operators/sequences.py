"""Attention and recurrent networks."""

from collections.abc import Mapping
from types import MappingProxyType

from pase.importers.ir import Attention, Concat, Contract, Recurrent, Reshape, Slice, Step, Transpose, Value
from pase.importers.onnx.operators.call import Call, Translation, generic, inner, node

_HEADS_FIRST = (0, 2, 1, 3)


def attention(call: Call) -> list[Step]:
    """Return scaled dot-product attention of [b, h, s, k], or of [b, s, h · k] that is seen so."""
    if call.result(3) is not None or len(call.x.shape) not in (3, 4):
        return generic(call)
    heads = call.whole("q_num_heads", 0), call.whole("kv_num_heads", 0), call.whole("kv_num_heads", 0)
    steps: list[Step] = []
    values: list[Value] = []
    for i, count in enumerate(heads):
        value = call.value(i)
        values.append(value if len(value.shape) == 4 else _heads(call, value, count, f"qkv{i}", steps))
    for i, past in ((1, 4), (2, 5)):
        values[i] = _with_past(call, values[i], past, steps)
    masks = [call.value(3)] if call.has(3) else []
    scale = call.attributes.get("scale")
    op = Attention(is_causal=bool(call.whole("is_causal", 0)), scale=None if scale is None else float(scale))
    out = call.out
    if len(out.shape) == 4:
        return [*steps, node(op, (*values, *masks), out)]
    q, _, v = values
    steps += _heads_put_back(call, node(op, (*values, *masks), inner(call, "heads", (*q.shape[:3], v.shape[3]))), out)
    return steps


def multi_head_attention(call: Call) -> list[Step]:
    """Return attention of [b, s, h · k] without a past; of others it is not known."""
    heads = call.whole("num_heads", 0)
    is_plain = all(call.has(i) and len(call.value(i).shape) == 3 for i in range(3)) and not call.has(3)
    if not is_plain or any(call.has(i) for i in (6, 7)) or any(call.result(i) is not None for i in (1, 2)):
        return generic(call)
    steps: list[Step] = []
    q, k, v = (_heads(call, call.value(i), heads, f"qkv{i}", steps) for i in range(3))
    made = node(Attention(), (q, k, v), inner(call, "heads", (*q.shape[:3], v.shape[3])))
    return [*steps, *_heads_put_back(call, made, call.out)]


def packed_attention(call: Call) -> list[Step]:
    """Return attention of queries, keys and values that one product of the input makes, without a past."""
    x, w, heads = call.x, call.value(1), call.whole("num_heads", 0)
    sizes = call.wholes("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    if call.has(4) or call.result(1) is not None or sum(sizes) != w.shape[1] or len(x.shape) != 3:
        return generic(call)
    bias = [call.value(2)] if call.has(2) else []
    whole = inner(call, "qkv", (*x.shape[:2], w.shape[1]))
    op = Contract(operands=("abk", "kn"), output="abn", has_bias=bool(bias))
    steps = [node(op, (x, w, *bias), whole)]
    values = []
    for i, size in enumerate(sizes):
        part = inner(call, f"part{i}", (*x.shape[:2], size))
        steps.append(node(Slice(starts=(0, 0, sum(sizes[:i])), steps=(1, 1, 1)), (whole,), part))
        values.append(_heads(call, part, heads, f"qkv{i}", steps))
    q, _, v = values
    attend = Attention(is_causal=bool(call.whole("unidirectional", 0)))
    made = node(attend, tuple(values), inner(call, "heads", (*q.shape[:3], v.shape[3])))
    return [*steps, *_heads_put_back(call, made, call.out)]


def _heads(call: Call, value: Value, count: int, tag: str, steps: list[Step]) -> Value:
    """Return [b, s, h · k] as [b, h, s, k]."""
    b, s, width = value.shape
    if count < 1 or width % count:
        raise ValueError(f"{width} cannot be divided into {count} heads")
    apart = inner(call, f"{tag}:apart", (b, s, count, width // count), value.dtype)
    turned = inner(call, f"{tag}:heads", (b, count, s, width // count), value.dtype)
    steps += [node(Reshape(), (value,), apart), node(Transpose(order=_HEADS_FIRST), (apart,), turned)]
    return turned


def _heads_put_back(call: Call, made: Step, out: Value) -> list[Step]:
    """Return [b, h, s, k] as [b, s, h · k]."""
    (value,) = made.outputs
    turned = inner(call, "turned", tuple(value.shape[i] for i in _HEADS_FIRST))
    return [made, node(Transpose(order=_HEADS_FIRST), (value,), turned), node(Reshape(), (turned,), out)]


def _with_past(call: Call, value: Value, past: int, steps: list[Step]) -> Value:
    """Return keys or values behind those of the past, which are a result as well."""
    position = 1 if past == 4 else 2
    result = call.results[position] if position < len(call.results) else None
    if not call.has(past) or not call.value(past).shape[2]:
        if call.result(position) is not None and result is not None:
            steps.append(node(Reshape(), (value,), result))
        return value
    before = call.value(past)
    shape = (*value.shape[:2], before.shape[2] + value.shape[2], value.shape[3])
    whole = result or inner(call, f"past{past}", shape, value.dtype)
    steps.append(node(Concat(dim=2), (before, value), whole))
    return whole


def recurrent(call: Call) -> list[Step]:
    """Return a recurrent layer over a sequence [s, b, d], or [b, s, d] where layout is 1."""
    x = call.x
    directions = 2 if call.text("direction", "forward") == "bidirectional" else 1
    is_batch_first = bool(call.whole("layout", 0))
    units = call.whole("hidden_size", call.value(2).shape[-1])
    # The sequence's lengths are whole numbers, and no part of it.
    inputs = tuple(value for i, value in enumerate(call.inputs) if value is not None and i != 4)
    states = tuple(value for value in call.results[1:] if value is not None)
    first = call.results[0] or states[0]
    shape = (*x.shape[:2], directions * units)
    hidden = Value(name=f"{first.name}:sequence", shape=shape, dtype=first.dtype)
    op = Recurrent(
        cell=_CELLS[call.operator],  # type: ignore[arg-type]
        units=units,
        is_bidirectional=directions == 2,
        is_batch_first=is_batch_first,
    )
    steps = [node(op, inputs, hidden, *states)]
    if call.results[0] is not None:
        out = call.out
        apart = inner(call, "apart", (*x.shape[:2], directions, units), x.dtype)
        order = (0, 1, 2, 3) if is_batch_first else (0, 2, 1, 3)
        steps += [node(Reshape(), (hidden,), apart), node(Transpose(order=order), (apart,), out)]
    return steps


_CELLS: Mapping[str, str] = MappingProxyType({"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"})

SEQUENCES: Mapping[str, Translation] = MappingProxyType(
    {
        "Attention": attention,
        "MultiHeadAttention": multi_head_attention,
        **dict.fromkeys(_CELLS, recurrent),
    }
)
"""By the operator's name."""
