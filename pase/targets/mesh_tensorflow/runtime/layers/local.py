"""`Shardwise`: a TensorFlow function of every device's slices, differentiated by TensorFlow, on every device too.

What is ours of its gradient is which of its results are parts of sums: those over the split dims that an operand lacks,
because devices that hold the same part of it use that part for different points of those dims.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf

Gradient = Callable[[Any], Sequence[Any]]
"""Takes the gradient of the output, returns those of the inputs (None for one that has none)."""


class Shardwise(mtf.Operation):
    """Runs ``function(*slices)`` on each device.

    Args:
        function: of one slice of each input, returns one tensor.
        inputs: tensors of one mesh.
        shape: of the output.
        name: of the operation.
        partial_over: names of dims whose split leaves partial sums in the output; they are added when somebody needs
            the sum.
        per_position: returns [positions] a value to pass as the first argument, such as where the shard begins.
        gradient: a fused one of the whole operation, instead of TensorFlow's own of the function.
        recompute: whether the function runs again when its gradient is taken, so that only its arguments are kept.
        is_constant: whether nothing flows back.
        is_move: whether it computes nothing of the points, so that parts of a sum are moved on their way back, and
            added where the sum is needed.

    Raises:
        ProgramError: the inputs are on two meshes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        shape: Any,
        name: str,
        partial_over: Iterable[str] = (),
        per_position: Callable[[], Sequence[Any]] | None = None,
        gradient: Gradient | None = None,
        recompute: bool = False,
        is_constant: bool = False,
        is_move: bool = False,
    ) -> None:
        check_one_mesh(repr(name), inputs)
        super().__init__(list(inputs), mesh=inputs[0].mesh, name=name)
        self._function = function
        self.partial_over = frozenset(partial_over)
        self._per_position = per_position
        self._gradient = gradient
        # What moves alone is as cheap to do again.
        self._recompute = recompute or is_move
        self.is_move = is_move
        self._is_constant = is_constant
        self._is_recorded = False
        self._records: list[Record] = []
        self._outputs = [mtf.Tensor(self, mtf.ops.convert_to_shape(shape), inputs[0].dtype)]

    @property
    def has_gradient(self) -> bool:
        """Whether anything flows back."""
        return not self._is_constant

    def gradient(self, grad_ys: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs."""
        if self._gradient is not None:
            return self._gradient(grad_ys[0])
        # The forward pass is lowered after all gradients were declared.
        self._is_recorded = not self._recompute
        found = iter(_LocalGradient(self, grad_ys[0]).outputs)
        return [next(found) if x.dtype.is_floating else None for x in self.inputs]

    def lower(self, lowering: Any) -> None:
        """Run the function on each device."""
        implementation = lowering.mesh_impl(self)
        y = implementation.slicewise(self._recorded if self._is_recorded else self._function, *self.columns(lowering))
        lowering.set_tensor_lowering(self.outputs[0], partial_sums(implementation, y, self.partial_over))

    def columns(self, lowering: Any) -> list[Any]:
        """Return the arguments of the function, each for all positions."""
        found = [lowering.tensors[x] for x in self.inputs]
        if self._per_position is not None:
            found.insert(0, lowering.mesh_impl(self).LaidOutTensor(list(self._per_position())))
        return found

    def _recorded(self, *arguments: Any) -> Any:
        self._records.append(Record(self._function, arguments))
        return self._records[-1].result

    def record(self, position: int, arguments: Sequence[Any]) -> "Record":
        """Return the function's run at a position: the forward pass's, or another one."""
        return Record(self._function, arguments) if self._recompute else self._records[position]


class Record:
    """A run of a function of tensors, of one result or several, whose gradient TensorFlow can take."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        own: list[Any] = []
        for x in arguments:
            # One tensor in two places has a gradient in each of them.
            own.append(tf.identity(x) if any(x is other for other in own) and isinstance(x, tf.Tensor) else x)
        self._operands = [x for x in own if isinstance(x, tf.Tensor) and x.dtype.is_floating]
        with tf.GradientTape() as self._tape:
            self._tape.watch(self._operands)
            self.result = function(*own)

    def gradients(self, dy: Any) -> list[Any]:
        """Return those of the floating-point arguments from those of the results; once."""
        found = self._tape.gradient(
            self.result, self._operands, output_gradients=dy, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return [_dense(gradient, x) for gradient, x in zip(found, self._operands, strict=True)]


def _dense(gradient: Any, x: Any) -> Any:
    """Return a gradient of rows that were looked up as that of the table."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, x.shape.as_list()[0])


class _LocalGradient(mtf.Operation):
    """TensorFlow's gradient of a function on each device. Inputs: those of the function, the gradient of its result."""

    def __init__(self, forward: Shardwise, dy: Any) -> None:
        super().__init__([*forward.inputs, dy], mesh=forward.mesh, name=f"{forward.name}_gradient")
        self._forward = forward
        operands = [x for x in forward.inputs if x.dtype.is_floating]
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(operands)]

    def lower(self, lowering: Any) -> None:
        """Take the gradient of what each device did; what it used for points of other dims is a part of a sum."""
        implementation = lowering.mesh_impl(self)
        forward = self._forward
        positions = implementation.LaidOutTensor(list(range(implementation.size)))

        def local(position: int, dy: Any, *arguments: Any) -> Any:
            return forward.record(position, arguments).gradients(dy)

        dy, summed = lowering.tensors[self.inputs[-1]], set[str]()
        if forward.is_move and isinstance(dy, mtf.ops.LazyAllreduceSum):
            summed = {implementation.shape.dims[axis].name for axis in dy.mesh_axes}
            dy = dy.laid_out_input
        columns = [positions, dy, *forward.columns(lowering)]
        found = implementation.slicewise(local, *columns).tensor_list
        names = {*forward.partial_over, *(name for x in (*forward.inputs, *forward.outputs) for name in names_of(x))}
        for i, tensor in enumerate(self.outputs):
            own = implementation.LaidOutTensor([gradients[i] for gradients in found])
            over = (names | summed) - names_of(tensor)
            lowering.set_tensor_lowering(tensor, partial_sums(implementation, own, over))


class Slices:
    """The slices of an operation's inputs: functions of them on each device, and reductions over a dim's devices."""

    def __init__(self, lowering: Any, operation: Any) -> None:
        self.implementation = lowering.mesh_impl(operation)
        self.inputs = [lowering.tensors[x].to_laid_out_tensor() for x in operation.inputs]

    def laid_out(self, values: Sequence[Any]) -> Any:
        """Return [positions] values as an argument of `each`."""
        return self.implementation.LaidOutTensor(list(values))

    def each(self, function: Callable[..., Any], *columns: Any) -> Any:
        """Return a function of slices on each device."""
        return self.implementation.slicewise(function, *columns)

    def reduced(self, x: Any, dims: Iterable[Any], how: str) -> Any:
        """Return the "SUM" or "MAX" over the devices along some dims, where they are split."""
        axes = _axes(self.implementation, [dim.name for dim in dims])
        return self.implementation.allreduce(x, axes, how) if axes else x

    def summed(self, x: Any, dims: Iterable[Any]) -> Any:
        """Return the sum over the devices along some dims, where they are split."""
        return self.reduced(x, dims, "SUM")

    def lazy(self, x: Any, dims: Iterable[Any]) -> Any:
        """Return what is to be added over the devices along some dims when somebody needs the sum."""
        return partial_sums(self.implementation, x, [dim.name for dim in dims])


def partial_sums(implementation: Any, x: Any, names: Iterable[str]) -> Any:
    """Return slices as parts of sums over the devices along some dims, where these are split."""
    axes = _axes(implementation, names)
    return mtf.ops.LazyAllreduceSum(implementation, x, axes) if axes else x


def _axes(implementation: Any, names: Iterable[str]) -> list[int]:
    """Return the numbers of the axes of a mesh that split some dims."""
    wanted = frozenset(names)
    return [i for i, axis in enumerate(implementation.shape.dims) if axis.name in wanted]


def check_one_mesh(what: str, tensors: Sequence[Any]) -> None:
    """Raise ProgramError, on behalf of an operation, where tensors are on two meshes."""
    mesh = tensors[0].mesh
    for x in tensors:
        if x.mesh is not mesh:
            raise ProgramError(
                f"{what} reads tensors of two meshes, those of layers {mesh.layer!r} and {x.mesh.layer!r}; "
                "reshard one of them"
            )


def names_of(x: Any) -> frozenset[str]:
    """Return the names of a tensor's dims."""
    return frozenset(x.shape.dimension_names)


def begins(mesh: Any, dim: Any) -> list[int]:
    """Return [positions] where each device's range of a dim begins."""
    size = dim.size // mesh.devices.size(dim.name)
    return [point.get(dim.name, 0) * size for point in mesh.devices.coordinates]
