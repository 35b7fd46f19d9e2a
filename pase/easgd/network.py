"""A network whose weights come in one vector and whose gradients leave in one; what replicas are made of.

A step is one run of a graph that keeps nothing: the weights are fed, cut into their parts inside the graph and brought
to the devices of each layer, and the gradients are brought together on the host. So replicas share graph and session,
and several threads may run them at the same time.
"""

import ast
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pase.easgd.actors import Gradient
from pase.easgd.job import DataSplit
from pase.easgd.messages import Packing
from pase.errors import TrainingError
from pase.graph import Scalar
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine
from pase.planning.plan import Plan
from pase.planning.plan_file import read_plan
from pase.planning.planner import Progress, search
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import Devices, virtual_cpus
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import accuracy_of, check_operations
from pase.targets.programs import emit
from pase.targets.training.counted import NOTHING_DROPPED, Key, initial_value, step_key
from pase.targets.training.data import Array, Batches, DataInput

Build = Callable[[Program], Any]

_EXPECTED = "expected a file that pase emit wrote, which declares 'build' and ends in main(build, num_devices=N)"


# -- where it comes from: a model's name, a plan, or a program that `pase emit` wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A network to make replicas of. build: declares its layers on a program. num_devices: of one replica."""

    build: Callable[[Any], Any]
    num_devices: int


def load_build(
    source: str,
    *,
    devices: int = 1,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    machine: Machine | str = DEFAULT_MACHINE,
    on_progress: Progress | None = None,
) -> Loaded:
    """Return the network of a program (a path that ends in .py), a plan (.json) or a model (anything else).

    devices, batch, arguments, machine: for a model, of which the best strategy is searched; devices: of one replica.
    A program's code is executed; that of a plan or a model is written here. Raises TrainingError
    where a file is no emitted program, and what `load`, `search` and `emit` raise.
    """
    path = Path(source)
    if path.suffix == ".py":
        return build_of_program(path)
    if path.suffix == ".json":
        return build_of_plan(read_plan(path))
    graph = load(source, batch=batch, arguments=dict(arguments or {}))
    return build_of_plan(search(graph, devices, machine=machine, on_progress=on_progress))


def build_of_plan(plan: Plan) -> Loaded:
    """Return the network of a plan, emitted and compiled in memory."""
    namespace = _executed(emit(plan, target="mesh_tensorflow"), f"<{plan.graph.name}>")
    return Loaded(build=namespace["build"], num_devices=plan.num_devices)


