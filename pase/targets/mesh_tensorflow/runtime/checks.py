"""Checks of a program: what Mesh-TensorFlow would compute wrongly without a word, and numbers that are not finite.

No update follows from such a number, and the layer where the first one arose is found.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pase.errors import ProgramError
from pase.sharding.layouts import HOST
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh
from pase.targets.mesh_tensorflow.primitives.parts import Reshard
from pase.targets.mesh_tensorflow.runtime.reshard import FanOut, layout_of_tensor

_OF_MESH_TENSORFLOW = (mtf.ops.EinsumOperation, mtf.ops.BinaryOpWithBroadcasting)
"""Operations that people write out and that check nothing; ours check themselves (a window's dim has two extents)."""


def check_operations(graph: Any, meshes: Sequence[LayerMesh]) -> None:
    """Raise ProgramError for an operation on two meshes, a dim of two extents, an axis that splits nothing."""
    names: dict[LayerMesh, set[str]] = {mesh: set() for mesh in meshes}
    for operation in graph.operations:
        tensors = [*operation.inputs, *operation.outputs]
        for tensor in tensors:
            names[tensor.mesh] |= set(tensor.shape.dimension_names)
        if isinstance(operation, FanOut):
            names[operation.mesh] |= operation.named
        if isinstance(operation, _OF_MESH_TENSORFLOW):
            _check_one_mesh(operation)
            _check_extents(operation, tensors)
    for mesh in meshes:
        for axis, size in mesh.devices.axes[: _num_splits(mesh)]:
            if axis not in names[mesh]:
                raise ProgramError(
                    f"layer {mesh.layer!r} has {size} parts along {axis!r}, which is a dim of none of its tensors; "
                    "use the names of its dims as axes"
                )


def _num_splits(mesh: LayerMesh) -> int:
    return len(mesh.devices.axes) - mesh.devices.has_replicas


def _check_one_mesh(operation: Any) -> None:
    for x in operation.inputs:
        if x.mesh is not operation.mesh:
            raise ProgramError(
                f"operation {operation.name!r} reads tensors of two meshes, those of layers {operation.mesh.layer!r} "
                f"and {x.mesh.layer!r}; reshard one of them"
            )


def _check_extents(operation: Any, tensors: Sequence[Any]) -> None:
    extents: dict[str, int] = {}
    for tensor in tensors:
        for dim in tensor.shape.dims:
            if extents.setdefault(dim.name, dim.size) != dim.size:
                raise ProgramError(
                    f"operation {operation.name!r} of layer {operation.mesh.layer!r} has dim {dim.name} with extents "
                    f"{extents[dim.name]} and {dim.size}; give it one"
                )


class Gate:
    """Lets gradients through once the loss and all gradients of the step are known to be finite.

    A step of which one is not changes nothing: its weights are there to find out where that began.
    """

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._checks: list[Any] = []
        self._opened: Any = None

    def check(self, x: Any) -> None:
        """Have a tensor checked."""
        _Check(x, self._checks)

    def passed(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the gradients, each to be had when all were checked."""
        for gradient in gradients.values():
            self.check(gradient)
        return {name: _Pass(gradient, self).outputs[0] for name, gradient in gradients.items()}

    @property
    def opened(self) -> Any:
        """The operation that runs after all checks; made when the first gradient is lowered."""
        if self._opened is None:
            with tf.device(self._host):
                self._opened = tf.group(self._checks)
        return self._opened


class _Check(mtf.Operation):
    """Fails where a tensor is not finite; every part is checked on one of the devices that hold it."""

    def __init__(self, x: Any, checks: list[Any]) -> None:
        super().__init__([x], name="check")
        self._checks = checks

    def lower(self, lowering: Any) -> None:
        (x,) = self.inputs
        slices = lowering.tensors[x].to_laid_out_tensor().tensor_list
        parts = layout_of_tensor(x).parts
        for position, (slice_, device) in enumerate(zip(slices, x.mesh.device_names, strict=True)):
            if parts.index(parts[position]) == position:
                with tf.device(device):
                    self._checks.append(tf.check_numerics(slice_, "not finite").op)


class _Pass(mtf.Operation):
    """A tensor, once the gate is open."""

    def __init__(self, x: Any, gate: Gate) -> None:
        super().__init__([x], name="pass")
        self._gate = gate
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering: Any) -> None:
        (x,) = self.inputs
        implementation = lowering.mesh_impl(self)
        with tf.control_dependencies([self._gate.opened]):
            passed = implementation.slicewise(tf.identity, lowering.tensors[x])
        lowering.set_tensor_lowering(self.outputs[0], passed)


def first_not_finite(
    session: Any,
    lowering: Any,
    operations: Sequence[Any],
    *,
    num_forward: int,
    weights: Mapping[Any, str],
    feeds: Mapping[Any, Any],
) -> str:
    """Return in words where numbers that are not finite arose first, "" where all are finite.

    operations: of the graph, in order; num_forward: how many of them end in the loss, the others being gradients.
    weights: names of those that are trained, by their operations. feeds: of the step that failed.
    """
    checked, flags = [], []
    for i, operation in enumerate(operations):
        # What only moves numbers makes none; and the padding of a maximum is not finite.
        slices = [] if isinstance(operation, Reshard) else _slices(lowering, operation)
        if slices:
            checked.append((i, operation))
            flags.append(_all_finite(slices))
    for (i, operation), is_finite in zip(checked, session.run(flags, feeds), strict=True):
        if not np.all(is_finite):
            return _place(operation, weights, is_forward=i < num_forward)
    return ""


def _slices(lowering: Any, operation: Any) -> list[Any]:
    lowered = [lowering.tensors[x].to_laid_out_tensor() for x in operation.outputs if x.dtype.is_floating]
    return [slice_ for x in lowered for slice_ in x.tensor_list]


def _all_finite(slices: Sequence[Any]) -> list[Any]:
    flags = []
    for slice_ in slices:
        with tf.device(slice_.device):
            flags.append(tf.reduce_all(tf.is_finite(slice_)))
    return flags


def _place(operation: Any, weights: Mapping[Any, str], *, is_forward: bool) -> str:
    mesh = operation.mesh
    if operation in weights:
        return f"weight {weights[operation]!r} of layer {mesh.layer!r}"
    if not is_forward:
        return f"the gradients in layer {mesh.layer!r}"
    return "the batch" if mesh.devices.devices == (HOST,) else f"the output of layer {mesh.layer!r}"
