"""`lstm` and `recurrent`: layers of cells over a sequence; layers, batch, steps, inputs and units may all be split."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.chain import Cell, Chain, Grid, Stack, Wires, total_bytes
from pase.targets.mesh_tensorflow.runtime.layers.local import names_of, partial_sums
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange

GATES = mtf.Dimension("gates", 4)
"""Of the weights of `lstm`: input, forget and output gate, and the candidate, in this order."""


def lstm(x: Any, w: Any, u: Any, bias: Any, out: Sequence[Any]) -> Any:
    """Return the last of a stack of LSTM layers over x, dims [b, s, d] (Hochreiter and Schmidhuber 1997; forget gates).

    w, u: weights of the input and of the previous hidden state, dims [l, d, GATES, e]; bias: [l, GATES, e]; out:
    [b, s, e]; d and e have one extent. State is zero at first. Where l or s is split, states are handed on, layer
    after layer and step after step; where d or e is, every step adds up gates and re-lays the hidden state.
    """
    layers, width, _, units = w.shape.dimension_names
    chained = layers, x.shape.dimension_names[1], width, units
    return _Recurrent(Stack(cell=_CELLS["lstm"], unpacked=_of_stack), x, [w, u, bias], out, chained).outputs[0]


def recurrent(
    x: Any,
    weights: Sequence[Any],
    gate: Any,
    out: Sequence[Any],
    *,
    cell: str,
    layers: int = 1,
    hidden: Any = None,
    kept: Any = None,
) -> Any:
    """Return the last of some recurrent layers over a sequence, dims `out`: the batch, the steps, directions, units.

    Args:
        x: the sequence: the batch, the steps and perhaps what it holds at each.
        weights: of each layer and direction, those of the input and of the hidden state (the gates, the units and what
            they read), and perhaps a bias of each (the gates, the units); gates in PyTorch's order.
        gate: the dim of the gates.
        out: the dims of the result. The units of each device are its own.
        cell: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        layers: how many, each reading the hidden states of the one before in both directions.
        hidden: the first hidden state of each layer and direction, the batch, the units; zeros without it.
        kept: the first cells of an LSTM, likewise.
    """
    batch, steps, directions, unit = out
    of_each = len(weights) // (layers * directions.size)
    stack = Stack(
        cell=_CELLS[cell],
        unpacked=lambda *slices: _of_list(slices, of_each, cell),
        num_directions=directions.size,
        scatters=True,
        num_cells=layers * directions.size,
        has_first=(hidden is not None, kept is not None),
    )
    first = [_last_dims(state, [batch, unit]) for state in (hidden, kept) if state is not None]
    operands = [*(_last_dims(w, [gate, unit]) for w in weights), *first]
    x = arrange(x, [batch, steps, *(dim for dim in x.shape.dims if dim not in (batch, steps))])
    return _Recurrent(stack, x, operands, out, ("", "", "", unit.name)).outputs[0]


def last_state(y: Any, which: int) -> Any:
    """Return what recurrent layers hold after the last step: of each layer and direction, the batch, the units.

    y: what `recurrent` returned. which: 1 for the hidden states, 2 for the cells of an LSTM.
    """
    return y.operation.outputs[which]


def _last_dims(x: Any, dims: Sequence[Any]) -> Any:
    return arrange(x, [*(dim for dim in x.shape.dims if dim not in dims), *dims])


# -- cells


def _lstm(gates: Any, cell: Any) -> tuple[Any, Any]:
    *gates, candidate = tf.split(gates, 4, axis=1)
    # Each by itself: the gradient needs the same tensors as the products, and no copy of them is kept.
    into, forget, out = (tf.sigmoid(gate) for gate in gates)
    cell = forget * cell + into * tf.tanh(candidate)
    return out * tf.tanh(cell), cell


def _gru(of_input: Any, of_hidden: Any, own: Any) -> tuple[Any, Any]:
    columns = own.shape.as_list()[-1]
    both, (new, old) = zip(*(tf.split(x, [2 * columns, columns], axis=1) for x in (of_input, of_hidden)), strict=True)
    reset, update = tf.split(tf.sigmoid(tf.add(*both)), 2, axis=1)
    hidden = (1 - update) * tf.tanh(new + reset * old) + update * own
    return hidden, tf.identity(hidden)


_CELLS: Mapping[str, Cell] = MappingProxyType(
    {
        "gru": Cell(step=_gru, terms=2, keeps="hidden"),
        "lstm": Cell(step=_lstm, keeps="cell"),
        "rnn_relu": Cell(step=lambda gates: (tf.nn.relu(gates),)),
        "rnn_tanh": Cell(step=lambda gates: (tf.tanh(gates),)),
    }
)


def _of_stack(w: Any, u: Any, bias: Any) -> list[list[Any]]:
    """Return [cells] the matrices of the input and of the hidden state, what they read by all gates, and the bias."""
    layers, rows, gates, columns = w.shape.as_list()
    unstacked = (tf.unstack(tf.reshape(x, [layers, rows, gates * columns])) for x in (w, u))
    return [list(of_layer) for of_layer in zip(*unstacked, tf.unstack(tf.reshape(bias, [layers, -1])), strict=True)]


def _of_list(slices: Sequence[Any], of_each: int, cell: str) -> list[list[Any]]:
    """Return the same of the weights of each cell; biases are one where both are added to the same gates."""
    found = []
    for first in range(0, len(slices), of_each):
        w, u, *biases = (_by_gates(x, cell) for x in slices[first : first + of_each])
        biases = [tf.reshape(bias, [-1]) for bias in biases]
        found.append([w, u, *(biases if _CELLS[cell].terms > 1 or not biases else [tf.add_n(biases)])])
    return found


def _by_gates(x: Any, cell: str) -> Any:
    """Return a weight as a matrix, its gates and units one dim; the gates of an LSTM in the order of `lstm`."""
    if cell == "lstm":
        into, forget, candidate, out = tf.unstack(x, axis=-2)
        x = tf.stack([into, forget, out, candidate], axis=-2)
    return tf.reshape(x, [-1, prod(x.shape.as_list()[-2:])])


# -- operations


class _Recurrent(mtf.Operation):
    """Inputs: a sequence, weights, first states. Outputs: that of the last layer, then the states after the last step.

    chained: the names of the dims along which devices compute one part of the batch together.
    """

    def __init__(
        self, stack: Stack, x: Any, operands: Sequence[Any], out: Sequence[Any], chained: tuple[str, str, str, str]
    ) -> None:
        super().__init__([x, *operands], name="recurrent")
        self.stack, self.chained = stack, chained
        shapes = [list(out)]
        if stack.num_cells:
            lead = [mtf.Dimension("states", stack.num_cells)] if stack.num_cells > 1 else []
            shapes += [[*lead, out[0], out[-1]]] * (2 if stack.cell.keeps == "cell" else 1)
        self._outputs = [mtf.Tensor(self, mtf.Shape(dims), x.dtype, index=i) for i, dims in enumerate(shapes)]
        self.chains: list[Chain] = []

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of the inputs."""
        return list(_RecurrentGradient(self, grad_ys).outputs)

    def lower(self, lowering: Any) -> None:
        """Run the chains of devices that hold one part of the batch each."""
        implementation = lowering.mesh_impl(self)
        x, *slices = (lowering.tensors[x].to_laid_out_tensor().tensor_list for x in self.inputs)
        num_weights = len(slices) - sum(self.stack.has_first)
        with _exchange() as scope:
            for grid in _grids(self.mesh, self.chained):
                wires = Wires(self.mesh)
                chain = Chain(self.stack, grid, wires, x, slices[:num_weights], slices[num_weights:])
                self.chains.append(chain)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
        found = {position: own for chain in self.chains for position, own in chain.results.items()}
        for i, tensor in enumerate(self.outputs):
            lowering.set_tensor_lowering(tensor, _laid_out(implementation, tensor, found, i))


