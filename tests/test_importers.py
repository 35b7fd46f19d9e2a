"""`load`: names, graphs, and what is said of everything else."""

from pathlib import Path
from typing import Any

import pytest

from pase import load
from pase.errors import GraphError, ModelError
from pase.graph import Graph
from pase.graph.operators import dense
from pase.models import build
from tests.networks import SMALL, small_graph


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_name_is_a_built_in_network(name: str) -> None:
    assert small_graph(name) == build(name, arguments=SMALL[name])


def test_a_batch_and_arguments_reach_the_builder() -> None:
    graph = load("mlp", batch=32, arguments={"layers": "5", "hidden": 64})
    assert dict(graph.arguments) == {"batch": 32, "inputs": 784, "hidden": 64, "layers": 5, "classes": 10}
    assert graph["fc5"].extents["b"] == 32


def test_a_graph_is_itself() -> None:
    graph = small_graph("mlp")
    assert load(graph) is graph


def test_a_graph_is_verified() -> None:
    with pytest.raises(GraphError, match="graph 'none' is empty"):
        load(Graph(name="none", operators=(), edges=()))
    layer = dense("fc", (8, 4), out=(("n", 4),))
    with pytest.raises(GraphError, match="2 layers of graph 'twins' are named 'fc'"):
        load(Graph(name="twins", operators=(layer, layer), edges=()))


@pytest.mark.parametrize("given", [{"batch": 8}, {"arguments": {"layers": 2}}])
def test_a_graph_takes_no_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="graph 'mlp' is built already: a batch or arguments cannot change it"):
        load(small_graph("mlp"), **given)


OTHERS = ["./alexnet", "models/alexnet", "C:\\net", "net.pb", Path("net.tflite"), "net.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *(
            (name, rf"^unknown model '{name}': did you mean '{nearest}'.*known models are alexn")
            for name, nearest in (("alexnett", "alexnet"), ("Alexnet", "alexnet"), ("inception", "inception_v3"))
        ),
        *(
            (name, r"^unknown model .*known models are .*alexnet.* vgg16, vgg19$")
            for name in ("", " ", "zzzzzz", "alexnet\x00", "\x1b[31m", "os", "__init__")
        ),
        *((source, r"looks like a file of a kind that PaSE does not read; it reads") for source in OTHERS),
        *(
            (source, rf"^a model of type {type(source).__name__} cannot be imported")
            for source in (None, 8, b"alexnet", ["alexnet"], object())
        ),
    ],
)
def test_what_is_no_model_is_refused(source: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(source)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".PT", ".bin", ".ckpt", ".joblib"])
def test_a_pickle_is_refused_unread(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"net{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ModelError, match="is a pickle, and reading one runs the code in it: it is refused"):
        load(path)
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch=0 is not usable; expected a whole number from 1"),
        ({"batch": -8}, "batch=-8 is not usable"),
        ({"batch": 7.5}, "batch=7.5 is not usable"),
        ({"batch": 2**31}, "batch=2147483648 is not usable; expected a whole number from 1 to 2147483647"),
        ({"batch": 8, "arguments": {"batch": 8}}, "is given twice"),
        ({"arguments": {"layer": 2}}, "model 'mlp' has no parameter 'layer': did you mean 'layers'"),
        ({"arguments": {"layers": "two"}}, "layers='two' is not usable"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load("mlp", **given)
