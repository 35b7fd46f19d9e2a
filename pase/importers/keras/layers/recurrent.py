"""Recurrent layers, in one direction or both, and layers that are applied to each step."""

from math import prod
from typing import Any

from pase.importers.ir import Concat, Identity, Pointwise, Recurrent, Reshape, Value
from pase.importers.keras.layers.call import Call, Translation, UntranslatableError, generic, is_keras, values_of
from pase.importers.keras.layers.shapes import sliced

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


def recurrent(call: Call) -> None:
    """Write a recurrent layer: all of its steps, the last of them where it returns that alone, and its states."""
    layer = call.operation
    cells = _cells(layer)
    value, states = call.x, [state for state in call.tensors[1:] if state.is_float]
    last: list[Value] = []
    for cell in cells:
        kind = _cell(cell)
        own, states = states[: _STATES[kind]], states[_STATES[kind] :]
        value, found = _run(call, [cell], kind, value, own)
        last += found
    _finish(call, value, last if layer.return_state else [])


def bidirectional(call: Call) -> None:
    """Write both directions as one where they are put end to end, else as two and what brings them together."""
    layer = call.operation
    cells = [_cells(inner) for inner in (layer.forward_layer, layer.backward_layer)]
    if any(len(cell) != 1 for cell in cells):
        raise UntranslatableError
    (forward,), (backward,) = cells
    kinds = (_cell(forward), _cell(backward))
    states = [state for state in call.tensors[1:] if state.is_float]
    if layer.merge_mode == "concat" and kinds[0] == kinds[1] and forward.units == backward.units:
        value, found = _run(call, [forward, backward], kinds[0], call.x, states)
        _finish(call, value, found if layer.return_state else [])
        return
    half = len(states) // 2
    first, first_states = _run(call, [forward], kinds[0], call.x, states[:half])
    second, second_states = _run(call, [backward], kinds[1], call.x, states[half:])
    found = [*first_states, *second_states] if layer.return_state else []
    if layer.merge_mode is None:
        for result, value in zip(call.results, (first, second), strict=False):
            _steps(call, value, result)
        _write_states(call, call.results[2:], found)
        return
    both = [*first.shape[:2], first.shape[2] + second.shape[2]]
    merged = (
        call.then(Concat(dim=2), first, second, shape=both)
        if layer.merge_mode == "concat"
        else call.then(Pointwise(functions=_MERGES[layer.merge_mode]), first, second, shape=first.shape)
    )
    _finish(call, merged, found)


def time_distributed(call: Call) -> None:
    """Write a layer that is applied to each step: the steps are examples to it."""
    inner = call.operation.layer
    x, out = call.x, call.result
    scope = f"{call.scope}/{inner.name}"
    if is_keras(inner) and type(inner).__name__ in _ALONG_LAST:
        call.emit(Identity(), *values_of(call.reader.apply(inner, (x,), {}, scope)))
        return
    flat = call.reshaped(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    found = values_of(call.reader.apply(inner, (flat,), {}, scope))
    if len(found) != 1 or found[0].shape != (flat.shape[0], *out.shape[2:]):
        raise UntranslatableError
    call.emit(Reshape(), found[0])


def convolutional(call: Call) -> None:
    """Write a recurrent layer of convolutions, which can be split along its batch alone, with the FLOP that it has."""
    cell = call.operation.cell
    batch, steps = call.x.shape[:2]
    shape = call.result.shape[2:] if call.operation.return_sequences else call.result.shape[1:]
    points = batch * steps * prod(shape) // cell.filters
    flop = 2.0 * points * (prod(cell.kernel.shape) + prod(cell.recurrent_kernel.shape))
    generic(call, passes=((0, 0),), flop_per_point=flop / prod(call.result.shape))


_ALONG_LAST = frozenset({"Dense", "Activation", "Dropout", "ReLU", "LeakyReLU", "ELU", "Identity", "Embedding"})
"""Layers to which dims before the last one are all alike."""


def _cells(layer: Any) -> list[Any]:
    cell: Any = getattr(layer, "cell", None)
    if type(cell).__name__ == "StackedRNNCells" and is_keras(cell):
        return list(cell.cells)
    if cell is None or getattr(layer, "stateful", False):
        raise UntranslatableError
    return [cell]


def _cell(cell: Any) -> Any:
    kind = _CELLS.get(type(cell).__name__)
    if kind is None or not is_keras(cell):
        raise UntranslatableError
    return kind


def _run(call: Call, cells: list[Any], kind: Any, value: Value, states: list[Value]) -> tuple[Value, list[Value]]:
    """Write one recurrent operator, of one cell or of one in each direction; return its steps and last states."""
    batch, steps = value.shape[:2]
    units = int(cells[0].units)
    op = Recurrent(cell=kind, units=units, is_bidirectional=len(cells) == 2)
    weights = [w for cell in cells for w in call.parameters(cell.kernel, cell.recurrent_kernel, cell.bias)]
    dtype = call.result.dtype
    sequence = call.fresh((batch, steps, units * len(cells)), dtype)
    found = [call.fresh((batch, units), dtype) for _ in range(_STATES[kind] * len(cells))]
    call.emit_all(op, (value, *weights, *states), (sequence, *found))
    return sequence, found


def _finish(call: Call, value: Value, states: list[Value]) -> None:
    _steps(call, value, call.result)
    _write_states(call, call.results[1:], states)


def _write_states(call: Call, results: tuple[Value, ...], states: list[Value]) -> None:
    if len(results) != len(states):
        raise UntranslatableError
    for result, state in zip(results, states, strict=True):
        call.emit(Identity(), state, out=result)


def _steps(call: Call, value: Value, result: Value) -> None:
    """Write all steps, or the last one alone, as the result."""
    if value.shape == result.shape:
        call.emit(Identity(), value, out=result)
        return
    last = sliced(call, value, 1, value.shape[1] - 1, 1)
    call.emit(Reshape(), last, out=result)


RECURRENT: dict[str, Translation] = {
    **{f"ConvLSTM{rank}D": convolutional for rank in (1, 2, 3)},
    "Bidirectional": bidirectional,
    "GRU": recurrent,
    "LSTM": recurrent,
    "RNN": recurrent,
    "SimpleRNN": recurrent,
    "TimeDistributed": time_distributed,
}
"""Layers."""
