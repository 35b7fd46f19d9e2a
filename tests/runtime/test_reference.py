"""The reference against numpy: forward passes written out with loops, gradients by finite differences."""

from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.graph import Builder, Graph, Tensor
from pase.graph.operators import (
    attention,
    batch_norm,
    conv2d,
    dense,
    embedding,
    gather,
    layer_norm,
    lstm,
    padded,
    pool2d,
    softmax_loss,
    transposed_convolution,
)
from pase.sharding.traffic import parameter_name
from pase.targets.mesh_tensorflow.runtime.reference import reference_losses, reference_training
from pase.targets.training.counted import initial_deviation, initial_value
from pase.targets.training.data import Batches, data_inputs
from tests.runtime.networks import sorting
from tests.runtime.training import options

Array = np.ndarray[Any, Any]


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


RATE = 0.5


def projected(net: Builder, name: str, shape: tuple[int, int, int], **options: Any) -> Tensor:
    return net.add(dense, name, net.input(shape), lead=("b", "s"), reduce=("c",), bias=False, **options)


def batch_normalised() -> Graph:
    net = Builder("batch_normalised")
    out = (("c", 2), ("h", 3), ("w", 2))
    x = net.add(dense, "first", net.input((3, 4)), reduce=("d",), out=out, bias=False)
    x = net.add(batch_norm, "norm", x, activation="sigmoid")
    net.add(softmax_loss, "loss", net.reshape(x, (3, 12)))
    return net.build()


def batch_normalised_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = np.einsum("bd,dchw->bchw", batch["inputs"].astype(float), weights["first/w"])
    for channel in range(2):
        values = x[:, channel]
        deviation = (((values - values.mean()) ** 2).mean() + 1e-5) ** 0.5
        factor = 1 + weights["norm/scale"][channel]
        x[:, channel] = (values - values.mean()) / deviation * factor + weights["norm/shift"][channel]
    return cross_entropy((1 / (1 + np.exp(-x))).reshape(3, 12), batch["labels"])


def layer_normalised() -> Graph:
    net = Builder("layer_normalised")
    x = projected(net, "first", (2, 3, 4), out=(("d", 5),))
    net.add(softmax_loss, "loss", net.add(layer_norm, "norm", x), dims=("b", "s", "d"))
    return net.build()


def layer_normalised_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = batch["inputs"].astype(float) @ weights["first/w"]
    for point in np.ndindex(2, 3):
        values = x[point]
        deviation = (((values - values.mean()) ** 2).mean() + 1e-5) ** 0.5
        x[point] = (values - values.mean()) / deviation * (1 + weights["norm/scale"]) + weights["norm/shift"]
    return cross_entropy(x, batch["labels"])


def attended(*, causal: bool) -> Graph:
    net = Builder("attended")
    heads = (("h", 2), ("k", 3))
    q, k, v = (projected(net, name, (2, 4, 3), out=heads) for name in ("q", "k", "v"))
    x = net.add(attention, "attention", q, k, v, causal=causal)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 4, 6)), dims=("b", "s", "n"))
    return net.build()


def attended_loss(weights: dict[str, Array], batch: dict[str, Array], *, causal: bool) -> float:
    q, k, v = (np.einsum("bsd,dhk->bshk", batch[name].astype(float), weights[f"{name}/w"]) for name in ("q", "k", "v"))
    result = np.zeros_like(q)
    for b, s, h in np.ndindex(2, 4, 2):
        seen = range(s + 1) if causal else range(4)
        powers = np.array([np.exp(q[b, s, h] @ k[b, t, h] / np.sqrt(3)) for t in seen])
        result[b, s, h] = sum(power * v[b, t, h] for power, t in zip(powers / powers.sum(), seen, strict=True))
    return cross_entropy(result.reshape(2, 4, 6), batch["labels"])


def recurrent() -> Graph:
    net = Builder("recurrent")
    x = net.add(lstm, "lstm", projected(net, "first", (2, 3, 2), out=(("d", 3),)), layers=2, units=3)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 3, 3)), dims=("b", "s", "n"))
    return net.build()