def build_of_program(path: Path) -> Loaded:
    """Return the network of an emitted program; its code is executed, but for the call of `main`."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}; {_EXPECTED}") from None
    except (SyntaxError, ValueError) as error:
        raise TrainingError(f"{path} is no Python program: {error}; {_EXPECTED}") from None
    given = [
        keyword.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "main"
        for keyword in node.keywords
        if keyword.arg == "num_devices" and isinstance(keyword.value, ast.Constant)
    ]
    num_devices = next((value for value in given if isinstance(value, int) and value > 0), None)
    if num_devices is None:
        raise TrainingError(f"{path} has no call of main with num_devices; {_EXPECTED}")
    try:
        namespace = _executed(text, str(path))
    # The code is the user's: it may raise anything.
    except Exception as error:
        raise TrainingError(f"{path} raised {type(error).__name__}: {error}; {_EXPECTED}") from error
    build = namespace.get("build")
    if not callable(build):
        raise TrainingError(f"{path} declares no function 'build'; {_EXPECTED}")
    return Loaded(build=build, num_devices=num_devices)


def _executed(text: str, called: str) -> dict[str, Any]:
    # Under another name than __main__, so that it only declares.
    namespace: dict[str, Any] = {"__name__": "pase_emitted", "__file__": called}
    exec(compile(text, called, "exec"), namespace)
    return namespace


# -- which examples a worker sees when: of its part of the data, or of all of them, in a random order for each epoch

Sampler = Callable[[int], dict[str, Array]]
"""Returns the batch of a step, counted from 0."""


def worker_seed(seed: int, worker: int) -> int:
    """Return a seed of a worker's own; the first worker's is the seed itself, as in a training without workers."""
    if worker == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"worker {worker} of seed {seed}".encode(), digest_size=4).digest(), "little")


def part_of(num_rows: int, *, worker: int, num_workers: int, seed: int) -> Array:
    """Return the rows of a worker's part, shuffled over the parts; parts differ by one row at most (Section 2.3)."""
    order = np.random.default_rng([seed, 0]).permutation(num_rows)
    return order[num_rows * worker // num_workers : num_rows * (worker + 1) // num_workers]


def batches_of_workers(
    arrays: Mapping[str, Array] | None,
    inputs: Iterable[DataInput],
    *,
    workers: Iterable[int],
    num_workers: int,
    seed: int,
    split: DataSplit = DataSplit.PARTITION,
) -> dict[int, Sampler]:
    """Return the batches of some workers, each a function of seed, worker and step alone.

    A part (or all rows, where these are not partitioned) is gone through again and again, each time in another random
    order; a batch may end one and begin the next.
    Without arrays: made-up numbers, one batch for all steps of a worker. Raises ProgramError where arrays do not fit
    the inputs, TrainingError where there are fewer rows than workers.
    """
    items = tuple(inputs)
    if arrays is None or not items:
        return {worker: Batches(items, seed=worker_seed(seed, worker), arrays=arrays).batch for worker in workers}
    # It checks the arrays: once, whoever reads them.
    Batches(items, seed=seed, arrays=arrays)
    num_rows = min(len(arrays[item.name]) for item in items)
    is_partitioned = split is DataSplit.PARTITION
    if is_partitioned and num_rows < num_workers:
        raise TrainingError(
            f"the data have {num_rows} examples for {num_workers} workers; each needs one of its own, use fewer workers"
        )

    def part(worker: int) -> Array:
        # All rows, each in an order of its own: one worker's is that of a training without workers, whatever the split.
        mine, parts = (worker, num_workers) if is_partitioned else (0, 1)
        return part_of(num_rows, worker=mine, num_workers=parts, seed=seed)

    return {worker: _Shuffled(arrays, items, part(worker), worker_seed(seed, worker)) for worker in workers}


class _Shuffled:
    """The batches of a part. The orders of the last epochs are kept, as they are the next step's too."""

    def __init__(self, arrays: Mapping[str, Array], inputs: tuple[DataInput, ...], part: Array, seed: int) -> None:
        self._arrays = arrays
        self._inputs = inputs
        self._part = part
        self._seed = seed
        self._orders: dict[int, Array] = {}

    def __call__(self, step: int) -> dict[str, Array]:
        """Return the arrays of a step, by name: floating point as given, indices as int32."""
        rows: dict[int, Array] = {}
        batch = {}
        for item in self._inputs:
            size = item.shape[0]
            if size not in rows:
                rows[size] = self._rows(step * size, size)
            array = self._arrays[item.name][rows[size]]
            batch[item.name] = array.astype(np.int32) if item.below else array
        return batch

    def _rows(self, begin: int, count: int) -> Array:
        position = np.arange(begin, begin + count)
        epochs, offsets = np.divmod(position, len(self._part))
        return np.concatenate([self._order(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs).tolist()])

    def _order(self, epoch: int) -> Array:
        if epoch not in self._orders:
            kept = {number: order for number, order in self._orders.items() if number >= epoch - 1}
            order = self._part[np.random.default_rng([self._seed, 1, epoch]).permutation(len(self._part))]
            self._orders = kept | {epoch: order}
        return self._orders[epoch]


# -- replicas


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
        many as there are cores; TensorFlow takes it from the first session of a process. Raises ProgramError where
        the program is wrong.
        """
        devices = devices or virtual_cpus(num_devices)
        with ProgramGraph().as_default() as graph:
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
            lowering = program.lowered(Traffic())
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
            _session=tf.Session(graph=graph, config=config),
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
        """Return what tests weights on arrays, in whole batches. Raises ProgramError where they do not fit."""
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
        """Free the session."""
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
        begin_s = time.perf_counter()
        batch = self.batches(step)
        data_s = time.perf_counter() - begin_s
        return replace(self.network.gradient(weights, batch, step_key(self.seed, step)), data_s=data_s)


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
