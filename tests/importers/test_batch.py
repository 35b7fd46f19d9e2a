"""The batch, followed through imported models: what grows where a model is imported with twice as many examples.

The oracle knows nothing of views or names: a dim carries the batch if, and only if, its extent doubles with it.
"""

from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import pase
from pase.graph import Graph, Operator
from pase.graph.operator import access_dims
from pase.machine import DEFAULT_MACHINE, load_machine
from pase.planning.problems import data_parallel_cost, problem_of
from pase.sharding.shards import data_parallel
from tests.importers import torch_zoo
from tests.importers.architectures import ARCHITECTURES, CASES, check_known, imported

torch = pytest.importorskip("torch")

BATCH = 4


def check_data_parallelism(load: Callable[[int], Graph]) -> Graph:
    """Assert that data parallelism splits just what grows with the batch, in every layer, and costs what that costs.

    load: returns the graph of a model with so many examples. Returns the graph.
    """
    graph, wider = load(BATCH), load(2 * BATCH)
    check_batch_splits(graph, wider)
    return graph


def check_batch_splits(graph: Graph, wider: Graph) -> None:
    """Assert as `check_data_parallelism` does; wider: the graph of the same model with twice as many examples."""
    assert [op.name for op in graph.operators] == [op.name for op in wider.operators]
    problem = problem_of(graph, BATCH, load_machine(DEFAULT_MACHINE), "paper")
    choice = [0] * len(problem.graph.operators)
    for operator, other in zip(graph.operators, wider.operators, strict=True):
        expected = dict.fromkeys(operator.extents, 1) | dict.fromkeys(_growing(operator, other), BATCH)
        splits = dict(zip(operator.extents, data_parallel(graph, operator, BATCH), strict=True))
        assert splits == expected, (operator.name, operator.extents)
        vertex = problem.graph.index[operator.name]
        found = problem.choice(vertex, tuple(expected.values()))
        assert found is not None
        choice[vertex] = found
    # What the search puts between layers, of which none reads another, is not the model's: the cheapest is right.
    for vertex, operator in enumerate(problem.graph.operators):
        if operator.name not in graph.index:
            choice[vertex] = int(problem.tables.costs_beside(vertex, choice).argmin())
    assert data_parallel_cost(problem) == problem.tables.evaluate(choice)


def _growing(operator: Operator, wider: Operator) -> set[str]:
    """Return the dim, if any, in which a layer has twice as many examples.

    Rows that are looked up are split, and not the table of rows, of which each device may need any.
    """
    growing = {dim for dim, extent in operator.extents.items() if wider.extents[dim] == 2 * extent}
    written = {dim for write in operator.writes for dim in access_dims(write)}
    found = (growing & written or growing) - set(operator.unsplittable)
    assert len(found) <= 1, (operator.name, operator.extents, found)
    assert bool(found) == bool(growing), (operator.name, operator.extents, operator.unsplittable)
    return found


SIZED = [n for n, make in torch_zoo.OWN.items() if "batch" in signature(make).parameters and n != "alexnet"]


