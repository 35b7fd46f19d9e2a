"""What is refused of an edited program before it trains; a step with a number that is not finite changes nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers import convolve, dims, fn, pool, reshard, softmax_loss, window
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.counted import initial_value
from pase.targets.training.optimisers import make_rule


@pytest.fixture
def program() -> Iterator[Program]:
    with tf.Graph().as_default():
        yield Program(num_devices=4, dtype="float64")


def start(program: Program, loss: Any) -> Training:
    return Training.start(program, loss, learning_rate=0.1, seed=0)


def dense_loss(program: Program, axes: list[tuple[str, int]], devices: list[int] | None = None) -> Any:
    inputs, labels = program.floats("inputs", [8, 6]), program.indices("labels", [8], below=4)
    b, n, c = dims(b=8, n=4, c=6)
    mesh = program.mesh("fc", axes, devices)
    x = reshard(inputs, mesh, [b, c])
    y = mtf.einsum([x, program.weight(mesh, "fc/w", [c, n], 0.4)], [b, n]) + program.weight(mesh, "fc/bias", [n])
    return softmax_loss(fn.relu(y), reshard(labels, mesh, [b]), n)


def test_operations_on_two_meshes_are_refused(program: Program) -> None:
    first, second = program.mesh("a", [("b", 2)]), program.mesh("b", [("b", 4)])
    (b,) = dims(b=8)
    x, y = program.weight(first, "x", [b], 1.0), program.weight(second, "y", [b], 1.0)
    loss = mtf.reduce_sum(x + y)
    with pytest.raises(ProgramError, match=r"reads tensors of two meshes, those of layers 'a' and 'b'; reshard one"):
        start(program, loss)
    with pytest.raises(ProgramError, match=r"'sum' reads tensors of two meshes, those of layers 'a' and 'b'"):
        Shardwise(tf.add, [x, y], shape=[b], name="sum")


def test_a_dim_with_two_extents_is_refused(program: Program) -> None:
    mesh = program.mesh("fc", [])
    x, w = (program.weight(mesh, name, dims(c=c, **more), 1.0) for name, c, more in (("x", 4, {}), ("w", 8, {"n": 3})))
    with pytest.raises(ProgramError, match=r"of layer 'fc' has dim c with extents 4 and 8; give it one"):
        start(program, mtf.reduce_sum(mtf.einsum([x, w], dims(n=3))))


def test_a_name_that_is_used_twice_is_refused(program: Program) -> None:
    program.floats("inputs", [8, 6])
    with pytest.raises(ProgramError, match=r"two inputs of the program are named 'inputs'"):
        program.floats("inputs", [8, 6])


def test_windows_that_cannot_be_split_or_do_not_belong_are_refused(program: Program) -> None:
    images = program.floats("inputs", [2, 4, 6, 6])
    b, n, h, w, c, r, s, other = dims(b=2, n=4, h=4, w=4, c=4, r=3, s=3, other=5)
    mesh = program.mesh("pool", [("r", 1), ("n", 4)])
    rows, columns = window(h, r, of=6), window(w, s, of=6)
    x = reshard(images, mesh, [b, c, rows, columns])
    with pytest.raises(ProgramError, match=r"filters .* do not produce other; give the same dims to both"):
        convolve(x, program.weight(mesh, "w", [n, c, r, s]), [rows, columns], [b, other, h, w])
    with tf.Graph().as_default():
        split = Program(num_devices=3)
        mesh = split.mesh("pool", [("r", 3)])
        x = reshard(split.floats("inputs", [2, 4, 6, 6]), mesh, [b, c, rows, columns])
        with pytest.raises(
            ProgramError, match=r"layer 'pool' pools windows of r, which cannot be split; take r out of the mesh"
        ):
            pool(x, [rows, columns], [b, c, h, w], function="max")


def test_names_that_tensorflow_does_not_accept_are_made_acceptable(program: Program) -> None:
    mesh = program.mesh("couche n°1 ✓", [])
    other = program.mesh("couche n°1 ✗", [])
    assert mesh.name != other.name
    (b,) = dims(b=2)
    weights = [program.weight(m, name, [b], 1.0) for m, name in ((mesh, "-w é"), (other, "-w è"))]
    first, second = (mtf.reduce_sum(x * x) for x in weights)
    training = start(program, first + reshard(second, mesh, []))
    assert np.isfinite(training.step({}).loss)
    training.close()


def test_every_slice_of_a_weight_is_read_once(program: Program) -> None:
    """Another read could come after the update of the same step."""
    training = start(program, dense_loss(program, [("c", 2), ("n", 2)]))
    training.close()
    handles = [
        op for op in tf.get_default_graph().get_operations() if op.type == "VarHandleOp" and "_slice_" in op.name
    ]
    assert len(handles) == 8
    for handle in handles:
        reads = [
            op for op in handle.outputs[0].consumers() if op.type == "ReadVariableOp" and op.outputs[0].consumers()
        ]
        assert len(reads) == 1


def test_weights_are_whole_and_those_that_were_drawn(program: Program) -> None:
    training = start(program, dense_loss(program, [("c", 2), ("n", 2)], [3, 1, 0, 2]))
    before = training.weights()
    drawn = initial_value("fc/w", (6, 4), 0.4, 0)
    np.testing.assert_array_equal(before["fc/w"], drawn)
    np.testing.assert_array_equal(before["fc/bias"], np.zeros(4))
    assert drawn.std() == pytest.approx(0.4, rel=0.5)
    numbers = np.random.default_rng(0)
    training.step({"inputs": numbers.standard_normal((8, 6)), "labels": numbers.integers(4, size=8)})
    after = training.weights()
    assert (after["fc/w"] != before["fc/w"]).any()
    training.close()


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
    """Set one number of a weight, before the first step."""
    weights = {name: array.copy() for name, array in training.weights().items()}
    weights[weight][where] = value
    training.initialise(0, weights)


def held(training: Training) -> dict[str, Any]:
    """Return the weights and what the optimiser keeps of each."""
    found: dict[str, Any] = dict(training.weights())
    for name, own in training._updates.state.items():
        found[f"{name} velocity"] = training.session.run(own["velocity"].operation.get_master())
    return found


def failing(training: Training, batch: dict[str, Any], message: str) -> None:
    before, num_steps = held(training), training.num_steps
    with pytest.raises(ProgramError, match=message):
        training.step(batch)
    after = held(training)
    assert training.num_steps == num_steps
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    training.close()


def test_the_batch(program: Program) -> None:
    training = two_layers(program)
    training.step(BATCH)
    broken = {**BATCH, "inputs": np.where(np.arange(48).reshape(8, 6) == 40, np.nan, 1.0)}
    message = r"^step 2: the loss is nan; use a smaller learning rate, .*that are not finite are in the batch; the"
    failing(training, broken, message)


def test_a_weight(program: Program) -> None:
    training = two_layers(program)
    changed(training, "fc2/w", np.nan)
    failing(training, BATCH, r"^step 1: the loss is nan; .*are in weight 'fc2/w' of layer 'fc2'; the step was not")


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
    filters_now = training.weights()["filters"].copy()
    filters_now[0, 0, 0, 0] = np.inf
    training.initialise(0, {"filters": filters_now})
    with pytest.raises(ProgramError, match=r"^step 1: .* are in weight 'filters' of layer 'conv'"):
        training.step(batch)
    training.close()
