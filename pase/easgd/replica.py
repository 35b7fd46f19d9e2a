"""`Network`: a program whose weights come in one vector and whose gradients leave in one; what replicas are made of.

A step is one run of a graph that keeps nothing: the weights are fed, cut into their parts inside the graph and brought
to the devices of each layer, and the gradients are brought together on the host. So replicas share graph and session,
and several threads may run them at the same time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pase.easgd.objective import Gradient
from pase.easgd.packing import Packing
from pase.easgd.samples import worker_seed
from pase.targets.mesh_tensorflow.runtime.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.data import Array, Batches, DataInput
from pase.targets.mesh_tensorflow.runtime.devices import Devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.guards import check_operations
from pase.targets.mesh_tensorflow.runtime.initial import initial_value
from pase.targets.mesh_tensorflow.runtime.masks import NOTHING_DROPPED, Key, step_key
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.traffic import Traffic
from pase.targets.mesh_tensorflow.runtime.training import accuracy_of

Build = Callable[[Program], Any]


class _FedWeight(mtf.Operation):  # type: ignore[misc]
    """A weight on its mesh, cut from a tensor on the host that is known when it is lowered."""

    def __init__(self, mesh: Any, name: str, shape: Any, dtype: Any) -> None:
        super().__init__([], mesh=mesh, name=name)
        self.value: Any = None
        self._outputs = [mtf.Tensor(self, shape, dtype)]

    def lower(self, lowering: Any) -> None:
        """Give every device its slice."""
        (x,) = self.outputs
        lowering.set_tensor_lowering(x, lowering.mesh_impl(self).import_tf_tensor(x, self.value))


class _FedProgram(Program):
    """A program that keeps no weights: they are fed."""

    def _trained(self, mesh: Any, tf_name: str, shape: Any) -> Any:
        return _FedWeight(mesh, tf_name, shape, self.dtype).outputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One lowered program in a session. inputs: of a batch. packing: of its weights. batch_size: examples of a step."""

    inputs: tuple[DataInput, ...]
    packing: Packing
    batch_size: int
    _program: Program
    _session: Any
    _vector: Any
    _loss: Any
    _accuracy: tuple[Any, ...]
    _gradient: Any

    @classmethod
    def load(
        cls,
        build: Build,
        *,
        num_devices: int,
        dtype: str = "float32",
        devices: Devices | None = None,
        num_threads: int = 1,
    ) -> "Network":
        """Return the network that an emitted program's `build` declares.

        devices: which ones, by default virtual CPUs of this process. num_threads: of one operation on CPUs, 0 for as
        many as there are cores; TensorFlow takes it from the first session of a process. Raises RuntimeFailure where
        the program is wrong.
        """
        devices = devices or virtual_cpus(num_devices)
        with tf.Graph().as_default() as graph, tf.device(devices.scope):
            program = _FedProgram(num_devices=num_devices, dtype=dtype, devices=devices)
            loss = build(program)
            packing = Packing(
                names=tuple(program.weights),
                shapes=tuple(weight.shape for weight in program.weights.values()),
                dtype=dtype,
            )
            tensors = [weight.tensor for weight in program.weights.values()]
            gradients = mtf.gradients([loss], tensors)
            check_operations(program.graph, program.meshes)
            with tf.device(devices.host):
                vector = tf.placeholder(program.dtype, [packing.num_weights], name="weights")
                for tensor, part, shape in zip(
                    tensors, tf.split(vector, list(packing.sizes)), packing.shapes, strict=True
                ):
                    tensor.operation.value = tf.reshape(part, shape)
            traffic = Traffic()
            implementations = {mesh: mesh.implementation(traffic) for mesh in program.meshes}
            lowering = mtf.Lowering(program.graph, implementations, autostack=False)
            exported_loss = lowering.export_to_tf_tensor(loss)
            exported = [None if each is None else lowering.export_to_tf_tensor(each) for each in gradients]
            with tf.device(devices.host):
                parts = [
                    tf.zeros([size], program.dtype) if each is None else tf.reshape(each, [size])
                    for each, size in zip(exported, packing.sizes, strict=True)
                ]
                gradient = tf.concat(parts, 0, name="gradient")
            accuracy = accuracy_of(loss, devices.host)
            graph.finalize()
        config = devices.config()
        config.intra_op_parallelism_threads = num_threads
        return cls(
            inputs=tuple(program.inputs),
            packing=packing,
            batch_size=program.inputs[0].shape[0] if program.inputs else 1,
            _program=program,
            _session=tf.Session(devices.target, graph=graph, config=config),
            _vector=vector,
            _loss=exported_loss,
            _accuracy=accuracy,
            _gradient=gradient,
        )

    def initial(self, seed: int) -> Array:
        """Return the initial weights [n] of a seed, those of a training without workers."""
        values = {
            name: initial_value(name, weight.shape, weight.deviation, seed)
            for name, weight in self._program.weights.items()
        }
        return self.packing.pack(values)

    def replica(self, batches: Callable[[int], Mapping[str, Array]], *, seed: int = 0, worker: int = 0) -> "Replica":
        """Return a worker's objective. batches: of its steps, from 0. seed: of what is dropped, with the worker."""
        return Replica(network=self, batches=batches, seed=worker_seed(seed, worker))

    def evaluator(self, arrays: Mapping[str, Array]) -> "HeldOut":
        """Return what tests weights on arrays, in whole batches. Raises RuntimeFailure where they do not fit."""
        return HeldOut(network=self, batches=Batches(self.inputs, seed=0, arrays=arrays, called="the test data"))

    def gradient(self, weights: Array, batch: Mapping[str, Array], key: Key) -> Gradient:
        """Return loss, accuracy and gradient [n] at weights [n]; key: of the step's random masks."""
        fetches = [self._loss, self._accuracy, self._gradient]
        loss, accuracy, vector = self._session.run(fetches, self._feeds(weights, batch, key))
        return Gradient(loss=float(loss), vector=vector, accuracy=float(accuracy[0]) if accuracy else None)

    def forward(self, weights: Array, batch: Mapping[str, Array]) -> tuple[float, float | None]:
        """Return the loss and the accuracy at weights [n] with nothing dropped."""
        fetches = [self._loss, self._accuracy]
        loss, accuracy = self._session.run(fetches, self._feeds(weights, batch, NOTHING_DROPPED))
        return float(loss), float(accuracy[0]) if accuracy else None

    def close(self) -> None:
        """Free the session, unless it is a cluster's: that would wait for processes that may be gone."""
        if not self._program.devices.target:
            self._session.close()

    def _feeds(self, weights: Array, batch: Mapping[str, Array], key: Key) -> dict[Any, Any]:
        feeds = {placeholder: batch[name] for name, placeholder in self._program.placeholders.items()}
        return feeds | {self._vector: weights} | self._program.mask_feeds(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One worker's replica of a network: an `Objective`. seed: of this worker's random masks."""

    network: Network
    batches: Callable[[int], Mapping[str, Array]]
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """Examples of a step."""
        return self.network.batch_size

    def gradient(self, weights: Array, step: int) -> Gradient:
        """Return the gradient at weights [n] on the batch of a step; what is not finite is returned as it is."""
        return self.network.gradient(weights, self.batches(step), step_key(self.seed, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Tests weights on data that are not trained on: an `Evaluator`."""

    network: Network
    batches: Batches

    def evaluate(self, weights: Array) -> tuple[float, float | None, int]:
        """Return (mean loss, mean accuracy, examples) at weights [n]; None for a loss that is no `softmax_loss`."""
        results = [self.network.forward(weights, self.batches.batch(i)) for i in range(self.batches.num_batches)]
        accuracies = [accuracy for _, accuracy in results if accuracy is not None]
        accuracy = float(np.mean(accuracies)) if accuracies else None
        return float(np.mean([loss for loss, _ in results])), accuracy, self.batches.num_examples
