"""`lstm`: a stack of LSTM layers over a sequence; layers, batch, steps, inputs and units may all be split."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers.lstm_chain import Chain, Grid
from pase.targets.mesh_tensorflow.runtime.layers.lstm_wires import Wires, total_bytes

GATES = mtf.Dimension("gates", 4)
"""Input, forget and output gate, and the candidate, in this order."""

_CHAINED = ("l", "s", "d", "e")


class _Lstm(mtf.Operation):
    """Inputs: x [b, s, d], w and u [l, d, gates, e], bias [l, gates, e]. Output: [b, s, e] of the last layer."""

    def __init__(self, inputs: Sequence[Any], out: Sequence[Any]) -> None:
        super().__init__(list(inputs), name="lstm")
        self._outputs = [mtf.Tensor(self, mtf.Shape(list(out)), inputs[0].dtype)]
        self.chains: list[Chain] = []

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the gradients of the input and of the weights."""
        return list(_LstmGradient(self, grad_ys[0]).outputs)

    def lower(self, lowering: Any) -> None:
        """Run the chains of devices that hold one part of the batch each."""
        implementation = lowering.mesh_impl(self)
        slices = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in self.inputs]
        results: list[Any] = [None] * implementation.size
        with _exchange() as scope:
            for grid in _grids(self.mesh):
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
        with _exchange() as scope:
            for chain in self._forward.chains:
                wires = Wires(self.mesh)
                found = chain.gradients(slices, wires)
                implementation.traffic.add(scope, total_bytes(wires.sent))
                implementation.traffic.keep(wires.sent)
                for position, gradients in found.items():
                    for column, gradient in zip(columns, gradients, strict=True):
                        column[position] = gradient
        axes = [axis.name for axis in implementation.shape.dims]
        for tensor, column in zip(self.outputs, columns, strict=True):
            lacking = _names_of(self.inputs) - _names_of([tensor])
            if tensor is self.outputs[3]:
                # All devices along d have the whole gradient of the gates.
                lacking -= {"d"}
            partial = [i for i, name in enumerate(axes) if name in lacking]
            value = implementation.LaidOutTensor(column)
            if partial:
                value = mtf.ops.LazyAllreduceSum(implementation, value, partial)
            lowering.set_tensor_lowering(tensor, value)


@contextmanager
def _exchange() -> Iterator[str]:
    """Name operations as parts of an exchange within the layer; give the scope's name."""
    with tf.name_scope("all_reduce"):
        yield tf.get_default_graph().get_name_scope()


def _names_of(tensors: Sequence[Any]) -> set[str]:
    return {name for x in tensors for name in x.shape.dimension_names}


def _grids(mesh: Any) -> list[Grid]:
    """Return the positions of each part of the batch (and each replica) by their coordinates along l, s, d and e."""
    found: dict[tuple[tuple[str, int], ...], Grid] = defaultdict(dict)
    for position, point in enumerate(mesh.devices.coordinates):
        key = tuple((name, coordinate) for name, coordinate in point.items() if name not in _CHAINED)
        layer, step, row, column = (point.get(name, 0) for name in _CHAINED)
        found[key][layer, step, row, column] = position
    return list(found.values())


def lstm(x: Any, w: Any, u: Any, bias: Any, out: Sequence[Any]) -> Any:
    """Return the last of a stack of LSTM layers over x, dims [b, s, d] (Hochreiter and Schmidhuber 1997; forget gates).

    w, u: weights of the input and of the previous hidden state, dims [l, d, GATES, e]; bias: [l, GATES, e]; out:
    [b, s, e]; d and e have one extent. State is zero at first. Where l or s is split, states are handed on, layer
    after layer and step after step; where d or e is, every step adds up gates and re-lays the hidden state.
    """
    return _Lstm([x, w, u, bias], out).outputs[0]
