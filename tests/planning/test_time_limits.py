"""Limits of time and of work: searches of steps end in time, and without a limit no clock changes their answers."""

import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

import pase
from pase.costs import edges
from pase.errors import SolverError
from pase.graph import Graph
from pase.planning import memory_limit, pipelines, planner, spans, stage_problem
from pase.planning.plan import Plan
from pase.solver import constrained, overlap, solution
from pase.solver import search as solver_search

SETTINGS: dict[str, Any] = {
    "devices": 8,
    "machine": "v100",
    "cost_model": "step",
    "stages": "auto",
    "micro_batches": "auto",
    "modes": ["zero1", "recompute"],
    "optimiser": "adamw",
}


class Clock:
    """Counts how often it is looked at; each look takes so many seconds."""

    def __init__(self, look_s: float) -> None:
        self.look_s, self.looks = look_s, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.look_s * self.looks


def _use(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    for module in (edges, constrained, memory_limit, overlap, pipelines, planner, spans, stage_problem):
        monkeypatch.setattr(module, "perf_counter", clock)
    for module in (solver_search, solution):
        monkeypatch.setattr(module.time, "perf_counter", clock)


def _gpt(layers: int = 2) -> Graph:
    arguments = {"layers": layers, "model_width": 64, "heads": 4, "steps": 32, "vocabulary": 96}
    return pase.load("gpt", batch=8, arguments=arguments)


def _searched(graph: Graph, **settings: Any) -> Plan | None:
    """Return a plan, or None where a search says that it has none yet."""
    try:
        return pase.search(graph, **settings)
    except SolverError as error:
        if "no plan of 'gpt' yet: the time limit was reached before a step" not in str(error):
            raise
        return None


def _looks_of_search(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    """Return a list of how often the clock was looked at before the plan of what was found was made, if any was."""
    looks: list[int] = []
    make = pipelines.plan_of_step

    def plan_of_step(*found: Any) -> Plan:
        looks.append(clock.looks)
        return make(*found)

    monkeypatch.setattr(pipelines, "plan_of_step", plan_of_step)
    return looks


def test_a_search_ends_soon_after_its_limit_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly anything is looked at once time is over; more time never proves less."""
    best = pase.search(_gpt(), **SETTINGS)
    refused, bounds, limit_s = 0, [0.0], 40.0
    while True:
        clock = Clock(1.0)
        with monkeypatch.context() as patch:
            _use(patch, clock)
            looks = _looks_of_search(patch, clock)
            found = _searched(_gpt(), time_limit_s=limit_s, **SETTINGS)
        if found is None:
            refused += 1
        else:
            plan = found
            bounds.append(plan.lower_bound)
            assert plan.lower_bound <= best.total_cost * (1 + 1e-9) <= plan.total_cost * (1 + 1e-9)
        assert (looks or [clock.looks])[0] < limit_s + 20
        if clock.looks < 0.9 * limit_s:
            break
        limit_s *= 2
    assert refused
    assert len(bounds) > 3
    assert plan.total_cost == best.total_cost


def test_a_limit_holds_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fits need not be known before time counts."""
    clock = Clock(1.0)
    _use(monkeypatch, clock)
    with pytest.raises(SolverError, match=r"no plan of 'gpt' yet: .* \(no step takes less than .*s\); give more time"):
        pase.search(_gpt(4), time_limit_s=400.0, device_memory_bytes=100_000, **SETTINGS)
    assert clock.looks < 420


def test_without_a_limit_no_clock_changes_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the bounds are the same: work is limited, not time."""
    settings = SETTINGS | {"stages": 2, "micro_batches": 2}
    free = pase.search(_gpt(), **settings)
    settings |= {"device_memory_bytes": int(0.8 * free.memory.total_bytes)}
    expected = pase.search(_gpt(), **settings)
    _use(monkeypatch, Clock(100.0))
    plan = pase.search(_gpt(), **settings)
    assert (plan.total_cost, plan.lower_bound, plan.layers) == (
        expected.total_cost,
        expected.lower_bound,
        expected.layers,
    )


@pytest.mark.full
def test_a_search_of_a_large_model_takes_little_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds of this process, which other work on the machine does not prolong."""
    _use(monkeypatch, time.process_time)
    arguments = {"layers": 96, "model_width": 12288, "heads": 96, "steps": 2048, "vocabulary": 51200}
    graph = pase.load("gpt", batch=64, arguments=arguments)
    settings = SETTINGS | {"devices": 64, "machine": "a100", "modes": ["zero1", "zero2", "zero3", "recompute"]}
    costs = []
    for limit_s in (2.0, 5.0, 10.0, 20.0):
        begin_s = time.process_time()
        plan = _searched(graph, precision="bf16-mixed", time_limit_s=limit_s, **settings)
        costs.append(inf if plan is None else plan.total_cost)
        assert time.process_time() - begin_s < 1.1 * limit_s + 2
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < inf
