"""Convolutions and pooling, channels first or last; dense layers, products of tensors, attention, recurrent layers."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pase.importers.ir import Value, ops
from pase.importers.ir.call import each, letters, parse_einsum, table, values_of
from pase.importers.ir.shared import adaptive_pool, pool_whole, window_pads
from pase.importers.ir.shared import pool as pool_windows
from pase.importers.ir.shared import tensordot as contracted
from pase.importers.keras.call import KerasCall, UntranslatableError, is_keras


def layout(data_format: str, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return the positions of the channels and of the spatial dims, of which there are so many."""
    first = data_format == "channels_first"
    return (1, tuple(range(2, rank + 2))) if first else (rank + 1, tuple(range(1, rank + 1)))


def _convolve(x: Value, owner: Any, kernel: Sequence[int], **more: Any) -> ops.Convolve:
    """Return a convolution with filters of a shape [spatial…, in-channels of one group, out-channels].

    x: the tensor whose extents "same" padding depends on. owner: a layer or an operation.
    """
    rank = len(x.shape) - 2
    channels, spatial = layout(owner.data_format, rank)
    stride, dilation = each(owner.strides, rank), each(owner.dilation_rate, rank)
    return ops.Convolve(
        channels=channels,
        spatial=spatial,
        filters=(rank + 1, rank, *range(rank)),
        stride=stride,
        dilation=dilation,
        pads=window_pads(owner.padding, [x.shape[i] for i in spatial], kernel[:rank], stride, dilation),
        **more,
    )


def convolution(call: KerasCall) -> None:
    """Write a convolution."""
    layer = call.operation
    if getattr(layer, "lora_enabled", False):
        raise UntranslatableError
    op = _convolve(call.x, layer, layer._kernel.shape, groups=layer.groups, has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer._kernel, layer.bias))


def transposed(call: KerasCall) -> None:
    """Write the gradient of a convolution; filters are [spatial…, out-channels, in-channels]."""
    layer = call.operation
    op = _convolve(call.result, layer, layer.kernel.shape, is_transposed=True, has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer.kernel, layer.bias))


def depthwise(call: KerasCall) -> None:
    """Write a convolution of each channel alone; filters are [spatial…, channels, multiplier]."""
    layer = call.operation
    op, filters = _of_each_channel(call, layer, *call.parameters(layer.kernel))
    call.emit_activated(replace(op, has_bias=layer.use_bias), call.x, filters, *call.parameters(layer.bias))


def separable(call: KerasCall) -> None:
    """Write a convolution of each channel alone, then one across channels."""
    layer = call.operation
    first, filters = _of_each_channel(call, layer, *call.parameters(layer.depthwise_kernel))
    shape = list(call.result.shape)
    shape[first.channels] = filters.shape[-1]
    deep = call.part("depthwise").add(first, call.x, filters, shape=shape)
    rank = len(shape) - 2
    ones = {"stride": (1,) * rank, "dilation": (1,) * rank, "pads": ((0, 0),) * rank}
    second = replace(first, groups=1, has_bias=layer.use_bias, **ones)  # type: ignore[arg-type]
    call.emit_activated(second, deep, *call.parameters(layer.pointwise_kernel, layer.bias))


def convolution_operation(call: KerasCall) -> None:
    """Write a convolution that is called as an operation with filters of its own."""
    x, filters = call.tensors[:2]
    channels, _ = layout(call.operation.data_format, len(x.shape) - 2)
    groups = x.shape[channels] // filters.shape[-2]
    call.give(_convolve(x, call.operation, filters.shape, groups=groups), x, filters)


def depthwise_operation(call: KerasCall) -> None:
    """Write a convolution of each channel alone that is called as an operation."""
    op, filters = _of_each_channel(call, call.operation, call.tensors[1])
    call.give(op, call.x, filters)


def _of_each_channel(call: KerasCall, owner: Any, filters: Value) -> tuple[ops.Convolve, Value]:
    """Return a convolution with a group for each channel, and its filters as [spatial…, 1, channels · multiplier]."""
    *spatial, channels, multiplier = filters.shape
    flat = call.reshape(filters, (*spatial, 1, channels * multiplier))
    return _convolve(call.x, owner, flat.shape, groups=channels), flat


# -- pooling


