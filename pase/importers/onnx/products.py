"""What multiplies: matrix products, Gemm, Einsum, convolutions and pooling, attention, recurrent networks."""

from dataclasses import replace
from math import prod

from pase.importers.ir import ops
from pase.importers.ir.call import Shape, table
from pase.importers.ir.shared import pool as pool_windows
from pase.importers.ir.shared import window_pads
from pase.importers.ir.trace import Piece, Step, Use, Value
from pase.importers.onnx.walk import OnnxCall

# -- products


def fused_matmul(call: OnnxCall) -> None:
    """Write alpha · x · y with the last two dims of either perhaps transposed."""
    values = []
    for i, name in enumerate(("transA", "transB")):
        value = call.value(i)
        rank = len(value.shape)
        is_turned = bool(call.get(name, 0)) and rank > 1
        values.append(call.transpose(value, (*range(rank - 2), rank - 1, rank - 2)) if is_turned else value)
    alpha = call.get("alpha", 1.0)
    if alpha == 1:
        call.matmul(*values, out=call.result)
    else:
        call.point("multiply", call.matmul(*values), constant=alpha, out=call.result)


def gemm(call: OnnxCall) -> None:
    """Write alpha · x · y + beta · c, either of the factors perhaps transposed."""
    x, y, out = call.value(0), call.value(1), call.result
    operands = ("km" if call.get("transA", 0) else "mk", "nk" if call.get("transB", 0) else "kn")
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    c = call.value(2) if call.has(2) and beta != 0 else None
    if c is not None and beta != 1:
        c = call.point("multiply", c, constant=beta)
    if alpha == 1 and (c is None or c.shape in (out.shape[1:], (1, *out.shape[1:]))):
        bias = [] if c is None else [call.reshape(c, c.shape[-1:])]
        call.contract(x, y, operands, "mn", *bias, out=out)
        return
    if alpha == 1:
        made = call.contract(x, y, operands, "mn")
    else:
        plain = call.contract(x, y, operands, "mn")
        made = call.point("multiply", plain, constant=alpha, out=out if c is None else None)
    if c is not None:
        call.point("add", made, c, out=out)


def einsum(call: OnnxCall) -> None:
    """Write a sum of products of tensors, two at a time from the left."""
    if not call.einsum(call.get("equation", ""), call.tensors, out=call.result):
        call.opaque()


# -- windows


def convolution(call: OnnxCall) -> None:
    """Write a convolution over all dims but the batch and the channels."""
    x, w, is_transposed = call.value(0), call.value(1), call.name == "ConvTranspose"
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        return call.opaque()
    if len(w.shape) != len(x.shape):
        raise ValueError(f"filters have {len(w.shape)} dims; expected {len(x.shape)}")
    op = ops.Convolve(
        channels=1,
        spatial=tuple(range(2, 2 + rank)),
        filters=tuple(range(2 + rank)),
        stride=_each(call, "strides", rank),
        dilation=_each(call, "dilations", rank),
        pads=_pads_of_transposed(call, w.shape[2:]) if is_transposed else _pads(call, w.shape[2:]),
        groups=call.get("group", 1),
        is_transposed=is_transposed,
        has_bias=call.has(2),
    )
    call.add(op, x, w, *call.maybe(2), out=call.result)
    return None


def pool(call: OnnxCall) -> None:
    """Write the maximum or mean over windows; of indices of the maxima only the shape is known."""
    rank, kernel = len(call.x.shape) - 2, call.wholes("kernel_shape")
    if kernel is None or len(kernel) != rank:
        raise ValueError(f"kernel_shape is {kernel}; expected {rank} extents")
    if rank not in (1, 2, 3) or call.further(1) is not None:
        return call.opaque(passes=((0, 0), (1, 1)), flop_per_point=float(prod(kernel)))
    return pool_windows(
        call,
        range(2, 2 + rank),
        kernel,
        stride=_each(call, "strides", rank),
        dilation=_each(call, "dilations", rank),
        pads=_pads(call, kernel),
        counts_padding=bool(call.get("count_include_pad", 0)),
    )


def _each(call: OnnxCall, name: str, rank: int) -> Shape:
    """Return an attribute that has one number for each spatial dim; ones where it is left out."""
    found = call.wholes(name) or (1,) * rank
    if len(found) != rank or min(found) < 1:
        raise ValueError(f"{name} is {found}; expected {rank} positive whole numbers")
    return found


