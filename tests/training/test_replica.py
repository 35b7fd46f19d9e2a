"""A network whose weights come in one vector: its gradients are those of the single-device program."""

import threading
from functools import cache
from typing import Any

import numpy as np
import pytest

from pase.easgd.network import Network, build_of_plan
from pase.graph import Builder, Graph
from pase.graph.operators import dense, dropout, softmax_loss
from pase.planning.plan import Plan
from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf
from pase.targets.mesh_tensorflow.runtime.layers import dims, fn, reshard
from pase.targets.mesh_tensorflow.runtime.layers import softmax_loss as layer_of_the_loss
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.reference import reference_training
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.data import Batches
from tests.runtime.networks import small
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.training import builder_of

RATE = 0.1


def network(plan: Plan, dtype: str = "float64") -> Network:
    return Network.load(build_of_plan(plan).build, num_devices=plan.num_devices, dtype=dtype)


@cache
def split_mlp() -> Network:
    splits = {"fc1": {"b": 2}, "fc2": {"n": 2}, "fc3": {"c": 2}}
    return network(make_plan(small("mlp"), 2, splits, {"fc2": (1, 0)}))


def dropping() -> Graph:
    net = Builder("dropping")
    x = net.add(dense, "first", net.input((8, 12)), out=(("n", 24),), activation="tanh")
    x = net.add(dropout, "drop", x, dims=("b", "n"), rate=0.4)
    net.add(softmax_loss, "loss", net.add(dense, "fc", x, out=(("n", 6),)))
    return net.build()


def descended(net: Network, num_steps: int, seed: int = 0) -> tuple[list[float], list[float | None], dict[str, Any]]:
    """Losses, accuracies and the last weights of gradient descent with a replica, on the batch of the reference."""
    replica = net.replica(Batches(net.inputs, seed=seed).batch, seed=seed)
    weights = net.initial(seed)
    losses: list[float] = []
    accuracies: list[float | None] = []
    for step in range(num_steps):
        gradient = replica.gradient(weights, step)
        weights = weights - RATE * gradient.vector
        losses.append(gradient.loss)
        accuracies.append(gradient.accuracy)
    return losses, accuracies, net.packing.unpack(weights)


@pytest.mark.parametrize(
    ("graph", "num_devices"),
    [
        (small("mlp"), 4),
        (dropping(), 2),
        pytest.param(small("lenet5"), 2, marks=pytest.mark.full),
        pytest.param(small("gpt"), 2, marks=pytest.mark.full),
    ],
    ids=["mlp", "dropout", "lenet5", "gpt"],
)
def test_steps_along_its_gradients_are_those_of_one_device(graph: Graph, num_devices: int) -> None:
    reference = reference_training(graph, options(3, rate=RATE, seed=1))
    net = network(random_plan(graph, num_devices, seed=4))
    losses, accuracies, weights = descended(net, 3, seed=1)
    net.close()
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert accuracies == pytest.approx(reference.accuracies, rel=1e-12)
    assert weights.keys() == reference.weights.keys()
    for name, expected in reference.weights.items():
        assert np.abs(weights[name] - expected).max() <= 1e-12


def test_initial_weights_are_those_of_a_training_without_workers() -> None:
    plan = make_plan(small("mlp"), 2, {})
    with tf.Graph().as_default():
        program = Program(num_devices=2)
        training = Training.start(program, builder_of(emit(plan))(program), learning_rate=0.1, seed=6)
        expected = training.weights()
        training.close()
    net = network(plan, "float32")
    found = net.packing.unpack(net.initial(6))
    assert list(found) == list(expected)
    assert all(found[name].dtype == np.float32 and np.array_equal(found[name], expected[name]) for name in expected)


def test_in_32_bits_gradients_are_those_of_64_up_to_rounding() -> None:
    nets = [network(make_plan(small("mlp"), 1, {}), dtype) for dtype in ("float32", "float64")]
    single, double = (net.replica(Batches(net.inputs, seed=0).batch).gradient(net.initial(0), 0) for net in nets)
    assert single.vector.dtype == np.float32
    assert double.vector.dtype == np.float64
    assert single.loss == pytest.approx(double.loss, rel=1e-5)
    assert np.abs(single.vector - double.vector).max() <= 1e-5 * np.abs(double.vector).max()


