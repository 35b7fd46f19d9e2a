"""Recurrent networks over a sequence, and single cells."""

from typing import Literal

from pase.importers.ir import Recurrent, Step, Value
from pase.importers.torch.aten.call import Call, generic, table, uses

_CELLS: dict[str, Literal["lstm", "gru", "rnn"]] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


def recurrent(call: Call) -> list[Step]:
    """Return a recurrent network over a sequence: inputs are the tensor, the weights, then the first states."""
    x, out = call.value("input"), call.result
    if len(x.shape) != 3:
        return generic(call)
    directions = 2 if call.get("bidirectional") else 1
    op = Recurrent(
        cell=_CELLS[call.function],
        units=out.shape[-1] // directions,
        layers=int(call.get("num_layers", 1)),
        is_bidirectional=directions == 2,
        is_batch_first=bool(call.get("batch_first", False)),
    )
    weights = [value for value in call.get("params", []) if isinstance(value, Value)]
    states = call.get("hx", [])
    states = [value for value in (states if isinstance(states, list) else [states]) if isinstance(value, Value)]
    return [Step(op=op, inputs=uses(x, *weights, *states), outputs=call.results)]


TRANSLATIONS = table(
    (recurrent, " ".join(_CELLS)),
)
"""Of recurrent networks, by the operator's name."""
