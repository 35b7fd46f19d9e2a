"""The reference: a network trained by plain TensorFlow on one device, without meshes, for comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import RuntimeFailure
from pase.graph import Graph, Role
from pase.runtime.compat import tf
from pase.runtime.data import Array, Batches, DataInput, data_inputs, read_arrays
from pase.runtime.initial import initial_deviation, initial_value, parameter_name, shared_order
from pase.runtime.reference_kinds import COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """losses: of every step, before its update. weights: by name, after the last one."""

    losses: list[float]
    weights: dict[str, Array]


def reference_losses(
    graph: Graph,
    *,
    steps: int,
    dtype: str = "float32",
    seed: int = 0,
    learning_rate: float = 0.01,
    data_path: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Return the losses of `reference_training`, which is given the same."""
    return reference_training(
        graph,
        steps=steps,
        dtype=dtype,
        seed=seed,
        learning_rate=learning_rate,
        data_path=data_path,
        on_step=on_step,
    ).losses


def reference_training(
    graph: Graph,
    *,
    steps: int,
    dtype: str = "float32",
    seed: int = 0,
    learning_rate: float = 0.01,
    data_path: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> ReferenceResult:
    """Train the single-device program; its initial weights, batches and updates are those of the parallel one.

    Raises RuntimeFailure for a kind of layer that it cannot compute, for data that do not fit and for a loss that is
    not finite.
    """
    arrays = None if data_path is None else read_arrays(data_path)
    with tf.Graph().as_default(), tf.device("/device:CPU:0"):
        network = _Network(graph, tf.as_dtype(dtype))
        loss = network.loss
        batches = Batches(network.inputs, seed=seed, arrays=arrays)
        variables = list(network.variables.values())
        gradients = tf.gradients(loss, variables)
        updates = [
            tf.assign_sub(variable, learning_rate * tf.convert_to_tensor(gradient))
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
        ]
        config = tf.ConfigProto()
        # It takes longer than it saves, and rounds differently.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            initial = {
                variable.initializer.inputs[1]: initial_value(
                    name, tuple(variable.shape.as_list()), network.deviations[name], seed
                )
                for name, variable in network.variables.items()
            }
            # In one run: each run looks through the whole graph first.
            session.run([variable.initializer for variable in variables], initial)
            losses: list[float] = []
            for step in range(steps):
                batch = batches.batch(step)
                feeds = {network.placeholders[name]: array for name, array in batch.items()}
                value, _ = session.run([loss, updates], feeds)
                if not np.isfinite(value):
                    raise RuntimeFailure(
                        f"the reference's loss is {value} at step {step + 1}; use a smaller learning rate"
                    )
                losses.append(float(value))
                if on_step is not None:
                    on_step(step + 1, losses[-1])
            weights: dict[str, Array] = session.run(network.variables)
    return ReferenceResult(losses=losses, weights=weights)


class _Network:
    """The layers that lead to the loss, computed in order."""

    def __init__(self, graph: Graph, dtype: Any) -> None:
        self.variables: dict[str, Any] = {}
        self.deviations: dict[str, float] = {}
        self.placeholders: dict[str, Any] = {}
        self.inputs: list[DataInput] = []
        reads: dict[str, Any] = {}
        items = data_inputs(graph)
        written: dict[str, Any] = {}
        losses = []
        for operator in graph.operators:
            if operator.kind not in COMPUTE:
                raise RuntimeFailure(
                    f"layer {operator.name!r} is a {operator.kind!r}, which the reference cannot compute; "
                    f"kinds that it can are {', '.join(sorted(COMPUTE))}"
                )
            values = []
            for i, access in enumerate(operator.reads):
                edge = graph.incoming.get((operator.name, i))
                if access.role is Role.PARAMETER:
                    name = parameter_name(operator, access)
                    if name not in self.variables:
                        self.deviations[name] = initial_deviation(operator, access)
                        self.variables[name] = tf.get_variable(
                            f"parameter_{len(self.variables)}",
                            access.shape,
                            dtype,
                            initializer=tf.zeros_initializer(),
                            use_resource=True,
                        )
                        # One value for all uses of a step.
                        reads[name] = self.variables[name].read_value()
                    order = shared_order(graph, operator, access)
                    is_plain = order == tuple(range(len(order)))
                    values.append(reads[name] if is_plain else tf.transpose(reads[name], order))
                elif edge is not None:
                    values.append(tf.reshape(written[edge.producer], access.shape))
                else:
                    values.append(self._placeholder(items[operator.name, i], dtype))
            written[operator.name] = COMPUTE[operator.kind](operator, values)
            if operator.kind == "softmax_loss":
                losses.append(written[operator.name])
        if len(losses) != 1:
            raise RuntimeFailure(f"network {graph.name!r} has {len(losses)} losses; training needs exactly one")
        (self.loss,) = losses

    def _placeholder(self, item: DataInput, dtype: Any) -> Any:
        self.inputs.append(item)
        self.placeholders[item.name] = tf.placeholder(tf.int32 if item.below else dtype, item.shape)
        return self.placeholders[item.name]
