"""Steps in stages, pass by pass: beside another simulation, closed forms, and steps worked out by hand."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import pase
from pase.analysis.simulation.pipeline import StagedSimulation, chrome_trace, simulate_stages
from pase.analysis.simulation.simulation import simulate
from pase.errors import PlanError
from pase.graph import Graph
from pase.graph.parts import cuts
from pase.machine import Machine
from pase.planning.passes import Pass, Work, run_passes
from pase.planning.plan import Plan
from pase.planning.stages import actions, step_s
from pase.planning.steps import TrainingStep
from tests.costs.test_schedules import order_of, simulated
from tests.networks import staged_plan, tiny_plan
from tests.simulation.machines import machine

FLOP_PER_S = 1e9
ALPHA_S, BANDWIDTH = 1e-6, 1e9


def _passes(
    schedule: str, m: int, stages: Sequence[tuple[float, float]], groups: int | None = None, weights: float = 0.0
) -> tuple[Pass, ...]:
    """The passes of stages that take (forward, backward), gradients of weights apart."""
    groups = groups or len(stages)
    orders = [
        actions(schedule, group=g, num_groups=groups, num_stages=len(stages), micro_batches=m) for g in range(groups)
    ]
    times = [{**dict.fromkeys(Work, 0.0), Work.FORWARD: f, Work.BACKWARD: b, Work.WEIGHTS: weights} for f, b in stages]
    return run_passes(orders, times)


def _step_s(passes: Sequence[Pass]) -> float:
    return max(each.end_s for each in passes)


# -- schedules


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_any_length_take_what_another_simulation_says(schedule: str) -> None:
    numbers = random.Random(2)
    for _ in range(60):
        m, num = numbers.randint(1, 9), numbers.randint(1, 5)
        stages = [(numbers.uniform(0.5, 2), numbers.uniform(0.5, 4)) for _ in range(num)]
        expected, _ = simulated(schedule, [f for f, _ in stages], [b for _, b in stages], m)
        assert _step_s(_passes(schedule, m, stages)) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_stages_of_one_length_take_what_the_closed_form_says(schedule: str) -> None:
    for groups in range(1, 5):
        for chunks in (2, 3) if schedule == "interleaved" else (1,):
            for m in range(groups, 4 * groups + 1, groups):
                passes = _passes(schedule, m, [(1.0, 2.0)] * (groups * chunks), groups)
                expected = step_s([3.0 * chunks] * groups, [0.0] * groups, m, chunks)
                assert _step_s(passes) == pytest.approx(expected), (groups, chunks, m)


def test_with_stages_of_other_lengths_1f1b_may_take_less_than_the_closed_form_says() -> None:
    """A long stage before a short one works ahead while the first micro-batch comes back. Passes back are twice as long
    as forth, and stages within a tenth of the mean.
    """
    numbers = random.Random(3)
    shares = []
    for _ in range(200):
        m = numbers.randint(2, 12)
        stages = [(f, 2 * f) for f in (numbers.uniform(0.9, 1.1) for _ in range(numbers.randint(2, 5)))]
        closed = step_s([f + b for f, b in stages], [0.0] * len(stages), m)
        assert _step_s(_passes("gpipe", m, stages)) == pytest.approx(closed)
        shares.append(_step_s(_passes("1f1b", m, stages)) / closed)
    assert 0.93 < min(shares) < 0.97
    assert max(shares) == pytest.approx(1)


def test_under_gpipe_the_longest_pass_each_way_counts() -> None:
    numbers = random.Random(4)
    for _ in range(50):
        m, num = numbers.randint(1, 9), numbers.randint(1, 5)
        forward, backward = ([numbers.uniform(0.5, 2) for _ in range(num)] for _ in range(2))
        expected = sum(sum(way) + (m - 1) * max(way) for way in (forward, backward))
        assert _step_s(_passes("gpipe", m, list(zip(forward, backward, strict=True)))) == pytest.approx(expected)


def test_gradients_of_weights_that_are_put_off_fill_the_bubble() -> None:
    """ZB-H1 waits (S - 1) (f + b - w), with b for inputs (Qi et al., Zero Bubble Pipeline Parallelism, table 2)."""
    for num in range(1, 5):
        for m in range(2 * num, 3 * num + 1):
            passes = _passes("zero_bubble", m, [(1.0, 1.0)] * num, weights=1.0)
            assert _step_s(passes) == pytest.approx(3.0 * m + (num - 1) * (1.0 + 1.0 - 1.0))


# -- plans


def _perceptron(batch: int = 32, width: int = 64) -> Graph:
    return pase.load("mlp", batch=batch, arguments={"layers": 4, "inputs": width, "hidden": width, "classes": width})


def _machine() -> Machine:
    return machine((0, ALPHA_S, BANDWIDTH), flop_per_s=FLOP_PER_S)


def _plan(**settings: Any) -> Plan:
    return pase.search(_perceptron(), **{"devices": 2, "machine": _machine(), "cost_model": "alpha_beta"} | settings)


def test_two_stages_by_hand() -> None:
    """Layers of 64 × 64, 8 examples in a micro-batch: a product, a bias and a ReLU; the device before sends 8 × 64."""
    found = simulate_stages(_plan(stages=2, micro_batches=4))
    first, second = found.stages
    assert (first.layers, first.devices, second.devices) == (("fc1", "fc2"), (0, 1), (1, 2))
    assert first.times_s[Work.FORWARD] == pytest.approx(2 * (2 * 64 + 2) * 8 * 64 / FLOP_PER_S)
    message_s = ALPHA_S + 8 * 64 * 4 / BANDWIDTH
    assert second.times_s[Work.RECEIVE] == first.times_s[Work.TAKE_BACK] == pytest.approx(message_s)
    assert (first.times_s[Work.RECEIVE], second.times_s[Work.TAKE_BACK]) == (0, 0)
    # Back, fc1 has no gradient of what it reads.
    products_s = 2 * 64 * 8 * 64 / FLOP_PER_S
    assert 3 * products_s < first.times_s[Work.BACKWARD] < 3.1 * products_s
    assert 4 * products_s < second.times_s[Work.BACKWARD] < 4.1 * products_s
    assert [use.in_flight for use in found.stages] == [2, 1]


@pytest.fixture(scope="module")
def found() -> StagedSimulation:
    return simulate_stages(staged_plan())


def test_passes_add_up_to_what_the_search_counts(found: StagedSimulation) -> None:
    assert any(layer.is_recomputed for layer in found.plan)
    assert {layer.state for layer in found.plan} > {"replicated"}
    for use, sums in zip(found.stages, found.step.sums, strict=True):
        assert use.micro_batch_s == pytest.approx(sums.micro_batch)
        assert use.times_s[Work.ONCE] == pytest.approx(sums.step)
        assert use.times_s[Work.RECOMPUTE] <= use.times_s[Work.FORWARD] * (1 + 1e-9)
        assert use.busy_s == pytest.approx(4 * sums.micro_batch + sums.step)
        assert use.busy_s + use.waiting_s == pytest.approx(found.step_time_s)
    assert found.closed_form_s == pytest.approx(found.plan.total_cost)
    memory = max(use.memory_bytes for use in found.stages)
    assert memory == pytest.approx(found.plan.memory.total_bytes, abs=2)


def test_what_is_recomputed_takes_its_forward_pass_once_more() -> None:
    """With all layers but the first and the loss recomputed, what a micro-batch takes grows by their forward passes."""
    plan = _plan(micro_batches=2)
    again = replace(plan, layers=tuple(replace(layer, is_recomputed=layer.name in {"fc2", "fc3"}) for layer in plan))
    (kept,), (remade,) = simulate_stages(plan).stages, simulate_stages(again).stages
    assert kept.times_s[Work.RECOMPUTE] == 0
    assert remade.times_s[Work.RECOMPUTE] >= 2 * (2 * 64 + 2) * 8 * 64 / FLOP_PER_S
    assert remade.micro_batch_s == pytest.approx(kept.micro_batch_s + remade.times_s[Work.RECOMPUTE])
    assert remade.times_s[Work.BACKWARD] == pytest.approx(kept.times_s[Work.BACKWARD])
    assert remade.memory_bytes <= kept.memory_bytes
    waiting = [TrainingStep.of(own).memory_of_stage(0).waiting_bytes()[1] for own in (plan, again)]
    assert waiting[1] < waiting[0]


def test_the_critical_path_fills_the_step(found: StagedSimulation) -> None:
    path = found.critical_path
    assert path[0].begin_s == 0
    assert path[-1].end_s == found.step_time_s
    for before, after in pairwise(path):
        assert before.end_s == after.begin_s
    for number in range(found.plan.num_stages):
        own = [each for each in found.passes if each.stage == number]
        assert all(before.end_s <= after.begin_s for before, after in pairwise(own))


def test_without_overlap_nothing_hides(found: StagedSimulation) -> None:
    waited = simulate_stages(found.plan, overlaps=False)
    for use, sums in zip(waited.stages, found.step.sums, strict=True):
        assert use.micro_batch_s == pytest.approx(sums.repeated + sums.streamed)
        assert use.times_s[Work.ONCE] == pytest.approx(sums.once + sums.summed)
    assert waited.step_time_s >= found.step_time_s


def test_another_machine_takes_other_times() -> None:
    plan = _plan(stages=2, micro_batches=4)
    twice = simulate_stages(plan, machine=machine((0, ALPHA_S / 2, 2 * BANDWIDTH), flop_per_s=2 * FLOP_PER_S))
    assert 2 * twice.step_time_s == pytest.approx(simulate_stages(plan).step_time_s)
    assert simulate_stages(plan, machine="v100").machine.name == "v100"


def test_modes_and_micro_batches_need_no_stages() -> None:
    found = simulate_stages(_plan(micro_batches=4, modes=["zero1"]))
    assert found.step_time_s == pytest.approx(found.closed_form_s) == found.plan.total_cost
    assert found.bubble == pytest.approx(0, abs=1e-12)
    assert [each.micro_batch for each in found.passes if each.work == Work.FORWARD] == [0, 1, 2, 3]


def test_under_zero_bubble_gradients_of_weights_are_put_off() -> None:
    """Of a layer of 64 × 64 and 8 examples, one of its three products; the micro-batch takes what it did."""
    plan = _plan(stages=2, micro_batches=4)
    kept, split = simulate_stages(plan), simulate_stages(replace(plan, schedule="zero_bubble"))
    for own, other in zip(kept.stages, split.stages, strict=True):
        weights = other.times_s[Work.WEIGHTS]
        assert weights == pytest.approx(2 * 2 * 64 * 8 * 64 / FLOP_PER_S, rel=0.02)
        assert other.times_s[Work.BACKWARD] + weights == pytest.approx(own.times_s[Work.BACKWARD])
        assert other.busy_s == pytest.approx(own.busy_s)
    assert split.step_time_s < kept.step_time_s


def _chunked(seed: int) -> Plan:
    """A random pipeline of random widths, cut at random, whose groups have several stages each; not searched."""
    numbers = random.Random(seed)
    groups, chunks = numbers.choice([(2, 2), (2, 3), (4, 2)])
    sizes = {name: numbers.choice([32, 64, 96]) for name in ("inputs", "hidden", "classes")}
    plan = pase.search(
        pase.load("mlp", batch=64, arguments={"layers": groups * chunks + 2, **sizes}),
        groups * numbers.choice([1, 2]),
        machine=machine((4, ALPHA_S, BANDWIDTH), (0, 3 * ALPHA_S, BANDWIDTH / 5), flop_per_s=FLOP_PER_S),
        cost_model="step",
        stages=groups,
        micro_batches=groups * numbers.choice([1, 2, 4]),
    )
    size, places = plan.num_devices // groups, cuts(plan.graph)
    at = sorted(numbers.sample(places, groups * chunks - 1))
    layers = []
    for v, layer in enumerate(plan.layers):
        stage = sum(v >= place for place in at)
        first = stage % groups * size
        devices = tuple(range(first, first + size))
        layers.append(
            replace(layer, stage=stage, devices=devices, is_recomputed=v not in places and numbers.random() < 0.3)
        )
    return replace(plan, layers=tuple(layers), num_groups=groups, schedule="interleaved")


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_several_stages_have_them_in_turns(seed: int) -> None:
    """What a step costs is what its passes take in Megatron-LM's order, in which memory is walked through, too."""
    plan = _chunked(seed)
    found, step, m = simulate_stages(plan), TrainingStep.of(plan), plan.micro_batches
    groups, chunks = plan.num_groups, plan.num_stages // plan.num_groups
    often = [sum(use.micro_batch_s for use in found.stages[g::groups]) for g in range(groups)]
    once = [sum(use.times_s[Work.ONCE] for use in found.stages[g::groups]) for g in range(groups)]
    fill = (sum(often) - max(often)) / chunks
    assert m * max(often) + fill + max(once) == pytest.approx(found.closed_form_s)
    ways = (Work.RECEIVE, Work.FORWARD), (Work.TAKE_BACK, Work.RECOMPUTE, Work.BACKWARD)
    forward, backward = ([sum(use.times_s[work] for work in way) for use in found.stages] for way in ways)
    all_once = [use.times_s[Work.ONCE] for use in found.stages]
    assert step.cost == pytest.approx(found.step_time_s, rel=1e-12)
    if m % groups == 0:
        expected, _ = simulated("interleaved", forward, backward, m, chunks, all_once)
        assert step.cost == pytest.approx(expected, rel=1e-9)
    assert found.step_time_s >= max(m * t + o for t, o in zip(often, once, strict=True)) * (1 - 1e-12)
    # Stages of random widths differ by much: some wait for others more than the form says.
    assert 0.95 < found.step_time_s / found.closed_form_s < 1.15
    for group in range(groups):
        numbers = range(group, plan.num_stages, groups)
        states, kept = zip(*(step.memory_of_stage(number).waiting_bytes() for number in numbers), strict=True)
        for own, number in enumerate(numbers):
            held = most = 0
            for kind, other, _ in order_of("interleaved", groups, group, m, chunks):
                held += kept[other // groups] * (1 if kind == "f" else -1) * (other != number)
                most = max(most, held)
            # What the other stages hold at any time counts as if it were there in the turn that has most.
            alone = step.memory_of_stage(number).peak().bytes
            assert step.peaks[number].bytes == alone + sum(states) - states[own] + most


def test_stages_that_no_groups_can_have_in_turns_are_refused() -> None:
    plan = _plan(stages=2, micro_batches=4)
    with pytest.raises(PlanError, match=r"the stages of the plan are \[0, 1\], for 1 groups of 2 devices"):
        simulate_stages(replace(plan, num_groups=1))


def test_a_trace_has_a_process_for_each_stage(found: StagedSimulation) -> None:
    events = json.loads(chrome_trace(found))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["stage 0: devices 0 to 3", "stage 1: devices 4 to 7"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(found.step_time_s * 1e6)
    assert len(spans) == len(found.passes)


def test_each_plan_has_its_simulation() -> None:
    with pytest.raises(PlanError, match="simulate_stages simulates it pass by pass"):
        simulate(_plan(stages=2))
    plain = tiny_plan()
    assert simulate_stages(plain).bubble == 0
