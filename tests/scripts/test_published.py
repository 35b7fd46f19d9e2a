"""Published steps: what hides beside a simulation, FLOP and messages beside the papers' formulas."""

import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pase.costs import traffic_of
from pase.machine import Machine
from scripts.benchmarks.large_steps import (
    LayerTime,
    Scheme,
    exposed_s,
    layer_times,
    stage_layers,
    step_model,
    step_parts,
)
from scripts.benchmarks.published import Outcome, leave_one_out
from scripts.benchmarks.published_steps import (
    FSDP_BF16,
    LLAMAS,
    MEGATRON,
    STEPS,
    Row,
    degrees,
    gpt,
    llama,
    machine_of,
    measured_s,
    model_flop,
    predicted,
    published_steps,
    torchtitan_memory,
)

ROWS = {row.id: row for row in published_steps()}


def sharded_s(layers: int, compute_s: float, gather_s: float, scatter_s: float) -> float:
    """Return when a step of layers in shards ends: beside computation one queue of gathers, one ahead, and of sums."""
    gathered, link, device = list[float](), 0.0, 0.0
    starts, ends = list[float](), list[float]()
    for number in range(2 * layers):
        # A gather starts once the layer before the one that computes now is done.
        ready = starts[number - 1] if number else 0.0
        link = max(link, ready) + gather_s
        gathered.append(link)
        starts.append(max(device, gathered[number]))
        device = starts[number] + compute_s * (1 if number < layers else 2)
        ends.append(device)
        if number > layers:
            # What the layer before has left is summed meanwhile.
            link = max(link, ends[number - 1]) + scatter_s
    return max(link, device) + scatter_s


@pytest.mark.parametrize(("gather_s", "scatter_s"), [(0.2, 0.4), (0.01, 0.02), (1.5, 3.0)])
def test_shards_hide_as_in_their_schedule(gather_s: float, scatter_s: float) -> None:
    layers, compute_s = 24, 1.0
    expected = sharded_s(layers, compute_s, gather_s, scatter_s)
    compute = 3 * layers * compute_s
    hidden = 2 * layers * gather_s - gather_s + (layers - 1) * scatter_s
    found = compute + gather_s + scatter_s + exposed_s(hidden, compute, 1.0)
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("number", [3, 21])
def test_a_block_has_the_flop_of_the_formula(number: int) -> None:
    row = ROWS[number]
    graph = gpt(row, row.mbs)
    flop = 0.0
    for operator in graph.operators:
        if operator.name.startswith("block_"):
            traffic = traffic_of(graph, operator, np.ones((1, len(operator.extents)), dtype=np.int32))
            for work in (traffic.forward, traffic.backward):
                assert work.product_flop is not None
                flop += float(work.product_flop[0])
    expected = 72 * row.mbs * row.seq * row.hidden**2 * (1 + row.seq / (6 * row.hidden))
    assert flop == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("number", [20, 21])
def test_a_block_sends_four_all_reduces(number: int) -> None:
    row, machine = ROWS[number], free_of_latency(machine_of("a100"))
    split = dict.fromkeys("ghev", row.tp) | {"s": row.tp if number == 21 else 1}
    times = layer_times(gpt(row, row.mbs), split, step_model(machine, row.tp, MEGATRON))
    found = sum(time.messages_s for name, time in times.items() if name.startswith("block_"))
    vector = 2 * row.mbs * row.seq * row.hidden
    expected = 4 * 2 * 7 / 8 * vector / machine.levels[0].bandwidth_bytes_per_s
    # Where norms are split, their weights' gradients are summed too.
    assert found == pytest.approx(expected, rel=1e-3)


def test_weights_are_those_of_the_model() -> None:
    row = ROWS[22]
    times = layer_times(
        gpt(row, row.mbs), dict.fromkeys("ghev", row.tp), step_model(machine_of("a100"), row.tp, MEGATRON)
    )
    block = sum(time.weights for name, time in times.items() if name.startswith("block_"))
    assert block == pytest.approx(12 * row.hidden**2 / row.tp, rel=1e-3)


def test_parts_of_a_step_add_up() -> None:
    machine = free_of_latency(machine_of("a100"))
    block = LayerTime(forward_s=1.0, backward_s=2.0, messages_s=0.5, weights=1e9)
    again = LayerTime(forward_s=1.0, messages_s=0.25)
    scheme = Scheme(
        stages=2,
        chunks=1,
        micro_batches=4,
        replicas=3,
        shards=1,
        tensor=8,
        hand_over_bytes=0.0,
        gradient_bytes=2,
        weight_bytes=2,
        optimizer_bytes=50,
    )
    model = step_model(machine, 48, MEGATRON)
    ends = LayerTime(), LayerTime()
    parts = step_parts(block, again, ends, 6, scheme, model, bytes_per_s=1e12)
    node = machine.levels[1].bandwidth_bytes_per_s / 8
    assert parts.compute_s == pytest.approx(4 * 3 * 3.0)
    assert parts.again_s == pytest.approx(4 * 3 * 1.0)
    assert parts.messages_s == pytest.approx(4 * 3 * 0.75)
    assert parts.bubble_s == pytest.approx(3 * 4.75)
    assert parts.shards_s == pytest.approx(2 * 2 / 3 * 3e9 * 2 / node)
    assert parts.update_s == pytest.approx(3e9 * 50 / 1e12)
    gathered = replace(scheme, stages=1, micro_batches=1, replicas=6, shards=6)
    parts = step_parts(block, again, ends, 6, gathered, model, bytes_per_s=1e12)
    # The first gather and the last sum stand alone; the others hide behind 24 s.
    assert parts.shards_s == pytest.approx(2 * 5 / 6 * 1e9 * 2 / node)
    assert parts.update_s == pytest.approx(1e9 * 50 / 1e12)


