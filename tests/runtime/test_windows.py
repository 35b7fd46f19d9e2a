"""Convolution and pooling of lines, images and volumes: one device against tf.nn, any strategy against one device."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import pase
from pase.errors import GraphError
from pase.graph import Builder, Graph, Operator
from pase.graph.operators import (
    batch_norm,
    conv1d,
    conv2d,
    conv3d,
    dense,
    global_pool,
    pool1d,
    pool2d,
    pool3d,
    softmax_loss,
)
from pase.sharding.traffic import bytes_by_movement, flows
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.interpreter import interpret
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from tests.networks import slow_machine
from tests.runtime.plans import configurations, make_plan, random_plan
from tests.runtime.test_measure_plans import run, that_move
from tests.runtime.training import options, parallel_training

Array = np.ndarray[Any, Any]

SHAPES = {1: (2, 4, 13), 2: (2, 4, 9, 7), 3: (2, 4, 6, 9, 7)}
CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
POOLINGS = {1: pool1d, 2: pool2d, 3: pool3d}


def lines() -> Graph:
    """Strides, padding of each side, groups, dilation, both means, the maximum of windows that overlap."""
    net = Builder("lines")
    x = net.add(conv1d, "a", net.input((8, 4, 23)), out=8, kernel=5, stride=2, padding=((2, 3),), groups=2)
    x = net.add(pool1d, "b", x, kernel=3, stride=1, padding=1)
    x = net.add(conv1d, "c", x, out=12, kernel=3, padding="same", dilation=2, activation="tanh", bias=False)
    x = net.add(pool1d, "d", x, kernel=4, stride=2, padding=1, reduction="mean")
    x = net.add(batch_norm, "e", x)
    x = net.add(pool1d, "f", x, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.add(global_pool, "g", x), out=(("n", 6),)))
    return net.build()


def volumes() -> Graph:
    """As `lines`, with other options for each dim."""
    net = Builder("volumes")
    x = net.input((4, 2, 6, 9, 8))
    x = net.add(conv3d, "a", x, out=4, kernel=(3, 3, 2), stride=(1, 2, 1), padding=((1, 1), (1, 0), (0, 1)), groups=2)
    x = net.add(pool3d, "b", x, kernel=(2, 3, 3), stride=(1, 1, 2), padding=((1, 0), 1, 1))
    x = net.add(conv3d, "c", x, out=8, kernel=(2, 2, 3), padding="same", dilation=(2, 1, 1), activation="tanh")
    x = net.add(pool3d, "d", x, kernel=(3, 2, 2), stride=(2, 1, 2), padding=(1, 0, 0), reduction="mean")
    x = net.add(batch_norm, "e", x)
    x = net.add(pool3d, "f", x, kernel=3, stride=1, padding=1, reduction="mean", count_padding=True)
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.add(global_pool, "g", x), out=(("n", 6),)))
    return net.build()


NETWORKS = {"lines": lines, "volumes": volumes}


@cache
def network(name: str) -> Graph:
    return NETWORKS[name]()


@cache
def reference(name: str) -> ReferenceResult:
    return reference_training(network(name), options(3, rate=0.3))


def check(name: str, plan: pase.Plan) -> None:
    losses, weights = parallel_training(plan, steps=3, rate=0.3)
    expected = reference(name)
    assert max_relative_difference(losses, expected.losses) < 1e-12
    assert set(weights) == set(expected.weights)
    for weight, values in expected.weights.items():
        # A program has a dim for the groups.
        np.testing.assert_allclose(weights[weight].reshape(values.shape), values, rtol=1e-11, atol=1e-12)


# -- one device


def value_and_gradients(y: Any, reads: list[Any], dtype: str) -> list[Array]:
    """What is computed, and the gradients of its product with numbers that are all different."""
    shape = y.shape.as_list()
    numbers = np.random.default_rng(9).normal(size=shape).astype(dtype)
    with tf.Session() as session:
        found: list[Array] = session.run([y, *tf.gradients(tf.reduce_sum(y * numbers), reads)])
    return found


def read_tensors(operator: Operator, dtype: str) -> list[Any]:
    generator = np.random.default_rng(4)
    return [tf.constant(generator.normal(size=access.shape).astype(dtype)) for access in operator.reads]


def computed(operator: Operator, reads: list[Any]) -> Any:
    assert operator.body is not None
    names = [access.tensor for access in operator.reads]
    return interpret(operator, operator.body, dict(zip(names, reads, strict=True)))[0]


def last(x: Any) -> Any:
    return tf.transpose(x, [0, *range(2, len(x.shape)), 1])


def first(x: Any) -> Any:
    rank = len(x.shape)
    return tf.transpose(x, [0, rank - 1, *range(1, rank - 1)])


def assert_alike(found: list[Array], expected: list[Array], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padding", [0, "same"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_are_those_of_tensorflow(rank: int, stride: int, padding: Any) -> None:
    operator = CONVOLUTIONS[rank]("conv", SHAPES[rank], out=6, kernel=3, stride=stride, padding=padding)
    with tf.Graph().as_default():
        reads = read_tensors(operator, "float64")
        found = value_and_gradients(computed(operator, reads), reads, "float64")
        x, w, bias = reads
        filters = tf.transpose(w, [*range(2, rank + 2), 1, 0])
        how = "SAME" if padding == "same" else "VALID"
        functions: dict[int, Any] = {
            1: lambda: tf.nn.conv1d(last(x), filters, stride, how),
            2: lambda: tf.nn.conv2d(last(x), filters, stride, how),
            3: lambda: tf.nn.conv3d(last(x), filters, [1, stride, stride, stride, 1], how),
        }
        expected = value_and_gradients(first(functions[rank]() + bias), reads, "float64")
    assert operator.writes[0].shape == found[0].shape
    assert_alike(found, expected, 1e-12)


@pytest.mark.parametrize("padding", [0, "same"])
@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_poolings_are_those_of_tensorflow(rank: int, reduction: str, padding: Any) -> None:
    """A mean over "same" windows leaves the padding out there. TensorFlow does not pool volumes in float64."""
    dtype = "float32" if rank == 3 else "float64"
    operator = POOLINGS[rank]("pool", SHAPES[rank], kernel=3, stride=2, padding=padding, reduction=reduction)
    with tf.Graph().as_default():
        reads = read_tensors(operator, dtype)
        found = value_and_gradients(computed(operator, reads), reads, dtype)
        how = "SAME" if padding == "same" else "VALID"
        functions = {
            "max": {1: tf.nn.max_pool1d, 2: tf.nn.max_pool2d, 3: tf.nn.max_pool3d},
            "mean": {1: tf.nn.avg_pool1d, 2: tf.nn.avg_pool2d, 3: tf.nn.avg_pool3d},
        }
        expected = value_and_gradients(first(functions[reduction][rank](last(reads[0]), 3, 2, how)), reads, dtype)
    assert_alike(found, expected, 1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dilated_strided_convolutions_are_those_of_numpy(rank: int) -> None:
    options: dict[str, Any] = {"kernel": 2, "stride": 2, "dilation": 3, "padding": 1, "groups": 2, "bias": False}
    operator = CONVOLUTIONS[rank]("conv", SHAPES[rank], out=6, **options)
    with tf.Graph().as_default(), tf.Session() as session:
        reads = read_tensors(operator, "float64")
        x, w, found = session.run([*reads, computed(operator, reads)])
    axes = tuple(range(2, rank + 2))
    padded = np.pad(x, [(0, 0), (0, 0), *[(1, 1)] * rank])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (4,) * rank, axis=axes)
    steps = [1, 1, *[2] * rank, *[3] * rank]
    windows = windows[tuple(slice(None, None, step) for step in steps)]
    halves = [
        np.tensordot(part, weight, axes=([1, *range(rank + 2, 2 * rank + 2)], list(range(1, rank + 2))))
        for part, weight in zip(np.split(windows, 2, axis=1), np.split(w, 2), strict=True)
    ]
    np.testing.assert_allclose(found, np.moveaxis(np.concatenate(halves, axis=-1), -1, 1), rtol=1e-12)


# -- many devices


@pytest.mark.parametrize(("num_devices", "seed"), [(2, 0), (4, 1), (8, 3)])
@pytest.mark.parametrize("name", NETWORKS)
def test_random_strategies(name: str, num_devices: int, seed: int) -> None:
    check(name, random_plan(network(name), num_devices, seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_dim_splits(name: str) -> None:
    """Each configuration of two devices of each convolution and pooling, several layers at once."""
    graph = network(name)
    choices = {operator.name: configurations(operator, 2)[1:] for operator in graph.operators}
    for i in range(max(len(choices[layer]) for layer in "abcdf")):
        check(name, make_plan(graph, 2, {layer: found[i % len(found)] for layer, found in choices.items()}))


@pytest.mark.parametrize("name", NETWORKS)
def test_they_are_searched(name: str) -> None:
    plan = pase.search(network(name), devices=4, machine=slow_machine())
    assert any(factor > 1 for layer in plan.layers for factor in layer.splits.values())
    check(name, plan)


@pytest.mark.parametrize(("name", "seed"), [("lines", 0), ("volumes", 1)])
def test_executed_bytes_are_those_predicted(name: str, seed: int) -> None:
    """Where batch normalisation exchanges in both passes, layers as a whole."""
    plan = random_plan(network(name), 4, seed)
    traffic, measured = run(plan, keep_alive=True)
    assert that_move(dict(measured.by_movement)) == that_move(traffic.bytes_by_movement)
    predicted = bytes_by_movement(flows(plan))
    assert measured.total_bytes == traffic.total_bytes == sum(predicted.values()) > 0


# -- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: conv1d("l", (2, 4, 9, 7), out=4, kernel=3), r"expected \[batch, channels, width\]"),
        (lambda: conv3d("l", (2, 4, 9, 7), out=4, kernel=3), r"expected \[batch, channels, depth, height, width\]"),
        (lambda: pool3d("l", (2, 4), kernel=3, stride=1), r"expected \[batch, channels, depth, height, width\]"),
        (lambda: conv2d("l", SHAPES[2], out=4, kernel=(3,)), r"kernel \(3,\) for 2 dims \(height, width\)"),
        (lambda: conv3d("l", SHAPES[3], out=4, kernel=3, stride=(1, 2)), r"stride \(1, 2\) for 3 dims \(depth"),
        (lambda: conv3d("l", SHAPES[3], out=4, kernel=3, padding=(1, 2)), r"padding \(1, 2\) for 3 dims"),
        (lambda: pool1d("l", SHAPES[1], kernel=3, stride=1, padding=3), r"padding \(3, 3\) holds a whole window of 3"),
        (lambda: global_pool("l", (2, 3, 4, 5, 6, 7)), "expected .* 1 to 3 of depth, height, width"),
        (lambda: pool3d("l", SHAPES[3], kernel=(1, 1, 8), stride=1), "a window of 8 does not fit 7 points"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