def test_replicas_in_threads_do_not_disturb_one_another() -> None:
    net = split_mlp()
    replica = net.replica(Batches(net.inputs, seed=0).batch)
    weights = [net.initial(seed) for seed in range(4)]
    alone = [replica.gradient(each, 0).vector for each in weights]
    found: list[list[Any]] = [[] for _ in weights]

    def work(i: int) -> None:
        own = net.replica(Batches(net.inputs, seed=0).batch)
        found[i].extend(own.gradient(weights[i], step).vector for step in range(15))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(weights))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(vectors) for vectors in found] == [15] * 4
    for expected, vectors in zip(alone, found, strict=True):
        assert all(np.array_equal(vector, expected) for vector in vectors)


def test_what_is_not_finite_is_returned_as_it_is() -> None:
    net = split_mlp()
    replica = net.replica(Batches(net.inputs, seed=0).batch)
    weights = net.initial(0)
    weights[0] = np.nan
    gradient = replica.gradient(weights, 0)
    assert np.isnan(gradient.loss)
    assert np.isnan(gradient.vector).any()
    # Nothing of it stays behind.
    assert np.isfinite(replica.gradient(net.initial(0), 0).vector).all()


def test_masks_depend_on_seed_worker_and_step() -> None:
    net = network(make_plan(dropping(), 1, {}))
    batches = Batches(net.inputs, seed=0).batch
    weights = net.initial(0)
    found = {
        (seed, worker, step): net.replica(batches, seed=seed, worker=worker).gradient(weights, step).loss
        for seed in range(2)
        for worker in range(3)
        for step in range(2)
    }
    assert len(set(found.values())) == len(found)
    assert net.replica(batches, seed=1, worker=2).gradient(weights, 1).loss == found[1, 2, 1]
    net.close()


def test_tests_are_those_of_a_training_without_workers_and_drop_nothing() -> None:
    plan = make_plan(dropping(), 1, {})
    net = network(plan)
    numbers = np.random.default_rng(3)
    arrays = {"inputs": numbers.standard_normal((20, 12)), "labels": numbers.integers(6, size=20)}
    loss, accuracy, num_examples = net.evaluator(arrays).evaluate(net.initial(2))
    assert num_examples == 16
    with tf.Graph().as_default():
        program = Program(num_devices=1, dtype="float64")
        training = Training.start(program, builder_of(emit(plan))(program), learning_rate=0.1, seed=2)
        batches = Batches(program.inputs, seed=0, arrays=arrays)
        expected = [training.evaluate(batches.batch(i)) for i in range(2)]
        training.close()
    assert loss == pytest.approx(np.mean([each.loss for each in expected]), rel=1e-12)
    assert accuracy == pytest.approx(np.mean([each.accuracy for each in expected]), rel=1e-12)
    net.close()


def test_a_weight_that_the_loss_does_not_use_has_gradient_zero() -> None:
    def build(program: Program) -> Any:
        inputs, labels = program.floats("inputs", [4, 3]), program.indices("labels", [4], below=2)
        b, n, c = dims(b=4, n=2, c=3)
        mesh = program.mesh("fc", [])
        program.weight(mesh, "unused", [n], 1.0)
        x = fn.relu(mtf.einsum([reshard(inputs, mesh, [b, c]), program.weight(mesh, "fc/w", [c, n], 1.0)], [b, n]))
        return layer_of_the_loss(x, reshard(labels, mesh, [b]), n)

    net = Network.load(build, num_devices=1, dtype="float64")
    vector = net.replica(Batches(net.inputs, seed=0).batch).gradient(net.initial(0), 0).vector
    found = net.packing.unpack(vector)
    assert found["unused"].tolist() == [0, 0]
    assert np.any(found["fc/w"])
    net.close()