def pool(call: KerasCall) -> None:
    """Write maximum or mean over windows; what lies outside does not count."""
    owner = call.operation
    spatial = spatial_dims(call)
    kernel = each(owner.pool_size, len(spatial))
    stride = each(owner.strides if owner.strides is not None else kernel, len(spatial))
    pads = window_pads(owner.padding, [call.x.shape[i] for i in spatial], kernel, stride, (1,) * len(spatial))
    pool_windows(call, spatial, kernel, stride=stride, pads=pads)


def spatial_dims(call: KerasCall) -> tuple[int, ...]:
    """Return the dims of the first tensor but the batch and the channels."""
    return layout(call.operation.data_format, len(call.x.shape) - 2)[1]


WINDOW_LAYERS = table(
    (convolution, "Conv1D Conv2D Conv3D"),
    (transposed, "Conv1DTranspose Conv2DTranspose Conv3DTranspose"),
    (depthwise, "DepthwiseConv1D DepthwiseConv2D DepthwiseConv3D"),
    (separable, "SeparableConv1D SeparableConv2D SeparableConv3D"),
    (pool, "MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D"),
    (
        lambda call: pool_whole(call, spatial_dims(call), keeps_dims=bool(call.operation.keepdims)),
        """
        GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GlobalAveragePooling1D GlobalAveragePooling2D
        GlobalAveragePooling3D
        """,
    ),
    (
        lambda call: adaptive_pool(call, spatial_dims(call)),
        """
        AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D AdaptiveAveragePooling1D AdaptiveAveragePooling2D
        AdaptiveAveragePooling3D
        """,
    ),
)
"""Layers."""

WINDOW_OPERATIONS = table(
    (convolution_operation, "Conv"),
    (depthwise_operation, "DepthwiseConv"),
    (pool, "MaxPool AveragePool"),
    (lambda call: adaptive_pool(call, spatial_dims(call)), "AdaptiveMaxPool AdaptiveAveragePool"),
)
"""Of `keras.ops`."""


# -- products


def dense(call: KerasCall) -> None:
    """Write x · kernel + bias."""
    layer = call.operation
    _check_plain(layer)
    lead = letters(len(call.x.shape) - 1, without="yz")
    op = ops.Contract(operands=(f"{lead}y", "yz"), output=f"{lead}z", has_bias=layer.bias is not None)
    call.emit_activated(op, call.x, *call.parameters(layer._kernel, layer.bias))


def einsum_dense(call: KerasCall) -> None:
    """Write an einsum with a kernel, and a bias."""
    layer = call.operation
    _check_plain(layer)
    kernel, *bias = call.parameters(layer._kernel, layer.bias)
    parsed = parse_einsum(layer.equation, (call.x, kernel))
    if parsed is None:
        raise UntranslatableError
    (left, right), output = parsed
    out = call.result.shape
    is_last = all(value.shape == out[len(out) - len(value.shape) :] for value in bias)
    op = ops.Contract(operands=(left, right), output=output, has_bias=is_last and bool(bias))
    if is_last:
        call.emit_activated(op, call.x, kernel, *bias)
    else:
        call.emit_activated(ops.Pointwise(functions=("add",)), call.add(op, call.x, kernel, shape=out), *bias)


def embedding(call: KerasCall) -> None:
    """Write rows of a table."""
    _check_plain(call.operation)
    call.give(ops.Lookup(), *call.parameters(call.operation._embeddings), call.x)


def reversible_embedding(call: KerasCall) -> None:
    """Write rows of a table, or the product with it that gives logits."""
    layer = call.operation
    if not call.argument(1, "reverse", False):
        embedding(call)
        return
    _check_plain(layer)
    lead = letters(len(call.x.shape) - 1, without="yz")
    (table,) = call.parameters(layer._embeddings if layer.tie_weights else layer.reverse_embeddings)
    op = ops.Contract(operands=(f"{lead}y", "zy" if layer.tie_weights else "yz"), output=f"{lead}z")
    if layer.logit_soft_cap is None:
        call.give(op, call.x, table)
    else:
        logits = call.add(op, call.x, table, shape=call.result.shape)
        call.give(ops.Pointwise(functions=("divide", "tanh", "multiply"), flop_per_point=3), logits)


def dot(call: KerasCall) -> None:
    """Write the layer's product of two tensors along one dim of each; the first dim is the batch of both."""
    axes = call.operation.axes
    if call.operation.normalize:
        raise UntranslatableError
    first, second = (axes, axes) if isinstance(axes, int) else axes
    _tensordot(call, [first], [second], batch=True)


