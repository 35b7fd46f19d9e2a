"""`lstm`: layers of cells over a sequence; layers, batch, steps, inputs and units may all be split."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.chain import Chain, Grid, Wires, total_bytes
from pase.targets.mesh_tensorflow.runtime.layers.local import names_of, partial_sums

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
    return _Lstm([x, w, u, bias], out, chained).outputs[0]


# -- operations


class _Lstm(mtf.Operation):
    """Inputs: a sequence, weights of the input and of the hidden state, biases. Output: that of the last layer.

    chained: the names of the dims along which devices compute one part of the batch together.
    """

    def __init__(self, operands: Sequence[Any], out: Sequence[Any], chained: tuple[str, str, str, str]) -> None:
        super().__init__(list(operands), name="recurrent")
        self.chained = chained
        self._outputs = [mtf.Tensor(self, mtf.Shape(list(out)), operands[0].dtype)]
        self.chains: list[Chain] = []

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of the inputs."""
        return list(_LstmGradient(self, *grad_ys).outputs)

    def lower(self, lowering: Any) -> None:
        """Run the chains of devices that hold one part of the batch each."""
        implementation = lowering.mesh_impl(self)
        x, *weights = (lowering.tensors[x].to_laid_out_tensor().tensor_list for x in self.inputs)
        with _exchange() as scope:
            for grid in _grids(self.mesh, self.chained):
                wires = Wires(self.mesh)
                chain = Chain(grid, wires, x, weights)
                self.chains.append(chain)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
        found = {position: [own] for chain in self.chains for position, own in chain.results.items()}
        lowering.set_tensor_lowering(self.outputs[0], _laid_out(implementation, self.outputs[0], found, 0))


class _LstmGradient(mtf.Operation):
    """Inputs: those of the forward operation, and the gradient of its output. Outputs: the inputs' gradients."""

    def __init__(self, forward: _Lstm, dy: Any) -> None:
        super().__init__([*forward.inputs, dy], name="recurrent_gradient")
        self._forward = forward
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward.inputs)]

    def lower(self, lowering: Any) -> None:
        """Go back through the chains; what a device holds a copy of, it has a partial gradient of."""
        implementation = lowering.mesh_impl(self)
        dy = lowering.tensors[self.inputs[-1]].to_laid_out_tensor().tensor_list
        found: dict[int, list[Any]] = {}
        with _exchange() as scope:
            for chain in self._forward.chains:
                wires = Wires(self.mesh)
                found |= chain.gradients(dy, wires)
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
