"""The reference against PyTorch: networks and their losses written out, two steps of gradient descent by autograd."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

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
from tests.runtime.options import options

Tensors = Mapping[str, Any]
Loss = Callable[[Tensors, Tensors], Any]

CASES: dict[str, tuple[Callable[[], Graph], Loss]] = {}
"""By what they hold: a network, and its loss from weights and a batch."""


def case(name: str, loss: Loss) -> Callable[[Callable[[], Graph]], Callable[[], Graph]]:
    def keep(build: Callable[[], Graph]) -> Callable[[], Graph]:
        CASES[name] = build, loss
        return build

    return keep


def cross_entropy(logits: Any, batch: Tensors) -> Any:
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten().long())


def convolutional_loss(w: Tensors, batch: Tensors) -> Any:
    x = functional.conv2d(batch["inputs"], w["conv/w"], w["conv/bias"], stride=(2, 1), padding=1).relu()
    x = functional.max_pool2d(x, 2, 1, padding=1)
    x = functional.avg_pool2d(x, 2, 2, padding=1, count_include_pad=False)
    return cross_entropy(torch.tanh(x.flatten(1) @ w["fc/w"] + w["fc/bias"]), batch)


@case("convolutions", convolutional_loss)
def convolutional() -> Graph:
    net = Builder("convolutional")
    strides: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 1), "padding": 1}
    x = net.add(conv2d, "conv", net.input((2, 2, 5, 6)), out=3, activation="relu", **strides)
    x = net.add(pool2d, "max", x, kernel=2, stride=1, padding=1)
    x = net.add(pool2d, "mean", x, kernel=2, stride=2, padding=1, reduction="mean")
    size = x.shape[1] * x.shape[2] * x.shape[3]
    net.add(softmax_loss, "loss", net.add(dense, "fc", net.reshape(x, (2, size)), out=(("n", 4),), activation="tanh"))
    return net.build()


def language_loss(w: Tensors, batch: Tensors) -> Any:
    return cross_entropy(w["embedding/table"][batch["inputs"].long()] @ w["fc/w"] + w["fc/bias"], batch)


@case("embedding", language_loss)
def language() -> Graph:
    net = Builder("language")
    x = net.add(embedding, "embedding", net.input((2, 3)), vocabulary=7, size=4)
    x = net.add(dense, "fc", x, lead=("b", "s"), out=(("v", 7),), reduce=("d",))
    net.add(softmax_loss, "loss", x, dims=("b", "s", "v"))
    return net.build()


def batch_normalised_loss(w: Tensors, batch: Tensors) -> Any:
    x = torch.einsum("bd,dchw->bchw", batch["inputs"], w["first/w"])
    x = functional.batch_norm(x, None, None, 1 + w["norm/scale"], w["norm/shift"], training=True)
    return cross_entropy(torch.sigmoid(x).flatten(1), batch)


@case("batch_norm", batch_normalised_loss)
def batch_normalised() -> Graph:
    net = Builder("batch_normalised")
    out = (("c", 2), ("h", 3), ("w", 2))
    x = net.add(dense, "first", net.input((3, 4)), reduce=("d",), out=out, bias=False)
    net.add(softmax_loss, "loss", net.reshape(net.add(batch_norm, "norm", x, activation="sigmoid"), (3, 12)))
    return net.build()


def projected(net: Builder, name: str, shape: tuple[int, int, int], **options: Any) -> Tensor:
    return net.add(dense, name, net.input(shape), lead=("b", "s"), reduce=("c",), bias=False, **options)


def layer_normalised_loss(w: Tensors, batch: Tensors) -> Any:
    x = batch["inputs"] @ w["first/w"]
    return cross_entropy(functional.layer_norm(x, [5], 1 + w["norm/scale"], w["norm/shift"]), batch)


@case("layer_norm", layer_normalised_loss)
def layer_normalised() -> Graph:
    net = Builder("layer_normalised")
    x = projected(net, "first", (2, 3, 4), out=(("d", 5),))
    net.add(softmax_loss, "loss", net.add(layer_norm, "norm", x), dims=("b", "s", "d"))
    return net.build()


def attended_loss(w: Tensors, batch: Tensors, *, causal: bool = False) -> Any:
    q, k, v = (torch.einsum("bsd,dhk->bhsk", batch[name], w[f"{name}/w"]) for name in ("q", "k", "v"))
    x = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return cross_entropy(x.transpose(1, 2).reshape(2, 4, 6), batch)


@case("causal", lambda w, batch: attended_loss(w, batch, causal=True))
def causal() -> Graph:
    return attended(causal=True)


@case("attention", attended_loss)
def attended(*, causal: bool = False) -> Graph:
    net = Builder("attended")
    q, k, v = (projected(net, name, (2, 4, 3), out=(("h", 2), ("k", 3))) for name in ("q", "k", "v"))
    x = net.add(attention, "attention", q, k, v, causal=causal)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 4, 6)), dims=("b", "s", "n"))
    return net.build()


def recurrent_loss(w: Tensors, batch: Tensors) -> Any:
    x = batch["inputs"] @ w["first/w"]
    for layer in range(2):
        hidden = cell = torch.zeros(2, 3, dtype=torch.float64)
        states = []
        for s in range(3):
            gates = [
                x[:, s] @ w["lstm/w"][layer][:, g] + hidden @ w["lstm/u"][layer][:, g] + w["lstm/bias"][layer][g]
                for g in range(4)
            ]
            into, forget, out = (torch.sigmoid(gate) for gate in gates[:3])
            cell = forget * cell + into * torch.tanh(gates[3])
            hidden = out * torch.tanh(cell)
            states.append(hidden)
        x = torch.stack(states, 1)
    return cross_entropy(x, batch)


@case("lstm", recurrent_loss)
def recurrent() -> Graph:
    net = Builder("recurrent")
    x = net.add(lstm, "lstm", projected(net, "first", (2, 3, 2), out=(("d", 3),)), layers=2, units=3)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 3, 3)), dims=("b", "s", "n"))
    return net.build()


def spread_loss(w: Tensors, batch: Tensors) -> Any:
    x = torch.einsum("bd,dchw->bchw", batch["inputs"], w["first/w"])
    numbers: dict[str, Any] = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "output_padding": (1, 0)}
    return cross_entropy(
        functional.conv_transpose2d(x, w["spread/w"], w["spread/bias"], groups=2, **numbers).flatten(1), batch
    )


@case("transposed_convolution", spread_loss)
def spread() -> Graph:
    net = Builder("spread")
    options: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    x = net.add(dense, "first", net.input((2, 3)), reduce=("d",), out=(("c", 4), ("h", 3), ("w", 2)), bias=False)
    x = net.add(transposed_convolution, "spread", x, out=2, groups=2, positions=(6, 4), **options)
    net.add(softmax_loss, "loss", net.reshape(x, (2, 48)))
    return net.build()


def taken_loss(w: Tensors, batch: Tensors, *, count: int) -> Any:
    x = torch.gather(batch["first"] @ w["first/w"], 1, batch["taken"].long().reshape(3, count))
    before = 2 - (count == 3)
    return cross_entropy(functional.pad(x, (before, 5 - before - count)), batch)


@case("gather", lambda w, batch: taken_loss(w, batch, count=1))
def taken(*, count: int = 1) -> Graph:
    """Some elements of each row, put in the midst of zeros."""
    net = Builder("taken")
    x = net.add(dense, "first", net.input((3, 4)), out=(("n", 6),), bias=False)
    x = net.add(gather, "taken", x, dims=("b", "n"), along="n", count=count)
    net.add(
        softmax_loss, "loss", net.add(padded, "padded", x, dims=("b", "n"), before=(0, 2 - (count == 3)), out=(3, 5))
    )
    return net.build()


@case("gather_of_3", lambda w, batch: taken_loss(w, batch, count=3))
def taken_3() -> Graph:
    return taken(count=3)


RATE = 0.5


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_pytorch(name: str) -> None:
    build, loss = CASES[name]
    graph = build()
    weights = {}
    for operator in graph.operators:
        for access in operator.parameters:
            own = parameter_name(operator, access)
            value = initial_value(own, access.shape, initial_deviation(operator, access), 3)
            weights[own] = torch.tensor(value.astype(float), requires_grad=True)
    inputs = Batches(data_inputs(graph).values(), seed=3).batch(0)
    batch = {key: torch.tensor(array).double() for key, array in inputs.items()}
    result = reference_training(graph, options(2, rate=RATE, seed=3))
    for found in result.losses:
        value = loss(weights, batch)
        assert found == pytest.approx(value.item(), rel=1e-12)
        for weight, slope in zip(weights.values(), torch.autograd.grad(value, list(weights.values())), strict=True):
            assert slope.abs().max() > 1e-6
            weight.data -= RATE * slope
    assert set(result.weights) == set(weights)
    for own, weight in weights.items():
        np.testing.assert_allclose(result.weights[own], weight.detach().numpy(), rtol=1e-11, atol=1e-13)


# -- what is refused


def unknown_kind() -> Graph:
    net = Builder("net")
    net.add(softmax_loss, "loss", net.add(sorting, "sort", net.input((2, 48))))
    return net.build()


def no_loss() -> Graph:
    net = Builder("net")
    net.add(dense, "fc", net.input((2, 3)), out=(("n", 4),))
    return net.build()


@pytest.mark.parametrize(
    ("build", "rate", "message"),
    [
        (unknown_kind, 0.05, r"layer 'sort' is a 'sorting', which the reference cannot compute"),
        (no_loss, 0.05, r"network 'net' has 0 losses"),
        (language, 1e38, r"the reference's loss is nan at step \d+; use a smaller learning rate"),
    ],
)
def test_what_cannot_be_trained_is_refused(build: Callable[[], Graph], rate: float, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        reference_losses(build(), options(9, rate=rate, dtype="float32"))
