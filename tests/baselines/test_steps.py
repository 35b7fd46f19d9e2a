"""Our step beside those that people train with: never dearer than one that it could have chosen; others as named."""

from functools import cache

import pytest

import pase
from pase import Plan
from pase.analysis.baselines.compare import OURS, Comparison, compare
from pase.errors import ConfigurationError
from pase.planning.planner import SearchOptions
from pase.planning.steps import TrainingStep


@cache
def _compared(stages: int) -> Comparison:
    arguments = {"layers": 1, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}
    options = SearchOptions(
        cost_model="step", stages=stages, micro_batches=4, modes=("zero1", "zero2", "zero3", "recompute")
    )
    machine = pase.load_machine("v100")
    return compare(pase.load("gpt", batch=16, arguments=arguments), 4, machine=machine, options=options)


def _plans(stages: int) -> dict[str, Plan]:
    return {contender.name: contender.plan for contender in _compared(stages).contenders}


@pytest.mark.parametrize("stages", [1, 2])
def test_others_are_what_they_are_called(stages: int) -> None:
    plans = _plans(stages)
    names = [OURS, "data_parallel", "mesh_tensorflow", "megatron", "mcmc", "zero1", "zero2", "zero3", "zero3_recompute"]
    assert list(plans) == [*names, *["even_stages"] * (stages > 1)]
    for name, plan in plans.items():
        assert plan.micro_batches == 4
        assert plan.total_cost == pytest.approx(TrainingStep.of(plan).cost)
        if name in ("mesh_tensorflow", "megatron", "mcmc"):
            assert {layer.state for layer in plan} == {"replicated"}
        elif name not in (OURS, "even_stages"):
            assert plan.num_stages == 1
            assert all(layer.splits.get("b", 4) == min(4, layer.dims["b"]) for layer in plan)
            assert {layer.state for layer in plan} == {
                name.removesuffix("_recompute").replace("data_parallel", "replicated")
            }
        assert any(layer.is_recomputed for layer in plan) == name.endswith("recompute") or name == OURS
    assert plans["data_parallel"].total_cost == pytest.approx(plans[OURS].baselines["data_parallel"])
    memory = {name: plan.memory for name, plan in plans.items()}
    assert memory["zero3"].total_bytes < memory["zero1"].total_bytes
    assert memory["zero2"].gradients_bytes < memory["zero1"].gradients_bytes
    assert memory["zero3"].weights_bytes < memory["zero2"].weights_bytes
    # The peak is that of the first layer's gradient, whole and reduced, whatever the layers behind it recompute.
    waiting = {name: TrainingStep.of(plan).memory_of_stage(0).waiting_bytes()[1] for name, plan in plans.items()}
    assert waiting["zero3_recompute"] < waiting["zero3"]


def test_ours_is_no_dearer_than_what_it_could_have_chosen() -> None:
    """Of one stage: all others but the pipeline are of the same number of micro-batches, and fit a V100."""
    plans = _plans(1)
    assert all(plans[OURS].total_cost <= plan.total_cost * (1 + 1e-9) for plan in plans.values())
    assert _plans(2)[OURS].total_cost <= _plans(2)["even_stages"].total_cost * (1 + 1e-9)


def test_even_stages_are_as_even_as_cuts_allow() -> None:
    plan = _plans(2)["even_stages"]
    work = [sum(layer.compute_cost for layer in plan if layer.stage == stage) for stage in (0, 1)]
    largest = max(layer.compute_cost for layer in plan)
    # A block of the network lies between neighbouring cuts: a half of it.
    assert abs(work[0] - work[1]) <= 0.5 * sum(work) + largest
    assert (plan.num_stages, plan.schedule, plan.num_groups) == (2, "1f1b", 2)


def test_plans_of_others_are_read_back(tmp_path: pytest.TempPathFactory) -> None:
    for name in (OURS, "even_stages", "zero3_recompute"):
        plan, path = _plans(2)[name], f"{tmp_path}/{name}.json"
        plan.save(path)
        assert pase.load_plan(path) == plan


def test_seconds_are_needed() -> None:
    graph = pase.load("mlp", batch=16)
    with pytest.raises(ConfigurationError, match="cost model 'paper' counts FLOP and bytes"):
        compare(graph, 4, machine=pase.load_machine("v100"), options=SearchOptions(stages=2))
