"""Update rules applied to a program: each weight's in its own mesh, its state laid out like the weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pase.targets.mesh_tensorflow.primitives.mesh import assign_slice
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.optimisers import Rule


class _HostScalar(mtf.Operation):
    """A number on the host, that every device of a mesh uses."""

    def __init__(self, mesh: Any, value: Any) -> None:
        super().__init__([], mesh=mesh, name="host_scalar")
        self._value = value
        self._outputs = [mtf.Tensor(self, mtf.Shape([]), value.dtype)]

    def lower(self, lowering: Any) -> None:
        """Give every device the host's tensor."""
        implementation = lowering.mesh_impl(self)
        lowering.set_tensor_lowering(self.outputs[0], implementation.LaidOutTensor([self._value] * implementation.size))


@dataclass(frozen=True, slots=True)
class _MeshMaths:
    """`Maths` on Mesh-TensorFlow's tensors. dims: of the weight."""

    dims: Sequence[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    def sqrt(self, x: Any) -> Any:
        return mtf.sqrt(x)

    def at_least(self, x: Any, floor: float) -> Any:
        return mtf.cwise(lambda part: tf.maximum(part, tf.constant(floor, part.dtype)), [x], name="at_least")

    def mean(self, x: Any, dims: Sequence[int]) -> Any:
        lost = {self.dims[i].name for i in dims}
        kept = [dim for dim in x.shape.dims if dim.name not in lost]
        return mtf.reduce_mean(x, output_shape=mtf.Shape(kept))


@dataclass(slots=True)
class Updates:
    """What a rule adds to a program.

    operations: that assign. state: by weight and slot, the tensors that are kept. placeholders: of the scalars.
    """

    rule: Rule
    operations: list[Any] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    placeholders: dict[str, Any] = field(default_factory=dict)

    def feeds(self, step: int, learning_rate: float) -> dict[Any, float]:
        """Return what to feed for a step, counted from 1."""
        scalars = self.rule.scalars(step, learning_rate)
        return {placeholder: scalars[name] for name, placeholder in self.placeholders.items()}


def add_updates(
    rule: Rule,
    weights: Mapping[str, Any],
    gradients: Mapping[str, Any],
    *,
    dtype: Any,
    host: str,
    new_name: Callable[[str], str],
) -> Updates:
    """Declare the update of every weight that has a gradient, and the variables that it needs.

    host: device of the scalars. new_name: makes a name that TensorFlow accepts and no other variable has.
    """
    updates = Updates(rule)
    with tf.device(host):
        for name in rule.scalars(1, 1.0):
            updates.placeholders[name] = tf.placeholder(dtype, [], name=f"update_{name}")
    scalars: dict[Any, dict[str, Any]] = {}
    for name, gradient in gradients.items():
        weight = weights[name]
        mesh, dims = weight.mesh, weight.shape.dims
        if mesh not in scalars:
            scalars[mesh] = {key: _HostScalar(mesh, x).outputs[0] for key, x in updates.placeholders.items()}
        state = {
            slot: mtf.get_variable(
                mesh,
                new_name(f"{name}/{slot}"),
                mtf.Shape([dims[i] for i in kept]),
                dtype=dtype,
                initializer=tf.zeros_initializer(),
                trainable=False,
            )
            for slot, kept in rule.slots(tuple(dim.size for dim in dims)).items()
        }
        after, state_after = rule.update(_MeshMaths(dims), weight, gradient, state, scalars[mesh])
        updates.state[name] = state
        pairs = [(weight, after), *((state[slot], value) for slot, value in state_after.items())]
        updates.operations += [mtf.assign(old, new, assign_fn=assign_slice) for old, new in pairs]
    return updates