def recurrent_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = batch["inputs"].astype(float) @ weights["first/w"]
    for layer in range(2):
        w, u, bias = (weights[f"lstm/{name}"][layer] for name in ("w", "u", "bias"))
        result = np.zeros_like(x)
        for b in range(2):
            hidden = cell = np.zeros(3)
            for s in range(3):
                gates = [x[b, s] @ w[:, g] + hidden @ u[:, g] + bias[g] for g in range(4)]
                into, forget, out = (1 / (1 + np.exp(-gate)) for gate in gates[:3])
                cell = forget * cell + into * np.tanh(gates[3])
                hidden = out * np.tanh(cell)
                result[b, s] = hidden
        x = result
    return cross_entropy(x, batch["labels"])


def spread() -> Graph:
    net = Builder("spread")
    options: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    x = net.add(dense, "first", net.input((2, 3)), reduce=("d",), out=(("c", 4), ("h", 3), ("w", 2)), bias=False)
    x = net.add(transposed_convolution, "spread", x, out=2, groups=2, positions=(6, 4), **options)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 48)))
    return net.build()


def spread_loss(weights: dict[str, Array], batch: dict[str, Array]) -> float:
    x = np.einsum("bd,dchw->bchw", batch["inputs"].astype(float), weights["first/w"])
    y = np.zeros((2, 2, 6, 4)) + weights["spread/bias"][:, None, None]
    for b, c, h, w, r, s in np.ndindex(2, 4, 3, 2, 3, 2):
        row, column = 2 * h + r - 1, w + 2 * s
        if 0 <= row < 6 and column < 4:
            # Two groups of two channels, each of one result.
            y[b, c // 2, row, column] += x[b, c, h, w] * weights["spread/w"][c, 0, r, s]
    return cross_entropy(y.reshape(2, 48), batch["labels"])


def taken(*, count: int) -> Graph:
    """Some elements of each row, put in the midst of zeros."""
    net = Builder("taken")
    x = net.add(dense, "first", net.input((3, 4)), out=(("n", 6),), bias=False)
    x = net.add(gather, "taken", x, dims=("b", "n"), along="n", count=count)
    x = net.add(padded, "padded", x, dims=("b", "n"), before=(0, 2 - (count == 3)), out=(3, 5))
    net.add(softmax_loss, "loss", x)
    return net.build()


def taken_loss(weights: dict[str, Array], batch: dict[str, Array], *, count: int) -> float:
    x = batch["first"].astype(float) @ weights["first/w"]
    y = np.zeros((3, 5))
    for b, i in np.ndindex(3, count):
        y[b, 2 + i - (count == 3)] = x[b, batch["taken"][b, i]]
    return cross_entropy(y, batch["labels"])


@pytest.mark.parametrize(
    ("graph", "loss"),
    [
        (convolutional(), convolutional_loss),
        (language(), language_loss),
        (batch_normalised(), batch_normalised_loss),
        (layer_normalised(), layer_normalised_loss),
        (attended(causal=False), lambda weights, batch: attended_loss(weights, batch, causal=False)),
        (attended(causal=True), lambda weights, batch: attended_loss(weights, batch, causal=True)),
        (recurrent(), recurrent_loss),
        (spread(), spread_loss),
        (taken(count=1), lambda weights, batch: taken_loss(weights, batch, count=1)),
        (taken(count=3), lambda weights, batch: taken_loss(weights, batch, count=3)),
    ],
    ids=[
        "convolutions",
        "embedding",
        "batch_norm",
        "layer_norm",
        "attention",
        "causal",
        "lstm",
        "transposed_convolution",
        "gather",
        "gather_of_3",
    ],
)
def test_training_is_that_of_numpy(graph: Graph, loss: Any) -> None:
    weights = {}
    for operator in graph.operators:
        for access in operator.parameters:
            name = parameter_name(operator, access)
            weights[name] = initial_value(name, access.shape, initial_deviation(operator, access), 3).astype(float)
    batch = Batches(data_inputs(graph).values(), seed=3).batch(0)
    expected = []
    for _ in range(2):
        expected.append(loss(weights, batch))
        changes = {name: gradient(loss, weights, name, batch) for name in weights}
        assert all(np.abs(change).max() > 1e-6 for change in changes.values())
        weights = {name: value - RATE * changes[name] for name, value in weights.items()}
    result = reference_training(graph, options(2, rate=RATE, seed=3))
    assert result.losses[0] == pytest.approx(expected[0], rel=1e-13)
    assert result.losses[1] == pytest.approx(expected[1], rel=1e-6)
    assert set(result.weights) == set(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(result.weights[name], value, rtol=1e-5, atol=1e-7)
