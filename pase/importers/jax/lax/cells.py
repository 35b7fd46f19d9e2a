"""Recurrent cells: a loop over steps whose products are those of an LSTM, a GRU or a plain recurrent layer."""

from collections.abc import Sequence

from pase.importers.ir import Recurrent, Value
from pase.importers.ir.count import recurrent_flop


def cell_of(stacked: Sequence[Value], carry: Sequence[Value], flop: float) -> Recurrent | None:
    """Return the cell that a loop is; None where it is none.

    stacked: what each turn reads its slice of, [s, b, d]; carry: what turns hand on, [b, units]. flop: of the products
    of all turns. It is a cell where its FLOP are those of the gates of one, with an input and a state.
    """
    if len(stacked) != 1 or len(carry) not in _CELLS or len(stacked[0].shape) != 3:
        return None
    (x,), batch = stacked, stacked[0].shape[1]
    shapes = {value.shape for value in carry if value.is_float}
    if len(shapes) != 1 or not x.is_float or not all(value.is_float for value in carry):
        return None
    (shape,) = shapes
    if len(shape) != 2 or shape[0] != batch:
        return None
    found = [
        Recurrent(cell=cell, units=shape[1], is_batch_first=False)  # type: ignore[arg-type]
        for cell in _CELLS[len(carry)]
    ]
    return next((op for op in found if recurrent_flop(op, x.shape) == flop), None)


_CELLS: dict[int, tuple[str, ...]] = {1: ("gru", "rnn"), 2: ("lstm",)}
"""By the number of states."""
