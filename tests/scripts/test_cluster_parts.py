"""The benchmark of steps in parts on a cluster: what its strategies are, and its table of made-up times."""

from dataclasses import replace

import pytest

from pase.machine import Overlap
from pase.planning.steps import TrainingStep
from scripts.benchmarks.cluster_parts import MODELS, PARTS, SEARCHES, strategies, tables
from tests.simulation.machines import machine

MACHINE = replace(
    machine((2, 1e-4, 5e7), (4, 5e-4, 2.5e7), flop_per_s=3e10),
    collectives="ring",
    overlap=Overlap(share=0.6, source="a test"),
)


def test_strategies_have_the_parts_that_their_names_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "mlp", {"batch": 32, "inputs": 16, "hidden": 64, "classes": 8, "layers": 4})
    plans = strategies("mlp", 4, MACHINE)
    assert plans.keys() == {*PARTS, *SEARCHES}
    for name, modes in PARTS.items():
        plan = plans[name]
        assert (plan.num_groups, plan.micro_batches) == (modes.stages, modes.micro_batches)
        assert {layer.state for layer in plan} == {modes.state}
        assert any(layer.is_recomputed for layer in plan) == modes.is_recomputed
    costs = {name: TrainingStep.of(plan).cost for name, plan in plans.items()}
    assert min(costs, key=costs.__getitem__) in SEARCHES
    limited = plans["searched, in a third of the memory"]
    assert limited.peak.bytes <= (limited.device_memory_bytes or 0) <= plans["data parallel"].peak.bytes / 3


def test_a_table_tells_the_middle_step_and_how_ranks_agree() -> None:
    found = {
        ("mlp", "4 × 200 / 50"): {
            "a": (0.1, ((0.3, 0.4), (0.2, 0.3), (0.9, 1.0))),
            "b": (0.2, ((0.5, 0.6),)),
            "c": (0.3, ((0.4, 0.5),)),
        },
        ("gpt", "4 × 200 / 50"): {"a": (1.0, ((2.0, 2.1),)), "b": (3.0, ((4.0, 4.1),))},
    }
    lines = [line.split(" | ") for line in tables(found)["parts"].splitlines()]
    assert lines[2] == ["| a", "300 (100)", "2000 (1000) |"]
    assert lines[4] == ["| c", "400 (300)", "– |"]
    # Ranks 1, 2, 3 beside 1, 3, 2: 1 - 6 · 2 / (3 · 8).
    assert lines[5] == ["| Spearman's ρ", "0.50", "1.00 |"]
    # Ranks 1 to 5 beside 1, 3, 2, 4, 5: 1 - 6 · 2 / (5 · 24).
    assert lines[6][1] == "0.900"
