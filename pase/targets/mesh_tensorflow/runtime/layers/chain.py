"""Layers of recurrent cells over a sequence on the devices that hold one part of the batch, and their gradients.

What a cell does in a step is TensorFlow's, and its gradient is too. Ours are the products of many steps at once, and
what goes between devices: states from step to step and from layer to layer; partial gates, where what is read is split
(d); each step's hidden state, where the units are (e), and backward the parts of its gradient.

Devices that differ along d alone compute the same gates, cells and hidden states: what they add up is whole before they
go on. Backward each of them therefore has the whole gradient of its gates too, and what is added up is the gradient of
the hidden state alone, over the units that it fed.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
        total = self.added(terms, root)
        return {position: self.send(total, root, position) for position, _ in terms}

    def added(self, terms: Sequence[tuple[int, Any]], target: int) -> Any:
        """Return at a position the sum of what some hold."""
        held = [self.send(x, position, target) for position, x in terms]
        with self.on(target):
            return held[0] if len(held) == 1 else tf.add_n(held)


def total_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors of known shapes."""
    return sum(int(x.shape.num_elements()) * int(x.dtype.size) for x in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one device computes in a step.

    step: given the gates and what the cell keeps, returns its units of the hidden state and what it keeps. terms: 2
    where what the input and what the hidden state add to the gates are told apart. keeps: "" for nothing.
    """

    step: Callable[..., tuple[Any, ...]]
    terms: int = 1
    keeps: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """How layers are made of slices.

    unpacked: given the slices of the weights, returns [cells] the matrices and biases of one device, the directions of
    a layer one after the other. scatters: whether the parts of the hidden state's gradient are added by the devices of
    its units, where d is not split; otherwise all of it is added. num_cells: of all devices, where states are told.
    has_first: whether the first hidden states and the first cells are given.
    """

    cell: Cell
    unpacked: Callable[..., list[list[Any]]]
    num_directions: int = 1
    scatters: bool = False
    num_cells: int = 0
    has_first: tuple[bool, bool] = (False, False)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A cell's steps in one part of the sequence.

    number: which of a device's cells it is. turn: its direction. at: where it runs. inputs: what it reads. reads,
    records: by step, the hidden state before it, along d, nothing for zeros; what the cell does.
    """

    number: int
    turn: int
    at: Positions
    inputs: Cells
    reads: dict[int, Cells]
    records: dict[int, dict[tuple[int, int], Record]]


class Chain:
    """The forward pass of one part of the batch, kept so that its gradients can be taken.

    x, weights, first: [positions] slices. results: by position, the output of the last layer [b, s, directions, e],
    which positions of other layers get from those of the last one, and the states after the last step.
    """

    def __init__(
        self,
        stack: Stack,
        grid: Grid,
        wires: Wires,
        x: Sequence[Any],
        weights: Sequence[Sequence[Any]],
        first: Sequence[Sequence[Any]],
    ) -> None:
        self._stack, self._grid, self._wires = stack, grid, wires
        self._parts = tuple(1 + max(point[i] for point in grid) for i in range(4))
        self._batch, self._num_steps = x[grid[0, 0, 0, 0]].shape.as_list()[:2]
        self._dtype = x[grid[0, 0, 0, 0]].dtype
        self._weights: dict[int, Record] = {}
        self._first: dict[int, list[list[Any]]] = {}
        for position in grid.values():
            with wires.on(position):
                self._weights[position] = Record(stack.unpacked, [column[position] for column in weights])
                self._first[position] = [tf.unstack(self._states_of(column[position])) for column in first]
        matrices = self._weights[grid[0, 0, 0, 0]].result
        self._num_layers = len(matrices) // stack.num_directions
        self._columns = weights[1][grid[0, 0, 0, 0]].shape.as_list()[-1]
        self._rows = matrices[0][1].shape.as_list()[0]
        # By layer, direction and part of s.
        self._runs: dict[tuple[int, int, int], _Run] = {}
        parts_of_s = range(self._parts[1])
        below = [{key: x[position] for key, position in self._at(0, s).items()} for s in parts_of_s]
        outputs: list[list[Cells]] = []
        states: list[tuple[Cells, Cells]] = []
        for layer in range(self._parts[0] * self._num_layers):
            below, outputs, after = self._layer(layer, below)
            states += after
        last = self._parts[0] - 1
        self.results: dict[int, list[Any]] = {}
        for (_, s, d, e), position in grid.items():
            source = grid[last, s, d, e]
            with wires.on(source):
                both = [of_direction[s][d, e] for of_direction in outputs]
                y = both[0] if len(both) == 1 else tf.stack(both, axis=2)
            self.results[position] = [wires.send(y, source, position)]
            if stack.num_cells:
                with wires.on(position):
                    for column in zip(*states, strict=True):
                        self.results[position] += [tf.stack([x[d, e] for x in column])] if column[0] else []

    def _states_of(self, x: Any) -> Any:
        """Return [cells, b, e] a slice of states, whose first dim is left out where it is one."""
        return tf.reshape(x, [self._stack.num_cells, self._batch, -1])

    def _at(self, part: int, s: int) -> Positions:
        """Return the positions that compute some layers' part of the steps."""
        return {(d, e): self._grid[part, s, d, e] for d in range(self._parts[2]) for e in range(self._parts[3])}

    def _of_cell(self, run: _Run, key: tuple[int, int]) -> list[Any]:
        """Return the matrices of a cell on a device, and its biases."""
        found: list[Any] = self._weights[run.at[key]].result[run.number]
        return found

    # -- forward

    def _layer(
        self, layer: int, below: Sequence[Cells]
    ) -> tuple[list[Cells], list[list[Cells]], list[tuple[Cells, Cells]]]:
        """Run one layer over all steps; below: [parts of s] what it reads, along d, where the layer below left it.

        Returns the same of this layer; of each direction, its output along e, and its states after the last step.
        """
        part, number = divmod(layer, self._num_layers)
        if part and number == 0:
            places = ((self._at(part - 1, s), self._at(part, s)) for s in range(self._parts[1]))
            below = [self._wires.send_all(x, *ends) for x, ends in zip(below, places, strict=True)]
        found = [self._run(layer, turn, below) for turn in range(self._stack.num_directions)]
        above: list[Cells] = []
        for s in range(self._parts[1]):
            above.append({})
            for key, position in self._at(part, s).items():
                with self._wires.on(position):
                    above[-1][key] = _joined([of_direction[s][key] for of_direction, _, _ in found])
        return above, [outputs for _, outputs, _ in found], [states for _, _, states in found]

    def _run(
        self, layer: int, turn: int, below: Sequence[Cells]
    ) -> tuple[list[Cells], list[Cells], tuple[Cells, Cells]]:
        """Run a cell over all steps, backwards where `turn` is 1; return what it adds to what `_layer` does."""
        part, number = divmod(layer, self._num_layers)
        above: list[Cells] = [{}] * self._parts[1]
        outputs: list[Cells] = [{}] * self._parts[1]
        before: Positions = {}
        read, kept, own = Cells(), Cells(), Cells()
        for s in _order(self._parts[1], turn):
            number_of_cell = number * self._stack.num_directions + turn
            at = self._at(part, s)
            run = _Run(number=number_of_cell, turn=turn, at=at, inputs=below[s], reads={}, records={})
            self._runs[layer, turn, s] = run
            read, kept = (
                [self._wires.send_all(state, before, at) for state in (read, kept)]
                if before
                else self._first_states(run)
            )
            before = at
            partial = {key: self._of_input(run, key) for key in at}
            hidden: dict[int, Cells] = {}
            along_d: dict[int, Cells] = {}
            for step in _order(self._num_steps, turn):
                gates = self._gates(run, {key: x[step] for key, x in partial.items()}, read)
                run.reads[step], run.records[step], own, found = read, {}, {}, Cells()
                for key, position in at.items():
                    with self._wires.on(position):
                        record = Record(self._stack.cell.step, [*gates[key], *([kept[key]] if kept else [])])
                    run.records[step][key] = record
                    own[key], *rest = record.result
                    if rest:
                        found[key] = rest[0]
                hidden[step], kept = own, found
                # Once for the next step and the next layer.
                read = along_d[step] = self._along_d(own, at)
            above[s], outputs[s] = self._stacked(along_d, at), self._stacked(hidden, at)
        return above, outputs, (own, kept if self._stack.cell.keeps == "cell" else {})

    def _first_states(self, run: _Run) -> tuple[Cells, Cells]:
        """Return the hidden state that the first step reads, along d, nothing for zeros; and what the cell keeps."""
        own = {key: iter(self._first[position]) for key, position in run.at.items()}
        hidden, cell = (
            {key: next(x)[run.number] for key, x in own.items()} if given else {} for given in self._stack.has_first
        )
        kept = {"hidden": hidden, "cell": cell, "": {}}[self._stack.cell.keeps]
        if self._stack.cell.keeps and not kept:
            kept = {key: self._zeros(position, self._columns) for key, position in run.at.items()}
        return self._along_d(hidden, run.at) if hidden else {}, kept

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
        w, _, *biases = self._of_cell(run, key)
        with self._wires.on(run.at[key]):
            product = tf.matmul(tf.reshape(run.inputs[key], [-1, w.shape.as_list()[0]]), w)
            if biases and key[0] == 0:
                # Where d is split, gates are sums, of which one term has the bias.
                product = tf.nn.bias_add(product, biases[0])
            return list(tf.unstack(tf.reshape(product, [self._batch, self._num_steps, -1]), axis=1))

    def _gates(self, run: _Run, partial: Cells, read: Cells) -> dict[tuple[int, int], list[Any]]:
        """Return the gates of one step, products with the input and with the hidden state, summed over d."""
        terms: dict[tuple[int, int], list[Any]] = {}
        for key, position in run.at.items():
            _, u, *biases = self._of_cell(run, key)
            with self._wires.on(position):
                product = tf.matmul(read[key], u) if read else None
                if self._stack.cell.terms == 1:
                    terms[key] = [partial[key] if product is None else partial[key] + product]
                    continue
                product = tf.zeros_like(partial[key]) if product is None else product
                terms[key] = [partial[key], tf.nn.bias_add(product, biases[1]) if biases else product]
        if self._parts[2] > 1:
            for e in range(self._parts[3]):
                column = [(d, e) for d in range(self._parts[2])]
                totals = self._wires.summed([(run.at[key], terms[key][0]) for key in column])
                terms |= {key: [totals[run.at[key]]] for key in column}
        return terms

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
            return _joined(pieces)

    # -- backward

    def gradients(
        self, dy: Sequence[Any] | None, d_states: Sequence[Sequence[Any] | None], wires: Wires
    ) -> dict[int, list[Any]]:
        """Return by position the gradients of its slices of x, of the weights and of the first states.

        That of x is a part of the sum over e, and zero where another device reads x; those of the weights are parts of
        sums over the batch and the steps; that of a bias is the same for all devices along d.

        Args:
            dy: [positions] that of the output; None if nothing reads it.
            d_states: likewise those of the hidden states and of the cells after the last step.
            wires: send what goes between devices.
        """
        back = _Backward(wires=wires, dy={}, d_states=[], of_weights=defaultdict(dict), of_first=defaultdict(dict))
        for position in self._grid.values():
            with wires.on(position):
                if dy is not None:
                    shape = [self._batch, self._num_steps, self._stack.num_directions, self._columns]
                    back.dy[position] = tf.reshape(dy[position], shape)
        for column in d_states:
            back.d_states.append({})
            for position in self._grid.values() if column else ():
                with wires.on(position):
                    assert column is not None
                    back.d_states[-1][position] = tf.unstack(self._states_of(column[position]))
        above: list[Cells] = [{} for _ in range(self._parts[1])]
        for layer in reversed(range(self._parts[0] * self._num_layers)):
            above = self._layer_gradients(layer, above, back)
        dx = {self._at(0, s)[key]: x for s, cells in enumerate(above) for key, x in cells.items()}
        found = {}
        for position in self._grid.values():
            of_cells, of_first = back.of_weights[position], back.of_first[position]
            with wires.on(position):
                if position not in dx:
                    x = self._runs[0, 0, 0].inputs[0, 0]
                    dx[position] = tf.zeros(x.shape, self._dtype)
                of_weights = self._weights[position].gradients([of_cells[i] for i in sorted(of_cells)])
                states = zip(*(of_first[i] for i in sorted(of_first)), strict=True)
                found[position] = [dx[position], *of_weights, *(tf.stack(column) for column in states)]
        return found

    def _layer_gradients(self, layer: int, above: Sequence[Cells], back: "_Backward") -> list[Cells]:
        """Go back through one layer; above: [parts of s] the gradient of what the next one read, nothing for the last.

        Returns the same of this layer's input: along d, a part of the sum over e, where the layer below is.
        """
        part, number = divmod(layer, self._num_layers)
        both = [self._run_gradients(layer, turn, above, back) for turn in reversed(range(self._stack.num_directions))]
        below: list[Cells] = []
        for s in range(self._parts[1]):
            at = self._at(part, s)
            below.append({})
            for key, position in at.items():
                with back.wires.on(position):
                    below[-1][key] = _added([of_direction[s][key] for of_direction in both])
            if part and number == 0:
                below[-1] = back.wires.send_all(below[-1], at, self._at(part - 1, s))
        return below

    def _run_gradients(self, layer: int, turn: int, above: Sequence[Cells], back: "_Backward") -> list[Cells]:
        """Go back through a cell; return what it adds to what `_layer_gradients` does."""
        is_last = layer == self._parts[0] * self._num_layers - 1
        below: list[Cells] = [{}] * self._parts[1]
        following: Positions = {}
        d_read, d_kept = Cells(), Cells()
        run = self._runs[layer, turn, 0]
        for s in _order(self._parts[1], 1 - turn):
            run, d_own = self._runs[layer, turn, s], Cells()
            if following:
                d_read, d_kept = (back.wires.send_all(state, following, run.at) for state in (d_read, d_kept))
            else:
                d_own, d_kept = self._state_gradients(run, back)
            following = run.at
            d_gates: dict[tuple[int, int], dict[int, list[Any]]] = {key: {} for key in run.at}
            for step in _order(self._num_steps, 1 - turn):
                d_hidden = self._hidden_gradient(run, self._read_gradients(run, above[s], d_read, step, back), back)
                is_read, found_read, found_kept = bool(above[s] or d_read), Cells(), Cells()
                for key, position in run.at.items():
                    with back.wires.on(position):
                        # The gradient that nothing reads but the output has no other term.
                        terms = [d_hidden[key]] if is_read else []
                        terms += [back.dy[position][:, step, turn]] if is_last and back.dy else []
                        terms += [d_own[key]] if d_own else []
                        dys = [_added(terms or [d_hidden[key]]), *([d_kept[key]] if d_kept else [])]
                        gradients = run.records[step][key].gradients(dys)
                        if d_kept:
                            found_kept[key] = gradients.pop()
                        d_gates[key][step] = gradients
                        if run.reads[step]:
                            found_read[key] = tf.matmul(
                                d_gates[key][step][-1], self._of_cell(run, key)[1], transpose_b=True
                            )
                d_own, d_read, d_kept = {}, found_read, found_kept
            below[s] = {key: self._product_gradients(run, key, d_gates[key], back) for key in run.at}
        self._first_gradients(run, d_read, d_kept, back)
        return below

    def _state_gradients(self, run: _Run, back: "_Backward") -> tuple[Cells, Cells]:
        """Return the gradients of the states after a cell's last step: of the hidden state, and of what is kept."""
        hidden, cell = (
            {key: given[position][run.number] for key, position in run.at.items()} if given else {}
            for given in back.d_states
        )
        if self._stack.cell.keeps and not cell:
            cell = {key: self._zeros(position, self._columns) for key, position in run.at.items()}
        return hidden, cell

    def _read_gradients(self, run: _Run, above: Cells, d_read: Cells, step: int, back: "_Backward") -> Cells:
        """Return the parts of the gradient of a step's hidden state, along d, sums over e.

        above: that of what the next layer read, of all steps and directions; d_read: that of what the next step read.
        Either may be nothing.
        """
        parts: Cells = {}
        for key, position in run.at.items():
            with back.wires.on(position):
                found = [above[key][:, step]] if above else []
                if found and self._stack.num_directions > 1:
                    found = [tf.split(found[0], self._stack.num_directions, axis=1)[run.turn]]
                found += [d_read[key]] if d_read else []
                # Nothing reads the last state of all: its place in the exchange is taken, by zeros.
                parts[key] = _added(found) if found else tf.zeros([self._batch, self._rows], self._dtype)
        return parts

    def _hidden_gradient(self, run: _Run, parts: Cells, back: "_Backward") -> Cells:
        """Return the gradient of a step's hidden state along e, from parts of sums over e along d."""
        at, wires = run.at, back.wires
        mine = [slice(e * self._columns, (e + 1) * self._columns) for e in range(self._parts[3])]
        if self._stack.scatters:
            held: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
            for (d, source), part in parts.items():
                for e in range(self._parts[3]):
                    with wires.on(at[d, source]):
                        held[d, e].append((at[d, source], part[:, mine[e]] if len(mine) > 1 else part))
            return {key: wires.added(terms, at[key]) for key, terms in held.items()}
        whole: Cells = {}
        for d in range(self._parts[2]):
            row = [(d, e) for e in range(self._parts[3])]
            sums = wires.summed([(at[key], parts[key]) for key in row])
            whole |= {key: sums[at[key]] for key in row}
        return {
            (d, e): self._gathered(
                wires,
                [(whole[other, e], other * self._rows, at[other, e]) for other in range(self._parts[2])],
                (mine[e].start, mine[e].stop),
                position,
            )
            for (d, e), position in at.items()
        }

    def _product_gradients(
        self, run: _Run, key: tuple[int, int], d_gates: Mapping[int, list[Any]], back: "_Backward"
    ) -> Any:
        """Return that of what a cell read, and keep those of its matrices and biases, each of all steps in one product.

        d_gates: by step, those of what the input and the hidden state add to the gates.
        """
        order = range(self._num_steps)
        with back.wires.on(run.at[key]):
            w, _, *biases = self._of_cell(run, key)
            terms = (tf.stack([d_gates[step][i] for step in order], axis=1) for i in range(self._stack.cell.terms))
            of_gates = [tf.reshape(x, [-1, w.shape.as_list()[1]]) for x in terms]
            zeros = tf.zeros([self._batch, self._rows], self._dtype)
            reads = tf.stack([run.reads[step].get(key, zeros) for step in order], axis=1)
            x = run.inputs[key]
            back.of_weights[run.at[key]][run.number] = [
                tf.matmul(tf.reshape(x, [-1, w.shape.as_list()[0]]), of_gates[0], transpose_a=True),
                tf.matmul(tf.reshape(reads, [-1, self._rows]), of_gates[-1], transpose_a=True),
                *(tf.reduce_sum(of_gates[i], 0) for i in range(len(biases))),
            ]
            return tf.reshape(tf.matmul(of_gates[0], w, transpose_b=True), x.shape)

    def _first_gradients(self, run: _Run, d_read: Cells, d_kept: Cells, back: "_Backward") -> None:
        """Keep the gradients of a cell's first states, where these are given."""
        has_hidden, has_cell = self._stack.has_first
        d_hidden = self._hidden_gradient(run, d_read, back) if has_hidden else {}
        for key, position in run.at.items():
            found = [[d_hidden[key]]] if has_hidden else []
            if self._stack.cell.keeps == "hidden" and has_hidden:
                found[0].append(d_kept[key])
            found += [[d_kept[key]]] if has_cell else []
            with back.wires.on(position):
                back.of_first[position][run.number] = [_added(terms) for terms in found]


@dataclass(slots=True, kw_only=True)
class _Backward:
    """What a backward pass is given by position, and what it finds: by position and cell."""

    wires: Wires
    dy: dict[int, Any]
    d_states: list[dict[int, list[Any]]]
    of_weights: dict[int, dict[int, list[Any]]]
    of_first: dict[int, dict[int, list[Any]]]


def _order(extent: int, turn: int) -> range:
    """Return the numbers below one, from the last on where `turn` is 1."""
    return range(extent - 1, -1, -1) if turn else range(extent)


def _joined(pieces: Sequence[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, -1)


def _added(terms: Sequence[Any]) -> Any:
    return terms[0] if len(terms) == 1 else tf.add_n(terms)
