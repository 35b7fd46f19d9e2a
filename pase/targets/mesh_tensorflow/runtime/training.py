"""`Training`: a program that was lowered, in a session that trains it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from pase.errors import ProgramError
from pase.sharding.traffic import Phase
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.primitives.mesh import PhaseMark, Traffic
from pase.targets.mesh_tensorflow.runtime.checks import Gate, check_operations, first_not_finite
from pase.targets.mesh_tensorflow.runtime.layers.loss import SoftmaxLoss
from pase.targets.mesh_tensorflow.runtime.program import Program, Updates
from pase.targets.training.counted import NOTHING_DROPPED, step_key
from pase.targets.training.data import Array, Evaluation
from pase.targets.training.initial import given_value, initial_value
from pase.targets.training.optimisers import Rule, Sgd
from pase.targets.training.script import StepResult

_FED_BYTES = 2**28
"""Initial values are fed in portions of about this size."""


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
        values: of weights and constants, to begin with; without them weights are drawn.
        keep_alive: move all that was planned, also replicas that nobody uses, which TensorFlow leaves out.
        """
        tensors = {name: weight.tensor for name, weight in program.weights.items() if weight.is_trained}
        num_forward = len(program.graph.operations)
        gate = Gate(host=program.devices.host)
        gate.check(loss)
        PhaseMark(loss.mesh, Phase.BACKWARD)
        found = zip(tensors, mtf.gradients([loss], list(tensors.values())), strict=True)
        gradients = {name: gradient for name, gradient in found if gradient is not None}
        num_operations = num_forward, len(program.graph.operations)
        PhaseMark(loss.mesh, Phase.UPDATE)
        statistics = {name: value for name, (value, _) in program.statistics.items()}
        passed = gate.passed({**gradients, **statistics})
        updates = program.updates(
            rule or Sgd(), {name: passed[name] for name in gradients}, {name: passed[name] for name in statistics}
        )
        check_operations(program.graph, program.meshes)
        traffic = Traffic(keeps_alive=keep_alive)
        lowering = program.lowered(traffic)
        with traffic.within(Phase.FORWARD):
            exported = lowering.export_to_tf_tensor(loss)
        lowered = [lowering.lowered_operation(update) for update in updates.operations]
        training = cls(
            program=program,
            session=tf.Session(program.devices.target, config=program.devices.config()),
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

        values: by name, in place of those that are drawn. Raises ProgramError where they lack one, and where there
        are none for a constant.
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
        return dict(self.state().weights)

    def state(self) -> TrainingState:
        """Return the weights and what the optimiser keeps, whole; also leaves them in the masters."""
        if self._gather is None:
            # Made when it is first asked for: not every training is kept.
            with self.session.graph.as_default(), tf.device(self.program.devices.scope):
                self._gather = self._lowering.copy_slices_to_masters()
        self.session.run(self._gather)
        weights, slots = self.session.run(self._masters())
        return TrainingState(num_steps=self.num_steps, weights=weights, slots=slots)

    def restore(self, state: TrainingState) -> None:
        """Go on from a state of the same weights and optimiser, under whatever strategy it arose.

        Raises ProgramError where the optimiser kept other arrays.
        """
        weights, slots = self._masters()
        expected, found = ({(n, s) for n, own in kept.items() for s in own} for kept in (slots, state.slots))
        if expected != found:
            weight, slot = min(expected ^ found)
            how = "lacks" if (weight, slot) in expected else "has"
            raise ProgramError(
                f"the state to go on from {how} {slot!r} of weight {weight!r}; it is of another optimiser"
            )
        for (weight, slot), master in {(n, s): m for n, own in slots.items() for s, m in own.items()}.items():
            shape, kept = tuple(master.shape.as_list()), state.slots[weight][slot].shape
            if shape != kept:
                raise ProgramError(
                    f"the state to go on from has {slot!r} of weight {weight!r} in shape {list(kept)}, not "
                    f"{list(shape)}; it is of another optimiser or was changed"
                )
        self._assign(
            [*(state.weights[name] for name in weights), *(state.slots[n][s] for n, own in slots.items() for s in own)]
        )
        self.num_steps = state.num_steps

    def close(self) -> None:
        """Free the session, unless it is a cluster's: that would wait for processes that may be gone."""
        if not self.program.devices.target:
            self.session.close()

    def _feeds(self, batch: Mapping[str, Array]) -> dict[Any, Any]:
        return {placeholder: batch[name] for name, placeholder in self.program.placeholders.items()}

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
        assign(self.session, zip_longest(masters, values))
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


def assign(session: Any, values: Iterable[tuple[Any, Array | None]]) -> None:
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