class _RecurrentGradient(mtf.Operation):
    """Inputs: those of the forward operation, and the gradients of its outputs. Outputs: the inputs' gradients."""

    def __init__(self, forward: _Recurrent, grad_ys: Sequence[Any]) -> None:
        super().__init__([*forward.inputs, *(dy for dy in grad_ys if dy is not None)], name="recurrent_gradient")
        self._forward = forward
        self._is_given = [dy is not None for dy in grad_ys]
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward.inputs)]

    def lower(self, lowering: Any) -> None:
        """Go back through the chains; what a device holds a copy of, it has a partial gradient of."""
        implementation = lowering.mesh_impl(self)
        given = iter(self.inputs[len(self._forward.inputs) :])
        columns = (
            lowering.tensors[next(given)].to_laid_out_tensor().tensor_list if x else None for x in self._is_given
        )
        dy, *d_states = columns
        d_states += [None] * (2 - len(d_states))
        found: dict[int, list[Any]] = {}
        with _exchange() as scope:
            for chain in self._forward.chains:
                wires = Wires(self.mesh)
                found |= chain.gradients(dy, d_states, wires)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
        # All devices along d have the whole gradient of the gates.
        names = frozenset[str]().union(*map(names_of, self.inputs)) - {self._forward.chained[2]}
        for i, tensor in enumerate(self.outputs):
            value = _laid_out(implementation, tensor, found, i)
            lowering.set_tensor_lowering(tensor, partial_sums(implementation, value, names - names_of(tensor)))


def _laid_out(implementation: Any, tensor: Any, found: Mapping[int, Sequence[Any]], number: int) -> Any:
    """Return slices of a tensor, by position and number, in their shape."""
    shape = implementation.slice_shape(tensor.shape)
    slices = []
    for position in range(implementation.size):
        own = found[position][number]
        with tf.device(own.device):
            slices.append(own if own.shape.as_list() == shape else tf.reshape(own, shape))
    return implementation.LaidOutTensor(slices)


@contextmanager
def _exchange() -> Iterator[str]:
    """Name operations as parts of an exchange within the layer; give the scope's name."""
    with tf.name_scope("all_reduce"):
        yield tf.get_default_graph().get_name_scope()


def _grids(mesh: Any, chained: Sequence[str]) -> list[Grid]:
    """Return the positions of each part of the batch (and each replica) by their coordinates along some dims."""
    found: dict[tuple[tuple[str, int], ...], Grid] = defaultdict(dict)
    for position, point in enumerate(mesh.devices.coordinates):
        key = tuple((name, coordinate) for name, coordinate in point.items() if name not in chained)
        layer, step, row, column = (point.get(name, 0) for name in chained)
        found[key][layer, step, row, column] = position
    return list(found.values())
