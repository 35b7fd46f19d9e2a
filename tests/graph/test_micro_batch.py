"""Graphs of a part of the batch, beside graphs that are built, or imported, with so small a batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

import pase
from pase.errors import ConfigurationError
from pase.graph import Builder, Graph
from pase.graph.operators import dense, softmax_loss
from pase.graph.parts import cuts, micro_batch, stages, with_cuts
from tests.networks import SMALL

NETWORKS = ["alexnet", "resnet101", "gpt", "transformer", "bert_large", "rnnlm", "densenet121", "mlp"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_micro_batch_is_the_network_with_a_smaller_batch(name: str) -> None:
    whole, quarter = (pase.load(name, arguments=SMALL[name] | {"batch": batch}) for batch in (16, 4))
    assert micro_batch(whole, 4) == quarter
    assert micro_batch(whole, 1) == whole


class Model(nn.Module):
    """Images to classes, with a view over channels and places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.max_pool2d(functional.gelu(self.first(x)), 2).flatten(1))


def test_a_micro_batch_of_a_module_is_the_module_with_fewer_examples() -> None:
    whole, part = (pase.load((Model(), (torch.zeros(batch, 3, 8, 8),))) for batch in (12, 4))
    assert micro_batch(whole, 3) == part


def test_a_batch_that_has_no_such_parts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"layer fc1 has 128 examples, which 3 micro-batches cannot share"):
        micro_batch(pase.load("mlp"), 3)


def test_a_graph_is_cut_where_one_layer_reads_one_tensor() -> None:
    graph = with_cuts(pase.load("gpt", batch=4))
    at = cuts(graph)
    # Between the sub-blocks of twelve blocks, and around them.
    assert len(at) == 28
    for first, second in pairwise(at):
        parts = stages(graph, (first, second))
        assert [len(part.received) for part in parts] == [0, 1, 1]
        assert [len(part.sent) for part in parts] == [1, 1, 0]
        assert sum(len(part.operators) for part in parts) == len(graph.operators)
        assert all(part.trained == graph.trained & set(part.index) for part in parts)


def test_a_tensor_that_is_read_on_both_sides_of_a_place_is_cut_before_all_its_readers() -> None:
    """Not behind the first loss, though nothing else goes on from there."""
    net = Builder("two losses")
    x = net.add(dense, "fc0", net.input((8, 4)), out=(("n", 4),))
    net.add(softmax_loss, "early", x)
    net.add(softmax_loss, "loss", net.add(dense, "fc1", x, out=(("n", 4),)))
    graph = with_cuts(net.build())
    assert [operator.name for operator in graph.operators] == ["fc0", "fc0_fan_out", "early", "fc1", "loss"]
    assert [graph.operators[v].name for v in cuts(graph)] == ["fc0_fan_out", "loss"]


def test_a_tensor_that_several_layers_read_beyond_a_cut_goes_on_as_one() -> None:
    net = Builder("branches")
    x = net.add(dense, "fc0", net.input((8, 4)), out=(("n", 4),))
    y = net.add(dense, "left", x, out=(("n", 4),), reduce=("c",))
    net.add(softmax_loss, "loss", y)
    graph = with_cuts(net.build())
    assert [graph.operators[v].name for v in cuts(graph)] == ["left", "loss"]


def test_a_micro_batch_of_routed_rows_has_as_many_routes_as_rows() -> None:
    """But for the bodies, which are imported again where they are to run."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}

    def loaded(batch: int) -> Graph:
        with torch.device("meta"):
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(use_cache=False, **sizes, **heads))
            ids = torch.zeros(batch, 4, dtype=torch.long)
        graph = pase.load((model, {"input_ids": ids, "labels": ids}))
        return replace(graph, operators=tuple(replace(each, body=None) for each in graph.operators))

    assert micro_batch(loaded(12), 3) == loaded(4)