def dot_operation(call: KerasCall) -> None:
    """Write NumPy's dot: over the last dim of the first, the last but one of the second."""
    x, y = _two(call)
    if x.shape and y.shape:
        _tensordot(call, [-1], [max(0, len(y.shape) - 2)])
    else:
        call.point("multiply", x, y, out=call.result)


def tensordot(call: KerasCall) -> None:
    """Write a product over some dims of both operands."""
    x, _ = _two(call)
    axes = call.operation.axes
    if isinstance(axes, int):
        axes = (range(len(x.shape) - axes, len(x.shape)), range(axes))
    first, second = ([axis] if isinstance(axis, int) else list(axis) for axis in axes)
    _tensordot(call, first, second)


def _tensordot(call: KerasCall, first: Sequence[int], second: Sequence[int], *, batch: bool = False) -> None:
    if not call.result.shape:
        raise UntranslatableError
    contracted(call, first, second, batch=batch)


def matmul(call: KerasCall) -> None:
    """Write a product as NumPy's matmul has it; batch dims that only one operand has are read again and again."""
    call.matmul(*_two(call), out=call.result)


def einsum(call: KerasCall) -> None:
    """Write an einsum; one with a diagonal is not known."""
    if not call.result.shape or not call.einsum(call.operation.subscripts, call.tensors, out=call.result):
        raise UntranslatableError


def _two(call: KerasCall) -> tuple[Value, Value]:
    if len(call.tensors) != 2:
        raise UntranslatableError
    return call.tensors[0], call.tensors[1]


def _check_plain(layer: object) -> None:
    """Low-rank additions and quantised weights are no plain product any more."""
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        raise UntranslatableError


# -- attention: projections are products of their own, what is between them is one operator


def multi_head(call: KerasCall) -> None:
    """Write attention of several heads; those of the queries may share ones of keys and values."""
    layer = call.operation
    query, value = call.argument(0, "query"), call.argument(1, "value")
    key = call.argument(2, "key") or value
    has_gate = getattr(layer, "use_gate", getattr(layer, "_use_gate", False))
    gate = call.apply(layer._gate_dense, query) if has_gate else None
    q, k, v = (
        call.apply(dense, given)
        for dense, given in ((layer._query_dense, query), (layer._key_dense, key), (layer._value_dense, value))
    )
    axes = getattr(layer, "_attention_axes", None)
    if axes is not None and tuple(axes) != tuple(range(1, len(q.shape) - 2)):
        raise UntranslatableError
    mask = call.argument(6, "attention_mask")
    masks = [mask] if isinstance(mask, Value) else []
    if len(call.results) > 1:
        found = _with_scores(call, q, k, v)
    else:
        heads = [_heads_first(call, given) for given in (q, k, v)]
        op = ops.Attention(is_causal=bool(call.argument(9, "use_causal_mask", False)))
        found = call.part("attention").add(op, *heads, *masks, shape=(*heads[0].shape[:3], v.shape[-1]))
    joined = call.reshape(call.transpose(found, (0, 2, 1, 3)), (*q.shape[:-1], v.shape[-1]))
    if gate is not None:
        joined = call.point("multiply", joined, gate)
    call.identity(call.apply(layer._output_dense, joined), out=call.result)


def _heads_first(call: KerasCall, value: Value) -> Value:
    """Return [b, steps…, h, k] as [b, h, steps, k]."""
    *_, heads, width = value.shape
    flat = call.reshape(value, (value.shape[0], prod(value.shape[1:-2]), heads, width))
    return call.transpose(flat, (0, 2, 1, 3))


def _with_scores(call: KerasCall, q: Value, k: Value, v: Value) -> Value:
    """Write attention step by step, the weights being a result of their own; return [b, h, s, e]."""
    if len(q.shape) != 4 or q.shape[2] != k.shape[2]:
        raise UntranslatableError
    scores = call.part("scores").contract(q, k, ("bshk", "bthk"), "bhst")
    weights = call.part("softmax").softmax(scores, 3, out=call.results[1])
    return call.part("attention").contract(weights, v, ("bhst", "bthe"), "bhse")


