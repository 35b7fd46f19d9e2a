"""The same network by another way is the same search problem: another front end, or one that is built in."""

from typing import Any

import pytest

from pase import load, search
from pase.graph import Graph
from pase.importers.frameworks import import_model
from tests.importers.agreement import fingerprint, without

DEVICES = 8


def _torch(module: Any, inputs: Any) -> Graph:
    return import_model((module, inputs)).lowered.graph


def _check_same(one: Graph, other: Graph) -> None:
    assert fingerprint(one, DEVICES) == fingerprint(other, DEVICES)
    found = [search(graph, devices=DEVICES) for graph in (one, other)]
    assert all(plan.exact for plan in found)
    assert found[0].total_cost == pytest.approx(found[1].total_cost, rel=1e-12)


def test_another_network_is_another_problem() -> None:
    """The comparison can fail: one extent is different."""
    assert fingerprint(load("mlp"), DEVICES) == fingerprint(load("mlp"), DEVICES)
    assert fingerprint(load("mlp"), DEVICES) != fingerprint(load("mlp", arguments={"classes": 16}), DEVICES)


def test_alexnet_of_torch_is_the_one_that_is_built_in() -> None:
    torch = pytest.importorskip("torch")
    from tests.importers.torch_zoo import alexnet

    with torch.device("meta"):
        imported = _torch(*alexnet(batch=128))
    # The built-in one ends in its loss, which the module does not have.
    _check_same(imported, without(load("alexnet", batch=128), "softmax"))


def test_resnet_101_of_torch_is_the_one_that_is_built_in() -> None:
    torch = pytest.importorskip("torch")
    from tests.importers.torch_zoo import resnet

    with torch.device("meta"):
        imported = _torch(*resnet(batch=128))
    whole = load("resnet101", batch=128)
    built = without(whole, *(operator.name for operator in whole.operators if operator.kind == "softmax_loss"))
    (ours, _), (theirs, _) = fingerprint(imported, DEVICES), fingerprint(built, DEVICES)
    assert ours == theirs
    assert search(imported, devices=DEVICES).total_cost == pytest.approx(
        search(built, devices=DEVICES).total_cost, rel=1e-9
    )


def _torch_residual(torch: Any) -> tuple[Any, Any]:
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.norm(self.conv(x)) + x)

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)]
    return nn.Sequential(nn.Conv2d(3, 16, 1), Block(), nn.MaxPool2d(2), Block(), *head), (torch.zeros(8, 3, 16, 16),)


def _keras_residual(keras: Any) -> Any:
    layers = keras.layers

    def block(x: Any) -> Any:
        y = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same", use_bias=False)(x))
        return layers.ReLU()(layers.Add()([y, x]))

    x = keras.Input((16, 16, 3), batch_size=8)
    y = layers.MaxPooling2D(2)(block(layers.Conv2D(16, 1)(x)))
    y = layers.Dense(8)(layers.GlobalAveragePooling2D()(block(y)))
    return keras.Model(x, y)


def test_a_residual_network_of_torch_is_that_of_keras() -> None:
    torch, keras = pytest.importorskip("torch"), pytest.importorskip("keras")
    one, other = _torch(*_torch_residual(torch)), import_model(_keras_residual(keras)).lowered.graph
    _check_same(one, other)


def test_gpt_2_of_transformers_is_that_of_jax() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    transformers = pytest.importorskip("transformers")
    from tests.importers.jax_zoo import gpt2, tokens

    assert jax
    # More positions than steps: torch looks them up, jax takes the first rows; either way the table is held whole.
    config = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=96, n_positions=128, use_cache=False)
    with torch.device("meta"):
        module = transformers.GPT2LMHeadModel(config)
        inputs = (torch.zeros((8, 64), dtype=torch.long),)
    function, weights = gpt2(layers=2, width=48, heads=4, vocabulary=96, positions=128)
    one = _torch(module, inputs)
    other = import_model((function, weights, tokens(8, 64))).lowered.graph
    assert one.num_parameters == other.num_parameters
    assert one.forward_flop(contractions_only=True) == other.forward_flop(contractions_only=True)
    _check_same(one, other)
