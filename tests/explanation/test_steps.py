"""Why steps are as they are: every mode of a layer against the step that has it, other schemes against searches."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import pase
from pase import Plan
from pase.analysis.explanation import explain_step, other_schemes
from pase.errors import PlanError
from pase.planning.constraints import Forbid
from pase.planning.steps import Step
from pase.sharding.shards import enumerate_configurations
from tests.networks import staged_plan


def _step(plan: Plan, name: str, **changes: Any) -> Step:
    """The step in which one layer is otherwise."""
    return Step.of(replace(plan, layers=tuple(replace(own, **changes) if own.name == name else own for own in plan)))


@cache
def _free_plan(**settings: Any) -> Plan:
    """A plan in two stages whose memory nothing limits."""
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    return pase.search(graph, 4, machine="v100", cost_model="alpha_beta", stages=2, micro_batches=4, **settings)


def test_modes_take_what_the_step_with_them_does() -> None:
    plan = staged_plan()
    found = explain_step(plan)
    assert [layer.name for layer in found.layers] == [layer.name for layer in plan]
    checked = 0
    for layer in [one for one in found.layers if len(one.modes) > 2][::25]:
        for mode in layer.modes:
            step = _step(plan, layer.name, state=mode.state, is_recomputed=mode.is_recomputed)
            assert mode.step_s == pytest.approx(step.cost)
            assert mode.difference_s == pytest.approx(step.cost - plan.total_cost, abs=1e-12)
            assert mode.memory_bytes == step.peaks[layer.stage].bytes
            assert mode.fits == (mode.memory_bytes <= 900_000)
            checked += 1
    assert checked > 5


def test_each_layer_has_the_mode_that_the_plan_says() -> None:
    plan = staged_plan()
    for layer in explain_step(plan).layers:
        own = layer.own
        assert own.fits
        assert own.difference_s == 0
        assert own.is_recomputed == plan[layer.name].is_recomputed
        if len({mode.state for mode in layer.modes}) > 1:
            assert own.state == plan[layer.name].state


def test_reasons_say_what_memory_keeps_a_layer_from() -> None:
    plan = staged_plan()
    found = explain_step(plan)
    held = [layer for layer in found.layers if layer.held]
    assert any(plan[layer.name].is_recomputed for layer in held)
    for layer in held:
        assert layer.held is not None
        assert layer.held.memory_bytes > 900_000
        assert layer.held.step_s < plan.total_cost
        assert "more than its devices may" in layer.reason or "within the search's gap of" in layer.reason


def test_another_configuration_is_the_cheapest_of_all_that_fit() -> None:
    plan = _free_plan()
    layer = explain_step(plan, ["fc2"])["fc2"]
    (operator,) = [one for one in plan.graph.operators if one.name == "fc2"]
    costs = [
        _step(plan, "fc2", splits=dict(zip(operator.extents, row, strict=True))).cost
        for row in enumerate_configurations(operator, 2).tolist()
        if tuple(row) != tuple(plan["fc2"].splits.values())
    ]
    assert layer.other is not None
    assert layer.other.step_s == pytest.approx(min(costs))
    assert layer.held is None
    assert "because the next best" in layer.reason


def test_the_step_as_a_whole() -> None:
    plan = _free_plan()
    found = explain_step(plan)
    assert found.fill == pytest.approx(1 / (4 + 1))
    times = [sums.micro_batch for sums in Step.of(plan).sums]
    assert times[found.slowest] == max(times)
    with pytest.raises(KeyError):
        found["fc9"]
    with pytest.raises(PlanError, match="unknown layer 'fc9'"):
        explain_step(plan, ["fc9"])


def test_other_schemes_are_what_searches_find() -> None:
    plan = _free_plan()
    found = {(one.stages, one.micro_batches): one for one in other_schemes(plan)}
    assert set(found) == {(1, 4), (2, 2), (2, 4), (2, 8), (4, 4)}
    assert found[2, 4].is_own
    assert found[2, 4].step_s == plan.total_cost
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    for stages, m in set(found) - {(2, 4)}:
        other = pase.search(graph, 4, machine="v100", cost_model="alpha_beta", stages=stages, micro_batches=m)
        assert found[stages, m].step_s == pytest.approx(other.total_cost)
        assert found[stages, m].bound_s <= other.total_cost * (1 + 1e-9)


def test_a_plain_plan_is_one_of_the_schemes() -> None:
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    settings: dict[str, Any] = {"machine": "v100", "cost_model": "alpha_beta"}
    plan = pase.search(graph, 4, **settings)
    found = {(one.stages, one.micro_batches): one for one in other_schemes(plan)}
    assert set(found) == {(1, 1), (1, 2), (2, 1)}
    assert (found[1, 1].is_own, found[1, 1].step_s) == (True, plan.total_cost)
    for stages, m in ((1, 2), (2, 1)):
        other = pase.search(graph, 4, stages=stages, micro_batches=m, **settings)
        assert found[stages, m].step_s == pytest.approx(other.total_cost)


def test_what_fits_no_scheme_says_so() -> None:
    plan = replace(_free_plan(), device_memory_bytes=1000)
    assert [one.step_s for one in other_schemes(plan) if not one.is_own] == [None] * 4


def test_the_graph_of_the_whole_batch_is_needed() -> None:
    plan = _free_plan()
    other = replace(plan, graph=replace(plan.graph, name="mine"))
    with pytest.raises(PlanError, match="from that of the whole batch: search the model again"):
        other_schemes(other)
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    assert other_schemes(other, whole=graph) == other_schemes(plan)


def test_constraints_hold_for_what_could_be_otherwise() -> None:
    plan = _free_plan(modes=("zero1", "zero2"), constraints=(Forbid(layers=("*",), modes=("zero3", "recompute")),))
    for layer in explain_step(plan).layers:
        assert {mode.state for mode in layer.modes} <= {"replicated", "zero1", "zero2"}
        assert not any(mode.is_recomputed for mode in layer.modes)
    pinned = replace(plan, constraints=(Forbid(layers=("fc2",), dims=("c", "n")),))
    other = explain_step(pinned, ["fc2"])["fc2"].other
    assert other is None or (other.splits["n"], other.splits["c"]) == (1, 1)
