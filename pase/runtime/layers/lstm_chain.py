"""The devices that compute an LSTM stack for one part of the batch: what each does and what they send each other."""

from collections.abc import Sequence
from typing import Any

from pase.runtime.compat import tf

Grid = dict[tuple[int, int, int, int], int]
"""Position in the mesh by the coordinates along l (layers), s (steps), d (inputs) and e (units)."""

_Cells = dict[tuple[int, int], Any]
"""A tensor for each (d, e) of the devices that compute one layer's part of the steps."""


class Wires:
    """Sends tensors between positions of a mesh. sent: each tensor that arrived, at its target."""

    def __init__(self, mesh: Any) -> None:
        self._names = mesh.device_names
        self.sent: list[Any] = []

    def on(self, position: int) -> Any:
        """Return the context in which operations run at a position."""
        return tf.device(self._names[position])

    def send(self, x: Any, source: int, target: int) -> Any:
        """Return a tensor at another position: one copy, whose gradient goes back as one."""
        if source == target:
            return x
        with self.on(target):
            self.sent.append(tf.identity(x))
        return self.sent[-1]

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
        layers, self._rows, _, self._columns = w[0].shape.as_list()
        self._batch, self._steps, _ = x[0].shape.as_list()
        self._dtype = x[0].dtype
        # Copies of this layer's own: gradients are taken of them.
        self._copies = {position: self._copied(position, x, w, bias) for position in grid.values()}
        self._recurrent = {position: self._matrices(position, u[position]) for position in grid.values()}
        self._inner: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
        below: list[_Cells] = []
        for layer in range(self._parts[0] * layers):
            part, number = divmod(layer, layers)
            below = self._layer(part, number, below)
        last = self._parts[0] - 1
        self.results = {
            position: wires.send(below[s][d, e], grid[last, s, d, e], position)
            for (_, s, d, e), position in grid.items()
        }
        self._outputs = {grid[last, s, 0, e]: below[s][0, e] for (part, s, d, e) in grid if part == last and d == 0}

    def _copied(self, position: int, *columns: Sequence[Any]) -> list[Any]:
        with self._wires.on(position):
            return [tf.identity(column[position]) for column in columns]

    def _matrices(self, position: int, weights: Any) -> list[Any]:
        """Return [layers] matrices of d by gates and e."""
        with self._wires.on(position):
            flat = tf.reshape(weights, [-1, self._rows, 4 * self._columns])
            return list(tf.unstack(flat, axis=0))

    def _layer(self, part: int, number: int, below: Sequence[_Cells]) -> list[_Cells]:
        """Run one layer over all steps; below: [parts of s] what it reads, along e as it was written, none for x."""
        above: list[_Cells] = []
        hidden: _Cells = {}
        cell: _Cells = {}
        for s in range(self._parts[1]):
            at = {(d, e): self._grid[part, s, d, e] for d in range(self._parts[2]) for e in range(self._parts[3])}
            if s == 0:
                # No hidden state yet: nobody has to send zeros.
                cell = {key: self._zeros(position, self._columns) for key, position in at.items()}
            else:
                before = {key: self._grid[part, s - 1, *key] for key in at}
                hidden, cell = (
                    {key: self._wires.send(x, before[key], at[key]) for key, x in state.items()}
                    for state in (hidden, cell)
                )
            if below:
                beneath = {key: self._grid[part - (number == 0), s, *key] for key in at}
                inputs = self._along_d(below[s], beneath, at)
            else:
                inputs = {key: self._copies[position][0] for key, position in at.items()}
            partial = {key: self._input_gates(inputs[key], position, number) for key, position in at.items()}
            outputs: list[_Cells] = []
            for step in range(self._steps):
                gates = self._gates({key: x[step] for key, x in partial.items()}, hidden, at, number)
                for key, position in at.items():
                    with self._wires.on(position):
                        hidden[key], cell[key] = _cell(gates[key], cell[key])
                outputs.append(dict(hidden))
            joined: _Cells = {}
            for key, position in at.items():
                with self._wires.on(position):
                    joined[key] = tf.stack([output[key] for output in outputs], axis=1)
            above.append(joined)
        return above

    def _zeros(self, position: int, columns: int) -> Any:
        with self._wires.on(position):
            return tf.zeros([self._batch, columns], self._dtype)

    def _input_gates(self, x: Any, position: int, number: int) -> list[Any]:
        """Return [steps] what the input adds to the gates, for all steps in one product."""
        with self._wires.on(position):
            weights = tf.reshape(self._copies[position][1][number], [self._rows, 4 * self._columns])
            product = tf.matmul(tf.reshape(x, [-1, self._rows]), weights)
            return list(tf.unstack(tf.reshape(product, [self._batch, self._steps, -1]), axis=1))

    def _gates(self, partial: _Cells, hidden: _Cells, at: dict[tuple[int, int], int], number: int) -> _Cells:
        """Return the gates of one step: products with the input and with the hidden state, summed over d."""
        if hidden:
            read = self._along_d(hidden, at, at)
        else:
            read = {key: self._zeros(position, self._rows) for key, position in at.items()}
        sums: _Cells = {}
        for key, position in at.items():
            with self._wires.on(position):
                # The gradient of u is taken apart, as one product for all steps: here it is a constant.
                product = tf.matmul(read[key], tf.stop_gradient(self._recurrent[position][number]))
                sums[key] = partial[key] + product
            self._inner.setdefault((position, number), []).append((read[key], sums[key]))
        gates: _Cells = {}
        for e in range(self._parts[3]):
            column = [(d, e) for d in range(self._parts[2])]
            totals = self._wires.summed([(at[key], sums[key]) for key in column])
            for key in column:
                with self._wires.on(at[key]):
                    bias = tf.reshape(self._copies[at[key]][2][number], [-1])
                    gates[key] = tf.nn.bias_add(totals[at[key]], bias)
        return gates

    def _along_d(self, x: _Cells, source: dict[tuple[int, int], int], target: dict[tuple[int, int], int]) -> _Cells:
        """Return units, written in parts along e, in the parts along d in which they are read as inputs."""
        result: _Cells = {}
        for (d, e), position in target.items():
            low, high = d * self._rows, (d + 1) * self._rows
            pieces = []
            for other in range(self._parts[3]):
                first, last = other * self._columns, (other + 1) * self._columns
                begin, end = max(low, first), min(high, last)
                if begin < end:
                    whole = x[d, other]
                    with self._wires.on(source[d, other]):
                        piece = whole if (begin, end) == (first, last) else whole[..., begin - first : end - first]
                    pieces.append(self._wires.send(piece, source[d, other], position))
            with self._wires.on(position):
                result[d, e] = pieces[0] if len(pieces) == 1 else tf.concat(pieces, -1)
        return result

    def gradients(self, dy: Sequence[Any]) -> tuple[dict[int, list[Any]], int]:
        """Return by position the gradients of its copies of x, w, u and bias, and the bytes that went back for them.

        dy: [positions] the gradient of the output.
        """
        positions = list(self._grid.values())
        wanted = [
            *(x for position in positions for x in self._copies[position]),
            *(sums for steps in self._inner.values() for _, sums in steps),
            *self._wires.sent,
        ]
        # The outputs of one of the copies along d: the others would count them again.
        outputs = list(self._outputs.values())
        found = tf.gradients(
            outputs, wanted, [dy[position] for position in self._outputs], colocate_gradients_with_ops=True
        )
        moved_bytes = total_bytes([x for x in found[len(found) - len(self._wires.sent) :] if x is not None])
        remaining = iter(found)
        copies = {p: [self._or_zeros(next(remaining), x, p) for x in self._copies[p]] for p in positions}
        gates = {
            key: [self._or_zeros(next(remaining), sums, key[0]) for _, sums in steps]
            for key, steps in self._inner.items()
        }
        return {p: self._of_inputs(p, copies[p], gates) for p in positions}, moved_bytes

    def _of_inputs(self, position: int, copies: list[Any], gates: dict[tuple[int, int], list[Any]]) -> list[Any]:
        """Return the gradients of x, w, u and bias: u's as one product for all steps of a layer."""
        dx, dw, d_bias = copies
        with self._wires.on(position):
            du = []
            for number in range(dw.shape.as_list()[0]):
                read = [hidden for hidden, _ in self._inner[position, number]]
                du.append(tf.matmul(tf.concat(read, 0), tf.concat(gates[position, number], 0), transpose_a=True))
            return [dx, dw, tf.reshape(tf.stack(du), dw.shape), d_bias]

    def _or_zeros(self, gradient: Any, x: Any, position: int) -> Any:
        with self._wires.on(position):
            return tf.zeros(x.shape, x.dtype) if gradient is None else tf.convert_to_tensor(gradient)


def _cell(gates: Any, cell: Any) -> tuple[Any, Any]:
    """Return the hidden state and the cell after a step."""
    columns = cell.shape.as_list()[-1]
    sigmoids, candidate = tf.split(gates, [3 * columns, columns], axis=1)
    into, forget, out = tf.split(tf.sigmoid(sigmoids), 3, axis=1)
    cell = forget * cell + into * tf.tanh(candidate)
    return out * tf.tanh(cell), cell