def additive(call: KerasCall) -> None:
    """Write attention whose scores are sums of a hyperbolic tangent of queries and keys."""
    layer = call.operation
    query, value, *more = call.tensors
    key = more[0] if more and more[0].is_float else value
    (batch, steps, width), sources = query.shape, key.shape[1]
    wide = (batch, steps, sources, width)
    rows = call.reshape(query, (batch, steps, 1, width))
    columns = call.reshape(key, (batch, 1, sources, width))
    both = call.part("scores").add(
        ops.Pointwise(functions=("add", "tanh"), flop_per_point=2), rows, columns, shape=wide
    )
    if layer.scale is None:
        raise UntranslatableError
    (scale,) = call.parameters(layer.scale)
    scores = call.part("scores").contract(both, scale, ("bqkd", "d"), "bqk")
    weights = call.part("softmax").softmax(scores, 2)
    call.contract(weights, value, ("bqk", "bkd"), "bqd", out=call.result)
    if len(call.results) > 1:
        call.identity(weights, out=call.results[1])


def attention(call: KerasCall) -> None:
    """Write attention of [b, s, h, k]; queries may have more heads than keys and values."""
    q, k, v = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    heads = [call.transpose(value, (0, 2, 1, 3)) for value in (q, k, v)]
    masks = [mask for i, name in ((3, "bias"), (4, "mask")) if isinstance(mask := call.argument(i, name), Value)]
    op = ops.Attention(is_causal=bool(call.operation.is_causal), scale=call.argument(5, "scale"))
    found = call.add(op, *heads, *masks, shape=(*heads[0].shape[:3], v.shape[-1]))
    call.transpose(found, (0, 2, 1, 3), out=call.result)


def ctc(call: KerasCall) -> None:
    """Write the losses of examples whose targets may lie anywhere in time: of it is known what it costs.

    At each step each of the targets, with a blank before, between and behind them, sums three states of the last step.
    """
    steps, states = call.tensor(1, "output").shape[1], 2 * call.tensor(0, "target").shape[1] + 1
    call.opaque(passes=((0, 0),), flop_per_point=10.0 * steps * states)


# -- recurrent layers, in one direction or both, and layers that are applied to each step

_CELLS: dict[str, Any] = {
    "LSTM": "lstm",
    "LSTMCell": "lstm",
    "GRU": "gru",
    "GRUCell": "gru",
    "SimpleRNN": "rnn",
    "SimpleRNNCell": "rnn",
}
_STATES = {"lstm": 2, "gru": 1, "rnn": 1}
_MERGES = {"sum": ("add",), "mul": ("multiply",), "ave": ("add", "divide")}


def recurrent(call: KerasCall) -> None:
    """Write a recurrent layer: all of its steps, the last of them where it returns that alone, and its states."""
    layer = call.operation
    value, states = call.x, [state for state in call.tensors[1:] if state.is_float]
    last: list[Value] = []
    for cell in _cells(layer):
        count = _STATES[_kind(cell)]
        value, found = _run(call, [cell], value, states[:count])
        states = states[count:]
        last += found
    _finish(call, value, last if layer.return_state else [])


def bidirectional(call: KerasCall) -> None:
    """Write both directions as one where they are put end to end, else as two and what brings them together."""
    layer = call.operation
    cells = [*_cells(layer.forward_layer), *_cells(layer.backward_layer)]
    if len(cells) != 2:
        raise UntranslatableError
    forward, backward = cells
    kinds = _kind(forward), _kind(backward)
    states = [state for state in call.tensors[1:] if state.is_float]
    half = len(states) // 2
    if layer.merge_mode == "concat" and kinds[0] == kinds[1] and forward.units == backward.units:
        merged, found = _run(call, cells, call.x, states)
    else:
        first, first_states = _run(call, [forward], call.x, states[:half])
        second, second_states = _run(call, [backward], call.x, states[half:])
        found = [*first_states, *second_states]
        if layer.merge_mode is None:
            for result, value in zip(call.results, (first, second), strict=False):
                _steps(call, value, result)
            _write_states(call, call.results[2:], found if layer.return_state else [])
            return
        is_joined = layer.merge_mode == "concat"
        op = ops.Concat(dim=2) if is_joined else ops.Pointwise(functions=_MERGES[layer.merge_mode])
        width = first.shape[2] + second.shape[2] * is_joined
        merged = call.add(op, first, second, shape=(*first.shape[:2], width))
    _finish(call, merged, found if layer.return_state else [])


