"""`lstm` and `recurrent`: layers of cells over a sequence; layers, batch, steps, inputs and units may all be split.

Where a rank has all units of its layers, PyTorch's own kernels run them. Otherwise each step all-reduces its partial
gates (d), and redistributes the hidden state from the units that ranks compute (e) to those that they read. Where
layers or steps are split, states are sent to the next part, layer after layer and step after step, and their gradients
back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pase.sharding.boxes import whole
from pase.sharding.layouts import PlainDim, apart, layout_of
from pase.sharding.reshard import ReshardStep, reshard_steps
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.collectives import Exchange, GradientSum, Move, Sum, Traffic, carried, exchange
from pase.targets.torch.layers.points import arrange
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, local, one_mesh, resolved, spread

GATES = Dim("gates", 4)
"""Of the weights of `lstm`: input, forget and output gate, and the candidate, in this order."""

_TO_PYTORCH = (0, 1, 3, 2)
"""The order of the same in PyTorch's: the candidate comes before the output gate."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Recurrent(Tensor):
    """What recurrent layers return. states: after the last step, hidden ones and, of an LSTM, cells."""

    states: tuple[Tensor, ...] = ()


def lstm(x: Tensor, w: Tensor, u: Tensor, bias: Tensor, out: Sequence[Dim]) -> Tensor:
    """Return the last of a stack of LSTM layers over x, dims [b, s, d] (Hochreiter and Schmidhuber 1997; forget gates).

    w, u: weights of the input and of the previous hidden state, dims [l, d, GATES, e]; bias: [l, GATES, e]; out: [b, s,
    e]; d and e have one extent. The initial state is zero. Where l or s is split, states are sent to the next part,
    layer after layer and step after step; where d or e is, every step all-reduces gates and redistributes the hidden
    state.
    """
    mesh = one_mesh([x, w, u, bias])
    layers, width, _, units = w.dims
    batch, steps = out[:2]
    program = mesh.program
    # Only the first layers read x, and all of their units do; a bias is added to reduced gates.
    x = spread(resolved(x), mesh.split([layers.name, units.name]))
    weights = [spread(weight, mesh.split([batch.name, steps.name])) for weight in (w, u, bias)]
    cells = Cells(cell="lstm", num_layers=mesh.part(layers), columns=mesh.part(units), rows=mesh.part(width))
    if mesh.split([width.name, units.name]):
        # A point of layers and of steps for each part of them: states of others are other tensors.
        lead = [PlainDim(dim.name, mesh.devices.size(dim.name)) for dim in (layers, steps)]
        written, read = (
            layout_of(mesh.devices, [*lead, PlainDim(batch.name, batch.size), PlainDim(dim.name, dim.size)])
            for dim in (units, width)
        )
        cells.relaid = _relaid(program, mesh, reshard_steps(written, read), mesh.part(batch), cells)
    if mesh.split([width.name]):
        cells.sum_of_inputs = Sum(program.adder(mesh, [width.name]))
    if mesh.split([units.name]):
        cells.sum_for_units = GradientSum(replace(program.adder(mesh, [units.name]), is_exchange=True))
    is_chained = bool(mesh.split([layers.name, steps.name]))
    module = Chain(cells, mesh, layers.name, steps.name, x.shard) if is_chained else Stack(cells)
    value = program.run(module, x.value, "lstm", *(weight.value for weight in weights))
    return Tensor(value=value, mesh=mesh, dims=tuple(out))


