"""`Program`: what an emitted file declares its layers on, and the training that comes of it."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.runtime.compat import mtf, tf
from pase.runtime.data import Array, DataInput
from pase.runtime.finite import Gate, first_not_finite
from pase.runtime.guards import check_operations
from pase.runtime.initial import initial_value
from pase.runtime.layouts import HOST, DeviceMesh, device_mesh
from pase.runtime.mesh import LayerMesh, PhaseMark
from pase.runtime.optimisers import Rule
from pase.runtime.optimisers.sgd import Sgd
from pase.runtime.reshard import reshard
from pase.runtime.traffic import Phase, Traffic
from pase.runtime.updates import Updates, add_updates

HOST_DEVICE = "/device:CPU:0"

_FED_BYTES = 2**28
"""Initial values are fed in portions of about this size."""


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

    def updates(self, rule: Rule, gradients: Mapping[str, Any]) -> Updates:
        """Declare the updates of the weights that have a gradient."""
        tensors = {name: weight.tensor for name, weight in self.weights.items()}
        return add_updates(rule, tensors, gradients, dtype=self.dtype, host=HOST_DEVICE, new_name=self._tf_name)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What training changes, whole, whatever the strategy. slots: what the optimiser keeps, by weight and slot."""

    num_steps: int
    weights: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]


