"""Accuracy: counted beside the loss whatever the split, moved to nobody, and on data that are not trained on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.graph import Builder, Graph
from pase.graph.operators import dense, dropout, softmax_loss
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime import layers
from pase.targets.mesh_tensorflow.runtime.measure import crossed
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from pase.targets.mesh_tensorflow.runtime.script import main, train
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.data import Batches, DataInput, Evaluation, StepEvaluation, evaluated
from tests.runtime.networks import small
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import builder_of

Splits = list[tuple[str, int]]


@pytest.fixture
def program() -> Iterator[Program]:
    with tf.Graph().as_default():
        yield Program(num_devices=4, dtype="float64")


def logits_as_they_are(program: Program, shape: tuple[int, ...], splits: Splits, devices: list[int]) -> Training:
    """A program whose logits are its inputs: the weight that is added to them is zero until it is trained."""
    inputs, labels = program.floats("inputs", shape), program.indices("labels", shape[:-1], below=shape[-1])
    dims = layers.dims(**dict(zip(("b", "s", "n")[3 - len(shape) :], shape, strict=True)))
    mesh = program.mesh("softmax", splits, devices)
    x = layers.reshard(inputs, mesh, list(dims)) + program.weight(mesh, "w", [dims[-1]])
    loss = layers.softmax_loss(x, layers.reshard(labels, mesh, list(dims[:-1])), dims[-1])
    return Training.start(program, loss, learning_rate=0.1, seed=0)


@pytest.mark.parametrize(
    ("shape", "splits", "devices"),
    [
        ((12, 8), [], [0, 1, 2, 3]),
        ((12, 8), [("s", 4)], [3, 1, 0, 2]),
        ((12, 8), [("n", 4)], [3, 1, 0, 2]),
        ((12, 8), [("n", 2)], [0, 1, 2, 3]),
        ((12, 8), [("s", 2), ("n", 2)], [2, 0, 1, 3]),
        ((4, 6, 8), [("b", 2), ("s", 2)], [0, 1, 2, 3]),
        ((4, 6, 8), [("s", 2), ("n", 2)], [1, 3, 0, 2]),
    ],
)
def test_it_is_that_of_the_largest_logits(
    program: Program, shape: tuple[int, ...], splits: Splits, devices: list[int]
) -> None:
    training = logits_as_they_are(program, shape, splits, devices)
    numbers = np.random.default_rng(1)
    x = numbers.standard_normal(shape)
    # About half of them right.
    labels = np.where(numbers.random(shape[:-1]) < 0.5, x.argmax(-1), numbers.integers(8, size=shape[:-1]))
    batch = {"inputs": x, "labels": labels.astype(np.int32)}
    expected = (x.argmax(-1) == labels).mean()
    assert 0.3 < expected < 0.8
    shown = training.evaluate(batch)
    assert shown.accuracy == pytest.approx(expected, abs=1e-15)
    assert training.step(batch).accuracy == pytest.approx(expected, abs=1e-15)
    assert shown.loss == pytest.approx(
        (np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, labels[..., np.newaxis], -1)[..., 0]).mean(), rel=1e-14
    )
    training.close()


def test_a_label_that_shares_the_largest_logit_counts_wherever_the_other_is(program: Program) -> None:
    training = logits_as_they_are(program, (4, 8), [("n", 2), ("s", 2)], [0, 1, 2, 3])
    x = np.zeros((4, 8))
    x[:, 1] = x[:, 6] = 1.0
    labels = np.array([1, 6, 2, 7], np.int32)
    assert training.evaluate({"inputs": x, "labels": labels}).accuracy == 0.5
    training.close()


def test_an_evaluation_changes_nothing(program: Program) -> None:
    loss = builder_of(emit(random_plan(small("mlp"), 4, 1)))(program)
    batches = Batches(program.inputs, seed=0)
    training = Training.start(program, loss, learning_rate=0.5, seed=0)
    training.step(batches.batch(0))
    before = training.weights()
    shown = training.evaluate(batches.batch(0))
    after = training.weights()
    assert training.num_steps == 1
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    step = training.step(batches.batch(0))
    assert (step.loss, step.accuracy) == (shown.loss, shown.accuracy)
    training.close()


class Recorded:
    """A session that records what it runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.metadata = tf.RunMetadata()

    def run(self, fetches: Any, feeds: Any) -> Any:
        options = tf.RunOptions(output_partition_graphs=True)
        return self._session.run(fetches, feeds, options=options, run_metadata=self.metadata)


def kinds(metadata: Any) -> set[str]:
    return {node.op for partition in metadata.partition_graphs for node in partition.node}


def test_an_evaluation_runs_the_forward_pass_alone(program: Program) -> None:
    loss = builder_of(emit(random_plan(small("mlp"), 4, 1)))(program)
    batch = Batches(program.inputs, seed=0).batch(0)
    training = Training.start(program, loss, learning_rate=0.5, seed=0)
    stepped = training.step(batch, with_record=True).record
    session = training.session
    training.session = Recorded(session)
    training.evaluate(batch)
    recorded, training.session = training.session.metadata, session
    # Updates assign, and the loss's gradient makes one-hot labels.
    assert {"AssignVariableOp", "OneHot"} <= kinds(stepped)
    assert not {"AssignVariableOp", "OneHot"} & kinds(recorded)
    moved = [crossed(each, tf.get_default_graph(), training.traffic).total_bytes for each in (recorded, stepped)]
    assert moved[0] < moved[1]
    training.close()


