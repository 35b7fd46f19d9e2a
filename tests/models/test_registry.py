"""The registry: names, arguments as text, and the message for everything that does not fit."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import GraphError, ModelError
from pase.graph import Graph, verify
from pase.models import MODELS, build
from pase.models.parameters import written
from tests.networks import SMALL

NAMES = (
    *("alexnet", "inception_v3", "rnnlm", "transformer", "transformer_big", "lenet5", "vgg16", "vgg19", "googlenet"),
    *("resnet101", "densenet121", "bert_large", "gpt", "mlp"),
)


@pytest.mark.parametrize("name", NAMES)
def test_every_network_is_a_verified_graph_in_topological_order(name: str) -> None:
    graph, entry = build(name), MODELS[name]
    assert tuple(MODELS) == NAMES
    assert entry.name == name == graph.name
    assert entry.parameters == dict(graph.arguments)
    assert next(iter(entry.parameters.items())) == ("batch", entry.default_batch)
    assert graph.operators[0].extents["b"] == entry.default_batch
    assert entry.description
    assert "\n" not in entry.description
    assert verify(graph) is graph
    assert all(operator.name.isidentifier() and operator.name.islower() for operator in graph.operators)
    reference = nx.DiGraph((edge.producer, edge.consumer) for edge in graph.edges)
    assert nx.is_directed_acyclic_graph(reference)
    assert nx.is_weakly_connected(reference)
    assert set(reference) == {operator.name for operator in graph.operators}
    position = {operator.name: i for i, operator in enumerate(graph.operators)}
    assert all(position[u] < position[v] for u, v in reference.edges)
    assert [v for v in reference if reference.out_degree(v) == 0] == ["softmax"]
    assert graph["softmax"].kind == "softmax_loss"


@pytest.mark.parametrize("name", NAMES)
def test_recorded_arguments_build_the_same_graph(name: str) -> None:
    graph = build(name, arguments=SMALL[name])
    assert {key: dict(graph.arguments)[key] for key in SMALL[name]} == SMALL[name]
    assert build(name, arguments=dict(graph.arguments)) == graph
    as_text = {key: written(value) for key, value in graph.arguments}
    assert build(name, arguments=as_text) == graph


@given(batch=st.integers(1, 512))
def test_the_batch_scales_work_and_not_parameters(batch: int) -> None:
    one, many = build("lenet5", batch=1), build("lenet5", batch=batch)
    assert many.forward_flop() == batch * one.forward_flop()
    assert many.num_parameters == one.num_parameters


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("alexnet", 2),
        ("vgg16", 2),
        ("vgg19", 2),
        ("googlenet", 1),
        # Embeddings, and the sub-layers of one encoder or decoder of each.
        ("transformer", 2 + 2 + 3),
        ("transformer_big", 2 + 2 * (2 + 3)),
        ("bert_large", 1 + 2 * 2),
        ("gpt", 1 + 2 * 2),
    ],
)
def test_dropout_is_there_where_it_is_asked_for(name: str, layers: int) -> None:
    plain, dropping = build(name, arguments=SMALL[name]), build(name, arguments={**SMALL[name], "dropout": "0.25"})
    found = [operator for operator in dropping.operators if operator.kind == "dropout"]
    assert len(found) == layers
    assert all(operator.attribute("rate", 0.0) == 0.25 for operator in found)
    assert dict(dropping.arguments)["dropout"] == 0.25
    # Without it, and with a rate of 0, the layers are those that there were.
    assert [o for o in dropping.operators if o.kind != "dropout"] == list(plain.operators)
    assert build(name, arguments={**SMALL[name], "dropout": 0}) == plain


def test_truth_is_written_as_a_word() -> None:
    for text, value in (("true", True), ("True", True), ("false", False), ("FALSE", False), (True, True)):
        assert dict(build("alexnet", arguments={"grouped": text}).arguments)["grouped"] is value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"imag": 32},
            r"model 'alexnet' has no parameter 'imag': did you mean 'image'\? its parameters and their defaults",
        ),
        (
            {"zzz": 1},
            "has no parameter 'zzz': its parameters and their defaults are batch=128, image=224, classes=1000, ",
        ),
        ({"zzz": 1}, r"width=1, grouped=false, dropout=0\.0$"),
        (
            {"image": "big"},
            r"model 'alexnet': image='big' is not usable; expected a whole number from 1 to 2147483647 \(the",
        ),
        ({"image": "7.5"}, "image='7.5' is not usable; expected a whole number"),
        ({"image": 7.5}, r"image=7\.5 is not usable; expected a whole number"),
        ({"image": ""}, "image='' is not usable"),
        ({"image": True}, "image=True is not usable; expected a whole number"),
        ({"image": 0}, r"image=0 is not usable; expected a whole number from 1 to 2147483647 \(the default is 224\)"),
        ({"image": "-3"}, "image=-3 is not usable; expected a whole number from 1"),
        ({"image": 2**31}, "image=2147483648 is not usable; expected a whole number from 1 to 2147483647"),
        ({"grouped": "yes"}, r"grouped='yes' is not usable; expected true or false \(the default is false\)"),
        ({"grouped": 1}, "grouped=1 is not usable; expected true or false"),
        (
            {"dropout": "half"},
            r"dropout='half' is not usable; expected a number from 0 to below 1 \(the default is 0\.0\)",
        ),
        ({"dropout": 1}, r"dropout=1\.0 is not usable; expected a number from 0 to below 1"),
        ({"dropout": "nan"}, "dropout=nan is not usable; expected a number from 0"),
        ({"dropout": True}, "dropout=True is not usable; expected a number from 0"),
        ({"width": 3}, "width=3 does not divide 64 channels; use a power of two that does"),
        ({"batch": 0}, "batch=0 is not usable; expected a whole number from 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build("alexnet", arguments=arguments)


def test_the_batch_is_given_once() -> None:
    message = "the batch of model 'mlp' is given twice, as 8 and as batch=16; give it once"
    with pytest.raises(ModelError, match=message):
        build("mlp", batch=8, arguments={"batch": "16"})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "alexnt",
            {},
            r"unknown model 'alexnt': did you mean 'alexnet' or 'lenet5'\? known models are alexnet, bert_large, ",
        ),
        ("transfomer", {}, r"did you mean 'transformer' or 'transformer_big'\?"),
        ("qqq", {}, "unknown model 'qqq': known models are"),
        ("", {}, "unknown model '': known models are"),
        (
            "resnet101",
            {"blocks": "3,4,23"},
            "blocks=3,4,23 is not usable; expected 4 whole numbers with commas between them, such as 3,4,23,3",
        ),
        ("resnet101", {"blocks": ""}, "blocks= is not usable; expected 4 whole numbers"),
        ("resnet101", {"blocks": "3,4,x,3"}, "blocks='x' is not usable; expected a whole number from 1 to 10000"),
        ("resnet101", {"blocks": "3,4,0,3"}, "blocks=0 is not usable; expected a whole number from 1 to 10000"),
        ("resnet101", {"blocks": 3}, "blocks=3 is not usable; expected 4 whole numbers"),
        *(
            (name, {"heads": 7}, r"heads=7 does not divide model_width=\d+; every head needs as many channels")
            for name in ("transformer", "transformer_big", "bert_large", "gpt")
        ),
        ("gpt", {"layers": 10_001}, "layers=10001 is not usable; expected a whole number from 1 to 10000"),
        ("rnnlm", {"layers": -1}, "layers=-1 is not usable; expected a whole number from 0 to 10000"),
        ("mlp", {"batch": 7.5}, "batch=7.5 is not usable; expected a whole number from 1"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, arguments=arguments)


@pytest.mark.parametrize(
    ("name", "image", "message"),
    [
        ("alexnet", 62, "layer 'pool5': a window of 3 does not fit 2 points"),
        ("inception_v3", 74, "a window of 3 does not fit 2 points with padding .*; use a larger input"),
        ("vgg16", 31, "layer 'pool5': a window of 2 does not fit 1 points"),
        ("densenet121", 28, "layer 'transition3_pool': a window of 2 does not fit 1 points"),
    ],
)
def test_an_image_that_is_too_small_is_refused(name: str, image: int, message: str) -> None:
    # torchvision states the least sizes, as `min_size`, of the first four: 63, 75, 32 and 29.
    build(name, batch=1, arguments={"image": image + 1})
    with pytest.raises(GraphError, match=rf"{message}.*, those of {image + 1} are not: --arg image={image + 1}$"):
        build(name, arguments={"image": image})
    with pytest.raises(GraphError, match=r"of 32 points .*, those of 63 are not: --arg image=63$"):
        build("alexnet", arguments={"image": 32})


def test_a_builder_checks_its_arguments_when_it_is_called_by_itself() -> None:
    builder: Callable[..., Graph] = MODELS["mlp"].builder
    with pytest.raises(ModelError, match="model 'mlp': layers=0 is not usable"):
        builder(layers=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        builder(depth=3)


def test_the_networks_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import json, sys; from pase.models import build; before = sorted(sys.modules); build('mlp');"
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = json.loads(result.stdout)
    assert [name for name in before if name.startswith("pase.models.")] == []
    assert "pase.models.mlp" in after
    assert "pase.models.alexnet" not in after
    assert not {"tensorflow", "torch", "keras", "jax", "onnx"} & set(after)
