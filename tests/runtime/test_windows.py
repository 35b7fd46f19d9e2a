"""Convolution and pooling of lines, images and volumes against PyTorch's; windows that read padding alone."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pase.common.documents import DocumentSource
from pase.errors import GraphError, PlanError
from pase.graph import Builder, graph_document, graph_from_document
from pase.graph.operators import conv1d, conv2d, conv3d, global_pool, pool1d, pool2d, pool3d
from pase.importers.frameworks import import_model
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.interpreter import interpret
from tests.runtime.networks import zeros

SHAPES = {1: (2, 4, 13), 2: (2, 4, 9, 7), 3: (2, 4, 6, 9, 7)}
CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}
POOLINGS = {1: pool1d, 2: pool2d, 3: pool3d}


# -- one device


def options_of(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of an operator, and those that PyTorch calls so."""
    return options, {key: value for key, value in options.items() if key != "kernel"}


CONVOLVED = {
    "plain": options_of(kernel=3),
    "strided and padded": options_of(kernel=3, stride=2, padding=1),
    "dilated, in groups": options_of(kernel=2, stride=2, dilation=3, padding=1, groups=2),
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", [*CONVOLVED, "max", "max, padded", "mean", "mean, padded"])
def test_windows_are_those_of_pytorch(rank: int, name: str) -> None:
    """Values, and gradients of their product with numbers that are all different. A mean leaves the padding out."""
    if name in CONVOLVED:
        options, theirs = CONVOLVED[name]
        operator = CONVOLUTIONS[rank]("conv", SHAPES[rank], out=6, **options)
        function = partial(getattr(functional, f"conv{rank}d"), **theirs)
    else:
        reduction, padding = name.partition(",")[0], int("padded" in name)
        operator = POOLINGS[rank]("pool", SHAPES[rank], kernel=3, stride=2, padding=padding, reduction=reduction)
        counted = {"count_include_pad": False} if reduction == "mean" else {}
        pooled = getattr(functional, f"{'avg' if reduction == 'mean' else 'max'}_pool{rank}d")
        function = partial(pooled, kernel_size=3, stride=2, padding=padding, **counted)
    numbers = np.random.default_rng(4)
    reads = [torch.tensor(numbers.normal(size=access.shape), requires_grad=True) for access in operator.reads]
    y = function(*reads)
    factors = numbers.normal(size=tuple(y.shape))
    expected = [y, *torch.autograd.grad((y * torch.tensor(factors)).sum(), reads)]
    assert operator.body is not None
    with tf.Graph().as_default(), tf.Session() as session:
        own = [tf.constant(x.detach().numpy()) for x in reads]
        names = [access.tensor for access in operator.reads]
        computed = interpret(operator, operator.body, dict(zip(names, own, strict=True)))
        found = session.run([computed, *tf.gradients(tf.reduce_sum(computed * factors), own)])
    assert operator.writes[0].shape == found[0].shape
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, other.detach().numpy(), rtol=1e-12, atol=1e-12)


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
    assert graph_from_document(graph_document(graph), DocumentSource(PlanError, "plan.json")) == graph


def test_a_pooling_window_may_not_lie_in_the_padding_alone() -> None:
    net = Builder("pool")
    with pytest.raises(GraphError, match=r"padding \(1, 1\) holds a whole window of 1"):
        net.add(pool2d, "pool", net.input((2, 3, 4, 4)), kernel=1, stride=1, padding=1)


def test_a_convolution_of_one_point_with_padding_is_imported() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, kernel_size=1, padding=1), torch.nn.ReLU())
    x = torch.zeros(8, 3, 6, 6)
    graph = import_model((module, (x,))).lowered.graph
    (convolution,) = graph.operators
    assert convolution.kind == "conv2d"
    assert convolution.writes[0].shape == tuple(module(x).shape) == (8, 8, 8, 8)
