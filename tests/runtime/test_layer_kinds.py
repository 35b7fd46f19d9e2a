"""Kinds that exchange tensors within a layer: under any strategy, losses and weights are those of one device."""

from collections.abc import Callable, Container, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import pase
from pase.graph import Builder, Graph
from pase.graph.operators import (
    concat,
    dense,
    gather,
    padded,
    pointwise,
    reduction,
    softmax,
    softmax_loss,
    transposed_convolution,
)
from pase.planning.plan import Plan
from pase.targets.execute import max_relative_difference
from pase.targets.mesh_tensorflow.runtime.reference import ReferenceResult, reference_training
from tests.runtime.networks import EXCHANGING, deep, small
from tests.runtime.plans import configurations, make_plan, random_plan
from tests.runtime.training import Weights, options, parallel_training

TOLERANCE = 1e-12
RATES = {"inception_v3": 1e-6, "lstm": 0.5, "lstm_lm": 0.5}
NETWORKS = (
    "vgg16", "resnet101", "densenet121", "inception_v3",
    "lstm_lm", "transformer", "transformer_big", "bert_large", "gpt",
)  # fmt: skip


def with_full(names: Iterable[str], full: Container[str]) -> list[Any]:
    """Return names as parameters, some of them marked: networks that hold no kind of layer that others do not."""
    return [pytest.param(name, marks=[pytest.mark.full] if name in full else []) for name in names]


@cache
def network(name: str) -> Graph:
    return EXCHANGING[name]() if name in EXCHANGING else small(name)


@cache
def reference(name: str) -> ReferenceResult:
    return reference_training(network(name), options(3, rate=RATES.get(name, 0.05)))


def check(name: str, plan: Plan) -> None:
    losses, weights = parallel_training(plan, steps=3, rate=RATES.get(name, 0.05))
    expected = reference(name)
    assert max_relative_difference(losses, expected.losses) < TOLERANCE
    assert set(weights) == set(expected.weights)
    assert weight_difference(weights, expected.weights) < TOLERANCE


def weight_difference(weights: Weights, expected: Weights) -> float:
    """The largest difference, relative to the largest weight of the layer.

    A normalisation's weights begin at zero: theirs is relative to the 1 of what they scale and shift. The gradient of
    an attention's key bias is zero but for rounding: it is compared with the other weights of its layer.
    """
    sizes: dict[str, float] = {}
    for name, values in expected.items():
        of_norm = name.endswith(("/scale", "/shift"))
        layer = name.rpartition("/")[0] or name
        sizes[layer] = max(sizes.get(layer, 0.0), 1.0 if of_norm else float(np.abs(values).max()))
    return max(
        float(np.abs(weights[name].reshape(values.shape) - values).max()) / sizes[name.rpartition("/")[0] or name]
        for name, values in expected.items()
    )


@pytest.mark.parametrize("name", EXCHANGING)
def test_they_learn(name: str) -> None:
    """A network that does not learn would hide a wrong gradient."""
    losses = reference(name).losses
    assert all(earlier - later > 1e-4 for earlier, later in pairwise(losses)), losses


@pytest.mark.parametrize("num_devices", [3, *(pytest.param(p, marks=pytest.mark.full) for p in (4, 6)), 8])
@pytest.mark.parametrize("name", EXCHANGING)
def test_random_strategies(name: str, num_devices: int) -> None:
    check(name, random_plan(network(name), num_devices, num_devices))


@pytest.mark.parametrize("name", EXCHANGING)
def test_every_configuration_of_two_devices(name: str) -> None:
    """Layers of the kind go through all of theirs, each in an order of its own; the others are not split."""
    graph = network(name)
    choices = {operator.name: configurations(operator, 2) for operator in graph.operators if operator.kind == name}
    for i in range(max(len(found) for found in choices.values())):
        splits = {layer: found[(i * (1 + j)) % len(found)] for j, (layer, found) in enumerate(choices.items())}
        check(name, make_plan(graph, 2, splits))


@pytest.mark.parametrize("name", with_full(NETWORKS, ("transformer", "bert_large")))
def test_networks_under_the_searched_strategy(name: str) -> None:
    check(name, pase.search(network(name), devices=4))


@pytest.mark.full
def test_all_of_a_deep_network_under_the_searched_strategy() -> None:
    graph = deep("inception_v3")
    losses, weights = parallel_training(pase.search(graph, devices=4), steps=3, rate=RATES["inception_v3"])
    expected = reference_training(graph, options(3, rate=RATES["inception_v3"]))
    assert max_relative_difference(losses, expected.losses) < TOLERANCE
    assert weight_difference(weights, expected.weights) < TOLERANCE


# InceptionV3 under a random one is in test_strategies, on two devices, as `full`: DenseNet joins tensors, too.
@pytest.mark.parametrize("name", with_full((n for n in NETWORKS if n != "inception_v3"), ("transformer_big", "gpt")))
def test_networks_under_a_random_strategy(name: str) -> None:
    check(name, random_plan(network(name), 4, 1))


def functions() -> Graph:
    """Functions of points, of which one is broadcast, a softmax and a maximum between layers that are trained."""
    net = Builder("functions")
    left, right = (net.add(dense, name, net.input((4, 6)), out=(("n", 8),)) for name in ("left", "right"))
    x = net.add(pointwise, "both", left, right, dims=("b", "n"), out=(4, 8), function="multiply,tanh")
    shares = net.add(softmax, "shares", x, dims=("b", "n"), over="n")
    greatest = net.add(reduction, "greatest", shares, dims=("b", "n"), over=("n",), function="max")
    x = net.add(pointwise, "x", shares, net.reshape(greatest, (4, 1)), dims=("b", "n"), out=(4, 8), function="divide")
    net.add(softmax_loss, "loss", x)
    return net.build()


def moved() -> Graph:
    """Points that are spread over windows, elements of rows that are taken out, zeros around them."""
    net = Builder("moved")
    x = net.add(dense, "first", net.input((4, 6)), out=(("n", 8), ("w", 4)))
    x = net.add(transposed_convolution, "spread", x, out=4, kernel=3, stride=2, padding=1, groups=2)
    x = net.add(gather, "taken", x, dims=("b", "c", "w"), along="w", count=4)
    one = net.add(gather, "one", x, dims=("b", "c", "w"), along="c")
    x = net.add(concat, "joined", x, one, dims=("b", "c", "w"))
    x = net.add(padded, "padded", x, dims=("b", "c", "w"), before=(0, 1, 0), out=(4, 8, 4))
    net.add(softmax_loss, "loss", net.add(dense, "last", x, reduce=("c", "w"), out=(("n", 4),)))
    return net.build()


@pytest.mark.parametrize("build", [functions, moved])
@pytest.mark.parametrize("seed", range(2))
def test_functions_that_front_ends_have(build: Callable[[], Graph], seed: int) -> None:
    expected = reference_training(build(), options(3))
    assert expected.losses[-1] < expected.losses[0]
    losses, weights = parallel_training(random_plan(build(), 4, seed), steps=3)
    assert max_relative_difference(losses, expected.losses) < TOLERANCE
    assert weight_difference(weights, expected.weights) < TOLERANCE
