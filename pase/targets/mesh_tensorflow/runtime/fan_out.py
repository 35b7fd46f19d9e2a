"""`fan_out`: a tensor for several readers; their gradients are added, parts of sums before these are summed.

Hewett and Grady (2020) call it the broadcast, whose adjoint is the sum.
"""

from collections.abc import Sequence
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf


class FanOut(mtf.Operation):
    """Gives each reader of a tensor an output of its own, so that all gradients come together in one place.

    over: names of the dims of the mesh whose parts have parts of the gradient; by default all that the tensor lacks.
    """

    def __init__(self, x: Any, over: Sequence[str] | None = None) -> None:
        super().__init__([x], name="fan_out")
        self.named = frozenset(over or ())
        axes = x.mesh.devices.axes
        lacking = [name for name, _ in axes[: len(axes) - x.mesh.devices.has_replicas]]
        names = self.named if over is not None else frozenset(lacking) - frozenset(x.shape.dimension_names)
        self.over = frozenset(names)
        self._outputs: list[Any] = []

    def new_output(self) -> Any:
        """Return the tensor for another reader."""
        (x,) = self.inputs
        self._outputs.append(mtf.Tensor(self, x.shape, x.dtype, index=len(self._outputs)))
        return self._outputs[-1]

    def gradient(self, grad_ys: Sequence[Any]) -> list[Any]:
        """Return the sum of the readers' gradients."""
        found = [dy for dy in grad_ys if dy is not None]
        return found if len(found) == 1 else _Sum(found).outputs

    def lower(self, lowering: Any) -> None:
        """Give every reader what is there."""
        for y in self.outputs:
            lowering.set_tensor_lowering(y, lowering.tensors[self.inputs[0]])


class _Sum(mtf.Operation):
    """The sum of some tensors: partial sums over the same axes of the mesh are added before they are summed, once."""

    def __init__(self, xs: Sequence[Any]) -> None:
        super().__init__(list(xs), name="sum_of_gradients")
        self._outputs = [mtf.Tensor(self, xs[0].shape, xs[0].dtype)]

    def lower(self, lowering: Any) -> None:
        """Add on each device, sum over each group of axes, add the results."""
        implementation = lowering.mesh_impl(self)
        terms: dict[tuple[int, ...], list[Any]] = {(): []}
        for x in self.inputs:
            found = lowering.tensors[x]
            is_lazy = isinstance(found, mtf.ops.LazyAllreduceSum)
            axes = tuple(sorted(found.mesh_axes)) if is_lazy else ()
            terms.setdefault(axes, []).append(found.laid_out_input if is_lazy else found)

        def added(xs: Sequence[Any]) -> Any:
            return xs[0] if len(xs) == 1 else implementation.slicewise(lambda *own: tf.add_n(own), *xs)

        whole = terms.pop(())
        sums = [implementation.allreduce(added(parts), list(axes), "SUM") for axes, parts in terms.items()]
        lowering.set_tensor_lowering(self.outputs[0], added([*sums, *whole]))


def fan_out(x: Any, over: Sequence[Any]) -> Any:
    """Return x for its readers, whose gradients are summed once.

    over: the dims of its mesh that its gradient is summed over: what a reader leaves in as many parts is added first.
    """
    return FanOut(x, [dim.name for dim in over]).new_output()
