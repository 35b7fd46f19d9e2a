"""`Program`: what an emitted file declares its layers on, and the updates of their weights, each in its own mesh."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pase.errors import ProgramError
from pase.sharding.layouts import HOST, DeviceMesh, check_shared, check_split, device_mesh
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import Assign, LayerMesh, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import Devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.layers.movement import FanOut, reshard
from pase.targets.training.counted import Key
from pase.targets.training.data import DataInput
from pase.targets.training.optimisers import Rule


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
        updates.operations += [Assign(old, new) for old, new in pairs]
    return updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor that is kept from step to step; tensor: on the mesh of the layer that declared it.

    mean, deviation: of its initial values. handed: the tensor as that layer reads it, from which others get it.
    is_frozen: whether steps do not change it.
    """

    name: str
    tensor: Any
    handed: Any
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0
    is_frozen: bool = False


class Program:
    """Collects the layers of a network: meshes, inputs, weights.

    num_devices: devices of every mesh. dtype: "float32" or "float64". devices: which ones, by default virtual CPUs.
    Must be used, up to the end of `Training`'s construction, within ``ProgramGraph().as_default()``.
    """

    def __init__(self, *, num_devices: int, dtype: str = "float32", devices: Devices | None = None) -> None:
        self.num_devices = num_devices
        self.dtype = tf.as_dtype(dtype)
        self.graph = mtf.Graph()
        self.weights: dict[str, Weight] = {}
        self.inputs: list[DataInput] = []
        self.placeholders: dict[str, Any] = {}
        self.meshes: list[LayerMesh] = []
        self._mask_key: Any = None
        self.devices = devices or virtual_cpus(num_devices)
        self._tf_names: set[str] = set()
        self._host = self._new_mesh("host", DeviceMesh((), (HOST,)))

    def mesh(self, layer: str, axes: Sequence[tuple[str, int]], devices: Sequence[int] | None = None) -> LayerMesh:
        """Return the mesh of a layer: (dim, number of parts) for each dim that is split.

        devices: a permutation of the program's devices, row-major over the axes and then the replicas.
        Raises ProgramError where the parts do not divide the devices or the list is no permutation.
        """
        return self._new_mesh(layer, device_mesh(layer, axes, self.num_devices, devices))

    def floats(self, name: str, shape: Sequence[int]) -> Any:
        """Return an input of floating-point numbers, [batch, …], on the host; to be resharded to a layer's mesh."""
        return self._input(DataInput(name=name, shape=tuple(shape)), self.dtype)

    def indices(self, name: str, shape: Sequence[int], *, below: int) -> Any:
        """Return an input of whole numbers from 0 to below - 1 on the host."""
        return self._input(DataInput(name=name, shape=tuple(shape), below=below), tf.int32)

    def weight(
        self,
        mesh: LayerMesh,
        name: str,
        dims: Sequence[Any],
        deviation: float = 0.0,
        *,
        mean: float = 0.0,
        is_frozen: bool = False,
    ) -> Any:
        """Return a trained tensor on a mesh, its initial values normal with the given standard deviation and mean.

        A name that another layer declared gives that layer's tensor, brought to this mesh: a shared weight. is_frozen:
        whether it keeps its initial values.
        """
        shape = tuple(dim.size for dim in dims)
        if name in self.weights:
            first = self.weights[name]
            check_shared(name, first.tensor.mesh.layer, first.tensor.shape.dims, mesh.layer, dims)
            return reshard(first.handed, mesh, dims)
        check_split(mesh.layer, mesh.devices, ((dim.name, dim.size) for dim in dims))
        tensor = self._trained(mesh, self._tf_name(name), mtf.Shape(list(dims)))
        handed = tensor if is_frozen else FanOut(tensor).new_output()
        self.weights[name] = Weight(
            name=name,
            tensor=tensor,
            handed=handed,
            shape=shape,
            deviation=deviation,
            mean=mean,
            is_frozen=is_frozen,
        )
        return handed

    def _trained(self, mesh: LayerMesh, tf_name: str, shape: Any) -> Any:
        """Return the tensor of a weight that nobody declared yet: a variable on its mesh."""
        return mtf.get_variable(mesh, tf_name, shape, dtype=self.dtype, initializer=tf.zeros_initializer())

    @property
    def mask_key(self) -> Any:
        """The key of a step's random masks, on the host, for the layers that drop points."""
        if self._mask_key is None:
            with tf.device(self.devices.host):
                self._mask_key = tf.placeholder(tf.int64, [2])
        return self._mask_key

    def mask_feeds(self, key: Key) -> dict[Any, Key]:
        """Return what to feed so that masks are those of a key; nothing where no layer has any."""
        return {} if self._mask_key is None else {self._mask_key: key}

    def updates(self, rule: Rule, gradients: Mapping[str, Any]) -> Updates:
        """Declare the updates of the weights that have a gradient."""
        tensors = {name: weight.tensor for name, weight in self.weights.items()}
        return add_updates(rule, tensors, gradients, dtype=self.dtype, host=self.devices.host, new_name=self._tf_name)

    def lowered(self, traffic: Traffic) -> Any:
        """Return what lowers the program's tensors; traffic: counts what moves."""
        implementations = {mesh: mesh.implementation(traffic) for mesh in self.meshes}
        return mtf.Lowering(self.graph, implementations, autostack=False)

    def _new_mesh(self, layer: str, devices: DeviceMesh) -> LayerMesh:
        mesh = LayerMesh(
            self.graph, name=self._tf_name(layer), layer=layer, devices=devices, device_name=self.devices.name
        )
        self.meshes.append(mesh)
        return mesh

    def _input(self, item: DataInput, dtype: Any) -> Any:
        if item.name in self.placeholders:
            raise ProgramError(f"two inputs of the program are named {item.name!r}; names must be unique")
        with tf.device(self.devices.host):
            placeholder = tf.placeholder(dtype, item.shape)
        self.inputs.append(item)
        self.placeholders[item.name] = placeholder
        dims = [mtf.Dimension(f"dim{i}", extent) for i, extent in enumerate(item.shape)]
        return mtf.import_tf_tensor(self._host, placeholder, mtf.Shape(dims))

    def _tf_name(self, name: str) -> str:
        """Return a name that TensorFlow accepts, different for each name."""
        plain = re.sub(r"[^A-Za-z0-9_./-]", "_", name)
        if not re.match(r"[A-Za-z0-9.]", plain):
            plain = "." + plain
        unique, count = plain, 1
        while unique.lower() in self._tf_names:
            count += 1
            unique = f"{plain}_{count}"
        self._tf_names.add(unique.lower())
        return unique