def recurrent(
    x: Tensor,
    weights: Sequence[Tensor],
    gate: Dim,
    out: Sequence[Dim],
    *,
    cell: str,
    layers: int = 1,
    hidden: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the last of several recurrent layers over a sequence, dims `out`: batch, steps, directions, units.

    Args:
        x: The sequence: batch, steps and optionally features.
        weights: For each layer and direction, those of the input and of the hidden state (gates, units, inputs), and
            optionally a bias of each (gates, units); gates in PyTorch's order.
        gate: Dim of the gates.
        out: Dims of the result. Each rank computes its own units.
        cell: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        layers: Number of layers, each reading the hidden states of the previous one in both directions.
        hidden: Initial hidden state of each layer and direction, batch, units; default: zeros.
        kept: Initial cell states of an LSTM, likewise.
    """
    batch, steps, directions, unit = out
    num_cells = layers * directions.size
    mesh = x.mesh
    program = mesh.program
    x = arrange(x, [batch, steps, *(dim for dim in x.dims if dim not in (batch, steps))])
    ordered = [arrange(w, [gate, unit, *(dim for dim in w.dims if dim not in (gate, unit))]) for w in weights]
    first = [
        None if state is None else arrange(state, [*(d for d in state.dims if d not in (batch, unit)), batch, unit])
        for state in (hidden, kept)
    ]
    cells = Cells(
        cell=cell,
        num_layers=layers,
        num_directions=directions.size,
        columns=mesh.part(unit),
        rows=unit.size,
        of_each=len(weights) // num_cells,
    )
    if mesh.split([unit.name]):
        # Readers of all units have partial gradients, which are reduce-scattered to the ranks that compute the units.
        written = layout_of(mesh.devices, [PlainDim(batch.name, batch.size), PlainDim(unit.name, unit.size)])
        read = layout_of(mesh.devices, [PlainDim(batch.name, batch.size), PlainDim("every unit", unit.size)])
        read = replace(read, parts=written.parts)
        cells.relaid = _relaid(program, mesh, [ReshardStep(written, read)], mesh.part(batch), cells)
    module = States(cells, [state is not None for state in first])
    given = [state for state in first if state is not None]

    def compute(*shards: Any) -> Any:
        return program.run(module, shards[0], "recurrent", *shards[1:])

    found = local(compute, [x, *ordered, *given], out)
    lead = () if num_cells == 1 else (Dim("states", num_cells),)
    states = tuple(
        Tensor(value=found.value[i], mesh=mesh, dims=(*lead, batch, unit)) for i in range(1, 2 + (cell == "lstm"))
    )
    return _Recurrent(value=found.value[0], mesh=mesh, dims=tuple(out), states=states)


def last_state(y: Tensor, which: int) -> Tensor:
    """Return the states of recurrent layers after the last step: for each layer and direction, batch, units.

    y: result of `recurrent`. which: 1 for the hidden states, 2 for the cell states of an LSTM.
    """
    assert isinstance(y, _Recurrent)
    return y.states[which - 1]


def _relaid(program: Any, mesh: LayerMesh, steps: Sequence[ReshardStep], num_rows: int, cells: "Cells") -> Move:
    """Return the movement of a hidden state from the units that ranks compute to those that they read."""
    return Move(
        movement=Movement.within(mesh.layer, Phase.FORWARD),
        traffic=program.traffic,
        held=(num_rows, cells.columns),
        made=(num_rows, cells.rows),
        there=[exchange(step, program.groups) for step in steps],
        back=[exchange(step.adjoint, program.groups) for step in reversed(steps)],
        phase_back=Phase.FORWARD,
    )


# -- cells


def _lstm(of_input: Any, of_hidden: Any, _: Any, cell: Any) -> tuple[Any, Any]:
    into, forget, candidate, out = (of_input + of_hidden).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * candidate.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru(of_input: Any, of_hidden: Any, own: Any, cell: Any) -> tuple[Any, Any]:
    (reset, update, new), (old_reset, old_update, old) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    update = (update + old_update).sigmoid()
    return (1 - update) * (new + (reset + old_reset).sigmoid() * old).tanh() + update * own, cell


_STEPS: Mapping[str, Callable[[Any, Any, Any, Any], tuple[Any, Any]]] = MappingProxyType(
    {
        "gru": _gru,
        "lstm": _lstm,
        "rnn_relu": lambda of_input, of_hidden, _, cell: ((of_input + of_hidden).relu(), cell),
        "rnn_tanh": lambda of_input, of_hidden, _, cell: ((of_input + of_hidden).tanh(), cell),
    }
)
"""New units and cell states of a cell, from the contributions of its input and its hidden state to the gates."""

_KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"gru": torch.gru, "lstm": torch.lstm, "rnn_relu": torch.rnn_relu, "rnn_tanh": torch.rnn_tanh}
)


@dataclass(slots=True, kw_only=True, eq=False)
class Cells:
    """Execution of recurrent layers on this rank.

    Attributes:
        columns: Units that it computes.
        rows: Units that it reads.
        of_each: Number of tensors of a cell: matrices and biases.
        relaid: Redistributes a hidden state from the units that ranks compute to those that they read.
        sum_of_inputs: All-reduces partial gates.
        sum_for_units: Reduces partial gradients of the inputs. These are None where the rank has all units.
    """

    cell: str
    num_layers: int
    columns: int
    rows: int
    num_directions: int = 1
    of_each: int = 3
    relaid: Move | None = None
    sum_of_inputs: Sum | None = None
    sum_for_units: GradientSum | None = None

    def ran(self, x: Any, weights: Sequence[Any], hidden: Any, read: Any, kept: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return the output, the same as a next layer reads it, and the three states after the last step.

        Args:
            x: [b, s, ...].
            weights: For each cell two matrices [gates and units, inputs], then no bias, one, or one for each.
            hidden: [cells, b, columns], before the first step.
            read: The same as this rank reads it, [cells, b, rows].
            kept: [cells, b, columns], cell states of an LSTM.
        """
        if self.relaid is None:
            y, hidden, kept = self._by_kernel(x, weights, hidden, kept)
            return y, y, hidden, hidden, kept
        states: list[tuple[Any, Any, Any]] = []
        y = x
        for layer in range(self.num_layers):
            both = []
            for turn in range(self.num_directions):
                number = layer * self.num_directions + turn
                own = weights[number * self.of_each : (number + 1) * self.of_each]
                first = hidden[number], read[number], kept[number]
                outputs, reads, *after = self._by_steps(x, own, *first, backwards=turn == 1)
                both.append((outputs, reads))
                states.append((after[0], after[1], after[2]))
            y, x = (x[0] if len(x) == 1 else torch.cat(x, -1) for x in zip(*both, strict=True))
        return y, x, *(torch.stack(column) for column in zip(*states, strict=True))

    def _by_steps(
        self, x: Any, weights: Sequence[Any], hidden: Any, read: Any, kept: Any, *, backwards: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        w, u, *biases = weights
        # Parts of gates have no bias: it is added once, to their sum.
        parts, add = self.sum_of_inputs is not None, biases if self.sum_of_inputs is not None else []
        first, second = ([] if parts else [*biases, None, None][:2]) or (None, None)
        of_input = functional.linear(x, w, first)
        outputs, reads = [None] * x.shape[1], [None] * x.shape[1]
        for step in reversed(range(x.shape[1])) if backwards else range(x.shape[1]):
            gates = of_input[:, step], functional.linear(read, u, second)
            if self.sum_of_inputs is not None:
                gates = self.sum_of_inputs(gates[0] + gates[1]), sum(add)
            hidden, kept = _STEPS[self.cell](*gates, hidden, kept)
            assert self.relaid is not None
            read = self.relaid(hidden)
            read = read if self.sum_for_units is None else self.sum_for_units(read)
            outputs[step], reads[step] = hidden, read
        return torch.stack(outputs, 1), torch.stack(reads, 1), hidden, read, kept

    def _by_kernel(self, x: Any, weights: Sequence[Any], hidden: Any, kept: Any) -> tuple[Any, Any, Any]:
        flat: list[Any] = []
        for first in range(0, len(weights), self.of_each):
            flat += weights[first : first + self.of_each]
            if self.of_each == 3:
                flat.append(torch.zeros_like(flat[-1]))
        states = (hidden, kept) if self.cell == "lstm" else hidden
        options = self.of_each > 2, self.num_layers, 0.0, True, self.num_directions == 2, True
        y, hidden, *rest = _KERNELS[self.cell](x, states, flat, *options)
        return y, hidden, rest[0] if rest else kept


class _Beside(torch.autograd.Function):
    """A tensor, with a gradient of zeros for another one: the last step's state goes to its readers, as all others."""

    @staticmethod
    def forward(ctx: Any, y: Any, read: Any) -> Any:
        ctx.shape = read.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, Any]:
        return dy, dy.new_zeros(ctx.shape)


class States(nn.Module):
    """Recurrent layers that return their states. given: whether the first hidden states are, whether the cells are."""

    def __init__(self, cells: Cells, given: Sequence[bool]) -> None:
        super().__init__()
        self.cells, self.given = cells, tuple(given)

    def forward(self, x: Any, *operands: Any) -> Any:
        """Return the output [b, s, directions, units], the hidden states and, of an LSTM, the cells."""
        cells = self.cells
        number, batch = cells.num_layers * cells.num_directions, x.shape[0]
        weights = [
            w.flatten() if i % cells.of_each > 1 else w.reshape(w.shape[0] * w.shape[1], -1)
            for i, w in enumerate(operands[: number * cells.of_each])
        ]
        rest = iter(operands[number * cells.of_each :])
        hidden, kept = (
            next(rest).reshape(number, batch, -1) if given else x.new_zeros(number, batch, cells.columns)
            for given in self.given
        )
        read = x.new_zeros(number, batch, cells.rows)
        if cells.relaid is not None and self.given[0]:
            read = torch.stack([cells.relaid(state) for state in hidden])
        y, seen, hidden, _, kept = cells.ran(x.reshape(batch, x.shape[1], -1), weights, hidden, read, kept)
        y = y if cells.relaid is None else _Beside.apply(y, seen)
        y = y.reshape(batch, x.shape[1], cells.num_directions, cells.columns)
        shape = (*((number,) if number > 1 else ()), batch, cells.columns)
        return (y, hidden.reshape(shape), *((kept.reshape(shape),) if cells.cell == "lstm" else ()))


def _of_stack(w: Any, u: Any, bias: Any) -> list[Any]:
    """Return for each layer the matrices of input and hidden state, [gates and units, inputs], and the bias."""
    matrices = []
    for weight in (w, u):
        gates = weight.unbind(2)
        turned = torch.stack([gates[i].transpose(1, 2) for i in _TO_PYTORCH], 1)
        matrices.append(turned.reshape(turned.shape[0], -1, turned.shape[-1]))
    gates = bias.unbind(1)
    matrices.append(torch.stack([gates[i] for i in _TO_PYTORCH], 1).flatten(1))
    return [part for layer in zip(*(m.unbind(0) for m in matrices), strict=True) for part in layer]


class Stack(nn.Module):
    """LSTM layers of which this rank has all layers and steps."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Any, w: Any, u: Any, bias: Any) -> Any:
        cells = self.cells
        own, read = (x.new_zeros(cells.num_layers, x.shape[0], units) for units in (cells.columns, cells.rows))
        y, seen, *_ = cells.ran(x, _of_stack(w, u, bias), own, read, own)
        return y if cells.relaid is None else _Beside.apply(y, seen)


# -- layers and steps that are split


class Handing:
    """Sends tensors of one size from the ranks of each part along a mesh axis to those of the next part.

    before, after: this rank's receives from the previous part and sends to the next one, forward and backward; None at
    an end.
    """

    def __init__(self, mesh: LayerMesh, axis: str, num_points: int) -> None:
        program = mesh.program
        # Exchanges within a layer's computation count as forward, in either pass.
        self.traffic, self.movement = program.traffic, Movement.within(mesh.layer, Phase.FORWARD)
        self.num_points = num_points
        self.before: tuple[Exchange, Exchange] | None = None
        self.after: tuple[Exchange, Exchange] | None = None
        place = mesh.point.get(axis, 0)
        for number, (source, target) in enumerate(pairwise(_parts(mesh, axis))):
            step = ReshardStep(*(apart(enumerate([whole((num_points,))] * len(d)), d) for d in (source, target)))
            # Each is between some of the ranks; all ranks create all groups.
            found = exchange(step, program.groups), exchange(step.adjoint, program.groups)
            self.before = found if number + 1 == place else self.before
            self.after = found if number == place else self.after

    def received(self, like: Any, *, backward: bool = False) -> Any:
        """Return the tensor sent by the previous part, in a backward pass by the next; None where there is none."""
        found = self.after if backward else self.before
        return None if found is None else self._carried(like.new_empty(0), found[backward])

    def send(self, x: Any, *, backward: bool = False) -> None:
        found = self.before if backward else self.after
        if found is not None:
            self._carried(x, found[backward])

    def _carried(self, x: Any, step: Exchange) -> Any:
        return _carried(x, step, self.movement, self.traffic)


def _carried(x: Any, step: Exchange, movement: Movement, traffic: Traffic) -> Any:
    count = (lambda sent: traffic.add(movement, sent)) if traffic.is_counted else None
    return carried(x, [step], 0.0, count)


def _parts(mesh: LayerMesh, axis: str) -> list[list[int]]:
    """Return [parts along an axis] the ranks, in the order of their other coordinates."""
    found: list[list[int]] = [[] for _ in range(mesh.devices.size(axis))]
    for rank, point in zip(mesh.devices.devices, mesh.devices.coordinates, strict=True):
        found[point.get(axis, 0)].append(rank)
    return found


class Chain(nn.Module):
    """LSTM layers of which this rank has some layers or steps: it receives states, computes, and sends states on.

    Attributes:
        up: To the next layers.
        along: To the next steps.
        result: From the last layers to all others.
    """

    def __init__(self, cells: Cells, mesh: LayerMesh, layers: str, steps: str, shard: Sequence[int]) -> None:
        super().__init__()
        self.cells = cells
        batch, num_steps, _ = shard
        self.shape = (batch, num_steps, cells.columns)
        self.up = Handing(mesh, layers, batch * num_steps * cells.rows)
        self.along = Handing(mesh, steps, cells.num_layers * batch * (cells.rows + cells.columns))
        program = mesh.program
        *others, last = _parts(mesh, layers)
        self.is_last = program.rank in last
        y = whole((batch * num_steps * cells.columns,))
        self.result: Exchange | None = None
        if others:
            places = [(number, y) for part in others for number in range(len(part))]
            step = ReshardStep(
                apart(enumerate([y] * len(last)), last), apart(places, [r for part in others for r in part])
            )
            self.result = exchange(step, program.groups)

    def forward(self, x: Any, w: Any, u: Any, bias: Any) -> Any:
        return _Chained.apply(self, x, w, u, bias)

    def computed(self, x: Any, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the inputs of this rank's layers at its steps, and their results: output, states sent on."""
        cells = self.cells
        below = self.up.received(x)
        x = x if below is None else below.reshape(*self.shape[:2], cells.rows)
        sizes = (cells.num_layers, self.shape[0])
        states = self.along.received(x)
        if states is None:
            states = x.new_zeros(*sizes, cells.rows + cells.columns)
        read, kept = states.reshape(*sizes, -1).split([cells.rows, cells.columns], -1)
        inputs = [part.detach().contiguous().requires_grad_() for part in (x, read, kept, *weights)]
        x, read, kept, *own = inputs
        # Of the hidden state an LSTM only needs the units that it reads.
        y, seen, _, read, kept = cells.ran(x, _of_stack(*own), read, read, kept)
        return inputs, [y, seen, torch.cat([read, kept], -1)]


def _same(x: Any) -> Any:
    return x


class _Chained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Chain, x: Any, w: Any, u: Any, bias: Any) -> Any:
        ctx.module = module
        # Saved even with recomputation: the ranks of a chain work one after the other.
        with torch.set_grad_enabled(any(ctx.needs_input_grad)), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            ctx.inputs, ctx.outputs = module.computed(x, (w, u, bias))
        y, seen, states = (tensor.detach() for tensor in ctx.outputs)
        module.up.send(seen)
        module.along.send(states)
        if module.result is not None:
            received = _carried(
                y if module.is_last else y.new_empty(0), module.result, module.up.movement, module.up.traffic
            )
            y = y if module.is_last else received
        return y.reshape(module.shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        module: Chain = ctx.module
        y, seen, states = ctx.outputs
        d_states = module.along.received(dy, backward=True)
        d_seen = module.up.received(dy, backward=True)
        given = [
            dy if module.is_last else torch.zeros_like(y),
            torch.zeros_like(seen) if d_seen is None else d_seen.reshape(seen.shape),
            torch.zeros_like(states) if d_states is None else d_states.reshape(states.shape),
        ]
        dx, d_read, d_kept, *d_weights = torch.autograd.grad(ctx.outputs, ctx.inputs, given)
        ctx.inputs, ctx.outputs = [], []
        module.along.send(torch.cat([d_read, d_kept], -1), backward=True)
        module.up.send(dx, backward=True)
        # Only the first layers read x.
        return None, dx if module.up.before is None else torch.zeros_like(dx), *d_weights
