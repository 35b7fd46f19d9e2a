"""`recurrent`: LSTM, GRU and plain recurrent layers, in one or two directions; the batch and the units may be split.

What a device computes of a step is TensorFlow's, and its gradient is too. Ours is what goes between devices that hold
different units: each step's hidden state, of which all of them need the whole, and backward the parts of its gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import names_of, partial_sums
from pase.targets.mesh_tensorflow.runtime.layers.points import arrange
from pase.targets.mesh_tensorflow.runtime.layers.recurrent import Wires, exchange, total_bytes

At = dict[int, Any]
"""A tensor at each position of a mesh."""


def recurrent(x: Any, weights: Sequence[Any], gate: Any, out: Sequence[Any], *, cell: str, layers: int = 1) -> Any:
    """Return the last of some recurrent layers over a sequence, dims `out`: the batch, the steps, directions, units.

    Args:
        x: the sequence: the batch, the steps and perhaps what it holds at each.
        weights: of each layer and direction, those of the input and of the hidden state (the gates, the units and what
            they read), and perhaps a bias of each (the gates, the units); gates in PyTorch's order.
        gate: the dim of the gates.
        out: the dims of the result. The units of each device are its own; states are zero at first.
        cell: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        layers: how many, each reading the hidden states of the one before in both directions.
    """
    batch, steps, _, unit = out
    operands = [_led(x, [batch, steps]), *(_led(w, [gate, unit]) for w in weights)]
    return _Recurrent(operands, out, cell, layers).outputs[0]


def _led(x: Any, dims: Sequence[Any]) -> Any:
    return arrange(x, [*dims, *(dim for dim in x.shape.dims if dim not in dims)])


def _lstm(x: Any, hidden: Any, cell: Any, u: Any, *bias: Any) -> tuple[Any, Any]:
    into, forget, candidate, out = tf.unstack(x + _product(hidden, u, *bias), axis=1)
    cell = tf.sigmoid(forget) * cell + tf.sigmoid(into) * tf.tanh(candidate)
    return tf.sigmoid(out) * tf.tanh(cell), cell


def _gru(x: Any, hidden: Any, own: Any, u: Any, *bias: Any) -> tuple[Any, Any]:
    of_hidden = _product(hidden, u, *bias)
    reset, update = (tf.sigmoid(x[:, i] + of_hidden[:, i]) for i in range(2))
    new = (1 - update) * tf.tanh(x[:, 2] + reset * of_hidden[:, 2]) + update * own
    return new, tf.identity(new)


def _plain(function: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def step(x: Any, hidden: Any, own: Any, u: Any, *bias: Any) -> tuple[Any, Any]:
        return function((x + _product(hidden, u, *bias))[:, 0]), own

    return step


_CELLS: Mapping[str, Callable[..., tuple[Any, Any]]] = MappingProxyType(
    {"gru": _gru, "lstm": _lstm, "rnn_relu": _plain(tf.nn.relu), "rnn_tanh": _plain(tf.tanh)}
)
"""A step of a cell on one device: given what the input adds to its gates, the whole hidden state, what it keeps of its
own units, and the weights; returns its units of the hidden state, and what it keeps.
"""


def _product(x: Any, weights: Any, *bias: Any) -> Any:
    """Return […, gates, units] what some values, […, width], add to the gates, and perhaps a bias."""
    gates, units = weights.shape.as_list()[:2]
    lead = x.shape.as_list()[:-1]
    flat = tf.reshape(x, [-1, x.shape.as_list()[-1]])
    product = tf.matmul(flat, tf.reshape(weights, [gates * units, -1]), transpose_b=True)
    found = tf.reshape(product, [*lead, gates, units])
    return found + bias[0] if bias else found


def _of_input(x: Any, w: Any, *bias: Any) -> list[Any]:
    """Return [steps] what the input adds to the gates, for all steps in one product."""
    x = tf.reshape(x, [*x.shape.as_list()[:2], -1])
    return list(tf.unstack(_product(x, w, *bias), axis=1))


class _Record:
    """What a function computed of some tensors, each of which is an argument once."""

    def __init__(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any]) -> None:
        self._arguments = list(arguments)
        with tf.GradientTape() as self._tape:
            self._tape.watch(self._arguments)
            self.results = list(function(*self._arguments))

    def gradients(self, dys: Sequence[Any]) -> list[Any]:
        """Return those of the arguments; once."""
        none = tf.UnconnectedGradients.ZERO
        return list(self._tape.gradient(self.results, self._arguments, list(dys), unconnected_gradients=none))


class _Layers:
    """The forward pass on the devices that hold one part of the batch, kept so that its gradients can be taken.

    positions: of these devices, in the order of the units that they hold. columns: [inputs][positions] slices.
    """

    def __init__(
        self,
        positions: Sequence[int],
        wires: Wires,
        columns: Sequence[Sequence[Any]],
        cell: str,
        shape: tuple[int, int],
    ) -> None:
        self._positions, self._cell = positions, _CELLS[cell]
        self._num_layers, self._num_directions = shape
        first = positions[0]
        self._batch, self._num_steps = columns[0][first].shape.as_list()[:2]
        self._columns = columns[1][first].shape.as_list()[1]
        self._dtype = columns[0][first].dtype
        of_each = (len(columns) - 1) // (self._num_layers * self._num_directions)
        self._cells = [columns[i : i + of_each] for i in range(1, len(columns), of_each)]
        self._inputs: dict[int, dict[int, _Record]] = {}
        self._steps: dict[int, list[dict[int, _Record]]] = {}
        below = {position: columns[0][position] for position in positions}
        for layer in range(self._num_layers):
            both = [self._direction(number, below, wires) for number in self._numbers(layer)]
            below = {}
            for position in positions if layer < self._num_layers - 1 else ():
                with wires.on(position):
                    below[position] = tf.concat([tf.stack([x[position] for x in own], axis=1) for own in both], -1)
        self.results = self._last(wires)

    def _numbers(self, layer: int) -> range:
        """Return the numbers of a layer's cells, one for each direction."""
        return range(layer * self._num_directions, (layer + 1) * self._num_directions)

    def _order(self, number: int) -> list[int]:
        """Return the steps in the order in which a cell goes through them."""
        return list(range(self._num_steps))[:: -1 if number % self._num_directions else 1]

    def _is_last(self, number: int) -> bool:
        return number in self._numbers(self._num_layers - 1)

    def _weights(self, number: int, position: int) -> tuple[list[Any], list[Any]]:
        """Return the weights of what a cell reads, and of its hidden state."""
        own = [column[position] for column in self._cells[number]]
        return own[::2], own[1::2]

    def _zeros(self, units: int) -> Any:
        return tf.zeros([self._batch, units], self._dtype)

    # -- forward

    def _direction(self, number: int, below: At, wires: Wires) -> list[At]:
        """Run a cell over all steps; return [steps] its whole hidden state."""
        self._inputs[number] = {}
        self._steps[number] = [{} for _ in range(self._num_steps)]
        hidden, kept = At(), At()
        for position in self._positions:
            with wires.on(position):
                hidden[position] = self._zeros(self._columns * len(self._positions))
                kept[position] = self._zeros(self._columns)
                arguments = [below[position], *self._weights(number, position)[0]]
                self._inputs[number][position] = _Record(_of_input, arguments)
        whole: list[At] = [{} for _ in range(self._num_steps)]
        for step in self._order(number):
            found = {}
            for position in self._positions:
                with wires.on(position):
                    x = self._inputs[number][position].results[step]
                    arguments = [x, hidden[position], kept[position], *self._weights(number, position)[1]]
                    record = _Record(self._cell, arguments)
                    found[position], kept[position] = record.results
                    self._steps[number][step][position] = record
            hidden = whole[step] = self._gathered(found, wires)
        return whole

    def _gathered(self, parts: At, wires: Wires) -> At:
        """Return at each position all units of what each holds its own of."""
        whole = {}
        for target in self._positions:
            held = [wires.send(parts[source], source, target) for source in self._positions]
            with wires.on(target):
                whole[target] = tf.concat(held, -1) if len(held) > 1 else held[0]
        return whole

    def _last(self, wires: Wires) -> At:
        """Return the hidden states of the last layer: the batch, the steps, the directions, each device's units."""
        found = {}
        for position in self._positions:
            with wires.on(position):
                both = [
                    tf.stack([step[position].results[0] for step in self._steps[number]], axis=1)
                    for number in self._numbers(self._num_layers - 1)
                ]
                found[position] = tf.stack(both, axis=2)
        return found

    # -- backward

    def gradients(self, dy: Sequence[Any], wires: Wires) -> dict[int, list[Any]]:
        """Return by position the gradients of its slices; dy: [positions] that of the result.

        That of the sequence is a part of the sum over the units; those of the weights are over the batch.
        """
        of_cells: list[dict[int, list[Any]]] = []
        above: At = {}
        for layer in reversed(range(self._num_layers)):
            both = []
            for number in reversed(self._numbers(layer)):
                d_inputs, of_weights = self._back(number, above, dy, wires)
                both.append(d_inputs)
                of_cells.append(of_weights)
            above = {}
            for position in self._positions:
                with wires.on(position):
                    above[position] = tf.add_n([d_inputs[position] for d_inputs in both])
        found = {}
        for position in self._positions:
            every = [gradient for cell in reversed(of_cells) for gradient in cell[position]]
            found[position] = [above[position], *every]
        return found

    def _back(self, number: int, above: At, dy: Sequence[Any], wires: Wires) -> tuple[At, dict[int, list[Any]]]:
        """Go back through a cell; above: the gradient of what the next layer read, nothing for the last.

        Returns that of what this one read, a part of the sum over the units, and those of its weights.
        """
        turn = number % self._num_directions
        units = self._columns * len(self._positions)
        d_hidden, d_kept = At(), At()
        d_gates: dict[int, list[Any]] = {position: [None] * self._num_steps for position in self._positions}
        of_hidden: dict[int, list[list[Any]]] = defaultdict(list)
        for step in reversed(self._order(number)):
            parts = At()
            for position in self._positions:
                with wires.on(position):
                    terms = [above[position][:, step, turn * units : (turn + 1) * units]] if above else []
                    terms += [d_hidden[position]] if d_hidden else []
                    # Nothing reads the last state of all: its place in the exchange is taken, by zeros.
                    parts[position] = tf.add_n(terms) if terms else self._zeros(units)
            own = self._scattered(parts, wires)
            d_hidden = {}
            for position in self._positions:
                with wires.on(position):
                    terms = [own[position]]
                    terms += [dy[position][:, step, turn]] if self._is_last(number) else []
                    before = d_kept.get(position)
                    dys = [tf.add_n(terms), self._zeros(self._columns) if before is None else before]
                    found = self._steps[number][step][position].gradients(dys)
                    d_gates[position][step], d_hidden[position], d_kept[position], *of_weights = found
                    of_hidden[position].append(of_weights)
        d_inputs, of_weights_at = At(), {}
        for position in self._positions:
            with wires.on(position):
                d_inputs[position], *of_input = self._inputs[number][position].gradients(d_gates[position])
                summed = [tf.add_n(list(column)) for column in zip(*of_hidden[position], strict=True)]
            of_weights_at[position] = [x for pair in zip(of_input, summed, strict=True) for x in pair]
        return d_inputs, of_weights_at

    def _scattered(self, parts: At, wires: Wires) -> At:
        """Return at each position the sum of its units of what all positions hold parts of."""
        found = {}
        for i, target in enumerate(self._positions):
            held = []
            for source in self._positions:
                with wires.on(source):
                    own = parts[source][:, i * self._columns : (i + 1) * self._columns]
                held.append(wires.send(own, source, target))
            with wires.on(target):
                found[target] = tf.add_n(held)
        return found


