"""The reference: a network trained by plain TensorFlow on one device, without meshes, for comparison.

Its updates are written apart from those of the parallel program, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pase.errors import EmitError, ProgramError
from pase.graph import Graph, Operator, Role
from pase.graph.body import Step, elementary
from pase.sharding.traffic import parameter_name
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.interpreter import interpret, named, piece_of
from pase.targets.training.counted import (
    NOTHING_DROPPED,
    Key,
    given_value,
    initial_moments,
    initial_value,
    kept,
    shared_order,
    step_key,
)
from pase.targets.training.data import (
    Array,
    Batches,
    DataInput,
    Evaluation,
    StepEvaluation,
    data_inputs,
    evaluated,
    held_out_batches,
    read_arrays,
)
from pase.targets.training.optimisers import Rule, name_of, options_of
from pase.targets.training.options import TrainingOptions

Slot = Callable[..., Any]
"""Takes a name and a shape (by default the weight's) and returns the variable that is kept under it, at first zeros."""

Changes = list[tuple[Any, Any]]
"""Variables that are kept, with their new values."""


@dataclass(slots=True)
class ReferenceUpdates:
    """The updates of all weights by one rule.

    step, learning_rate: placeholders of the number of the step, from 1, and of its rate. operations: that assign.
    kept: the variables beside the weights, to be initialised.
    """

    rule: Rule
    step: Any = field(default_factory=lambda: tf.placeholder(tf.float64, []))
    learning_rate: Any = field(default_factory=lambda: tf.placeholder(tf.float64, []))
    operations: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def add(self, variable: Any, value: Any, gradient: Any) -> None:
        """Declare the update of a weight; value: what the gradient was taken at."""
        options = options_of(self.rule)
        pairs: Changes = []

        def slot(name: str, shape: tuple[int, ...] | None = None) -> Any:
            shape = tuple(value.shape.as_list()) if shape is None else shape
            variable = tf.get_variable(
                f"{name}_{len(self.kept)}", shape, value.dtype, initializer=tf.zeros_initializer(), use_resource=True
            )
            self.kept.append(variable)
            return variable

        def scalar(x: Any) -> Any:
            # From 64 bits: a power of a number near 1 is not for 32.
            return tf.cast(tf.convert_to_tensor(x, tf.float64), value.dtype)

        change = _Change(options=options, step=self.step, scalar=scalar, slot=slot, pairs=pairs)
        gradient = tf.convert_to_tensor(gradient)
        new_value = _RULES[name_of(self.rule)](change, value, gradient, scalar(self.learning_rate))
        self.operations += [tf.assign(old, new) for old, new in [*pairs, (variable, new_value)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a rule may use for one weight."""

    options: Mapping[str, Any]
    step: Any
    scalar: Callable[[Any], Any]
    slot: Slot
    pairs: Changes

    def keep(self, variable: Any, value: Any) -> Any:
        """Have a variable assigned a value, and return the value."""
        self.pairs.append((variable, value))
        return value


_Apply = Callable[[_Change, Any, Any, Any], Any]
"""Takes what there is, a weight, its gradient and the learning rate; returns the new weight."""


def _sgd(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    return w - rate * (g + change.options["weight_decay"] * w)


def _momentum(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Sutskever et al. 2013; Nesterov's weights are the points ahead, θ + μ v, at which gradients are taken."""
    mu, variable = change.options["momentum"], change.slot("velocity")
    before = variable.read_value()
    after = change.keep(variable, mu * before - rate * (g + change.options["weight_decay"] * w))
    if not change.options["nesterov"]:
        return w + after
    theta = w - mu * before + after
    return theta + mu * after


def _adam_direction(change: _Change, g: Any) -> Any:
    """Kingma and Ba 2015, Algorithm 1: m̂ / (√v̂ + ε)."""
    corrected = []
    for name, beta, moment in (("m", "beta1", g), ("v", "beta2", tf.square(g))):
        variable, decay = change.slot(name), change.options[beta]
        after = change.keep(variable, decay * variable.read_value() + (1 - decay) * moment)
        corrected.append(after / change.scalar(1 - tf.constant(decay, tf.float64) ** change.step))
    first, second = corrected
    return first / (tf.sqrt(second) + change.options["epsilon"])


def _adam(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    return w - rate * _adam_direction(change, g)


def _adamw(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Loshchilov and Hutter 2019, Algorithm 2, line 12, the rate in the schedule's factor."""
    return w - rate * (_adam_direction(change, g) + change.options["weight_decay"] * w)


def _adafactor(change: _Change, w: Any, g: Any, rate: Any) -> Any:
    """Shazeer and Stern 2018, Algorithms 4 and 5, with the sums of the paper: V = R C / 1ᵀR."""
    options, shape = change.options, tuple(w.shape.as_list())
    taken = change.scalar(change.step ** options["decay"])

    def averaged(name: str, now: Any) -> Any:
        variable = change.slot(name, tuple(now.shape.as_list()))
        return change.keep(variable, variable.read_value() * (1 - taken) + now * taken)

    squares = tf.square(g) + options["epsilon1"]
    if len(shape) < 2:
        direction = g / tf.sqrt(averaged("v", squares))
    else:
        rows, columns = sorted(np.argsort(shape, kind="stable")[-2:])
        r = averaged("r", tf.reduce_sum(squares, axis=columns, keepdims=True))
        c = averaged("c", tf.reduce_sum(squares, axis=rows, keepdims=True))
        direction = g / tf.sqrt(r / tf.reduce_sum(r, axis=rows, keepdims=True)) / tf.sqrt(c)
    clipped = direction / tf.maximum(change.scalar(1.0), _rms(direction) / options["clip"])
    relative = tf.minimum(rate, change.scalar(change.step**-0.5))
    return w - tf.maximum(change.scalar(options["epsilon2"]), _rms(w)) * relative * clipped


def _rms(x: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(x)))


_RULES: Mapping[str, _Apply] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "adafactor": _adafactor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """losses, accuracies: of every step, before its update. tests: on the test data. weights: by name, at the end."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float | None] = field(default_factory=list)
    tests: list[StepEvaluation] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)


def reference_losses(graph: Graph, options: TrainingOptions) -> list[float]:
    """Return the losses of `reference_training`."""
    return reference_training(graph, options).losses


def reference_training(
    graph: Graph, options: TrainingOptions, *, on_step: Callable[[int, float], None] | None = None
) -> ReferenceResult:
    """Train the single-device program; its initial weights, batches and updates are those of the parallel one.

    Raises ProgramError for a kind of layer that it cannot compute, for data that do not fit and for a loss that is
    not finite.
    """
    seed = options.seed or 0
    with tf.Graph().as_default(), tf.device("/device:CPU:0"):
        network = _Network(graph, tf.as_dtype(options.dtype))
        arrays = None if options.data_path is None else read_arrays(options.data_path)
        batches = Batches(network.inputs, seed=seed, arrays=arrays)
        test = options.test_data_path and held_out_batches(network.inputs, options.test_data_path)
        updates = _updates(network, options.rule)
        config = tf.ConfigProto()
        # It takes longer than it saves, and rounds differently.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            given = None if options.weights_path is None else read_arrays(options.weights_path)
            initial = {
                variable.initializer.inputs[1]: network.initial(name, seed, given)
                for name, variable in network.variables.items()
            }
            # In one run: each run looks through the whole graph first.
            variables = [*network.variables.values(), *updates.kept]
            session.run([variable.initializer for variable in variables], initial)

            def evaluate(batch: Mapping[str, Array]) -> Evaluation:
                feeds = network.feeds(batch) | network.mask_feeds(NOTHING_DROPPED)
                loss, accuracy = session.run([network.loss, network.accuracy], feeds)
                return Evaluation(loss=float(loss), accuracy=float(accuracy[0]) if accuracy else None)

            result = ReferenceResult()
            for step in range(options.steps):
                feeds = network.feeds(batches.batch(step)) | network.mask_feeds(step_key(seed, step))
                feeds |= {updates.step: step + 1, updates.learning_rate: options.schedule.rate(step)}
                value, accuracy, _ = session.run([network.loss, network.accuracy, updates.operations], feeds)
                if not np.isfinite(value):
                    raise ProgramError(
                        f"the reference's loss is {value} at step {step + 1}; use a smaller learning rate"
                    )
                result.losses.append(float(value))
                result.accuracies.append(float(accuracy[0]) if accuracy else None)
                if test and options.is_test_due(step + 1):
                    result.tests.append(evaluated(test, evaluate, step=step + 1))
                if on_step is not None:
                    on_step(step + 1, result.losses[-1])
            result.weights.update(session.run(network.variables))
    return result


def _updates(network: "_Network", rule: Rule) -> ReferenceUpdates:
    variables = network.variables
    updates = ReferenceUpdates(rule)
    gradients = tf.gradients(network.loss, list(variables.values()))
    for (name, variable), gradient in zip(variables.items(), gradients, strict=True):
        if gradient is not None and name not in network.frozen:
            updates.add(variable, network.values[name], gradient)
    return updates


class _Network:
    """The layers that lead to the loss, computed in order."""

    def __init__(self, graph: Graph, dtype: Any) -> None:
        self.variables: dict[str, Any] = {}
        self.frozen: set[str] = set()
        self.placeholders: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.inputs: list[DataInput] = []
        self.loss: Any = None
        self.accuracy: tuple[Any, ...] = ()
        self._moments: dict[str, tuple[float, float]] = {}
        self._graph, self._dtype = graph, dtype
        self._items = data_inputs(graph)
        self._masks: list[tuple[str, float, Any]] = []
        self._written: dict[str, Any] = {}
        try:
            loss = graph.loss_layer
        except EmitError as error:
            raise ProgramError(str(error)) from None
        wanted = graph.leading_to([loss])
        for operator in graph.operators:
            if operator.name in wanted:
                self._compute(operator)
        self.loss = tf.reshape(self._written[loss], [])

    def _compute(self, operator: Operator) -> None:
        """Compute what an operator writes, step by step."""
        if operator.body is None or operator.body.problem:
            problem = operator.body.problem if operator.body else "it does not say how"
            raise ProgramError(
                f"layer {operator.name!r} is a {operator.kind!r}, which the reference cannot compute: {problem}"
            )
        body = elementary(operator.body, trains=True)
        used = {operand for step in body.steps for operand in step.operands}
        reads = {access.tensor: i for i, access in enumerate(operator.reads) if access.tensor in used}
        tensors = {tensor: self._read(operator, i) for tensor, i in reads.items()}
        self._written[operator.name] = interpret(
            operator, body, tensors, lambda step, shape: self._mask(operator.name, step, shape)
        )
        if operator.is_loss:
            self.accuracy = (_accuracy(*(tensors[str(operand)] for operand in operator.body.steps[-1].operands)),)

    def _read(self, operator: Operator, position: int) -> Any:
        """Return a tensor in the shape in which an operator reads it."""
        access = operator.reads[position]
        edge = self._graph.incoming.get((operator.name, position))
        if access.role is Role.PARAMETER:
            name = parameter_name(operator, access)
            if not access.is_trained:
                self.frozen.add(name)
            order = shared_order(self._graph, operator, access)
            is_plain = order == tuple(range(len(order)))
            value = self._variable(name, access.shape, initial_moments(operator, access))
            return value if is_plain else tf.transpose(value, order)
        if edge is None:
            return tf.reshape(self._placeholder(self._items[operator.name, position]), access.shape)
        producer = self._graph[edge.producer]
        written = self._written[edge.producer]
        if edge.output:
            array, dims = named(producer, producer.writes[0], written)
            written = array[piece_of(dims, producer.writes[edge.output])]
        return written if written.shape.as_list() == list(access.shape) else tf.reshape(written, access.shape)

    def _variable(self, name: str, shape: tuple[int, ...], moments: tuple[float, float]) -> Any:
        """Return the value of a weight, one for all uses of a step."""
        if name not in self.variables:
            self._moments[name] = moments
            self.variables[name] = tf.get_variable(
                f"parameter_{len(self.variables)}",
                shape,
                self._dtype,
                initializer=tf.zeros_initializer(),
                use_resource=True,
            )
            self.values[name] = self.variables[name].read_value()
        return self.values[name]

    def initial(self, name: str, seed: int, given: Mapping[str, Array] | None) -> Array:
        """Return the initial value of a weight: as given, or as the seed draws it."""
        shape = tuple(self.variables[name].shape.as_list())
        if given is not None:
            return given_value(name, shape, given)
        mean, deviation = self._moments[name]
        return initial_value(name, shape, deviation, seed, mean)

    def feeds(self, batch: Mapping[str, Array]) -> dict[Any, Any]:
        """Return what to feed for a batch."""
        return {self.placeholders[name]: array for name, array in batch.items()}

    def mask_feeds(self, key: Key) -> dict[Any, Array]:
        """Return what the layers that drop points multiply them by in the step of a key."""
        feeds: dict[Any, Array] = {}
        for layer, rate, mask in self._masks:
            is_kept = kept(layer, tuple(mask.shape.as_list()), rate, key)
            feeds[mask] = is_kept.astype(np.float64) / (1 if key is NOTHING_DROPPED else 1 - rate)
        return feeds

    def _mask(self, layer: str, step: Step, shape: tuple[int, ...]) -> Any:
        """Return what a step that drops points multiplies them by."""
        mask = tf.placeholder(self._dtype, shape)
        self._masks.append((layer, float(step.option("rate", 0.0)), mask))
        return mask

    def _placeholder(self, item: DataInput) -> Any:
        if item.name not in self.placeholders:
            self.inputs.append(item)
            self.placeholders[item.name] = tf.placeholder(tf.int32 if item.below else self._dtype, item.shape)
        return self.placeholders[item.name]


def _accuracy(logits: Any, labels: Any) -> Any:
    is_right = tf.equal(tf.argmax(logits, axis=-1, output_type=labels.dtype), labels)
    return tf.reduce_mean(tf.cast(is_right, logits.dtype))
