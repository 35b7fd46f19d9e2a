"""Sensitivity: against plain searches on machines that are changed by hand."""

from dataclasses import replace
from typing import Any

import pytest

import pase
from pase import Machine, Plan, search
from pase.analysis.explanation import Sensitivity, sensitivity
from pase.analysis.explanation.sensitivity import figures
from pase.machine import load_machine
from pase.planning.problems import problem_of
from pase.planning.steps import TrainingStep
from tests.networks import slow_machine, small_graph


def with_level(machine: Machine, number: int, **figures: float) -> Machine:
    levels = list(machine.levels)
    levels[number] = replace(levels[number], **figures)  # type: ignore[arg-type]
    return replace(machine, levels=tuple(levels))


def of(found: tuple[Sensitivity, ...], figure: str, factor: float) -> Sensitivity:
    (one,) = (one for one in found if (one.figure, one.factor) == (figure, factor))
    return one


def searched(plan: Plan, machine: Machine) -> Plan:
    return search(plan.graph, plan.num_devices, machine=machine, cost_model=plan.cost_model)


def test_seconds_are_those_of_plain_searches() -> None:
    machine = slow_machine()
    plan = search(small_graph("alexnet"), 16, machine=machine, cost_model="alpha_beta")
    found = sensitivity(plan)
    node = machine.levels[0]
    changed = {
        "node latency": lambda f: with_level(machine, 0, latency_s=node.latency_s * f),
        "node bandwidth": lambda f: with_level(machine, 0, bandwidth_bytes_per_s=node.bandwidth_bytes_per_s * f),
        "device peak FLOP/s": lambda f: replace(
            machine,
            device=replace(
                machine.device, peak_flop_per_s={d: p * f for d, p in machine.device.peak_flop_per_s.items()}
            ),
        ),
    }
    assert {one.figure for one in found} >= set(changed)
    for figure, change in changed.items():
        for factor in (0.8, 1.2):
            other = searched(plan, change(factor))
            one = of(found, figure, factor)
            assert one.is_used
            assert one.is_proven
            assert one.time_change == pytest.approx(other.total_cost / plan.total_cost - 1)
            tables = problem_of(plan.graph, 16, other.machine, "alpha_beta")
            kept = [tables.choice(v, tuple(layer.splits.values())) for v, layer in enumerate(plan.layers)]
            assert one.regret == pytest.approx(
                tables.tables.evaluate(kept) / other.total_cost - 1,  # type: ignore[arg-type]
                abs=1e-9,
            )
            # Moving these layers, and no others, makes the plan one of the cheapest there.
            moved = dict(one.moves)
            own = [moved.get(layer.name, layer) for layer in plan.layers]
            choice = [tables.choice(v, tuple(layer.splits.values())) for v, layer in enumerate(own)]
            assert tables.tables.evaluate(choice) == pytest.approx(other.total_cost)  # type: ignore[arg-type]


def test_flop_are_turned_into_time_before_they_are_compared() -> None:
    """Devices a fifth faster do all computing in 1/1.2 of the time; their cost in FLOP rises with r."""
    machine = slow_machine()
    plan = search(small_graph("alexnet"), 16, machine=machine)
    faster = of(sensitivity(plan), "device peak FLOP/s", 1.2)
    device = replace(machine.device, peak_flop_per_s={d: p * 1.2 for d, p in machine.device.peak_flop_per_s.items()})
    other = searched(plan, replace(machine, device=device))
    peaks = other.machine.peak_flop_per_s() / machine.peak_flop_per_s()
    assert other.total_cost > plan.total_cost
    assert faster.time_change == pytest.approx(other.total_cost / plan.total_cost / peaks - 1)
    assert -1 / 6 - 1e-9 <= faster.time_change < 0


def test_the_paper_model_does_not_know_latencies_nor_faster_levels() -> None:
    machine = load_machine("1080ti")
    plan = search(small_graph("alexnet"), 16, machine=machine)
    found = sensitivity(plan)
    unused = {one.figure for one in found} - {one.figure for one in found if one.is_used}
    assert unused >= {"node latency", "cluster latency", "device memory bandwidth"}
    for one in found:
        if not one.is_used:
            assert (one.moves, one.regret) == ((), 0.0)
            assert one.time_change == pytest.approx(0.0)


def test_one_device_that_is_faster_takes_less_time() -> None:
    faster = of(sensitivity(search(small_graph("alexnet"), 1)), "device peak FLOP/s", 1.2)
    assert faster.is_used
    assert faster.time_change == pytest.approx(1 / 1.2 - 1)
    assert (faster.moves, faster.regret) == ((), 0.0)


def test_figures_are_those_of_levels_in_use() -> None:
    plan = search(small_graph("alexnet"), 8, machine="1080ti")
    assert [name for name, _ in figures(plan)] == [
        "device peak FLOP/s",
        "device memory bandwidth",
        "node latency",
        "node bandwidth",
    ]


def test_layers_of_a_step_keep_their_modes() -> None:
    """Against searches in which every layer is pinned to its state, on machines that are changed by hand."""
    graph, machine = small_graph("gpt"), slow_machine()
    everywhere = {"pin": {"*": "zero1 *"}}
    settings: dict[str, Any] = {"cost_model": "alpha_beta", "micro_batches": 2, "modes": ["zero1"]}
    plan = search(graph, 8, machine=machine, constraints=everywhere, **settings)
    found = sensitivity(plan)
    bandwidth = machine.levels[0].bandwidth_bytes_per_s
    for factor in (0.8, 1.2):
        changed = with_level(machine, 0, bandwidth_bytes_per_s=bandwidth * factor)
        other = search(graph, 8, machine=changed, constraints=everywhere, **settings)
        one = of(found, "node bandwidth", factor)
        assert one.time_change == pytest.approx(other.total_cost / plan.total_cost - 1, rel=1e-9)
        there = replace(TrainingStep.of(plan), machine=changed).cost
        assert one.regret == pytest.approx(there / other.total_cost - 1, abs=1e-9)


def test_a_plan_in_stages_is_searched_again_with_each_figure() -> None:
    graph, machine = pase.load("mlp", batch=16, arguments={"layers": 4, "hidden": 64, "inputs": 64}), slow_machine()
    settings: dict[str, Any] = {"cost_model": "alpha_beta", "stages": 2, "micro_batches": 4}
    plan = search(graph, 4, machine=machine, **settings)
    found = sensitivity(plan)
    assert {one.figure for one in found} == {figure for figure, _ in figures(plan)}
    bandwidth = machine.levels[0].bandwidth_bytes_per_s
    for factor in (0.8, 1.2):
        changed = with_level(machine, 0, bandwidth_bytes_per_s=bandwidth * factor)
        other = search(graph, 4, machine=changed, device_memory_bytes=plan.device_memory_bytes, **settings)
        one = of(found, "node bandwidth", factor)
        assert (one.is_used, one.is_proven) == (True, other.exact)
        assert one.time_change == pytest.approx(other.total_cost / plan.total_cost - 1, rel=1e-9)
        there = replace(TrainingStep.of(plan), machine=changed).cost
        assert one.regret == pytest.approx(there / other.total_cost - 1, abs=1e-9)
    assert not of(found, "device memory limit", 1.2).moves