def test_layers_are_spread_evenly() -> None:
    assert stage_layers(126, 8) == [15, 16, 16, 16, 16, 16, 16, 15]
    assert stage_layers(96, 24) == [4] * 24
    assert stage_layers(7, 1) == [7]


def test_what_does_not_hide() -> None:
    assert exposed_s(3.0, 2.0, 0.5) == 2.0
    assert exposed_s(1.0, 4.0, 0.5) == 0.0


def test_utilisation_is_as_published() -> None:
    published = {each["id"]: each["mfu"] for each in tomllib.loads(STEPS.read_text())["step"] if "mfu" in each}
    for number, mfu in published.items():
        row = ROWS[number]
        assert 100 * model_flop(row) / (measured_s(row) * row.gpus * 312e12) == pytest.approx(mfu, abs=0.25)


def test_torchtitan_s_utilisation_is_as_published() -> None:
    for number, mfu in ((31, 0.33), (29, 0.39)):
        row = ROWS[number]
        assert model_flop(row) / (measured_s(row) * row.gpus * 989.4e12) == pytest.approx(mfu, abs=0.006)


@pytest.mark.parametrize(("model", "weights"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405.85e9)])
def test_llamas_have_the_published_number_of_weights(model: str, weights: float) -> None:
    sizes = LLAMAS[f"Llama 3.1 {model}"]
    found = sizes.layers * sizes.block_weights + 2 * sizes.vocab * sizes.hidden
    assert found == pytest.approx(weights, rel=1e-3)


def test_a_block_of_a_llama_has_its_weights() -> None:
    sizes = LLAMAS["Llama 3.1 70B"]
    split = dict.fromkeys("ghuev", 8) | {"s": 8}
    times = layer_times(llama(sizes, FSDP_BF16, 1, 256), split, step_model(machine_of("h100"), 8, FSDP_BF16))
    block = sum(time.weights for name, time in times.items() if name.startswith("block_"))
    assert block == pytest.approx(sizes.block_weights / 8, rel=1e-3)


def test_memory_of_states_and_saved_results() -> None:
    peak = torchtitan_memory(ROWS[31])
    assert peak.states == pytest.approx(16 * 8_030_261_248 / 128, rel=1e-3)
    # The input, queries, values, the gate, the last product and attention's result, in bfloat16.
    assert peak.saved == 32 * 2 * 8192 * 2 * (4 * 4096 + 1024 + 14_336)
    assert all(torchtitan_memory(row).total < 95 * 2**30 for row in ROWS.values() if row.memory_gib)


def test_degrees_are_read() -> None:
    assert degrees(ROWS[44]) == {"FSDP": 2, "TP": 8, "PP": 8, "CP": 4}
    for row in ROWS.values():
        if row.parallelism:
            found = degrees(row)
            assert found["FSDP"] * found["TP"] * found["PP"] * found["CP"] == row.gpus


def test_factors_come_of_other_sources() -> None:
    numbers = (1, 2, 20, 21, 28)
    parts = predicted(ROWS[20])
    found = [Outcome(row=ROWS[number], parts=parts) for number in numbers]
    by_id = {each.row.id: each.factor for each in leave_one_out(found)}
    ratio = {number: measured_s(ROWS[number]) / parts.step_s for number in numbers}
    assert by_id[1] == by_id[2] == pytest.approx(sorted(ratio[number] for number in (20, 21, 28))[1])
    assert by_id[20] == pytest.approx(sorted(ratio[number] for number in (1, 2, 28))[1])
    middle = sorted(ratio[number] for number in (1, 2, 20, 21))[1:3]
    assert by_id[28] == pytest.approx(sum(middle) / 2)


def test_larger_groups_send_more() -> None:
    rows = [replace(ROWS[4], dp=dp, gpus=8 * dp, gbs=8 * dp * 4) for dp in (2, 8, 32)]
    shares = [predicted(row).shards_s for row in rows]
    assert all(a < b for a, b in pairwise(shares))


def free_of_latency(machine: Machine) -> Machine:
    return replace(machine, levels=tuple(replace(level, latency_s=0.0) for level in machine.levels))


def test_rows_are_all_there() -> None:
    assert len(ROWS) == 36
    assert all(isinstance(row, Row) for row in ROWS.values())
