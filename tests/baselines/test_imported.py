"""Experts' rules on models of PyTorch, whose layers and dims are named as the importer finds them."""

from collections.abc import Callable

import pytest

from pase import load, load_machine
from pase.analysis.baselines.registry import BASELINES, meshes
from pase.analysis.baselines.rules import transformer_dims
from pase.costs import Problem
from pase.planning.problems import problem_of
from tests.baselines.test_experts import splits_of
from tests.importers.torch_zoo import Made, alexnet, transformer

pytest.importorskip("torch")

MACHINE = load_machine("1080ti")


def _problem(make: Callable[..., Made], num_devices: int, **settings: int) -> Problem:
    return problem_of(load(make(**settings)), num_devices, MACHINE, "paper")


def test_one_weird_trick_finds_the_classifier() -> None:
    problem = _problem(alexnet, 8, batch=16)
    found = splits_of(problem, BASELINES["owt"].choose(problem, MACHINE))
    kinds = {operator.name: operator.kind for operator in problem.graph.operators}
    for name, split in found.items():
        assert split == ({"n": 8} if kinds[name] == "dense" else {"b": 8}), name
    assert [*kinds.values()].count("dense") == 3


def test_a_mesh_is_laid_over_attentions_that_project_all_at_once() -> None:
    """Queries, keys and values are one product, and sequences come first: attentions tell which dim is the batch."""
    problem = _problem(transformer, 4, batch=4)
    dims = transformer_dims(problem.graph)
    assert dims is not None
    (choice,) = meshes(problem, dims, [2])
    found = splits_of(problem, choice)
    assert found["encoder.layers.0.self_attn/attention"] == {"b": 2, "h": 2}
    assert found["encoder.layers.0.self_attn"] == {"s": 2, "n": 2}
    assert found["encoder.layers.0.self_attn_2"] == {"s": 2, "c1": 2}
    assert found["encoder.layers.0.linear1"] == {"b": 2, "n": 2}
    assert found["encoder.layers.0.linear2"] == {"b": 2, "c": 2}
    assert found["encoder.layers.0.norm1"] == {"b": 2}
