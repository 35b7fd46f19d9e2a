"""`lstm`: a stack of LSTM layers over a sequence; layers, batch, steps, inputs and units may all be split.

Devices that differ along d alone compute the same gates, cells and hidden states: what they add up is whole before they
go on. Backward each of them therefore has the whole gradient of its gates too, and what is added up is the gradient of
the hidden state alone, over the units that it fed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.local import names_of, partial_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one device keeps of a step for its gradients. read: the hidden state before it, along d; None at first."""

    read: Any
    into: Any
    forget: Any
    out: Any
    candidate: Any
    before: Any
    activated: Any


def cell_step(gates: Any, read: Any, before: Any) -> tuple[Step, Any, Any]:
    """Return what to keep of a step, the hidden state and the cell after it."""
    columns = before.shape.as_list()[-1]
    sigmoids, candidate = tf.split(gates, [3 * columns, columns], axis=1)
    into, forget, out = tf.split(tf.sigmoid(sigmoids), 3, axis=1)
    candidate = tf.tanh(candidate)
    cell = forget * before + into * candidate
    activated = tf.tanh(cell)
    kept = Step(read=read, into=into, forget=forget, out=out, candidate=candidate, before=before, activated=activated)
    return kept, out * activated, cell


def cell_gradient(kept: Step, d_hidden: Any, d_cell: Any) -> tuple[Any, Any]:
    """Return the gradients of the gates and of the cell before a step from those of what it left."""
    # What depends on the forward pass alone is not to be computed, and held, before the gradient is there.
    with tf.control_dependencies([d_hidden]):
        d_cell = d_cell + d_hidden * kept.out * (1 - kept.activated * kept.activated)
        d_gates = [
            d_cell * kept.candidate * kept.into * (1 - kept.into),
            d_cell * kept.before * kept.forget * (1 - kept.forget),
            d_hidden * kept.activated * kept.out * (1 - kept.out),
            d_cell * kept.into * (1 - kept.candidate * kept.candidate),
        ]
        return tf.concat(d_gates, axis=1), d_cell * kept.forget


Cells = dict[tuple[int, int], Any]
"""A tensor for each (d, e) of the devices that compute one layer's part of the steps."""

Positions = dict[tuple[int, int], int]
"""Position in the mesh for each of these devices."""


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
            total = held[0] if len(held) == 1 else tf.add_n(held)
        return {position: self.send(total, root, position) for position, _ in terms}


