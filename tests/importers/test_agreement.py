"""The same network by another way is the same search problem: another front end, or one that is built in."""

from typing import Any

import pytest

from pase import load, search
from pase.graph import Graph
from pase.importers.frameworks import import_model
from tests.importers.agreement import check_same, fingerprint, without


def _torch(module: Any, inputs: Any) -> Graph:
    return import_model((module, inputs)).lowered.graph


def test_another_network_is_another_problem() -> None:
    """The comparison can fail: one extent is different."""
    assert fingerprint(load("mlp")) == fingerprint(load("mlp"))
    assert fingerprint(load("mlp")) != fingerprint(load("mlp", arguments={"classes": 16}))


def test_alexnet_of_torch_is_the_one_that_is_built_in() -> None:
    torch = pytest.importorskip("torch")
    from tests.importers.torch_zoo import alexnet

    with torch.device("meta"):
        imported = _torch(*alexnet(batch=128))
    # The built-in one ends in its loss, which the module does not have.
    check_same(imported, without(load("alexnet", batch=128), "softmax"))


def test_a_residual_network_of_torch_is_the_one_that_is_built_in() -> None:
    torch = pytest.importorskip("torch")
    from tests.importers.torch_zoo import resnet

    with torch.device("meta"):
        imported = _torch(*resnet((1, 1, 1, 1), batch=32, size=64))
    whole = load("resnet101", batch=32, arguments={"blocks": "1,1,1,1", "image": 64})
    built = without(whole, "softmax")
    assert fingerprint(imported)[0] == fingerprint(built)[0]
    costs = [search(graph, devices=8).total_cost for graph in (imported, built)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)


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
    check_same(one, other)
