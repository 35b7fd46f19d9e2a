"""`Shardwise`: an operation that runs a TensorFlow function on every shard and knows what is left to add up."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pase.errors import RuntimeFailure
from pase.targets.mesh_tensorflow.runtime.compat import mtf

Gradient = Callable[[Any], Sequence[Any]]
"""Takes the gradient of the output, returns those of the inputs (None for one that has none)."""


class Shardwise(mtf.Operation):
    """Runs ``function(*slices)`` on each device.

    shape, dtype: of the output. partial_over: names of dims whose split leaves partial sums in the output; they are
    added when somebody needs the sum. per_position: [positions] a value to pass as the first argument, such as
    where the shard begins. gradient: explicit, because Mesh-TensorFlow's generic one ignores partial sums.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        shape: Any,
        name: str,
        dtype: Any = None,
        partial_over: Iterable[str] = (),
        per_position: Callable[[], Sequence[Any]] | None = None,
        gradient: Gradient | None = None,
    ) -> None:
        mesh = inputs[0].mesh
        for x in inputs:
            if x.mesh is not mesh:
                raise RuntimeFailure(
                    f"{name!r} reads tensors of two meshes, those of layers {mesh.layer!r} and {x.mesh.layer!r}; "
                    "reshard one of them"
                )
        super().__init__(list(inputs), mesh=mesh, name=name)
        self._function = function
        self._partial_over = frozenset(partial_over)
        self._per_position = per_position
        self._gradient = gradient
        self._outputs = [mtf.Tensor(self, mtf.ops.convert_to_shape(shape), dtype or inputs[0].dtype)]

    @property
    def has_gradient(self) -> bool:
        """Whether anything flows back."""
        return self._gradient is not None

    def gradient(self, grad_ys: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs."""
        assert self._gradient is not None
        return self._gradient(grad_ys[0])

    def lower(self, lowering: Any) -> None:
        """Run the function on each device."""
        implementation = lowering.mesh_impl(self)
        columns = [lowering.tensors[x] for x in self.inputs]
        if self._per_position is not None:
            columns.insert(0, implementation.LaidOutTensor(list(self._per_position())))
        y = implementation.slicewise(self._function, *columns)
        axes = [i for i, axis in enumerate(implementation.shape.dims) if axis.name in self._partial_over]
        if axes:
            y = mtf.ops.LazyAllreduceSum(implementation, y, axes)
        lowering.set_tensor_lowering(self.outputs[0], y)


def names_of(x: Any) -> frozenset[str]:
    """Return the names of a tensor's dims."""
    return frozenset(x.shape.dimension_names)


def begins(mesh: Any, dim: Any) -> list[int]:
    """Return [positions] where each device's range of a dim begins."""
    size = dim.size // mesh.devices.size(dim.name)
    return [point.get(dim.name, 0) * size for point in mesh.devices.coordinates]