def time_distributed(call: KerasCall) -> None:
    """Write a layer that is applied to each step: the steps are examples to it."""
    inner, x = call.operation.layer, call.x
    if is_keras(inner) and type(inner).__name__ in _ALONG_LAST:
        call.give(ops.Identity(), call.apply(inner, x))
        return
    flat = call.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    found = values_of(call.reader.apply(inner, (flat,), {}, f"{call.scope}/{inner.name}"))
    if len(found) != 1 or found[0].shape != (flat.shape[0], *call.result.shape[2:]):
        raise UntranslatableError
    call.reshape(found[0], out=call.result)


_ALONG_LAST = frozenset({"Dense", "Activation", "Dropout", "ReLU", "LeakyReLU", "ELU", "Identity", "Embedding"})
"""Layers to which dims before the last one are all alike."""


def convolutional(call: KerasCall) -> None:
    """Write a recurrent layer of convolutions, which can be split along its batch alone, with the FLOP that it has."""
    cell = call.operation.cell
    batch, steps = call.x.shape[:2]
    shape = call.result.shape[2:] if call.operation.return_sequences else call.result.shape[1:]
    points = batch * steps * prod(shape) // cell.filters
    flop = 2.0 * points * (prod(cell.kernel.shape) + prod(cell.recurrent_kernel.shape))
    inputs = (*call.tensors, *call.parameters(cell.kernel, cell.recurrent_kernel, cell.bias))
    call.opaque(*inputs, passes=((0, 0),), flop_per_point=flop / prod(call.result.shape))


def _cells(layer: Any) -> list[Any]:
    cell: Any = getattr(layer, "cell", None)
    if type(cell).__name__ == "StackedRNNCells" and is_keras(cell):
        return list(cell.cells)
    if cell is None or getattr(layer, "stateful", False):
        raise UntranslatableError
    return [cell]


def _kind(cell: Any) -> Any:
    kind = _CELLS.get(type(cell).__name__)
    if kind is None or not is_keras(cell):
        raise UntranslatableError
    return kind


def _run(call: KerasCall, cells: list[Any], value: Value, states: list[Value]) -> tuple[Value, list[Value]]:
    """Write one recurrent operator, of one cell or of one in each direction; return its steps and last states."""
    batch, steps = value.shape[:2]
    kind, units, dtype = _kind(cells[0]), int(cells[0].units), call.result.dtype
    op = ops.Recurrent(cell=kind, units=units, is_bidirectional=len(cells) == 2)
    weights = [w for cell in cells for w in call.parameters(cell.kernel, cell.recurrent_kernel, cell.bias)]
    sequence = call.between((batch, steps, units * len(cells)), dtype)
    found = [call.between((batch, units), dtype) for _ in range(_STATES[kind] * len(cells))]
    call.write(op, (value, *weights, *states), (sequence, *found))
    return sequence, found


def _finish(call: KerasCall, value: Value, states: list[Value]) -> None:
    if value.shape[2] != call.result.shape[-1]:  # Keras takes two directions to have as many units
        raise UntranslatableError
    _steps(call, value, call.result)
    _write_states(call, call.results[1:], states)


def _write_states(call: KerasCall, results: tuple[Value, ...], states: list[Value]) -> None:
    if len(results) != len(states):
        raise UntranslatableError
    for result, state in zip(results, states, strict=True):
        call.identity(state, out=result)


def _steps(call: KerasCall, value: Value, result: Value) -> None:
    """Write all steps, or the last one alone, as the result."""
    if value.shape != result.shape:
        value = call.cut(value, 1, value.shape[1] - 1, 1)
    call.reshape(value, out=result)


PRODUCT_LAYERS = table(
    (additive, "AdditiveAttention"),
    (bidirectional, "Bidirectional"),
    (dense, "Dense"),
    (dot, "Dot"),
    (einsum_dense, "EinsumDense"),
    (embedding, "Embedding"),
    (reversible_embedding, "ReversibleEmbedding"),
    (time_distributed, "TimeDistributed"),
    (convolutional, "ConvLSTM1D ConvLSTM2D ConvLSTM3D"),
    (multi_head, "GroupedQueryAttention MultiHeadAttention"),
    (recurrent, "GRU LSTM RNN SimpleRNN"),
)
"""Layers."""

PRODUCT_OPERATIONS = table(
    (ctc, "CTCLoss"),
    (dot_operation, "Dot"),
    (attention, "DotProductAttention"),
    (einsum, "Einsum"),
    (matmul, "Matmul"),
    (tensordot, "Tensordot"),
)
"""Of `keras.ops`."""