def _pads_of_transposed(call: OnnxCall, kernel: Shape) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each spatial dim; those that leave of the windows the extents that are told."""
    mode, rank = call.get("auto_pad", "NOTSET"), len(kernel)
    if mode not in ("SAME_UPPER", "SAME_LOWER") and call.wholes("output_shape") is None:
        return _pads(call, kernel)
    added = call.wholes("output_padding") or (0,) * rank
    steps = zip(_each(call, "strides", rank), _each(call, "dilations", rank), kernel, added, strict=True)
    found = []
    for i, (stride, dilation, extent, more) in enumerate(steps, 2):
        reached = (call.x.shape[i] - 1) * stride + (extent - 1) * dilation + 1
        total = max(0, reached + more - call.result.shape[i])
        less = total // 2
        found.append((less, total - less) if mode == "SAME_UPPER" else (total - less, less))
    return tuple(found)


def _pads(call: OnnxCall, kernel: Shape) -> tuple[tuple[int, int], ...]:
    """Return (before, after) of each spatial dim, those that auto_pad stands for included."""
    mode, rank = call.get("auto_pad", "NOTSET"), len(kernel)
    if mode == "VALID":
        return ((0, 0),) * len(kernel)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        given = call.wholes("pads") or (0,) * (2 * rank)
        if len(given) != 2 * rank:
            raise ValueError(f"pads is {given}; expected {2 * rank} whole numbers")
        return tuple(zip(given[:rank], given[rank:], strict=True))
    ways = {"SAME_UPPER": "same", "SAME_LOWER": "lower"}
    return window_pads(
        ways[mode], call.x.shape[2:], kernel, _each(call, "strides", rank), _each(call, "dilations", rank)
    )


# -- attention, on [b, h, s, k]


def attention(call: OnnxCall) -> None:
    """Write scaled dot-product attention of [b, h, s, k], or of [b, s, h · k] that is seen so."""
    if call.further(3) is not None or len(call.x.shape) not in (3, 4):
        return call.opaque()
    values = []
    for i, name in enumerate(("q_num_heads", "kv_num_heads", "kv_num_heads")):
        value = call.value(i)
        values.append(value if len(value.shape) == 4 else _heads(call, value, call.get(name, 0)))
    for i in (1, 2):
        values[i] = _with_past(call, values[i], 3 + i, i)
    scale = call.arguments.get("scale")
    op = ops.Attention(is_causal=bool(call.get("is_causal", 0)), scale=None if scale is None else float(scale))
    if len(call.result.shape) == 4:
        call.add(op, *values, *call.maybe(3), out=call.result)
        return None
    return _attend(call, op, values, *call.maybe(3))


def multi_head_attention(call: OnnxCall) -> None:
    """Write attention of [b, s, h · k] without a past; of others it is not known."""
    is_plain = all(call.has(i) and len(call.value(i).shape) == 3 for i in range(3))
    if not is_plain or any(call.has(i) for i in (3, 6, 7)) or any(call.further(i) is not None for i in (1, 2)):
        return call.opaque()
    heads = call.get("num_heads", 0)
    return _attend(call, ops.Attention(), [_heads(call, call.value(i), heads) for i in range(3)])


def packed_attention(call: OnnxCall) -> None:
    """Write attention of queries, keys and values that one product of the input makes, without a past."""
    x, w, heads = call.x, call.value(1), call.get("num_heads", 0)
    sizes = call.wholes("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    if call.has(4) or call.further(1) is not None or sum(sizes) != w.shape[1] or len(x.shape) != 3:
        return call.opaque()
    whole = call.contract(x, w, ("abk", "kn"), "abn", *call.maybe(2))
    parts = [_heads(call, call.cut(whole, 2, sum(sizes[:i]), size), heads) for i, size in enumerate(sizes)]
    return _attend(call, ops.Attention(is_causal=bool(call.get("unidirectional", 0))), parts)


def _heads(call: OnnxCall, value: Value, count: int) -> Value:
    """Write [b, s, h · k] as [b, h, s, k]."""
    b, s, width = value.shape
    if count < 1 or width % count:
        raise ValueError(f"{width} cannot be divided into {count} heads")
    return call.transpose(call.reshape(value, (b, s, count, width // count)), (0, 2, 1, 3))


def _attend(call: OnnxCall, op: ops.Attention, values: list[Value], *masks: Value) -> None:
    """Write attention, and what it makes, [b, h, s, k], as [b, s, h · k]."""
    q, _, v = values
    made = call.add(op, *values, *masks, shape=(*q.shape[:3], v.shape[3]))
    call.reshape(call.transpose(made, (0, 2, 1, 3)), out=call.result)


def _with_past(call: OnnxCall, value: Value, past: int, position: int) -> Value:
    """Write keys or values behind those of the past, which are a result as well."""
    result = call.outputs[position] if position < len(call.outputs) else None
    if call.has(past) and call.value(past).shape[2]:
        before = call.value(past)
        shape = (*value.shape[:2], before.shape[2] + value.shape[2], value.shape[3])
        return call.add(ops.Concat(dim=2), before, value, shape=shape, out=result)
    if result is not None and call.further(position) is not None:
        call.reshape(value, out=result)
    return value


def recurrent(call: OnnxCall) -> None:
    """Write a recurrent layer over a sequence [s, b, d], or [b, s, d] where layout is 1."""
    x = call.x
    directions = 2 if call.get("direction", "forward") == "bidirectional" else 1
    is_batch_first = bool(call.get("layout", 0))
    units = call.get("hidden_size", call.value(2).shape[-1])
    first, *others = call.outputs
    states = [value for value in others if value is not None]
    shape, dtype = (*x.shape[:2], directions * units), call.results[0].dtype
    hidden = Value(name=f"{call.results[0].name}:sequence", shape=shape, dtype=dtype)
    equations, gates = _equations(call, x.shape[1 if is_batch_first else 0])
    op = ops.Recurrent(
        cell=_CELLS[call.name],  # type: ignore[arg-type]
        units=units,
        is_bidirectional=directions == 2,
        is_batch_first=is_batch_first,
        equations=equations,  # type: ignore[arg-type]
        gates=gates,
    )
    # The sequence's lengths are whole numbers, and no part of it. Where the equations are told states are zeros.
    left_out = (4, 5, 6) if equations else (4,)
    uses = {i: Use(value=value.name) for i, value in enumerate(call.inputs) if value is not None and i not in left_out}
    inputs = list(uses.values())
    if equations and 3 in uses:
        # The biases of the input, then those of the hidden state.
        size = call.value(3).shape[1] // 2
        pieces = [replace(uses[3], piece=Piece(dim=1, start=start, size=size)) for start in (0, size)]
        inputs = [use for use in inputs if use is not uses[3]] + pieces
    call.steps.append(Step(op=op, inputs=tuple(inputs), outputs=(hidden, *states)))
    if first is not None:
        apart = call.reshape(hidden, (*x.shape[:2], directions, units))
        call.transpose(apart, (0, 1, 2, 3) if is_batch_first else (0, 2, 1, 3), out=first)


def _equations(call: OnnxCall, steps: int) -> tuple[str, tuple[int, ...]]:
    """Return what PyTorch calls the equations of a layer, and where their gates stand in ONNX's order.

    It has none, ("", ()), where lengths differ, states are no zeros, cells look at their state or have other functions,
    and for a GRU that resets the hidden state before its product.
    """
    lengths = call.constant(4)
    is_whole = not call.has(4) or (lengths is not None and bool((lengths == steps).all()))
    states = [call.constant(i) for i in (5, 6) if call.has(i)]
    is_zero = all(state is not None and not state.any() for state in states)
    is_plain = not call.has(7) and not {"clip", "input_forget", "activation_alpha"} & set(call.arguments)
    if not (is_whole and is_zero and is_plain and call.get("direction", "forward") == "forward"):
        return "", ()
    functions = call.arguments.get("activations", _FUNCTIONS[call.name])
    if call.name == "RNN":
        return {("Tanh",): "rnn_tanh", ("Relu",): "rnn_relu"}.get(functions, ""), ()
    if functions != _FUNCTIONS[call.name] or (call.name == "GRU" and not call.get("linear_before_reset", 0)):
        return "", ()
    return _CELLS[call.name], {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}[call.name]


_FUNCTIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"}

TRANSLATIONS = table(
    (lambda call: call.matmul(call.value(0), call.value(1), out=call.result), "MatMul"),
    (fused_matmul, "FusedMatMul TransposeMatMul"),
    (gemm, "Gemm"),
    (einsum, "Einsum"),
    (convolution, "Conv ConvTranspose"),
    (pool, "MaxPool AveragePool LpPool"),
    (attention, "Attention"),
    (multi_head_attention, "MultiHeadAttention"),
    (recurrent, " ".join(_CELLS)),
)
"""By the operator's name."""
