"""LSTM layers over a sequence on the devices that hold one part of the batch, and their gradients.

What a cell does in a step is TensorFlow's, and its gradient is too. Ours are the products of many steps at once, and
what goes between devices: states from step to step and from layer to layer; partial gates, where what is read is split
(d); each step's hidden state, where the units are (e), and backward the parts of its gradient.

Devices that differ along d alone compute the same gates, cells and hidden states: what they add up is whole before they
go on. Backward each of them therefore has the whole gradient of its gates too, and what is added up is the gradient of
the hidden state alone, over the units that it fed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.local import Record

Cells = dict[tuple[int, int], Any]
"""A tensor for each (d, e) of the devices that compute one layer's part of the steps."""

Positions = dict[tuple[int, int], int]
"""Position in the mesh for each of these devices."""

Grid = dict[tuple[int, int, int, int], int]
"""Position in the mesh by the coordinates along l (layers), s (steps), d (inputs) and e (units)."""


class Wires:
    """Sends tensors between positions of a mesh. sent: each tensor that arrived, at its target."""

    def __init__(self, mesh: Any) -> None:
        self._names = mesh.device_names
        self.sent: list[Any] = []

    def on(self, position: int) -> Any:
        """Return the context in which operations run at a position."""
        return tf.device(self._names[position])

    def send(self, x: Any, source: int, target: int) -> Any:
        """Return a tensor at another position."""
        if source == target:
            return x
        with self.on(target):
            self.sent.append(tf.identity(x))
        return self.sent[-1]

    def send_all(self, x: Cells, source: Positions, target: Positions) -> Cells:
        """Return tensors at other positions, each at that of its key."""
        return {key: self.send(tensor, source[key], target[key]) for key, tensor in x.items()}

    def summed(self, terms: Sequence[tuple[int, Any]]) -> dict[int, Any]:
        """Return at each of some positions the sum of what they hold."""
        root = terms[0][0]
        held = [self.send(x, position, root) for position, x in terms]
        with self.on(root):
            total = _added(held)
        return {position: self.send(total, root, position) for position, _ in terms}


def total_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors of known shapes."""
    return sum(int(x.shape.num_elements()) * int(x.dtype.size) for x in tensors)


def _lstm(gates: Any, cell: Any) -> tuple[Any, Any]:
    """Return one device's units of the hidden state after a step, and of the cell."""
    *gates, candidate = tf.split(gates, 4, axis=1)
    # Each by itself: the gradient needs the same tensors as the products, and no copy of them is kept.
    into, forget, out = (tf.sigmoid(gate) for gate in gates)
    cell = forget * cell + into * tf.tanh(candidate)
    return out * tf.tanh(cell), cell


def _of_layers(w: Any, u: Any, bias: Any) -> list[list[Any]]:
    """Return [layers] the matrices of the input and of the hidden state, what they read by all gates, and the bias."""
    layers, rows, gates, columns = w.shape.as_list()
    unstacked = (tf.unstack(tf.reshape(x, [layers, rows, gates * columns])) for x in (w, u))
    return [list(of_layer) for of_layer in zip(*unstacked, tf.unstack(tf.reshape(bias, [layers, -1])), strict=True)]


@dataclass(slots=True, kw_only=True)
class _Run:
    """A layer's steps in one part of the sequence.

    number: which of a device's layers it is. at: where it runs. inputs: what it reads. reads, records: by step, the
    hidden state before it, along d, nothing for zeros; what the cell does.
    """

    number: int
    at: Positions
    inputs: Cells
    reads: dict[int, Cells]
    records: dict[int, dict[tuple[int, int], Record]]


