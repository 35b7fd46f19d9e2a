"""`Program`: what an emitted file declares its layers on, and the training that comes of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.runtime.compat import mtf, tf
from pase.runtime.data import Array, DataInput
from pase.runtime.guards import check_operations
from pase.runtime.initial import initial_value
from pase.runtime.layouts import HOST, DeviceMesh, device_mesh
from pase.runtime.mesh import LayerMesh, Traffic, assign_slice
from pase.runtime.reshard import reshard

HOST_DEVICE = "/device:CPU:0"


def virtual_cpu(device: int) -> str:
    """Return TensorFlow's name of a device: one virtual CPU each, the first one being the host."""
    return HOST_DEVICE if device == HOST else f"/device:CPU:{device + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A trained tensor; tensor: on the mesh of the layer that declared it. deviation: of its initial values."""

    name: str
    tensor: Any
    shape: tuple[int, ...]
    deviation: float


class Program:
    """Collects the layers of a network: meshes, inputs, weights.

    num_devices: devices of every mesh. dtype: "float32" or "float64". device_name: TensorFlow's name of a device.
    Must be used, up to the end of `Training`'s construction, within ``tf.Graph().as_default()``.
    """

    def __init__(
        self, *, num_devices: int, dtype: str = "float32", device_name: Callable[[int], str] = virtual_cpu
    ) -> None:
        self.num_devices = num_devices
        self.dtype = tf.as_dtype(dtype)
        self.graph = mtf.Graph()
        self.weights: dict[str, Weight] = {}
        self.inputs: list[DataInput] = []
        self.placeholders: dict[str, Any] = {}
        self.meshes: list[LayerMesh] = []
        self._device_name = device_name
        self._tf_names: set[str] = set()
        self._host = self._new_mesh("host", DeviceMesh((), (HOST,)))

    def mesh(self, layer: str, axes: Sequence[tuple[str, int]], devices: Sequence[int] | None = None) -> LayerMesh:
        """Return the mesh of a layer: (dim, number of parts) for each dim that is split.

        devices: a permutation of the program's devices, row-major over the axes and then the replicas.
        Raises RuntimeFailure where the parts do not divide the devices or the list is no permutation.
        """
        return self._new_mesh(layer, device_mesh(layer, axes, self.num_devices, devices))

    def floats(self, name: str, shape: Sequence[int]) -> Any:
        """Return an input of floating-point numbers, [batch, …], on the host; to be resharded to a layer's mesh."""
        return self._input(DataInput(name=name, shape=tuple(shape)), self.dtype)

    def indices(self, name: str, shape: Sequence[int], *, below: int) -> Any:
        """Return an input of whole numbers from 0 to below - 1 on the host."""
        return self._input(DataInput(name=name, shape=tuple(shape), below=below), tf.int32)

    def weight(self, mesh: LayerMesh, name: str, dims: Sequence[Any], deviation: float = 0.0) -> Any:
        """Return a trained tensor on a mesh, its initial values normal with the given standard deviation.

        A name that another layer declared gives that layer's tensor, brought to this mesh: a shared weight.
        """
        shape = tuple(dim.size for dim in dims)
        if name in self.weights:
            first = self.weights[name]
            if first.shape != shape:
                raise RuntimeFailure(
                    f"layers {first.tensor.mesh.layer!r} and {mesh.layer!r} share weight {name!r} with shapes "
                    f"{list(first.shape)} and {list(shape)}; give them one shape"
                )
            return reshard(first.tensor, mesh, dims)
        for dim in dims:
            if dim.size % mesh.devices.size(dim.name):
                raise RuntimeFailure(
                    f"layer {mesh.layer!r} splits {dim.name} = {dim.size} in {mesh.devices.size(dim.name)} parts, "
                    "which do not divide it; choose a divisor"
                )
        tensor = mtf.get_variable(
            mesh, self._tf_name(name), mtf.Shape(list(dims)), dtype=self.dtype, initializer=tf.zeros_initializer()
        )
        self.weights[name] = Weight(name=name, tensor=tensor, shape=shape, deviation=deviation)
        return tensor

    def _new_mesh(self, layer: str, devices: DeviceMesh) -> LayerMesh:
        mesh = LayerMesh(
            self.graph, name=self._tf_name(layer), layer=layer, devices=devices, device_name=self._device_name
        )
        self.meshes.append(mesh)
        return mesh

    def _input(self, item: DataInput, dtype: Any) -> Any:
        if item.name in self.placeholders:
            raise RuntimeFailure(f"two inputs of the program are named {item.name!r}; names must be unique")
        with tf.device(HOST_DEVICE):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The loss before a step's update; run_metadata: TensorFlow's record, where it was asked for."""

    loss: float
    run_metadata: Any = None


@dataclass(slots=True)
class Training:
    """A lowered program and its session: stochastic gradient descent, one batch a step.

    traffic: bytes that the program was planned to move between devices in one step.
    """

    program: Program
    session: Any
    traffic: Traffic
    _loss: Any
    _update: Any
    _restore: Any
    _save: Callable[[], Any]
    _masters: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, program: Program, loss: Any, *, learning_rate: float, seed: int) -> "Training":
        """Return the training of a program: gradients, updates, lowering, a session, initial weights."""
        tensors = [weight.tensor for weight in program.weights.values()]
        updates = []
        for tensor, gradient in zip(tensors, mtf.gradients([loss], tensors), strict=True):
            if gradient is not None:
                new = tensor - gradient * learning_rate
                updates.append(mtf.assign(tensor, new, assign_fn=assign_slice))
        check_operations(program.graph, program.meshes)
        traffic = Traffic()
        implementations = {mesh: mesh.implementation(traffic) for mesh in program.meshes}
        lowering = mtf.Lowering(program.graph, implementations, autostack=False)
        training = cls(
            program,
            tf.Session(config=_session_config(program.num_devices)),
            traffic,
            lowering.export_to_tf_tensor(loss),
            tf.group([lowering.lowered_operation(update) for update in updates]),
            lowering.copy_masters_to_slices(),
            lowering.copy_slices_to_masters,
            {name: weight.tensor.operation.get_master() for name, weight in program.weights.items()},
        )
        training.initialise(seed)
        return training

    def initialise(self, seed: int) -> None:
        """Set every weight to its initial value."""
        for name, weight in self.program.weights.items():
            master = self._masters[name]
            value = initial_value(name, weight.shape, weight.deviation, seed)
            # Fed: as a constant it would be part of the graph.
            self.session.run(master.initializer, {master.initializer.inputs[1]: value})
        self.session.run(self._restore)

    def step(self, batch: Mapping[str, Array], *, with_metadata: bool = False) -> StepResult:
        """Train on one batch and return the loss; RuntimeFailure where it is not finite."""
        feeds = {placeholder: batch[name] for name, placeholder in self.program.placeholders.items()}
        metadata = tf.RunMetadata() if with_metadata else None
        options = tf.RunOptions(output_partition_graphs=True) if with_metadata else None
        loss, _ = self.session.run([self._loss, self._update], feeds, options=options, run_metadata=metadata)
        if not np.isfinite(loss):
            raise RuntimeFailure(f"the loss is {loss}; use a smaller learning rate, or look for it in the data")
        return StepResult(loss=float(loss), run_metadata=metadata)

    def weights(self) -> dict[str, Array]:
        """Return the weights as they are now, whole, by name; also leaves them in the masters."""
        with self.session.graph.as_default():
            self.session.run(self._save())
        values: dict[str, Array] = self.session.run(self._masters)
        return values

    def close(self) -> None:
        """Free the session."""
        self.session.close()


def _session_config(num_devices: int) -> Any:
    config = tf.ConfigProto(device_count={"CPU": num_devices + 1}, allow_soft_placement=False)
    # The graph optimiser takes longer than it saves, and would rename what the measurement counts.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    return config
