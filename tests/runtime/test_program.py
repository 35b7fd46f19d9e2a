"""What a person can get wrong in an edited program, and what is refused before it trains."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers import convolve, dims, fn, pool, reshard, softmax_loss, window
from pase.targets.mesh_tensorflow.runtime.layers.local import Shardwise
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.script import main
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.initial import initial_value


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


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ([("c", 4)], None, r"layer 'fc' splits c = 6 in 4 parts, which do not divide it; choose a divisor"),
        ([("q", 2)], None, r"layer 'fc' has 2 parts along 'q', which is a dim of none of its tensors"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(
    program: Program, axes: list[tuple[str, int]], devices: list[int] | None, message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        start(program, dense_loss(program, axes, devices))


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


def test_a_loss_that_is_not_finite_ends_the_training(program: Program) -> None:
    training = start(program, dense_loss(program, [("b", 2), ("n", 2)]))
    batch = {"inputs": np.full((8, 6), np.inf), "labels": np.zeros(8, np.int32)}
    with pytest.raises(ProgramError, match=r"the loss is nan; use a smaller learning rate"):
        training.step(batch)
    training.close()


def test_main_prints_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    main(lambda program: dense_loss(program, [("b", 2)]), num_devices=2, arguments=["--steps", "2", "--measure"])
    built, first, second, done = capsys.readouterr().out.splitlines()
    assert built.startswith("built in ")
    assert first.startswith("step 1  loss 1.")
    assert second.startswith("step 2  loss 1.")
    assert done.endswith("bytes moved between devices in a step")