class _Recurrent(mtf.Operation):
    """Inputs: the sequence and the weights. Output: the hidden states of the last layer."""

    def __init__(self, inputs: Sequence[Any], out: Sequence[Any], cell: str, layers: int) -> None:
        super().__init__(list(inputs), name="recurrent")
        self._outputs = [mtf.Tensor(self, mtf.Shape(list(out)), inputs[0].dtype)]
        self._unit = out[-1].name
        self._cell, self._shape = cell, (layers, out[2].size)
        self.groups: list[_Layers] = []

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of the sequence and of the weights."""
        return list(_RecurrentGradient(self, grad_ys[0]).outputs)

    def lower(self, lowering: Any) -> None:
        """Run the devices that hold one part of the batch each."""
        implementation = lowering.mesh_impl(self)
        columns = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in self.inputs]
        results: list[Any] = [None] * implementation.size
        with exchange() as scope:
            for positions in _groups(self.mesh, self._unit):
                wires = Wires(self.mesh)
                self.groups.append(_Layers(positions, wires, columns, self._cell, self._shape))
                for position, y in self.groups[-1].results.items():
                    results[position] = y
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
        lowering.set_tensor_lowering(self.outputs[0], implementation.LaidOutTensor(results))


class _RecurrentGradient(mtf.Operation):
    """Inputs: those of the forward operation, and the gradient of its output. Outputs: the inputs' gradients."""

    def __init__(self, forward: _Recurrent, dy: Any) -> None:
        super().__init__([*forward.inputs, dy], name="recurrent_gradient")
        self._forward = forward
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward.inputs)]

    def lower(self, lowering: Any) -> None:
        """Go back through the layers; what a device holds a copy of, it has a partial gradient of."""
        implementation = lowering.mesh_impl(self)
        slices = lowering.tensors[self.inputs[-1]].to_laid_out_tensor().tensor_list
        columns: list[list[Any]] = [[None] * implementation.size for _ in self.outputs]
        with exchange() as scope:
            for group in self._forward.groups:
                wires = Wires(self.mesh)
                found = group.gradients(slices, wires)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
                for position, gradients in found.items():
                    for column, gradient in zip(columns, gradients, strict=True):
                        column[position] = gradient
        names = frozenset[str]().union(*map(names_of, self.inputs))
        for tensor, column in zip(self.outputs, columns, strict=True):
            value = partial_sums(implementation, implementation.LaidOutTensor(column), names - names_of(tensor))
            lowering.set_tensor_lowering(tensor, value)


def _groups(mesh: Any, unit: str) -> Iterable[list[int]]:
    """Return the positions that share a part of the batch (and replicas of it), in the order of their units."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    coordinates = mesh.devices.coordinates
    for position in sorted(range(len(coordinates)), key=lambda i: coordinates[i].get(unit, 0)):
        found[tuple((name, at) for name, at in coordinates[position].items() if name != unit)].append(position)
    return found.values()
