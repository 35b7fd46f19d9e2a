"""Loops of a known length: written out turn by turn, or one vertex for all of the turns."""

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

from pase.importers.ir import Concat, Generic, Recurrent, Reshape, Slice, Transpose, Value
from pase.importers.jax.lax.call import Step
from pase.importers.jax.lax.cells import cell_of
from pase.importers.jax.lax.places import scopes

MAX_EQUATIONS = 60_000
"""Of a loop over layers that is written out."""

MAX_EQUATIONS_WITHOUT_WEIGHTS = 2_000
"""Of any other loop: a longer one is one vertex."""


class Walk(Protocol):
    """What loops and branches need of the walk that they are part of (`programs.Walk`)."""

    known: dict[str, Any]
    weights: dict[str, str]
    turn: tuple[int, int] | None
    num_loops: int

    def inline(self, inner: Any, inputs: Sequence[Value], outer: tuple[str, ...]) -> list[Value]:
        """Add the nodes of a program that is called with some values; return its results."""
        ...

    def steps(self, equation: Any, name: str, steps: Sequence[Step], outer: tuple[str, ...]) -> None:
        """Add nodes."""
        ...

    def value(self, wish: str, shape: Sequence[int], dtype: str) -> Value:
        """Return a value whose name nothing else has."""
        ...


def scan(walk: Walk, equation: Any, inputs: list[Value], outer: tuple[str, ...]) -> list[Value]:
    """Write a loop out where each turn has weights of its own (layers that are stacked), or where it is short.

    One whose turns read the same weights (a recurrent cell over steps) is one vertex, as is one that is too long.
    """
    params = equation.params
    first, last = int(params["num_consts"]), int(params["num_consts"]) + int(params["num_carry"])
    constants, carry, stacked = inputs[:first], inputs[first:last], inputs[last:]
    has_own = any(value.name in walk.weights for value in stacked)
    has_shared = any(value.name in walk.weights for value in (*constants, *carry))
    size = int(params["length"]) * _num_equations(params["jaxpr"].jaxpr)
    is_short = size <= (MAX_EQUATIONS if has_own else MAX_EQUATIONS_WITHOUT_WEIGHTS)
    is_once = int(params["length"]) == 1
    if is_once or (is_short and (has_own or not has_shared)):
        return _written_out(walk, equation, constants, carry, stacked, outer)
    cell = cell_of(stacked, carry, int(params["length"]) * product_flop(params["jaxpr"].jaxpr))
    if cell is not None and len(equation.outvars) <= len(carry) + 1:
        return _as_cell(walk, equation, cell, (stacked[0], *constants, *carry), len(carry), outer)
    return _as_one(walk, equation, constants, carry, stacked, outer)


def product_flop(jaxpr: Any) -> float:
    """Return the FLOP of all products and convolutions in a program, 2 for each multiplication."""
    total = 0.0
    for equation in jaxpr.eqns:
        inner = [product_flop(program) for program in programs(equation)]
        if equation.primitive.name == "scan":
            total += int(equation.params["length"]) * sum(inner)
        else:
            # Of several branches, one is taken.
            total += max(inner, default=0.0) if equation.primitive.name == "cond" else sum(inner)
        if equation.primitive.name == "dot_general":
            over = equation.params["dimension_numbers"][0][0]
            left = equation.invars[0].aval.shape
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(left[int(i)] for i in over)
        elif equation.primitive.name == "conv_general_dilated":
            filters = equation.invars[1].aval.shape
            channels = filters[equation.params["dimension_numbers"].rhs_spec[0]]
            spread = prod(equation.params["lhs_dilation"])
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(filters) / channels / spread
    return total


def _as_cell(
    walk: Walk, equation: Any, cell: Recurrent, inputs: Sequence[Value], num_carry: int, outer: tuple[str, ...]
) -> list[Value]:
    """Add a recurrent layer: the sequence that it gives comes first, then its last states."""
    results = [
        walk.value("scan", tuple(int(extent) for extent in variable.aval.shape), _dtype(variable))
        for variable in equation.outvars
    ]
    wanted = [i for i, variable in enumerate(equation.outvars) if i >= num_carry or not _is_dropped(variable)]
    outputs = tuple(results[i] for i in sorted(wanted, key=lambda i: i < num_carry))
    reads = tuple(value.name for value in inputs if value.is_float)
    steps = [Step(op=cell, inputs=reads, outputs=outputs)] if outputs else []
    walk.steps(equation, "scan", steps, (*outer, *scopes(equation)))
    return results


