"""The race of `pase.parallelize` with PyTorch's own ways: who is held against whom, and that all compute the same."""

import pytest
import torch

from scripts.benchmarks.torch import BARS, LAYERS, made, measured, plans, ratios


def test_the_searched_plan_is_held_against_the_better_one() -> None:
    times_s = {
        "searched": [1.0, 2.0, 9.0],
        "data parallelism": [3.0, 3.0, 3.0],
        "Megatron": [4.0, 5.0, 6.0],
        "DistributedDataParallel": [2.0, 2.0, 4.0],
        "parallelize_module": [1.0, 1.0, 8.0],
    }
    cpu_s = {name: [2.0 * seconds for seconds in times] for name, times in times_s.items()}
    found = {each.ours: each for each in ratios(times_s, cpu_s)}
    assert found.keys() == BARS.keys()
    assert [(each.theirs, each.ratio) for each in found.values()] == [
        ("DistributedDataParallel", 1.5),
        ("parallelize_module", 5.0),
        ("parallelize_module", 2.0),
    ]
    assert found["data parallelism"].values == [0.75, 1.5, 1.5]
    assert [each.cpu for each in found.values()] == [each.ratio for each in found.values()]


@pytest.mark.full
def test_rules_are_the_strategies_of_pytorchs_ways() -> None:
    found = plans(2)
    batch = found["data parallelism"]
    assert all(layer.splits.get("b", 2) == 2 for layer in batch.layers if "fan_out" not in layer.name)
    megatron = {layer.name: {dim for dim, k in layer.splits.items() if k > 1} for layer in found["Megatron"].layers}
    for i in range(LAYERS):
        assert megatron[f"attention.{i}.query"] == megatron[f"feed_forward.{i}.up"] == {"n"}
        assert megatron[f"norms.{i}"] == set()
    assert found["searched"].total_cost <= min(plan.total_cost for plan in found.values())


def test_the_model_is_the_same_wherever_it_is_made() -> None:
    (model, batch), (other, again) = made(), made()
    assert torch.equal(batch["x"], again["x"])
    assert model(**batch).item() == other(**again).item()


@pytest.mark.full
def test_all_contenders_compute_the_same() -> None:
    names = ("searched", "data parallelism", "Megatron", "DistributedDataParallel", "parallelize_module")
    for found in measured(plans(2), 2, 1):
        assert {name: len(each) for name, each in found.items()} == dict.fromkeys(names, 1)
