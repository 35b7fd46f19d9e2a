"""Convolution and pooling of lines, images and volumes against tf.nn and NumPy; windows that read padding alone."""

from typing import Any

import numpy as np
import pytest

from pase.common.documents import Field
from pase.errors import GraphError, PlanError
from pase.graph import Builder, Operator, graph_document, graph_from_document
from pase.graph.operators import conv1d, conv2d, conv3d, global_pool, pool1d, pool2d, pool3d
from pase.importers.frameworks import import_model
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.interpreter import interpret
from tests.runtime.networks import zeros

Array = np.ndarray[Any, Any]

SHAPES = {1: (2, 4, 13), 2: (2, 4, 9, 7), 3: (2, 4, 6, 9, 7)}
CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
POOLINGS = {1: pool1d, 2: pool2d, 3: pool3d}


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


# -- windows that lie in the padding alone, as in a convolution of one point with padding


def test_a_graph_with_such_windows_is_read_back() -> None:
    graph = zeros()
    # Each is as wide as torch says: floor((extent + zeros - kernel) / stride) + 1.
    assert [graph[name].extents["h"] for name in ("wide", "wider", "after")] == [6, 6, 5]
    assert [graph[name].extents["w"] for name in ("wide", "wider", "after")] == [6, 6, 4]
    assert graph_from_document(Field(graph_document(graph), "graph", PlanError, "plan.json")) == graph


def test_a_pooling_window_may_not_lie_in_the_padding_alone() -> None:
    net = Builder("pool")
    with pytest.raises(GraphError, match=r"padding \(1, 1\) holds a whole window of 1"):
        net.add(pool2d, "pool", net.input((2, 3, 4, 4)), kernel=1, stride=1, padding=1)


def test_a_convolution_of_one_point_with_padding_is_imported() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, kernel_size=1, padding=1), torch.nn.ReLU())
    x = torch.zeros(8, 3, 6, 6)
    graph = import_model((module, (x,))).lowered.graph
    (convolution,) = graph.operators
    assert convolution.kind == "conv2d"
    assert convolution.writes[0].shape == tuple(module(x).shape) == (8, 8, 8, 8)
