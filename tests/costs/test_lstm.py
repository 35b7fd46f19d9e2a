"""The LSTM vertex against a run of its wavefront, point by point, and against what every device holds and needs."""

from itertools import product

import numpy as np
import pytest

from pase.costs import Pattern, ReadTraits, layer_traffic
from pase.graph import Operator
from pase.graph.operators import lstm
from pase.graph.precision import FLOAT32, uniform_types
from tests.networks import row_of

L, B, S, D = 4, 8, 8, 16
LSTM = lstm("lstm", (B, S, D), layers=L, units=D)
READS = tuple(ReadTraits(has_gradient=True, is_fed=i == 0, is_owned=True) for i in range(4))


def _row(operator: Operator, split: dict[str, int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return row_of(operator, split)


def _flop(operator: Operator, **split: int) -> float:
    traffic = layer_traffic(operator, _row(operator, split), READS, types=uniform_types(operator, FLOAT32))
    return float(traffic.flop.item())


def _bytes(*patterns: Pattern, **split: int) -> dict[str, float]:
    """Bytes of all messages by tensor, times included."""
    traffic = layer_traffic(LSTM, _row(LSTM, split), READS, types=uniform_types(LSTM, FLOAT32))
    found: dict[str, float] = {}
    for message in traffic.messages:
        if message.size_bytes.item() and (not patterns or message.pattern in patterns):
            found[message.tensor] = found.get(message.tensor, 0) + message.times * message.size_bytes.item()
    return found


# -- the wavefront


def _finish(layers: int, steps: int, groups: int, parts: int, *, stage_by_stage: bool) -> int:
    """Run a wavefront of unit tasks (layer, step), each device's in a fixed order, and return when the last ends."""
    n, m = layers // groups, steps // parts
    todo = {}
    for group, part in product(range(groups), range(parts)):
        mine_l, mine_s = range(group * n, (group + 1) * n), range(part * m, (part + 1) * m)
        by_stage = [(layer, step) for layer in mine_l for step in mine_s]
        todo[group, part] = by_stage if stage_by_stage else [(layer, step) for step in mine_s for layer in mine_l]
    ended: dict[tuple[int, int], int] = {}
    now = 0
    while any(todo.values()):
        ready = {
            device: tasks[0]
            for device, tasks in todo.items()
            if tasks
            and all(
                min(before) < 0 or ended.get(before, now + 1) <= now
                for before in ((tasks[0][0] - 1, tasks[0][1]), (tasks[0][0], tasks[0][1] - 1))
            )
        }
        now += 1
        for device, task in ready.items():
            todo[device].pop(0)
            ended[task] = now
    return now


@pytest.mark.parametrize(("layers", "steps"), [(1, 4), (2, 8), (4, 8), (6, 12)])
def test_waiting_is_that_of_the_better_of_two_orders(layers: int, steps: int) -> None:
    operator = lstm("lstm", (B, steps, D), layers=layers, units=D)
    for groups in (g for g in range(1, layers + 1) if layers % g == 0):
        for parts in (c for c in range(1, steps + 1) if steps % c == 0):
            ends = [_finish(layers, steps, groups, parts, stage_by_stage=order) for order in (True, False)]
            # One point of the wavefront is the work of a whole device at one (layer, step).
            point = _flop(operator) / (layers * steps)
            assert _flop(operator, l=groups, s=parts) == pytest.approx(min(ends) * point), (groups, parts)


def test_work_of_one_device_is_three_matrix_products_for_each_weight_and_the_cells() -> None:
    assert _flop(LSTM) == 3 * 2 * (L * B * S) * (2 * D * 4 * D) + 2 * 9 * L * B * S * D


# -- what it communicates


def test_data_parallelism_reduces_the_gradients_of_all_weights() -> None:
    assert _bytes(b=8) == {
        "gradient of w": 4 * L * D * 4 * D,
        "gradient of u": 4 * L * D * 4 * D,
        "gradient of bias": 4 * L * 4 * D,
    }


def test_a_split_of_the_inputs_sums_gates_and_gathers_the_gradient() -> None:
    hidden = 4 * L * B * S * D
    # Every device has the whole gates after their sum, so forward it has its part of h, and the bias's gradient;
    # backward it has its part of the gradient of h and lacks the rest.
    assert _bytes(d=4) == {"gates": 4 * hidden, "hidden_gradient": hidden * 3 / 4}


def test_a_split_of_the_units_gathers_h_and_sums_its_gradient() -> None:
    hidden = 4 * L * B * S * D
    assert _bytes(e=4) == {"hidden": hidden * 3 / 4, "hidden_gradient": hidden, "gradient of x": 4 * B * S * D}


@pytest.mark.parametrize("split", [(1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (4, 4), (1, 1)])
def test_h_moves_between_its_two_layouts_as_devices_hold_it(split: tuple[int, int]) -> None:
    d, e = split
    held = {(i, j): set(range(j * D // e, (j + 1) * D // e)) for i in range(d) for j in range(e)}
    needed = {(i, j): set(range(i * D // d, (i + 1) * D // d)) for i in range(d) for j in range(e)}
    forward = max(len(needed[device] - held[device]) for device in held)
    backward = max(len(held[device] - needed[device]) for device in held)
    moved = _bytes(Pattern.MOVE, d=d, e=e)
    assert moved.get("hidden", 0) == 4 * L * B * S * forward
    assert moved.get("hidden_gradient", 0) == 4 * L * B * S * backward


def test_stages_hand_over_h_in_the_layout_in_which_it_is_read() -> None:
    boundary = 4 * B * S * D
    assert _bytes(l=2) == {"hidden": boundary, "hidden_gradient": boundary}
    moved = _bytes(Pattern.MOVE, Pattern.HANDOFF, l=2, d=4)
    assert moved["hidden"] == boundary / 4
    # A quarter of the gradient of h at the boundary too, and the rest of that within the two layers.
    assert moved["hidden_gradient"] == boundary / 4 + 4 * (L / 2) * B * S * D * 3 / 4


def test_parts_of_the_sequence_hand_over_both_states_and_share_gradients() -> None:
    weights = 4 * L * D * 4 * D
    assert _bytes(s=4) == {
        "gradient of w": weights,
        "gradient of u": weights,
        "gradient of bias": 4 * L * 4 * D,
        "state": 2 * 4 * L * B * D,
        "cell": 2 * 4 * L * B * D,
    }


def test_the_hidden_state_goes_on_as_it_is_read_and_the_cell_as_it_is_written() -> None:
    moved = _bytes(Pattern.HANDOFF, s=2, d=2, e=4)
    assert moved["state"] == 2 * 4 * L * B * D / 2
    assert moved["cell"] == 2 * 4 * L * B * D / 4