_ALIKE = ("shufflenet", "transformer", "unet", "volumes")
"""Networks of what is in others, too."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in _ALIKE else ()) for n in SIZED])
def test_networks_of_pytorch(name: str) -> None:
    check_data_parallelism(lambda batch: pase.load(torch_zoo.OWN[name](batch=batch)))


def test_a_network_of_scanned_states() -> None:
    """One layer: the next one reads what the first one writes, as the first reads its embeddings."""
    check_data_parallelism(lambda batch: pase.load(torch_zoo.transformers_model("mamba", batch=batch, steps=2)))


@pytest.mark.parametrize("name", ["cnn", "recurrent", "transformer"])
def test_networks_of_keras(name: str) -> None:
    pytest.importorskip("keras")
    from tests.importers import keras_zoo

    model = getattr(keras_zoo, name)()
    check_data_parallelism(lambda batch: pase.load(model, batch=batch))


def test_a_function_of_jax() -> None:
    pytest.importorskip("jax")
    from tests.importers import jax_zoo

    apply, params = jax_zoo.llama(layers=1)
    check_data_parallelism(lambda batch: pase.load((apply, params, jax_zoo.tokens(batch, 16))))


def test_a_network_in_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from tests.importers import onnx_models

    def load(batch: int) -> Graph:
        path = tmp_path / f"net{batch}.onnx"
        onnx.save(onnx_models.convolutional(17, batch), path)
        return pase.load(str(path))

    check_data_parallelism(load)


def test_a_batch_that_an_attention_reads_as_its_second_dim() -> None:
    """Attention over [steps, batch, width], as nn.MultiheadAttention has it by default."""

    def forward(self: Any, x: Any) -> Any:
        y = x.transpose(0, 1)
        y, _ = self.attention(y, y, y, need_weights=False)
        return self.out(y.transpose(0, 1))

    net = torch_zoo.module(forward, attention=torch.nn.MultiheadAttention(16, 2), out=torch.nn.Linear(16, 5))
    graph = check_data_parallelism(lambda batch: pase.load((net.eval(), (torch.zeros(batch, 6, 16),))))
    # The projection's dim that is named b counts the steps.
    assert graph["attention"].extents["b"] == 6
    assert dict(graph.batch["attention"].dims) == {"s": BATCH}


def test_sequences_of_two_lengths_have_the_batch_in_common() -> None:
    """Nobody says which dim of [steps, batch, width] is the batch: it is the one in which both inputs agree."""
    layer = torch.nn.TransformerDecoderLayer(16, 2, 32)

    def load(batch: int) -> Graph:
        return pase.load((layer.eval(), (torch.zeros(6, batch, 16), torch.zeros(5, batch, 16))))

    check_data_parallelism(load)


def test_data_parallelism_costs_what_the_batch_split_in_every_layer_costs() -> None:
    """An imported network against the same one built by hand, whose batch is called b everywhere."""
    from pase.graph import Builder
    from pase.graph.operators import dense

    layers = OrderedDict(first=torch.nn.Linear(64, 96), second=torch.nn.Linear(96, 32))
    imported = pase.load((torch.nn.Sequential(layers), (torch.zeros(64, 64),)))
    net = Builder("net")
    x = net.add(dense, "first", net.input((64, 64)), out=(("n", 96),))
    net.add(dense, "second", x, out=(("n", 32),))
    ours, theirs = (pase.search(graph, 8).baselines["data_parallel"] for graph in (imported, net.build()))
    assert ours == theirs


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES["keras"]) == 40
    assert sum(len(makes) for package, makes in ARCHITECTURES.items() if package != "keras") >= 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), CASES)
def test_architectures_of_other_packages_with_their_losses(package: str, name: str) -> None:
    """Of all of each it is known what it computes, and which dim is the batch."""
    model, wider = imported(package, name, BATCH, 2 * BATCH)
    check_known(name, model)
    check_batch_splits(model.graph, wider.graph)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "zero_infinity": True}, {"reduction": "none"}])
def test_a_ctc_loss_keeps_examples_apart(options: dict[str, Any]) -> None:
    """Of the loss itself its costs alone are known; its examples do not meet before their mean."""
    net = torch_zoo.module(
        lambda self, x, *texts: self.loss(self.letters(x).log_softmax(-1).transpose(0, 1), *texts),
        letters=torch.nn.Linear(16, 7),
        loss=torch.nn.CTCLoss(**options),
    )

    def load(batch: int) -> Graph:
        texts = torch.ones(batch, 3, dtype=torch.long)
        return pase.load((net, (torch.zeros(batch, 12, 16), texts, texts[:, 0] * 12, texts[:, 0] * 3)))

    graph = check_data_parallelism(load)
    (loss,) = (op for op in graph.operators if op.kind == "opaque")
    assert loss.attribute("function", "") == "pase.ctc_loss.default"
    # Three numbers are summed in each of 2 · 3 + 1 states at each of 12 steps of each example, of which none is read.
    flop = sum(work.flop_per_point * loss.work_points(work) for work in loss.work)
    assert flop == pytest.approx(BATCH * 12 * 7 * 10, rel=0.01)


def test_the_gradient_of_what_is_the_same_for_all_examples_is_summed_once() -> None:
    """A bias for each place, computed from a table, that two layers add to all examples."""

    def forward(self: Any, x: Any) -> Any:
        bias = self.project(self.table(torch.arange(12)))
        y = torch.tanh(self.first(x) * bias)
        return (torch.tanh(self.second(y)) * bias).sum()

    parts = {"table": torch.nn.Embedding(32, 8), "project": torch.nn.Linear(8, 16)}
    net = torch_zoo.module(forward, **parts, first=torch.nn.Linear(16, 16), second=torch.nn.Linear(16, 16))
    graph = check_data_parallelism(lambda batch: pase.load((net, (torch.zeros(batch, 12, 16),))))
    problem = problem_of(graph, BATCH, load_machine(DEFAULT_MACHINE), "paper")
    (fan_out,) = (op for op in problem.graph.operators if op.is_fan_out)
    splits = dict(zip(fan_out.extents, data_parallel(problem.graph, fan_out, BATCH), strict=True))
    assert splits == {"n": 1, "m": 1, "g": BATCH}
