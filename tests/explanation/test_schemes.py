"""Other numbers of stages and micro-batches: against searches."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import pase
from pase import Plan
from pase.analysis.explanation import other_schemes
from pase.errors import PlanError


@cache
def free_plan(**settings: Any) -> Plan:
    """A plan in two stages whose memory nothing limits."""
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    return pase.search(graph, 4, machine="v100", cost_model="alpha_beta", stages=2, micro_batches=4, **settings)


def test_other_schemes_are_what_searches_find() -> None:
    plan = free_plan()
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
    plan = replace(free_plan(), device_memory_bytes=1000)
    assert [one.step_s for one in other_schemes(plan) if not one.is_own] == [None] * 4


def test_the_graph_of_the_whole_batch_is_needed() -> None:
    plan = free_plan()
    other = replace(plan, graph=replace(plan.graph, name="mine"))
    with pytest.raises(PlanError, match="from that of the whole batch: search the model again"):
        other_schemes(other)
    graph = pase.load("mlp", batch=32, arguments={"layers": 4, "inputs": 64, "hidden": 64, "classes": 64})
    assert other_schemes(other, whole=graph) == other_schemes(plan)