def _as_one(
    walk: Walk, equation: Any, constants: list[Value], carry: list[Value], stacked: list[Value], outer: tuple[str, ...]
) -> list[Value]:
    """Add one vertex for all turns. It can be split along the batch where states and steps have one they share."""
    params = equation.params
    num_carry, length = len(carry), int(params["length"])
    results = [
        walk.value("scan", tuple(int(extent) for extent in variable.aval.shape), _dtype(variable))
        for variable in equation.outvars
    ]
    wanted = [i for i, variable in enumerate(equation.outvars) if not _is_dropped(variable)]
    batch = _batch([*carry, *(results[i] for i in wanted if i < num_carry)], [*stacked, *results[num_carry:]])
    own = []
    for i in wanted:
        result = results[i]
        if i >= num_carry and batch is not None and num_carry:
            # The batch first, as the states have it.
            shape = (result.shape[1], result.shape[0], *result.shape[2:])
            result = walk.value("scan", shape, result.dtype)
        own.append(result)
    # What is stacked has its batch after the steps.
    floats = [value for value in (*stacked, *carry, *constants) if value.is_float]
    others = [value for value in (*stacked, *carry, *constants) if not value.is_float]
    place = 1 if floats and floats[0] in stacked else 0
    points = sum(
        prod(variable.aval.shape) for inner in params["jaxpr"].jaxpr.eqns for variable in inner.outvars
    )  # fmt: skip
    size = prod(next((value.shape for value in own if value.is_float), (1,)))
    op = Generic(
        # Turns that hand nothing on stand side by side, as examples do.
        passes=((0, 0),) if not num_carry and floats and place else () if batch is None else ((place, 0),),
        flop_per_point=float(length * points) / max(1, size),
        is_index=not any(value.is_float for value in own),
        product_flop=length * product_flop(params["jaxpr"].jaxpr),
    )
    steps = [Step(op=op, inputs=tuple(value.name for value in (*floats, *others)), outputs=tuple(own))]
    for i, value in zip(wanted, own, strict=True):
        if value is not results[i]:
            order = (1, 0, *range(2, len(value.shape)))
            steps.append(Step(op=Transpose(order=order), inputs=(value.name,), outputs=(results[i],)))
    walk.steps(equation, "scan", steps if own else [], (*outer, *scopes(equation)))
    return results


def _batch(states: Sequence[Value], stacked: Sequence[Value]) -> int | None:
    """Return the extent that all states begin with, and all that is stacked after its steps; None for none."""
    leading = {value.shape[:1] for value in states if value.is_float}
    leading |= {value.shape[1:2] for value in stacked if value.is_float}
    (extent, *others) = leading or {()}
    return extent[0] if extent and not others and extent[0] > 1 else None


def _written_out(
    walk: Walk, equation: Any, constants: list[Value], carry: list[Value], stacked: list[Value], outer: tuple[str, ...]
) -> list[Value]:
    params = equation.params
    inner, num_carry = params["jaxpr"], len(carry)
    own = (*outer, *scopes(equation))
    turns = range(int(params["length"]))
    rows: list[list[Value]] = [[] for _ in equation.outvars[num_carry:]]
    outside = walk.turn
    walk.num_loops += len(turns) > 1
    loop = walk.num_loops
    for turn in reversed(turns) if params["reverse"] else turns:
        given = [_row(walk, equation, value, turn, own) for value in stacked]
        walk.turn = (loop, turn) if len(turns) > 1 else outside
        results = walk.inline(inner, [*constants, *carry, *given], (*own, f"#{turn}"))
        walk.turn = outside
        carry = results[:num_carry]
        for row, value in zip(rows, results[num_carry:], strict=True):
            row.append(value)
    ends = []
    for row, variable in zip(rows, equation.outvars[num_carry:], strict=True):
        is_read = not _is_dropped(variable) and row
        parts = row[::-1] if params["reverse"] else row
        ends.append(_stacked(walk, equation, parts, variable, own) if is_read else walk.value("unread", (), "bool"))
    return [*carry, *ends]


def _row(walk: Walk, equation: Any, value: Value, turn: int, outer: tuple[str, ...]) -> Value:
    """Return the slice of a stacked value that a turn reads."""
    shape, rank = value.shape[1:], len(value.shape)
    box = walk.value("turn", (1, *shape), value.dtype)
    row = walk.value("row", shape, value.dtype)
    weight = walk.weights.get(value.name)
    starts = tuple(turn if i == 0 else 0 for i in range(rank))
    piece = Step(op=Slice(starts=starts, steps=(1,) * rank), inputs=(value.name,), outputs=(box,))
    plain = Step(op=Reshape(), inputs=(box.name,), outputs=(row,))
    walk.steps(equation, "scan", [piece, plain], outer)
    if weight is not None:
        head, _, last = weight.rpartition(".")
        walk.weights[row.name] = f"{head}.{turn}.{last}" if head else f"{turn}.{last}"
    if value.name in walk.known:
        walk.known[row.name] = walk.known[value.name][turn]
    return row


def _stacked(walk: Walk, equation: Any, row: Sequence[Value], variable: Any, outer: tuple[str, ...]) -> Value:
    """Return the rows that the turns gave, put together."""
    parts = [walk.value("row", (1, *value.shape), value.dtype) for value in row]
    steps = [Step(op=Reshape(), inputs=(value.name,), outputs=(part,)) for value, part in zip(row, parts, strict=True)]
    if len(parts) > 1:
        whole = walk.value("stacked", tuple(int(extent) for extent in variable.aval.shape), parts[0].dtype)
        steps.append(Step(op=Concat(dim=0), inputs=tuple(part.name for part in parts), outputs=(whole,)))
        parts = [whole]
    walk.steps(equation, "scan", steps, outer)
    return parts[-1]


def _num_equations(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        times = int(equation.params["length"]) if equation.primitive.name == "scan" else 1
        total += 1 + times * sum(_num_equations(program) for program in programs(equation))
    return total


def programs(equation: Any) -> list[Any]:
    """Return the programs that an equation runs."""
    found: list[Any] = []
    for parameter in equation.params.values():
        each = parameter if isinstance(parameter, tuple | list) else (parameter,)
        own = [getattr(one, "jaxpr", one) for one in each]
        found += [one for one in own if hasattr(one, "eqns")]
    return found


def _is_dropped(variable: Any) -> bool:
    return type(variable).__name__ == "DropVar"


def _dtype(variable: Any) -> str:
    return str(variable.aval.dtype)
