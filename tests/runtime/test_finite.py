"""A step with a number that is not finite changes nothing and says where the first one arose."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers import convolve, dims, fn, pool, reshard, softmax_loss, window
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training, TrainingState
from pase.targets.training.optimisers import make_rule


@pytest.fixture
def program() -> Iterator[Program]:
    with tf.Graph().as_default():
        yield Program(num_devices=4, dtype="float64")


BATCH = {"inputs": np.ones((8, 6)), "labels": np.zeros(8, np.int32)}


def two_layers(program: Program) -> Training:
    """Two dense layers, split in different ways."""
    inputs, labels = program.floats("inputs", [8, 6]), program.indices("labels", [8], below=4)
    b, k, c = dims(b=8, k=6, c=6)
    mesh = program.mesh("fc1", [("b", 2), ("k", 2)])
    hidden = fn.relu(mtf.einsum([reshard(inputs, mesh, [b, c]), program.weight(mesh, "fc1/w", [c, k], 0.4)], [b, k]))
    b, n, c = dims(b=8, n=4, c=6)
    mesh = program.mesh("fc2", [("n", 2), ("c", 2)], [3, 1, 0, 2])
    logits = mtf.einsum([reshard(hidden, mesh, [b, c]), program.weight(mesh, "fc2/w", [c, n], 0.4)], [b, n])
    loss = softmax_loss(logits, reshard(labels, mesh, [b]), n)
    return Training.start(program, loss, learning_rate=0.1, seed=0, rule=make_rule("momentum", {}))


def changed(training: Training, weight: str, value: float, where: tuple[int, int] = (2, 3)) -> None:
    """Set one number of a weight."""
    state = training.state()
    weights = {name: array.copy() for name, array in state.weights.items()}
    weights[weight][where] = value
    training.restore(TrainingState(num_steps=state.num_steps, weights=weights, slots=state.slots))


def failing(training: Training, batch: dict[str, Any], message: str) -> None:
    before = training.state()
    with pytest.raises(ProgramError, match=message):
        training.step(batch)
    after = training.state()
    assert after.num_steps == before.num_steps
    for name, array in before.weights.items():
        np.testing.assert_array_equal(after.weights[name], array)
        np.testing.assert_array_equal(after.slots[name]["velocity"], before.slots[name]["velocity"])
    training.close()


def test_the_batch(program: Program) -> None:
    training = two_layers(program)
    training.step(BATCH)
    broken = {**BATCH, "inputs": np.where(np.arange(48).reshape(8, 6) == 40, np.nan, 1.0)}
    failing(training, broken, r"^step 2: the loss is nan; .*the first values that are not finite are in the batch; the")


@pytest.mark.parametrize("weight", ["fc1/w", "fc2/w"])
def test_a_weight(program: Program, weight: str) -> None:
    training = two_layers(program)
    changed(training, weight, np.nan)
    layer = weight.partition("/")[0]
    failing(
        training, BATCH, rf"^step 1: the loss is nan; .*are in weight '{weight}' of layer '{layer}'; the step was not"
    )


def test_a_layer_that_overflows(program: Program) -> None:
    training = two_layers(program)
    changed(training, "fc1/w", 1e200)
    changed(training, "fc2/w", 1e200, (3, 1))
    failing(training, BATCH, r"^step 1: the loss is .*are in the output of layer 'fc2'")


def test_a_gradient_where_the_loss_is_finite(program: Program) -> None:
    (b,) = dims(b=8)
    first, second = program.mesh("first", [("b", 4)]), program.mesh("second", [("b", 2)])
    x = program.weight(first, "x", [b], 1.0)
    root = mtf.sqrt(reshard(x * 0.0, second, [b]))
    training = Training.start(program, mtf.reduce_sum(root), learning_rate=0.1, seed=0, rule=make_rule("momentum", {}))
    failing(training, {}, r"^step 1: a gradient is not finite; .*are in the gradients in layer 'second'")


def test_the_padding_of_a_maximum_is_no_failure(program: Program) -> None:
    images, labels = program.floats("inputs", [4, 2, 4, 4]), program.indices("labels", [4], below=2)
    b, c, h, w, r, s, n = dims(b=4, c=2, h=4, w=4, r=3, s=3, n=2)
    mesh = program.mesh("pool", [("h", 2)])
    rows, columns = window(h, r, of=4, pad=1), window(w, s, of=4, pad=1)
    pooled = pool(
        reshard(images, mesh, [b, c, rows, columns], fill=-np.inf), [rows, columns], [b, c, h, w], function="max"
    )
    mesh = program.mesh("conv", [("b", 2)])
    (out,) = dims(out=2)
    filters = program.weight(mesh, "filters", [out, c, r, s], 1.0)
    features = convolve(reshard(pooled, mesh, [b, c, rows, columns]), filters, [rows, columns], [b, out, h, w])
    logits = mtf.reduce_sum(features, output_shape=mtf.Shape([b, out]))
    loss = softmax_loss(reshard(logits, program.mesh("loss", []), [b, n]), reshard(labels, program.meshes[-1], [b]), n)
    training = Training.start(program, loss, learning_rate=0.1, seed=0)
    batch = {"inputs": np.ones((4, 2, 4, 4)), "labels": np.zeros(4, np.int32)}
    assert np.isfinite(training.step(batch).loss)
    state = training.state()
    filters_now = state.weights["filters"].copy()
    filters_now[0, 0, 0, 0] = np.inf
    training.restore(TrainingState(num_steps=1, weights={"filters": filters_now}, slots={}))
    with pytest.raises(ProgramError, match=r"^step 2: .* are in weight 'filters' of layer 'conv'"):
        training.step(batch)
    training.close()


def test_another_optimisers_state_is_refused(program: Program) -> None:
    training = two_layers(program)
    state = training.state()
    with pytest.raises(ProgramError, match=r"lacks 'velocity' of weight 'fc1/w'; it is of another optimiser"):
        training.restore(TrainingState(num_steps=0, weights=state.weights, slots={}))
    training.close()