class Chain:
    """The forward pass of one part of the batch, kept so that its gradients can be taken.

    x, weights: [positions] slices. results: by position, the output of the last layer [b, s, e], which positions of
    other layers get from those of the last one.
    """

    def __init__(self, grid: Grid, wires: Wires, x: Sequence[Any], weights: Sequence[Sequence[Any]]) -> None:
        self._grid, self._wires = grid, wires
        self._parts = tuple(1 + max(point[i] for point in grid) for i in range(4))
        self._batch, self._num_steps = x[grid[0, 0, 0, 0]].shape.as_list()[:2]
        self._dtype = x[grid[0, 0, 0, 0]].dtype
        self._weights: dict[int, Record] = {}
        for position in grid.values():
            with wires.on(position):
                self._weights[position] = Record(_of_layers, [column[position] for column in weights])
        matrices = self._weights[grid[0, 0, 0, 0]].result
        self._num_layers = len(matrices)
        self._columns = weights[1][grid[0, 0, 0, 0]].shape.as_list()[-1]
        self._rows = matrices[0][1].shape.as_list()[0]
        # By layer and part of s.
        self._runs: dict[tuple[int, int], _Run] = {}
        below = [{key: x[position] for key, position in self._at(0, s).items()} for s in range(self._parts[1])]
        outputs: list[Cells] = []
        for layer in range(self._parts[0] * self._num_layers):
            below, outputs = self._layer(layer, below)
        last = self._parts[0] - 1
        self.results: dict[int, Any] = {}
        for (_, s, d, e), position in grid.items():
            self.results[position] = wires.send(outputs[s][d, e], grid[last, s, d, e], position)

    def _at(self, part: int, s: int) -> Positions:
        """Return the positions that compute some layers' part of the steps."""
        return {(d, e): self._grid[part, s, d, e] for d in range(self._parts[2]) for e in range(self._parts[3])}

    def _of_layer(self, run: _Run, key: tuple[int, int]) -> list[Any]:
        """Return the matrices of a layer on a device, and its bias."""
        found: list[Any] = self._weights[run.at[key]].result[run.number]
        return found

    # -- forward

    def _layer(self, layer: int, below: Sequence[Cells]) -> tuple[list[Cells], list[Cells]]:
        """Run one layer over all steps; below: [parts of s] what it reads, along d, where the layer below left it.

        Returns the same of this layer, and its output along e.
        """
        part, number = divmod(layer, self._num_layers)
        if part and number == 0:
            places = ((self._at(part - 1, s), self._at(part, s)) for s in range(self._parts[1]))
            below = [self._wires.send_all(x, *ends) for x, ends in zip(below, places, strict=True)]
        above: list[Cells] = []
        outputs: list[Cells] = []
        before: Positions = {}
        read, cell = Cells(), Cells()
        for s in range(self._parts[1]):
            at = self._at(part, s)
            run = _Run(number=number, at=at, inputs=below[s], reads={}, records={})
            self._runs[layer, s] = run
            if before:
                read, cell = (self._wires.send_all(state, before, at) for state in (read, cell))
            else:
                cell = {key: self._zeros(position, self._columns) for key, position in at.items()}
            before = at
            partial = {key: self._of_input(run, key) for key in at}
            hidden: dict[int, Cells] = {}
            along_d: dict[int, Cells] = {}
            for step in range(self._num_steps):
                gates = self._gates(run, {key: x[step] for key, x in partial.items()}, read)
                run.reads[step], run.records[step], own, found = read, {}, Cells(), Cells()
                for key, position in at.items():
                    with self._wires.on(position):
                        record = Record(_lstm, [gates[key], cell[key]])
                    run.records[step][key] = record
                    own[key], found[key] = record.result
                hidden[step], cell = own, found
                # Once for the next step and the next layer.
                read = along_d[step] = self._along_d(own, at)
            above.append(self._stacked(along_d, at))
            outputs.append(self._stacked(hidden, at))
        return above, outputs

    def _zeros(self, position: int, columns: int) -> Any:
        with self._wires.on(position):
            return tf.zeros([self._batch, columns], self._dtype)

    def _stacked(self, steps: Mapping[int, Cells], at: Positions) -> Cells:
        result: Cells = {}
        for key, position in at.items():
            with self._wires.on(position):
                result[key] = tf.stack([steps[step][key] for step in range(self._num_steps)], axis=1)
        return result

    def _of_input(self, run: _Run, key: tuple[int, int]) -> list[Any]:
        """Return [steps] what the input adds to the gates, for all steps in one product."""
        w, _, bias = self._of_layer(run, key)
        with self._wires.on(run.at[key]):
            product = tf.matmul(tf.reshape(run.inputs[key], [-1, w.shape.as_list()[0]]), w)
            if key[0] == 0:
                # Where d is split, gates are sums, of which one term has the bias.
                product = tf.nn.bias_add(product, bias)
            return list(tf.unstack(tf.reshape(product, [self._batch, self._num_steps, -1]), axis=1))

    def _gates(self, run: _Run, partial: Cells, read: Cells) -> Cells:
        """Return the gates of one step, products with the input and with the hidden state, summed over d."""
        gates: Cells = {}
        for key, position in run.at.items():
            _, u, _ = self._of_layer(run, key)
            with self._wires.on(position):
                gates[key] = partial[key] + tf.matmul(read[key], u) if read else partial[key]
        if self._parts[2] > 1:
            for e in range(self._parts[3]):
                column = [(d, e) for d in range(self._parts[2])]
                totals = self._wires.summed([(run.at[key], gates[key]) for key in column])
                gates |= {key: totals[run.at[key]] for key in column}
        return gates

    def _along_d(self, x: Cells, at: Positions) -> Cells:
        """Return units, written in parts along e, in the parts along d in which they are read as inputs."""
        return {
            (d, e): self._gathered(
                self._wires,
                [(x[d, other], other * self._columns, at[d, other]) for other in range(self._parts[3])],
                (d * self._rows, (d + 1) * self._rows),
                position,
            )
            for (d, e), position in at.items()
        }

    def _gathered(
        self, wires: Wires, held: Sequence[tuple[Any, int, int]], wanted: tuple[int, int], target: int
    ) -> Any:
        """Return a range of units at a position; held: (tensor, its first unit, its position), in order."""
        low, high = wanted
        pieces = []
        for x, first, source in held:
            last = first + x.shape.as_list()[-1]
            begin, end = max(low, first), min(high, last)
            if begin < end:
                with wires.on(source):
                    piece = x if (begin, end) == (first, last) else x[..., begin - first : end - first]
                pieces.append(wires.send(piece, source, target))
        with wires.on(target):
            return pieces[0] if len(pieces) == 1 else tf.concat(pieces, -1)

    # -- backward

    def gradients(self, dy: Sequence[Any], wires: Wires) -> dict[int, list[Any]]:
        """Return by position the gradients of its slices of x and of the weights.

        That of x is a part of the sum over e, and zero where another device reads x; those of the weights are parts of
        sums over the batch and the steps; that of a bias is the same for all devices along d.

        Args:
            dy: [positions] that of the output.
            wires: send what goes between devices.
        """
        back = _Backward(wires=wires, dy={}, of_weights=defaultdict(dict))
        for position in self._grid.values():
            with wires.on(position):
                back.dy[position] = tf.reshape(dy[position], [self._batch, self._num_steps, self._columns])
        above: list[Cells] = [{} for _ in range(self._parts[1])]
        for layer in reversed(range(self._parts[0] * self._num_layers)):
            above = self._layer_gradients(layer, above, back)
        dx = {self._at(0, s)[key]: x for s, cells in enumerate(above) for key, x in cells.items()}
        found = {}
        for position in self._grid.values():
            of_layers = back.of_weights[position]
            with wires.on(position):
                if position not in dx:
                    dx[position] = tf.zeros(self._runs[0, 0].inputs[0, 0].shape, self._dtype)
                of_weights = self._weights[position].gradients([of_layers[i] for i in sorted(of_layers)])
                found[position] = [dx[position], *of_weights]
        return found

    def _layer_gradients(self, layer: int, above: Sequence[Cells], back: "_Backward") -> list[Cells]:
        """Go back through one layer; above: [parts of s] the gradient of what the next one read, nothing for the last.

        Returns the same of this layer's input: along d, a part of the sum over e, where the layer below is.
        """
        part, number = divmod(layer, self._num_layers)
        is_last = layer == self._parts[0] * self._num_layers - 1
        below: list[Cells] = [{}] * self._parts[1]
        following: Positions = {}
        d_read, d_cell = Cells(), Cells()
        for s in reversed(range(self._parts[1])):
            run = self._runs[layer, s]
            if following:
                d_read, d_cell = (back.wires.send_all(state, following, run.at) for state in (d_read, d_cell))
            else:
                d_cell = {key: self._zeros(position, self._columns) for key, position in run.at.items()}
            following = run.at
            d_gates: dict[tuple[int, int], dict[int, Any]] = {key: {} for key in run.at}
            for step in reversed(range(self._num_steps)):
                d_hidden = self._hidden_gradient(run, self._read_gradients(run, above[s], d_read, step, back), back)
                is_read, found_read, found_cell = bool(above[s] or d_read), Cells(), Cells()
                for key, position in run.at.items():
                    with back.wires.on(position):
                        # The gradient that nothing reads but the output has no other term.
                        terms = [d_hidden[key]] if is_read else []
                        terms += [back.dy[position][:, step]] if is_last else []
                        d_gates[key][step], found_cell[key] = run.records[step][key].gradients(
                            [_added(terms), d_cell[key]]
                        )
                        if run.reads[step]:
                            u = self._of_layer(run, key)[1]
                            found_read[key] = tf.matmul(d_gates[key][step], u, transpose_b=True)
                d_read, d_cell = found_read, found_cell
            below[s] = {key: self._product_gradients(run, key, d_gates[key], back) for key in run.at}
            if part and number == 0:
                below[s] = back.wires.send_all(below[s], run.at, self._at(part - 1, s))
        return below

    def _read_gradients(self, run: _Run, above: Cells, d_read: Cells, step: int, back: "_Backward") -> Cells:
        """Return the parts of the gradient of a step's hidden state, along d, sums over e.

        above: that of what the next layer read, of all steps; d_read: that of what the next step read. Either may be
        nothing.
        """
        parts: Cells = {}
        for key, position in run.at.items():
            with back.wires.on(position):
                found = [above[key][:, step]] if above else []
                found += [d_read[key]] if d_read else []
                # Nothing reads the last state of all: its place in the exchange is taken, by zeros.
                parts[key] = _added(found) if found else tf.zeros([self._batch, self._rows], self._dtype)
        return parts

    def _hidden_gradient(self, run: _Run, parts: Cells, back: "_Backward") -> Cells:
        """Return the gradient of a step's hidden state along e, from parts of sums over e along d."""
        at, wires = run.at, back.wires
        whole: Cells = {}
        for d in range(self._parts[2]):
            row = [(d, e) for e in range(self._parts[3])]
            sums = wires.summed([(at[key], parts[key]) for key in row])
            whole |= {key: sums[at[key]] for key in row}
        return {
            (d, e): self._gathered(
                wires,
                [(whole[other, e], other * self._rows, at[other, e]) for other in range(self._parts[2])],
                (e * self._columns, (e + 1) * self._columns),
                position,
            )
            for (d, e), position in at.items()
        }

    def _product_gradients(self, run: _Run, key: tuple[int, int], d_gates: Mapping[int, Any], back: "_Backward") -> Any:
        """Return that of what a layer read, and keep those of its matrices and bias, each of all steps in one product.

        d_gates: by step.
        """
        order = range(self._num_steps)
        with back.wires.on(run.at[key]):
            w, _, _ = self._of_layer(run, key)
            of_gates = tf.reshape(tf.stack([d_gates[step] for step in order], axis=1), [-1, w.shape.as_list()[1]])
            zeros = tf.zeros([self._batch, self._rows], self._dtype)
            reads = tf.stack([run.reads[step].get(key, zeros) for step in order], axis=1)
            x = run.inputs[key]
            back.of_weights[run.at[key]][run.number] = [
                tf.matmul(tf.reshape(x, [-1, w.shape.as_list()[0]]), of_gates, transpose_a=True),
                tf.matmul(tf.reshape(reads, [-1, self._rows]), of_gates, transpose_a=True),
                tf.reduce_sum(of_gates, 0),
            ]
            return tf.reshape(tf.matmul(of_gates, w, transpose_b=True), x.shape)


@dataclass(slots=True, kw_only=True)
class _Backward:
    """What a backward pass is given by position, and what it finds: by position and layer."""

    wires: Wires
    dy: dict[int, Any]
    of_weights: dict[int, dict[int, list[Any]]]


def _added(terms: Sequence[Any]) -> Any:
    return terms[0] if len(terms) == 1 else tf.add_n(terms)