@dataclass(slots=True)
class Training:
    """A lowered program and its session, that trains it one batch a step.

    traffic: bytes that the program was planned to move between devices in one step. num_steps: done so far.
    """

    program: Program
    session: Any
    traffic: Traffic
    learning_rate: float
    num_steps: int
    _loss: Any
    _update: Any
    _updates: Updates
    _lowering: Any
    _restore: Any
    _num_operations: tuple[int, int]
    _gather: Any = None

    @classmethod
    def start(
        cls,
        program: Program,
        loss: Any,
        *,
        learning_rate: float,
        seed: int,
        rule: Rule | None = None,
        keep_alive: bool = False,
    ) -> "Training":
        """Return the training of a program: gradients, updates, lowering, a session, initial weights.

        rule: of the updates, by default plain gradient descent. learning_rate: where a step names no other.
        keep_alive: move all that was planned, also replicas that nobody uses, which TensorFlow leaves out.
        """
        tensors = {name: weight.tensor for name, weight in program.weights.items()}
        num_forward = len(program.graph.operations)
        gate = Gate(host=HOST_DEVICE)
        gate.check(loss)
        PhaseMark(loss.mesh, Phase.BACKWARD)
        found = zip(tensors, mtf.gradients([loss], list(tensors.values())), strict=True)
        gradients = {name: gradient for name, gradient in found if gradient is not None}
        num_operations = num_forward, len(program.graph.operations)
        PhaseMark(loss.mesh, Phase.UPDATE)
        updates = program.updates(rule or Sgd(), gate.passed(gradients))
        check_operations(program.graph, program.meshes)
        traffic = Traffic(keeps_alive=keep_alive)
        implementations = {mesh: mesh.implementation(traffic) for mesh in program.meshes}
        lowering = mtf.Lowering(program.graph, implementations, autostack=False)
        with traffic.within(Phase.FORWARD):
            exported = lowering.export_to_tf_tensor(loss)
        lowered = [lowering.lowered_operation(update) for update in updates.operations]
        training = cls(
            program=program,
            session=tf.Session(config=_session_config(program.num_devices)),
            traffic=traffic,
            learning_rate=learning_rate,
            num_steps=0,
            _loss=exported,
            _update=tf.group([*lowered, *traffic.kept]),
            _updates=updates,
            _lowering=lowering,
            _restore=lowering.copy_masters_to_slices(),
            _num_operations=num_operations,
        )
        training.initialise(seed)
        return training

    def initialise(self, seed: int) -> None:
        """Set every weight to its initial value and what the optimiser keeps to zero."""
        self._assign(
            initial_value(name, weight.shape, weight.deviation, seed) for name, weight in self.program.weights.items()
        )
        self.num_steps = 0

    def step(
        self, batch: Mapping[str, Array], *, learning_rate: float | None = None, with_metadata: bool = False
    ) -> StepResult:
        """Train on one batch and return the loss.

        Raises RuntimeFailure where the loss or a gradient is not finite, with the layer where that began; the step
        has changed nothing then.
        """
        feeds = {placeholder: batch[name] for name, placeholder in self.program.placeholders.items()}
        rate = self.learning_rate if learning_rate is None else learning_rate
        feeds |= self._updates.feeds(self.num_steps + 1, rate)
        metadata = tf.RunMetadata() if with_metadata else None
        record = {"output_partition_graphs": True, "trace_level": tf.RunOptions.FULL_TRACE}
        options = tf.RunOptions(**record) if with_metadata else None
        try:
            loss, _ = self.session.run([self._loss, self._update], feeds, options=options, run_metadata=metadata)
        # Where several devices fail, another one's cancelled step may be what is reported.
        except (tf.errors.InvalidArgumentError, tf.errors.AbortedError, tf.errors.CancelledError):
            where = self._first_not_finite(feeds)
            if not where:
                raise
            loss = self.session.run(self._loss, feeds)
            which = f"the loss is {loss}" if not np.isfinite(loss) else "a gradient is not finite"
            raise RuntimeFailure(
                f"step {self.num_steps + 1}: {which}; use a smaller learning rate, or look for it in the data; "
                f"the first values that are not finite are in {where}; the step was not taken"
            ) from None
        self.num_steps += 1
        return StepResult(loss=float(loss), run_metadata=metadata)

    def weights(self) -> dict[str, Array]:
        """Return the weights as they are now, whole, by name; also leaves them in the masters."""
        return dict(self.state().weights)

    def state(self) -> TrainingState:
        """Return the weights and what the optimiser keeps, whole; also leaves them in the masters."""
        if self._gather is None:
            # Made when it is first asked for: not every training is kept.
            with self.session.graph.as_default():
                self._gather = self._lowering.copy_slices_to_masters()
        self.session.run(self._gather)
        weights, slots = self.session.run(self._masters())
        return TrainingState(num_steps=self.num_steps, weights=weights, slots=slots)

    def restore(self, state: TrainingState) -> None:
        """Go on from a state of the same weights and optimiser, under whatever strategy it arose.

        Raises RuntimeFailure where the optimiser kept other arrays.
        """
        weights, slots = self._masters()
        expected, found = ({(n, s) for n, own in kept.items() for s in own} for kept in (slots, state.slots))
        if expected != found:
            weight, slot = min(expected ^ found)
            how = "lacks" if (weight, slot) in expected else "has"
            raise RuntimeFailure(
                f"the state to go on from {how} {slot!r} of weight {weight!r}; it is of another optimiser"
            )
        self._assign(
            [*(state.weights[name] for name in weights), *(state.slots[n][s] for n, own in slots.items() for s in own)]
        )
        self.num_steps = state.num_steps

    def close(self) -> None:
        """Free the session."""
        self.session.close()

    def _masters(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        weights = {name: weight.tensor.operation.get_master() for name, weight in self.program.weights.items()}
        slots = {
            name: {slot: tensor.operation.get_master() for slot, tensor in own.items()}
            for name, own in self._updates.state.items()
        }
        return weights, slots

    def _assign(self, values: Iterable[Array]) -> None:
        """Set the weights and then the slots, in their order; slots that no value is left for become zero."""
        weights, slots = self._masters()
        masters = [*weights.values(), *(master for own in slots.values() for master in own.values())]
        initialisers: list[Any] = []
        feeds: dict[Any, Array] = {}
        for master, value in zip_longest(masters, values):
            initialisers.append(master.initializer)
            if value is not None:
                # Fed: as a constant it would be part of the graph.
                feeds[master.initializer.inputs[1]] = value
            # Many at a time: every call goes through the whole graph. Not all: the values are held as often again.
            if sum(fed.nbytes for fed in feeds.values()) >= _FED_BYTES:
                self.session.run(initialisers, feeds)
                initialisers, feeds = [], {}
        if initialisers:
            self.session.run(initialisers, feeds)
        self.session.run(self._restore)

    def _first_not_finite(self, feeds: Mapping[Any, Any]) -> str:
        num_forward, num_checked = self._num_operations
        with self.session.graph.as_default():
            return first_not_finite(
                self.session,
                self._lowering,
                self.program.graph.operations[:num_checked],
                num_forward=num_forward,
                weights={weight.tensor.operation: name for name, weight in self.program.weights.items()},
                feeds=feeds,
            )


def _session_config(num_devices: int) -> Any:
    config = tf.ConfigProto(device_count={"CPU": num_devices + 1}, allow_soft_placement=False)
    # The graph optimiser takes longer than it saves, and would rename what the measurement counts.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    return config