# -- on data that are not trained on


def split(folder: Path, num_train: int = 60, num_test: int = 50) -> tuple[Path, Path]:
    """Files of data that a linear rule labels."""
    numbers = np.random.default_rng(3)
    rule = numbers.standard_normal((12, 12))
    for name, size in (("train", num_train), ("test", num_test)):
        x = numbers.standard_normal((size, 12))
        np.savez(folder / f"{name}.npz", inputs=x, labels=(x @ rule).argmax(-1))
    return folder / "train.npz", folder / "test.npz"


def with_dropout() -> Graph:
    net = Builder("drops")
    x = net.add(dense, "fc1", net.input((12, 12)), out=(("n", 24),), activation="relu")
    x = net.add(dropout, "drop", x, dims=("b", "c"), rate=0.5)
    net.add(softmax_loss, "loss", net.add(dense, "fc2", x, out=(("n", 12),)))
    return net.build()


def trained(plan: Plan, path: Path, test: Path, **others: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    given = options(5, rate=0.3, data_path=path, test_data_path=test, test_every=2)
    train(builder_of(emit(plan)), given, num_devices=plan.num_devices, report=events.append, **others)
    return events


@pytest.mark.parametrize(
    ("network", "batch"), [(lambda: small("mlp"), 24), (with_dropout, 12)], ids=["plain", "dropout"]
)
def test_it_is_tested_as_the_reference_is(network: Callable[[], Graph], batch: int, tmp_path: Path) -> None:
    path, test = split(tmp_path)
    plan = random_plan(network(), 4, 2)
    events = trained(plan, path, test, metrics_path=tmp_path / "metrics.jsonl")
    given = options(5, rate=0.3, data_path=path, test_data_path=test, test_every=2)
    reference = reference_training(plan.graph, given)
    found = [event for event in events if event["event"] == "tested"]
    assert [event["step"] for event in found] == [2, 4, 5]
    for event, expected in zip(found, reference.tests, strict=True):
        assert event["loss"] == pytest.approx(expected.loss, rel=1e-12)
        assert event["accuracy"] == pytest.approx(expected.accuracy, abs=1e-15)
        # Whole batches.
        assert event["num_examples"] == expected.num_examples == 50 // batch * batch
    steps = [event for event in events if event["event"] == "step"]
    assert [event["loss"] for event in steps] == pytest.approx(reference.losses, rel=1e-12)
    assert [event["accuracy"] for event in steps] == pytest.approx(reference.accuracies, abs=1e-15)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["accuracy"] for line in lines] == [event["accuracy"] for event in steps]
    shown = {line["step"]: (line["test_loss"], line["test_accuracy"]) for line in lines if "test_loss" in line}
    assert shown == {event["step"]: (event["loss"], event["accuracy"]) for event in found}


def test_tests_change_no_step(tmp_path: Path) -> None:
    path, test = split(tmp_path)
    plan = random_plan(small("mlp"), 4, 2)
    plain = train(builder_of(emit(plan)), options(5, rate=0.3, data_path=path), num_devices=4)
    events = trained(plan, path, test, measure=True, keep_alive=True)
    assert [event["loss"] for event in events if event["event"] == "step"] == plain
    # The bytes are those of a training step.
    assert events[0]["predicted_bytes"] == events[-1]["measured_bytes"]


def test_lines_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, test = split(tmp_path)
    build = builder_of(emit(make_plan(small("mlp"), 1, {})))
    main(build, num_devices=1, arguments=["--steps", "2", "--measure", "--data", str(path), "--test-data", str(test)])
    built, first, second, on_test, done = capsys.readouterr().out.splitlines()
    assert built.startswith("built in ")
    assert first.startswith("step 1  loss ")
    assert "  accuracy " in first
    assert "%  " in second
    assert on_test.startswith("tested after step 2: loss ")
    assert on_test.endswith("%  (48 examples)")
    assert done.startswith("median step ")
    assert done.endswith("bytes moved between devices in a step")


def test_a_loss_on_test_data_that_is_not_finite_ends_the_training() -> None:
    batches = Batches([DataInput(name="x", shape=(2, 3))], seed=0)
    losses = Evaluation(loss=float("nan"), accuracy=0.5)
    with pytest.raises(ProgramError, match=r"^after step 7 the loss on the test data is nan; use a smaller learning"):
        evaluated(batches, lambda _: losses, step=7)


def test_a_test_is_the_mean_of_whole_batches() -> None:
    inputs = [DataInput(name="x", shape=(2, 1))]
    batches = Batches(inputs, seed=0, arrays={"x": np.array([[1.0], [3.0], [5.0], [7.0], [100.0]])})
    found = evaluated(batches, lambda batch: Evaluation(loss=float(batch["x"].sum()), accuracy=None), step=1)
    assert found == StepEvaluation(step=1, loss=(4 + 12) / 2, accuracy=None, num_examples=4)
