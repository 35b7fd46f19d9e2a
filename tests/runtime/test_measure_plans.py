"""What crosses devices in a step is what was predicted, for each edge and each layer, from the plan alone too."""

from collections import Counter
from functools import cache

import pytest

from pase.graph import Graph
from pase.planning.plan import Plan
from pase.planning.planner import search
from pase.sharding.traffic import Movement, Phase, bytes_by_movement, edge_bytes, flows
from pase.targets.emitter import emit
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph
from pase.targets.mesh_tensorflow.primitives.traffic import Traffic
from pase.targets.mesh_tensorflow.runtime.measure import Crossed, crossed, crossed_bytes
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.data import Batches
from pase.targets.training.moved import tabulated
from tests.networks import slow_machine, small_graph
from tests.runtime.networks import mixed, small, tied
from tests.runtime.plans import data_parallel_plan, make_plan, random_plan
from tests.runtime.training import builder_of


@cache
def network(name: str) -> Graph:
    makers = {"mixed": mixed, "tied": tied}
    return makers[name]() if name in makers else small(name)


def plan_of(name: str, num_devices: int, how: str) -> Plan:
    graph = network(name)
    match how:
        case "searched":
            # On devices this slow even small layers are worth splitting.
            return search(graph, num_devices, machine=slow_machine())
        case "data parallel":
            return data_parallel_plan(graph, num_devices)
        case _:
            return random_plan(graph, num_devices, int(how))


@cache
def outcome(name: str, num_devices: int, how: str, keep_alive: bool) -> tuple[Traffic, Crossed]:
    return run(plan_of(name, num_devices, how), keep_alive=keep_alive)


def run(plan: Plan, *, keep_alive: bool) -> tuple[Traffic, Crossed]:
    """One step of a plan's program: what was planned, what was counted."""
    traffic, measured, _ = measured_training(plan, keep_alive=keep_alive, steps=1, dtype="float32", rate=0.1)
    return traffic, measured


def measured_training(
    plan: Plan, *, keep_alive: bool, steps: int, dtype: str, rate: float
) -> tuple[Traffic, Crossed, list[float]]:
    """Steps of a plan's program: what was planned for each, what was counted in the last one, the losses."""
    with ProgramGraph().as_default() as graph:
        program = Program(num_devices=plan.num_devices, dtype=dtype)
        loss = builder_of(emit(plan, target="mesh_tensorflow"))(program)
        training = Training.start(program, loss, learning_rate=rate, seed=0, keep_alive=keep_alive)
        batches = Batches(program.inputs, seed=0)
        found = [training.step(batches.batch(i), with_record=i == steps - 1) for i in range(steps)]
        record = found[-1].record
        measured = crossed(record, graph, training.traffic)
        assert crossed_bytes(record, graph) == measured.total_bytes
        training.close()
    return training.traffic, measured, [step.loss for step in found]


def that_move(total: dict[Movement, int]) -> dict[Movement, int]:
    return {movement: size for movement, size in total.items() if size}


CASES = [
    *((name, p, how) for name in ("mlp", "rnnlm") for p in (4, 8) for how in ("searched", "data parallel", "0")),
    *(("lenet5", 4, how) for how in ("searched", "0")),
    ("lenet5", 8, "1"),
    ("alexnet", 4, "searched"),
    ("alexnet", 4, "data parallel"),
    ("alexnet", 4, "0"),
    ("alexnet", 8, "searched"),
    ("mixed", 4, "0"),
    ("tied", 6, "1"),
]


