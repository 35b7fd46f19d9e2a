"""All layers at a glance: against the explanation of each layer by itself."""

from dataclasses import replace

import pytest

from pase import Plan, search
from pase.analysis.explanation import ExplainOptions, explain, overview
from pase.errors import PlanError
from pase.planning.planner import SearchOptions
from tests.explanation.test_explain import data_parallel_plan, planned
from tests.networks import slow_machine, small_graph, tiny_graph

WITHOUT_FLIPS = ExplainOptions(max_solutions=0)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("alexnet", "paper"),
        ("rnnlm", "alpha_beta"),
        ("tiny", "alpha_beta"),
        pytest.param("transformer_big", "paper", marks=pytest.mark.full),
        pytest.param("densenet121", "alpha_beta", marks=pytest.mark.full),
    ],
)
def test_it_says_what_each_explanation_says(name: str, model: str) -> None:
    plan = planned(name, 8, model)
    brief, full = overview(plan), explain(plan, options=WITHOUT_FLIPS)
    assert brief.is_optimal == full.is_optimal
    assert brief.optimum_cost == pytest.approx(full.optimum_cost)
    for found, expected in zip(brief.layers, full.layers, strict=True):
        assert found.name == expected.name
        assert found.num_configurations == expected.num_configurations
        assert sum(part.cost for part in found.parts) == pytest.approx(plan[found.name].layer_cost)
        assert (found.runner_up is None) == (expected.runner_up is None)
        if found.runner_up is not None and expected.runner_up is not None:
            tolerance = 1e-8 * plan.total_cost
            assert found.runner_up.difference == pytest.approx(expected.runner_up.difference, abs=tolerance)
            assert found.runner_up.is_exact
        assert found.reason == full[found.like].reason
    # Of several that cost the same, either may be named: it is a cheapest one if keeping to it costs no more.
    for found in brief.layers[1 :: len(brief.layers) // 3]:
        if found.runner_up is not None:
            alternative = replace_layer(plan, found.name, found.runner_up.choice.splits)
            (least,) = explain(alternative, [found.name], options=WITHOUT_FLIPS).layers
            assert least.kept_total_cost == pytest.approx(full.optimum_cost + found.runner_up.difference)


def replace_layer(plan: Plan, name: str, splits: dict[str, int]) -> Plan:
    """Return a plan with another configuration of one layer, unproven."""
    layers = tuple(replace(layer, splits=splits) if layer.name == name else layer for layer in plan.layers)
    return replace(plan, layers=layers, exact=False, lower_bound=0.0)


def test_repeated_layers_have_one_sentence() -> None:
    plan = search(small_graph("gpt"), 8, machine=slow_machine())
    found = overview(plan)
    sentences = {layer.like: layer.reason for layer in found.layers}
    assert len(sentences) < len(found.layers)
    for layer in found.layers:
        first = plan[layer.like]
        assert (plan[layer.name].kind, plan[layer.name].splits) == (first.kind, first.splits)
        assert layer.reason == sentences[layer.like]
        assert layer.reason is not None
        assert layer.reason.startswith(f"{layer.like}: ")


def test_a_plan_that_is_not_the_cheapest() -> None:
    found = overview(data_parallel_plan("alexnet", 8, "paper"))
    assert not found.is_optimal
    assert found.optimum_cost == pytest.approx(planned("alexnet", 8, "paper").total_cost)


def test_a_plan_that_says_that_it_is_the_cheapest_is_not_believed() -> None:
    plan = data_parallel_plan("alexnet", 8, "paper")
    found = overview(replace(plan, exact=True, lower_bound=plan.total_cost))
    assert not found.is_optimal
    assert found.optimum_cost == pytest.approx(planned("alexnet", 8, "paper").total_cost)


def test_under_a_limit_on_memory() -> None:
    free = search(tiny_graph(), 4, machine=slow_machine())
    limit = SearchOptions(device_memory_bytes=free.memory.total_bytes - 1)
    plan = search(tiny_graph(), 4, machine=slow_machine(), options=limit)
    found, full = overview(plan), explain(plan, options=WITHOUT_FLIPS)
    for brief, layer in zip(found.layers, full.layers, strict=True):
        assert brief.reason == layer.reason
        assert (brief.runner_up and brief.runner_up.choice.splits) == (
            layer.runner_up and layer.runner_up.choice.splits
        )


def test_what_there_is_no_time_for_is_left_out() -> None:
    plan = planned("alexnet", 8, "paper")
    found = overview(plan, time_limit_s=1e-9)
    assert {layer.reason for layer in found.layers} == {None}
    assert all(layer.parts for layer in found.layers if plan[layer.name].layer_cost)


def test_a_configuration_that_no_search_looks_at() -> None:
    plan = planned("tiny", 8, "paper")
    name = plan.layers[0].name
    odd = dict.fromkeys(plan[name].splits, 1) | {"b": 7}
    with pytest.raises(PlanError, match=f"layer '{name}' has the configuration .* nothing to compare it with"):
        overview(replace_layer(plan, name, odd))
