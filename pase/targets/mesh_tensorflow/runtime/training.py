"""`Training`: a program that was lowered, in a session that trains it; and what is checked of a program.

That is what Mesh-TensorFlow would compute wrongly without a word, and numbers that are not finite: no update follows
from such a number, and the layer where the first one arose is found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from pase.errors import ProgramError
from pase.sharding.layouts import HOST
from pase.sharding.traffic import Phase
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import LayerMesh, PhaseMark, Traffic
from pase.targets.mesh_tensorflow.primitives.parts import Reshard
from pase.targets.mesh_tensorflow.runtime.layers.local import check_one_mesh
from pase.targets.mesh_tensorflow.runtime.layers.movement import FanOut, layout_of_tensor
from pase.targets.mesh_tensorflow.runtime.layers.products import SoftmaxLoss
from pase.targets.mesh_tensorflow.runtime.program import Program, Updates
from pase.targets.training.counted import NOTHING_DROPPED, given_value, initial_value, step_key
from pase.targets.training.data import Array, Evaluation
from pase.targets.training.optimisers import Rule, Sgd
from pase.targets.training.script import StepResult

_FED_BYTES = 2**28
"""Initial values are fed in portions of about this size."""


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
    _accuracy: tuple[Any, ...]
    _update: Any
    _updates: Updates
    _lowering: Any
    _restore: Any
    _num_operations: tuple[int, int]
    _gather: Any = None
    _seed: int = 0

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
        values: Mapping[str, Array] | None = None,
    ) -> "Training":
        """Return the training of a program: gradients, updates, lowering, a session, initial weights.

        rule: of the updates, by default plain gradient descent. learning_rate: where a step names no other.
        values: of weights, to begin with; without them these are drawn.
        keep_alive: move all that was planned, also replicas that nobody uses, which TensorFlow leaves out.
        """
        tensors = {name: weight.tensor for name, weight in program.weights.items() if not weight.is_frozen}
        num_forward = len(program.graph.operations)
        gate = Gate(host=program.devices.host)
        gate.check(loss)
        PhaseMark(loss.mesh, Phase.BACKWARD)
        found = zip(tensors, mtf.gradients([loss], list(tensors.values())), strict=True)
        gradients = {name: gradient for name, gradient in found if gradient is not None}
        num_operations = num_forward, len(program.graph.operations)
        PhaseMark(loss.mesh, Phase.UPDATE)
        updates = program.updates(rule or Sgd(), gate.passed(gradients))
        check_operations(program.graph, program.meshes)
        traffic = Traffic(keeps_alive=keep_alive)
        lowering = program.lowered(traffic)
        with traffic.within(Phase.FORWARD):
            exported = lowering.export_to_tf_tensor(loss)
        lowered = [lowering.lowered_operation(update) for update in updates.operations]
        training = cls(
            program=program,
            session=tf.Session(config=program.devices.config()),
            traffic=traffic,
            learning_rate=learning_rate,
            num_steps=0,
            _loss=exported,
            _accuracy=accuracy_of(loss, program.devices.host),
            _update=tf.group([*lowered, *traffic.kept]),
            _updates=updates,
            _lowering=lowering,
            _restore=lowering.copy_masters_to_slices(),
            _num_operations=num_operations,
        )
        training.initialise(seed, values)
        return training

    def initialise(self, seed: int, values: Mapping[str, Array] | None = None) -> None:
        """Set every weight to its initial value and what the optimiser keeps to zero.

        values: by name, in place of those that are drawn. Raises ProgramError where they lack one.
        """
        self._assign(
            initial_value(name, weight.shape, weight.deviation, seed, weight.mean)
            if values is None
            else given_value(name, weight.shape, values)
            for name, weight in self.program.weights.items()
        )
        self.num_steps = 0
        self._seed = seed

    def step(
        self, batch: Mapping[str, Array], *, learning_rate: float | None = None, with_record: bool = False
    ) -> StepResult:
        """Train on one batch and return the loss.

        Raises ProgramError where the loss or a gradient is not finite, with the layer where that began; the step
        has changed nothing then.
        """
        feeds = self._feeds(batch)
        rate = self.learning_rate if learning_rate is None else learning_rate
        feeds |= self._updates.feeds(self.num_steps + 1, rate)
        feeds |= self.program.mask_feeds(step_key(self._seed, self.num_steps))
        metadata = tf.RunMetadata() if with_record else None
        record = {"output_partition_graphs": True, "trace_level": tf.RunOptions.FULL_TRACE}
        options = tf.RunOptions(**record) if with_record else None
        try:
            fetches = [self._loss, self._accuracy, self._update]
            loss, accuracy, _ = self.session.run(fetches, feeds, options=options, run_metadata=metadata)
        # Where several devices fail, another one's cancelled step may be what is reported.
        except (tf.errors.InvalidArgumentError, tf.errors.AbortedError, tf.errors.CancelledError):
            where = self._first_not_finite(feeds)
            if not where:
                raise
            loss = self.session.run(self._loss, feeds)
            which = f"the loss is {loss}" if not np.isfinite(loss) else "a gradient is not finite"
            raise ProgramError(
                f"step {self.num_steps + 1}: {which}; use a smaller learning rate, or look for it in the data; "
                f"the first values that are not finite are in {where}; the step was not taken"
            ) from None
        self.num_steps += 1
        return StepResult(loss=float(loss), accuracy=_only(accuracy), record=metadata)

    def evaluate(self, batch: Mapping[str, Array]) -> Evaluation:
        """Return the loss and the accuracy of a batch; the forward pass alone runs, drops nothing, changes nothing."""
        feeds = self._feeds(batch) | self.program.mask_feeds(NOTHING_DROPPED)
        loss, accuracy = self.session.run([self._loss, self._accuracy], feeds)
        return Evaluation(loss=float(loss), accuracy=_only(accuracy))

    def weights(self) -> dict[str, Array]:
        """Return the weights as they are now, whole, by name; also leaves them in the masters."""
        if self._gather is None:
            # Made when it is first asked for: few trainings end with it.
            with self.session.graph.as_default():
                self._gather = self._lowering.copy_slices_to_masters()
        self.session.run(self._gather)
        found: dict[str, Array] = self.session.run(self._masters())
        return found

    def close(self) -> None:
        """Free the session."""
        self.session.close()

    def _feeds(self, batch: Mapping[str, Array]) -> dict[Any, Any]:
        return {placeholder: batch[name] for name, placeholder in self.program.placeholders.items()}

    def _masters(self) -> dict[str, Any]:
        return {name: weight.tensor.operation.get_master() for name, weight in self.program.weights.items()}

    def _assign(self, values: Iterable[Array]) -> None:
        """Set the weights, in their order, and what the optimiser keeps to zero."""
        slots = [slot.operation.get_master() for own in self._updates.state.values() for slot in own.values()]
        _assign(self.session, zip_longest([*self._masters().values(), *slots], values))
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


def _assign(session: Any, values: Iterable[tuple[Any, Array | None]]) -> None:
    """Give variables their values, and zeros for None."""
    initialisers: list[Any] = []
    feeds: dict[Any, Array] = {}
    for variable, value in values:
        initialisers.append(variable.initializer)
        if value is not None:
            # Fed: as a constant it would be part of the graph.
            feeds[variable.initializer.inputs[1]] = value
        # Many at a time: every call goes through the whole graph. Not all: the values are held as often again.
        if sum(fed.nbytes for fed in feeds.values()) >= _FED_BYTES:
            session.run(initialisers, feeds)
            initialisers, feeds = [], {}
    if initialisers:
        session.run(initialisers, feeds)


def accuracy_of(loss: Any, host: str) -> tuple[Any, ...]:
    """Return the tensor of a lowered loss's accuracy; nothing where it has none."""
    operation = loss.operation
    if not isinstance(operation, SoftmaxLoss):
        return ()
    with tf.device(host):
        return (tf.add_n(operation.num_correct) / operation.num_points,)


def _only(values: Sequence[Any]) -> float | None:
    return float(values[0]) if values else None


# -- checks


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
            check_one_mesh(f"operation {operation.name!r}", [operation, *operation.inputs])
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