@pytest.mark.parametrize(("name", "num_devices", "how"), CASES)
def test_executed_bytes_are_those_predicted(name: str, num_devices: int, how: str) -> None:
    plan = plan_of(name, num_devices, how)
    predicted = bytes_by_movement(flows(plan))
    assert sum(predicted.values()) > 0

    traffic, measured = outcome(name, num_devices, how, True)
    assert that_move(traffic.bytes_by_movement) == predicted
    assert that_move(dict(measured.by_movement)) == predicted
    assert measured.elsewhere_bytes == 0
    assert measured.total_bytes == traffic.total_bytes == sum(predicted.values())

    # An ordinary step leaves out replicas that nobody uses, and sends once what several need on a device.
    traffic, measured = outcome(name, num_devices, how, False)
    assert that_move(traffic.bytes_by_movement) == predicted
    assert measured.elsewhere_bytes == 0
    assert all(size <= predicted.get(movement, 0) for movement, size in measured.by_movement.items())
    assert measured.total_bytes > 0.75 * sum(predicted.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["data parallel", "0"])
def test_what_layers_exchange_inside_themselves_is_predicted_too(how: str) -> None:
    """Attention and normalisation: edges and layers as a whole, as a plan does not say in which pass they exchange."""
    graph = small_graph("transformer")
    plan = data_parallel_plan(graph, 4) if how == "data parallel" else random_plan(graph, 4, int(how))
    traffic, measured = run(plan, keep_alive=True)
    assert that_move(dict(measured.by_movement)) == that_move(traffic.bytes_by_movement)
    assert measured.elsewhere_bytes == 0
    found = (measured.by_movement, bytes_by_movement(flows(plan)))
    counted, predicted = (Counter[tuple[str, str]](), Counter[tuple[str, str]]())
    for total, of_phases in zip((counted, predicted), found, strict=True):
        for movement, size in of_phases.items():
            total[movement.producer, movement.consumer] += size
    assert +counted == +predicted


def test_a_searched_plan_moves_less_than_data_parallelism_by_the_ratio_that_was_predicted() -> None:
    ratios = []
    for how in ("searched", "data parallel"):
        traffic, measured = outcome("alexnet", 4, how, False)
        ratios.append((traffic.total_bytes, measured.total_bytes))
    (ours, ours_measured), (data_parallel, data_parallel_measured) = ratios
    assert ours < data_parallel
    assert ours_measured / data_parallel_measured == pytest.approx(ours / data_parallel, rel=0.02)


def test_bytes_of_a_layer_are_told_apart_by_phase() -> None:
    """fc1 of 12 x 24 points, b = 2 c = 2: y [12, 24] is added up over c, its weight's gradient [6, 24] over b."""
    plan = make_plan(network("mlp"), 4, {"fc1": {"b": 2, "c": 2}, "fc2": {"b": 2, "n": 2}, "fc3": {"b": 2}})
    traffic, measured = run(plan, keep_alive=True)
    table = tabulated(traffic.bytes_by_movement, measured.by_movement)
    (row,) = (row for row in table["layers"] if row["name"] == "fc1")
    # Twice (k - 1) · n for each of two groups, 4 bytes a word; the bias [24] is on all 4 devices, added over b.
    assert row["forward"] == {"predicted_bytes": 2 * 2 * 12 * 24 * 4, "measured_bytes": 2 * 2 * 12 * 24 * 4}
    assert row["update"]["measured_bytes"] == 2 * 2 * (6 * 24 + 24) * 4
    # The data have no gradient.
    assert row["backward"] == {"predicted_bytes": 0, "measured_bytes": 0}
    assert row["measured_bytes"] == sum(row[phase.value]["measured_bytes"] for phase in Phase)
    assert sum(edge["measured_bytes"] for edge in table["edges"]) == sum(
        sum(edge_bytes(plan, edge)) for edge in plan.graph.edges
    )


def test_what_the_host_sends_is_apart() -> None:
    plan = data_parallel_plan(network("mlp"), 4)
    _, measured = run(plan, keep_alive=False)
    # Of the inputs [24, 12] and the labels [24] each device gets its rows, and the rate; it says how many were right.
    data = (24 * 12 + 24) * 4
    loss = 4
    assert data < measured.host_bytes <= data + 2 * 4 * 4 + loss