def total_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors of known shapes."""
    return sum(int(x.shape.num_elements()) * int(x.dtype.size) for x in tensors)


Grid = dict[tuple[int, int, int, int], int]
"""Position in the mesh by the coordinates along l (layers), s (steps), d (inputs) and e (units)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Of one device: [layers] matrices of the input and of the hidden state, d by gates and e, and biases."""

    inputs: list[Any]
    recurrent: list[Any]
    bias: list[Any]


class Chain:
    """The forward pass of one part of the batch, kept so that its gradients can be taken.

    x, w, u, bias: [positions] slices. results: by position, the output of the last layer; positions of other layers
    get it from those of the last one.
    """

    def __init__(
        self, grid: Grid, wires: Wires, x: Sequence[Any], w: Sequence[Any], u: Sequence[Any], bias: Sequence[Any]
    ) -> None:
        self._grid, self._wires = grid, wires
        self._parts = tuple(1 + max(point[i] for point in grid) for i in range(4))
        self._num_layers, self._rows, _, self._columns = w[0].shape.as_list()
        self._batch, self._num_steps, _ = x[0].shape.as_list()
        self._dtype = x[0].dtype
        self._weights = {
            position: self._unpacked(position, w[position], u[position], bias[position]) for position in grid.values()
        }
        # By layer, part of s and device: what is read, and what is kept of each step.
        self._inputs: dict[tuple[int, int], Cells] = {}
        self._steps: dict[tuple[int, int], list[dict[tuple[int, int], Step]]] = {}
        below = [{key: x[position] for key, position in self._at(0, s).items()} for s in range(self._parts[1])]
        outputs: list[Cells] = []
        for layer in range(self._parts[0] * self._num_layers):
            below, outputs = self._layer(layer, below)
        last = self._parts[0] - 1
        self.results = {
            position: wires.send(outputs[s][d, e], grid[last, s, d, e], position)
            for (_, s, d, e), position in grid.items()
        }

    def _unpacked(self, position: int, w: Any, u: Any, bias: Any) -> _Weights:
        shape = [-1, self._rows, 4 * self._columns]
        with self._wires.on(position):
            return _Weights(
                inputs=tf.unstack(tf.reshape(w, shape), axis=0),
                recurrent=tf.unstack(tf.reshape(u, shape), axis=0),
                bias=tf.unstack(tf.reshape(bias, [-1, 4 * self._columns]), axis=0),
            )

    def _at(self, part: int, s: int) -> Positions:
        """Return the positions that compute some layers' part of the steps."""
        return {(d, e): self._grid[part, s, d, e] for d in range(self._parts[2]) for e in range(self._parts[3])}

    # -- forward

    def _layer(self, layer: int, below: Sequence[Cells]) -> tuple[list[Cells], list[Cells]]:
        """Run one layer over all steps; below: [parts of s] what it reads, along d, where the layer below left it.

        Returns the same of this layer, and its output along e.
        """
        part, number = divmod(layer, self._num_layers)
        above: list[Cells] = []
        outputs: list[Cells] = []
        read: Cells = {}
        cell: Cells = {}
        for s in range(self._parts[1]):
            at = self._at(part, s)
            if s == 0:
                cell = {key: self._zeros(position, self._columns) for key, position in at.items()}
            else:
                before = self._at(part, s - 1)
                read, cell = (self._wires.send_all(state, before, at) for state in (read, cell))
            inputs = below[s]
            if part and number == 0:
                inputs = self._wires.send_all(inputs, self._at(part - 1, s), at)
            self._inputs[layer, s] = inputs
            partial = {key: self._input_gates(inputs[key], position, number) for key, position in at.items()}
            kept: list[dict[tuple[int, int], Step]] = []
            hidden: list[Cells] = []
            along_d: list[Cells] = []
            for step in range(self._num_steps):
                gates = self._gates({key: x[step] for key, x in partial.items()}, read, at, number)
                kept.append({})
                hidden.append({})
                for key, position in at.items():
                    with self._wires.on(position):
                        kept[-1][key], hidden[-1][key], cell[key] = cell_step(gates[key], read.get(key), cell[key])
                # Once for the next step and the next layer.
                read = self._along_d(hidden[-1], at)
                along_d.append(read)
            self._steps[layer, s] = kept
            above.append(self._stacked(along_d, at))
            outputs.append(self._stacked(hidden, at))
        return above, outputs

    def _zeros(self, position: int, columns: int) -> Any:
        with self._wires.on(position):
            return tf.zeros([self._batch, columns], self._dtype)

    def _stacked(self, steps: Sequence[Cells], at: Positions) -> Cells:
        result: Cells = {}
        for key, position in at.items():
            with self._wires.on(position):
                result[key] = tf.stack([x[key] for x in steps], axis=1)
        return result

    def _input_gates(self, x: Any, position: int, number: int) -> list[Any]:
        """Return [steps] what the input adds to the gates, for all steps in one product."""
        with self._wires.on(position):
            product = tf.matmul(tf.reshape(x, [-1, self._rows]), self._weights[position].inputs[number])
            return list(tf.unstack(tf.reshape(product, [self._batch, self._num_steps, -1]), axis=1))

    def _gates(self, partial: Cells, read: Cells, at: Positions, number: int) -> Cells:
        """Return the gates of one step: products with the input and with the hidden state, summed over d."""
        sums = dict(partial)
        for key, x in read.items():
            with self._wires.on(at[key]):
                sums[key] = partial[key] + tf.matmul(x, self._weights[at[key]].recurrent[number])
        gates: Cells = {}
        for e in range(self._parts[3]):
            column = [(d, e) for d in range(self._parts[2])]
            totals = self._wires.summed([(at[key], sums[key]) for key in column])
            for key in column:
                with self._wires.on(at[key]):
                    gates[key] = tf.nn.bias_add(totals[at[key]], self._weights[at[key]].bias[number])
        return gates

    def _along_d(self, x: Cells, at: Positions) -> Cells:
        """Return units, written in parts along e, in the parts along d in which they are read as inputs."""
        return {
            (d, e): self._joined(
                self._wires,
                [(x[d, other], other * self._columns, at[d, other]) for other in range(self._parts[3])],
                (d * self._rows, (d + 1) * self._rows),
                position,
            )
            for (d, e), position in at.items()
        }

    def _joined(self, wires: Wires, held: Sequence[tuple[Any, int, int]], wanted: tuple[int, int], target: int) -> Any:
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
        """Return by position the gradients of its slices of x, w, u and bias; dy: [positions] that of the output.

        That of x is a part of the sum over e, and zero where another device reads x; those of the weights are parts of
        sums over the batch and the steps; that of the bias is the same for all devices along d.
        """
        of_weights: dict[int, list[tuple[Any, Any, Any]]] = {position: [] for position in self._grid.values()}
        above: list[Cells] = [{} for _ in range(self._parts[1])]
        for layer in reversed(range(self._parts[0] * self._num_layers)):
            above = self._layer_gradients(layer, above, dy, wires, of_weights)
        first = {position for s in range(self._parts[1]) for position in self._at(0, s).values()}
        dx = {self._at(0, s)[key]: x for s, cells in enumerate(above) for key, x in cells.items()}
        found = {}
        for position, of_layers in of_weights.items():
            with wires.on(position):
                if position not in first:
                    dx[position] = tf.zeros([self._batch, self._num_steps, self._rows], self._dtype)
                # Last layers come first.
                dw, du, d_bias = (tf.stack(column[::-1]) for column in zip(*of_layers, strict=True))
                shape = [self._num_layers, self._rows, 4, self._columns]
                found[position] = [
                    dx[position],
                    tf.reshape(dw, shape),
                    tf.reshape(du, shape),
                    tf.reshape(d_bias, [self._num_layers, 4, self._columns]),
                ]
        return found

    def _layer_gradients(
        self,
        layer: int,
        above: Sequence[Cells],
        dy: Sequence[Any],
        wires: Wires,
        of_weights: Mapping[int, list[tuple[Any, Any, Any]]],
    ) -> list[Cells]:
        """Go back through one layer; above: [parts of s] the gradient of what the next one read, nothing for the last.

        Returns the same of this layer's input: along d, a part of the sum over e, where the layer below is.
        """
        part, number = divmod(layer, self._num_layers)
        is_last = layer == self._parts[0] * self._num_layers - 1
        below: list[Cells] = []
        d_read: Cells = {}
        d_cell: Cells = {}
        for s in reversed(range(self._parts[1])):
            at = self._at(part, s)
            if s == self._parts[1] - 1:
                d_cell = {key: self._zeros(position, self._columns) for key, position in at.items()}
            else:
                following = self._at(part, s + 1)
                d_read, d_cell = (wires.send_all(state, following, at) for state in (d_read, d_cell))
            d_gates: list[Cells] = []
            for step in reversed(range(self._num_steps)):
                kept = self._steps[layer, s][step]
                d_hidden = self._hidden_gradient([above[s], d_read], step, at, wires)
                d_gates.append({})
                d_read = {}
                for key, position in at.items():
                    with wires.on(position):
                        if is_last:
                            # The gradient that nothing reads but the output has no other term.
                            of_output = dy[position][:, step]
                            is_read = s < self._parts[1] - 1 or step < self._num_steps - 1
                            d_hidden[key] = d_hidden[key] + of_output if is_read else of_output
                        d_gates[-1][key], d_cell[key] = cell_gradient(kept[key], d_hidden[key], d_cell[key])
                        if kept[key].read is not None:
                            weights = self._weights[position].recurrent[number]
                            d_read[key] = tf.matmul(d_gates[-1][key], weights, transpose_b=True)
            below.append({})
            for key, position in at.items():
                with wires.on(position):
                    stacked = tf.reshape(tf.stack([x[key] for x in reversed(d_gates)], axis=1), [-1, 4 * self._columns])
                    of_weights[position].append(self._weight_gradients(layer, s, key, stacked))
                    product = tf.matmul(stacked, self._weights[position].inputs[number], transpose_b=True)
                    below[-1][key] = tf.reshape(product, [self._batch, self._num_steps, self._rows])
            if part and number == 0:
                below[-1] = wires.send_all(below[-1], at, self._at(part - 1, s))
        return below[::-1]

    def _hidden_gradient(self, terms: Sequence[Cells], step: int, at: Positions, wires: Wires) -> Cells:
        """Return the gradient of a step's hidden state along e, from parts of sums over e along d.

        terms: what the next layer read, of all steps; what the next step read. Either may be nothing.
        """
        from_above, from_next = terms
        parts: Cells = {}
        for key, position in at.items():
            with wires.on(position):
                found = [from_above[key][:, step]] if from_above else []
                found += [from_next[key]] if from_next else []
                # Nothing reads the last state of all: its place in the exchange is taken, by zeros.
                parts[key] = tf.add_n(found) if found else tf.zeros([self._batch, self._rows], self._dtype)
        whole: Cells = {}
        for d in range(self._parts[2]):
            row = [(d, e) for e in range(self._parts[3])]
            sums = wires.summed([(at[key], parts[key]) for key in row])
            whole |= {key: sums[at[key]] for key in row}
        return {
            (d, e): self._joined(
                wires,
                [(whole[other, e], other * self._rows, at[other, e]) for other in range(self._parts[2])],
                (e * self._columns, (e + 1) * self._columns),
                position,
            )
            for (d, e), position in at.items()
        }

    def _weight_gradients(self, layer: int, s: int, key: tuple[int, int], d_gates: Any) -> tuple[Any, Any, Any]:
        """Return those of the matrices and of the bias, each of all steps in one product; d_gates: [b · steps, …]."""
        inputs = tf.reshape(self._inputs[layer, s][key], [-1, self._rows])
        reads = [step[key].read for step in self._steps[layer, s]]
        present = [tf.zeros([self._batch, self._rows], self._dtype) if x is None else x for x in reads]
        read = tf.reshape(tf.stack(present, axis=1), [-1, self._rows])
        return (
            tf.matmul(inputs, d_gates, transpose_a=True),
            tf.matmul(read, d_gates, transpose_a=True),
            tf.reduce_sum(d_gates, 0),
        )


