"""The reference against numpy: a forward pass written with loops, gradients by finite differences."""

from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.graph import Builder, Graph
from pase.graph.operators import conv2d, dense, embedding, pool2d, softmax_loss
from pase.sharding.traffic import parameter_name
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from pase.targets.training.data import Batches, data_inputs
from pase.targets.training.initial import initial_deviation, initial_value
from tests.runtime.networks import sorting
from tests.runtime.training import options

Array = np.ndarray[Any, Any]
RATE = 0.1


def convolutional() -> Graph:
    net = Builder("convolutional")
    x = net.add(
        conv2d, "conv", net.input((2, 2, 5, 6)), out=3, kernel=(3, 2), stride=(2, 1), padding=1, activation="relu"
    )
    x = net.add(pool2d, "max", x, kernel=2, stride=1, padding=1)
    x = net.add(pool2d, "mean", x, kernel=2, stride=2, padding=1, reduction="mean")
    size = x.shape[1] * x.shape[2] * x.shape[3]
    x = net.add(dense, "fc", net.reshape(x, (2, size)), out=(("n", 4),), activation="tanh")
    net.add(softmax_loss, "loss", x)
    return net.build()


def language() -> Graph:
    net = Builder("language")
    x = net.add(embedding, "embedding", net.input((2, 3)), vocabulary=7, size=4)
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", 7),), reduce=("d",))
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    return net.build()


def windows(
    x: Array, kernel: tuple[int, int], stride: tuple[int, int], outs: tuple[int, int], pad: int, fill: float
) -> Array:
    """[b, c, h, w, r, s] by loops."""
    r, s = kernel
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad + 9), (pad, pad + 9)), constant_values=fill)
    result = np.empty((*x.shape[:2], *outs, r, s))
    for i in range(outs[0]):
        for j in range(outs[1]):
            top, left = i * stride[0], j * stride[1]
            result[:, :, i, j] = padded[:, :, top : top + r, left : left + s]
    return result


def cross_entropy(logits: Array, labels: Array) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_softmax, labels[..., np.newaxis], -1).mean())


def convolutional_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = batch["inputs"].astype(float)
    patches = windows(x, (3, 2), (2, 1), (3, 7), 1, 0.0)
    x = np.einsum("bchwrs,ncrs->bnhw", patches, weights["conv/w"]) + weights["conv/bias"][:, np.newaxis, np.newaxis]
    x = np.maximum(x, 0)
    x = windows(x, (2, 2), (1, 1), (4, 8), 1, -np.inf).max((-1, -2))
    ones = windows(np.ones_like(x), (2, 2), (2, 2), (3, 5), 1, 0.0).sum((-1, -2))
    x = windows(x, (2, 2), (2, 2), (3, 5), 1, 0.0).sum((-1, -2)) / ones
    x = np.tanh(x.reshape(2, -1) @ weights["fc/w"] + weights["fc/bias"])
    return cross_entropy(x, batch["labels"])


def language_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = weights["embedding/table"][batch["inputs"]]
    return cross_entropy(x @ weights["fc/w"] + weights["fc/bias"], batch["labels"])


@pytest.mark.parametrize(("graph", "loss"), [(convolutional(), convolutional_loss), (language(), language_loss)])
def test_losses_are_those_of_numpy(graph: Graph, loss: Any) -> None:
    weights = {}
    for operator in graph.operators:
        for access in operator.parameters:
            name = parameter_name(operator, access)
            weights[name] = initial_value(name, access.shape, initial_deviation(operator, access), 3).astype(float)
    batch = Batches(data_inputs(graph).values(), seed=3).batch(0)
    expected = []
    for _ in range(3):
        expected.append(loss(weights, batch))
        weights = {name: value - RATE * gradient(loss, weights, name, batch) for name, value in weights.items()}
    losses = reference_losses(graph, options(3, rate=RATE, seed=3))
    assert losses[0] == pytest.approx(expected[0], rel=1e-13)
    assert losses[1:] == pytest.approx(expected[1:], rel=1e-6)
    assert abs(expected[2] - expected[0]) > 1e-4


def gradient(loss: Any, weights: dict[str, Array], name: str, batch: dict[str, Array], step: float = 1e-6) -> Array:
    result = np.zeros_like(weights[name])
    for index in np.ndindex(result.shape):
        moved = [{**weights, name: weights[name].copy()} for _ in range(2)]
        moved[0][name][index] += step
        moved[1][name][index] -= step
        result[index] = (loss(moved[0], batch) - loss(moved[1], batch)) / (2 * step)
    return result


def test_a_kind_that_it_cannot_compute_is_refused() -> None:
    net = Builder("net")
    x = net.add(sorting, "sort", net.input((2, 48)))
    net.add(softmax_loss, "loss", x)
    with pytest.raises(ProgramError, match=r"layer 'sort' is a 'sorting', which the reference cannot compute"):
        reference_losses(net.build(), options(1))


def test_a_network_without_a_loss_is_refused() -> None:
    net = Builder("net")
    net.add(dense, "fc", net.input((2, 3)), out=(("n", 4),))
    with pytest.raises(ProgramError, match=r"network 'net' has 0 losses"):
        reference_losses(net.build(), options(1))


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"the reference's loss is nan at step \d+; use a smaller learning rate"):
        reference_losses(language(), options(9, rate=1e38, dtype="float32"))
