"""Whole steps: hand-computed ones, what is kept whatever the plan, bounds that no schedule can beat."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import load, search
from pase.analysis.simulation.engine import Collective, Compute, Direction
from pase.analysis.simulation.simulation import Activity, link_bytes, simulate
from pase.analysis.simulation.step import COLLECTIVES, layer_work
from pase.errors import MachineError, SimulationError
from pase.graph import Graph
from pase.machine import Machine
from pase.planning.plan import Plan
from pase.sharding.traffic import Phase, flows
from tests.networks import small_graph
from tests.runtime.networks import attentions, batch_norms, lstms, mixed, small, tied
from tests.runtime.plans import data_parallel_plan, make_plan, random_plan
from tests.simulation.machines import machine

GRAPHS = [small("mlp"), small("lenet5"), small("transformer"), tied(), lstms(), attentions(), batch_norms(), mixed()]

TWO_LEVELS = machine((2, 1e-6, 1e9), (0, 3e-6, 0.6e9))

plans = st.builds(
    random_plan, st.sampled_from(GRAPHS), num_devices=st.sampled_from([2, 4, 8]), seed=st.integers(0, 10**6)
)
ways = st.fixed_dictionaries({"collectives": st.sampled_from(list(COLLECTIVES)), "overlaps": st.booleans()})


# -- steps worked out by hand


@pytest.mark.parametrize("name", ["lenet5", "rnnlm", "transformer"])
def test_one_device_computes_layer_after_layer(name: str) -> None:
    """All FLOP of the step, as the search counts them, and two for each weight that is updated."""
    graph = small_graph(name)
    plan = search(graph, 1)
    found = simulate(plan, machine=machine((0, 1e-6, 1e9), flop_per_s=1e9))
    flop = sum(layer.compute_cost for layer in plan.layers) + 2 * graph.num_parameters
    assert found.step_time_s == pytest.approx(flop / 1e9)
    assert {level.moved_bytes for level in found.levels} == {0}


def perceptron() -> Graph:
    """Two dense layers without biases worth mentioning: 64 × 64 → 64 → 4."""
    return load("mlp", arguments={"layers": 2, "batch": 64, "inputs": 64, "hidden": 64, "classes": 4})


def test_the_memory_of_a_device_bounds_its_computation() -> None:
    """Forward, fc1 touches 64 × 64 inputs, weights and outputs and 64 biases: 4 bytes each."""
    plan = make_plan(perceptron(), 1, {})
    slow = machine((0, 0.0, 1e9), flop_per_s=1e15, memory_bandwidth_bytes_per_s=1e6)
    work = layer_work(plan, slow)["fc1"]
    assert work.forward_s == pytest.approx(4 * (3 * 64 * 64 + 64) / 1e6)
    assert work.update_s == pytest.approx(3 * 4 * (64 * 64 + 64) / 1e6)


def test_overlap_hides_an_all_reduce() -> None:
    """fc2's gradients are summed in less time than fc1's backward computation: without overlap that comes on top."""
    plan = data_parallel_plan(perceptron(), 2)
    found = machine((0, 0.0, 1e9), flop_per_s=1e9)
    work = layer_work(plan, found)
    sum_fc2 = 4 * (64 * 4 + 4) / 1e9
    sum_fc1 = 4 * (64 * 64 + 64) / 1e9
    assert work["fc1"].backward_s is not None
    assert work["fc1"].update_s is not None
    assert work["fc2"].update_s is not None
    assert sum_fc2 < work["fc1"].backward_s
    passes = sum(layer.forward_s + (layer.backward_s or 0) for layer in work.values())
    with_overlap, without = (simulate(plan, machine=found, overlaps=overlaps) for overlaps in (True, False))
    assert work["fc2"].update_s < sum_fc1
    assert with_overlap.step_time_s == pytest.approx(passes + sum_fc1 + work["fc1"].update_s)
    assert without.step_time_s == pytest.approx(with_overlap.step_time_s + sum_fc2)
    on_links = [with_overlap.activities[activity] for activity in (Activity.TRANSFER, Activity.QUEUE)]
    assert sum(on_links) == pytest.approx(sum_fc1)


def test_what_a_layer_needs_from_another_is_waited_for() -> None:
    """fc1's outputs are split along n, fc2 reads all of them: each of two devices fetches the other's half."""
    plan = make_plan(perceptron(), 2, {"fc1": {"n": 2}})
    found = machine((0, 1e-3, 1e6), flop_per_s=1e9)
    work = layer_work(plan, found)
    half_s = 1e-3 + 4 * 64 * 32 / 1e6
    passes = sum(layer.forward_s + (layer.backward_s or 0) for layer in work.values())
    updates = sum(layer.update_s or 0 for layer in work.values())
    step = simulate(plan, machine=found)
    # Backward, fc1's device has the whole gradient of its half already: replicas of fc2 compute the same.
    assert step.step_time_s == pytest.approx(passes + half_s + (work["fc1"].update_s or 0), rel=1e-9, abs=updates)
    assert step.phases[0].moved_bytes == 2 * 4 * 64 * 32


# -- what holds for every plan


@settings(max_examples=20)
@given(plans)
def test_links_carry_the_bytes_that_the_traffic_predicts(plan: Plan) -> None:
    step = simulate(plan, machine=TWO_LEVELS, collectives="program")
    expected = [0.0] * len(step.fabric.links)
    for flow in flows(plan):
        for (sender, receiver), size in flow.bytes_by_pair.items():
            for level in range(1 + (sender // 2 != receiver // 2)):
                expected[step.fabric.link(level, sender, Direction.OUT)] += size
                expected[step.fabric.link(level, receiver, Direction.IN)] += size
    assert link_bytes(step.tasks, step.fabric) == expected
    assert sum(phase.moved_bytes for phase in step.phases) == sum(flow.total_bytes for flow in flows(plan))


@settings(max_examples=30)
@given(plans, ways)
def test_no_step_is_shorter_than_what_it_takes_and_nothing_happens_at_once(plan: Plan, way: dict[str, bool]) -> None:
    step = simulate(plan, machine=TWO_LEVELS, **way)  # type: ignore[arg-type]
    least = step.step_time_s * (1 + 1e-9)
    work = layer_work(plan, TWO_LEVELS).values()
    computing = sum(layer.forward_s + (layer.backward_s or 0) + (layer.update_s or 0) for layer in work)
    assert computing <= least
    for link, size in zip(step.fabric.links, link_bytes(step.tasks, step.fabric), strict=True):
        assert size / link.bandwidth_bytes_per_s <= least
    for device in step.devices:
        assert device.computing_s == pytest.approx(computing)
        together = device.computing_s + device.communicating_s + device.waiting_s
        assert together == pytest.approx(step.step_time_s)
        assert max(device.sending_s, device.receiving_s) <= least
    for level in step.levels:
        assert 0 <= level.utilisation <= 1 + 1e-9
        assert level.busiest_s <= least
    # The critical path fills it.
    path = step.critical_path
    assert path[0].begin_s == 0
    assert path[-1].end_s == step.step_time_s
    assert all(one.end_s == other.begin_s for one, other in pairwise(path))
    assert sum(step.activities.values()) == pytest.approx(step.step_time_s)
    # Tasks wait for one another, and use devices and links one at a time.
    schedule = step.schedule
    for task, followers in enumerate(step.tasks.followers):
        assert all(schedule.end_s[task] <= schedule.start_s[follower] for follower in followers)
    for taken in schedule.occupancy:
        assert all(release <= begin for release, begin in zip(taken.release_s, list(taken.begin_s)[1:], strict=False))


@settings(max_examples=20)
@given(plans, ways)
def test_without_cost_of_communication_a_step_is_its_computation(plan: Plan, way: dict[str, bool]) -> None:
    free = machine((0, 0.0, inf))
    step = simulate(plan, machine=free, **way)  # type: ignore[arg-type]
    work = layer_work(plan, free).values()
    computing = sum(layer.forward_s + (layer.backward_s or 0) + (layer.update_s or 0) for layer in work)
    assert step.step_time_s == pytest.approx(computing)
    assert {part.activity for part in step.critical_path} <= {Activity.FORWARD, Activity.BACKWARD, Activity.UPDATE}


def slower(found: Machine, factor: float) -> Machine:
    device = replace(found.device, peak_flop_per_s={"float32": found.peak_flop_per_s() / factor})
    levels = tuple(
        replace(level, latency_s=level.latency_s * factor, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / factor)
        for level in found.levels
    )
    return replace(found, device=device, levels=levels)


@settings(max_examples=10)
@given(plans, ways)
def test_a_machine_of_a_quarter_of_the_speed_takes_four_times_as_long(plan: Plan, way: dict[str, bool]) -> None:
    step, again, slow = (
        simulate(plan, machine=found, **way)  # type: ignore[arg-type]
        for found in (TWO_LEVELS, TWO_LEVELS, slower(TWO_LEVELS, 4.0))
    )
    # Powers of two do not round: task by task.
    assert [4 * end_s for end_s in step.schedule.end_s] == list(slow.schedule.end_s)
    assert again.schedule == step.schedule


def test_a_shared_weight_is_updated_by_its_first_user_alone() -> None:
    """The table belongs to the first embedding; the projection updates its own biases."""
    step = simulate(random_plan(tied(), 4, 3), machine=TWO_LEVELS)
    updates = [
        (task.label.producer, task.device)
        for task in step.tasks.tasks
        if isinstance(task, Compute) and task.label.phase is Phase.UPDATE
    ]
    assert sorted(updates) == [(layer, device) for layer in ("fc", "first") for device in range(4)]


def test_a_shared_weight_is_summed_once_where_all_hold_it_alike() -> None:
    """Data parallel: the table's gradients of two embeddings and of a projection are added on each device first."""

    def summed(**splits: dict[str, int]) -> int:
        layers = {operator.name: {"b": 2} for operator in tied().operators} | splits
        step = simulate(make_plan(tied(), 2, layers), machine=TWO_LEVELS)
        found = [task for task in step.tasks.tasks if isinstance(task, Collective)]
        return sum(task.label.tensor == "gradient of table" or "gradient of w" in task.label.tensor for task in found)

    assert summed() == 1
    # One that holds another part of it sums its own gradient, if any device shares that part.
    assert summed(fc={"s": 2}) == 1
    assert summed(second={"v": 2}) == 1
    assert summed(first={"d": 2}) == 2


# -- what cannot be simulated


def test_an_unknown_way_of_collectives_is_refused() -> None:
    with pytest.raises(SimulationError, match=r"unknown way of collectives 'rings': .*hierarchical, program"):
        simulate(data_parallel_plan(perceptron(), 2), collectives="rings")


def test_devices_that_do_not_fill_the_nodes_are_refused() -> None:
    with pytest.raises(MachineError, match=r"levels\[0\]\.devices is 8, which does not divide 12"):
        simulate(data_parallel_plan(small("mlp"), 12), machine=machine((8, 0.0, 1e9), (0, 0.0, 1e9)))