GATES = mtf.Dimension("gates", 4)
"""Input, forget and output gate, and the candidate, in this order."""


class _Lstm(mtf.Operation):
    """Inputs: x [b, s, d], w and u [l, d, gates, e], bias [l, gates, e]. Output: [b, s, e] of the last layer."""

    def __init__(self, inputs: Sequence[Any], out: Sequence[Any]) -> None:
        super().__init__(list(inputs), name="lstm")
        self._outputs = [mtf.Tensor(self, mtf.Shape(list(out)), inputs[0].dtype)]
        layers, width, _, units = inputs[1].shape.dimension_names
        # Layers, steps, inputs and units.
        self.chained = layers, inputs[0].shape.dimension_names[1], width, units
        self.chains: list[Chain] = []

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of the input and of the weights."""
        return list(_LstmGradient(self, grad_ys[0]).outputs)

    def lower(self, lowering: Any) -> None:
        """Run the chains of devices that hold one part of the batch each."""
        implementation = lowering.mesh_impl(self)
        slices = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in self.inputs]
        results: list[Any] = [None] * implementation.size
        with exchange() as scope:
            for grid in _grids(self.mesh, self.chained):
                wires = Wires(self.mesh)
                chain = Chain(grid, wires, *slices)
                self.chains.append(chain)
                for position, y in chain.results.items():
                    results[position] = y
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
        lowering.set_tensor_lowering(self.outputs[0], implementation.LaidOutTensor(results))


class _LstmGradient(mtf.Operation):
    """Inputs: those of the forward operation, and the gradient of its output. Outputs: the inputs' gradients."""

    def __init__(self, forward: _Lstm, dy: Any) -> None:
        super().__init__([*forward.inputs, dy], name="lstm_gradient")
        self._forward = forward
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward.inputs)]

    def lower(self, lowering: Any) -> None:
        """Go back through the chains; what a device holds a copy of, it has a partial gradient of."""
        implementation = lowering.mesh_impl(self)
        slices = lowering.tensors[self.inputs[-1]].to_laid_out_tensor().tensor_list
        columns: list[list[Any]] = [[None] * implementation.size for _ in self.outputs]
        with exchange() as scope:
            for chain in self._forward.chains:
                wires = Wires(self.mesh)
                found = chain.gradients(slices, wires)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
                for position, gradients in found.items():
                    for column, gradient in zip(columns, gradients, strict=True):
                        column[position] = gradient
        names = frozenset[str]().union(*map(names_of, self.inputs))
        for tensor, column in zip(self.outputs, columns, strict=True):
            lacking = names - names_of(tensor)
            if tensor is self.outputs[3]:
                # All devices along d have the whole gradient of the gates.
                lacking -= {self._forward.chained[2]}
            value = partial_sums(implementation, implementation.LaidOutTensor(column), lacking)
            lowering.set_tensor_lowering(tensor, value)


@contextmanager
def exchange() -> Iterator[str]:
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


def lstm(x: Any, w: Any, u: Any, bias: Any, out: Sequence[Any]) -> Any:
    """Return the last of a stack of LSTM layers over x, dims [b, s, d] (Hochreiter and Schmidhuber 1997; forget gates).

    w, u: weights of the input and of the previous hidden state, dims [l, d, GATES, e]; bias: [l, GATES, e]; out:
    [b, s, e]; d and e have one extent. State is zero at first. Where l or s is split, states are handed on, layer
    after layer and step after step; where d or e is, every step adds up gates and re-lays the hidden state.
    """
    return _Lstm([x, w, u, bias], out).outputs[0]
