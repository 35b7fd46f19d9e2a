"""What an LSTM moves within its layer is what its plan says, however its five dims are split."""

from functools import cache
from math import prod

import numpy as np
import pytest

from pase.graph import Graph
from pase.planning.plan import Plan
from pase.sharding.traffic import Movement, bytes_by_movement, flows
from tests.runtime.networks import lstms
from tests.runtime.plans import make_plan, random_plan
from tests.runtime.test_measure_plans import run

B, S, UNITS, LAYERS = 6, 4, 12, 2
"""Of the network `lstms`."""

ITEMSIZES = 4


@cache
def network() -> Graph:
    return lstms()


def within(moved: dict[Movement, int]) -> dict[str, int]:
    """Bytes by layer, of all phases: a plan does not say in which pass a layer exchanges something."""
    total: dict[str, int] = {}
    for movement, size in moved.items():
        if movement.producer == movement.consumer and size:
            total[movement.producer] = total.get(movement.producer, 0) + size
    return total


def check(plan: Plan) -> None:
    predicted = bytes_by_movement(flows(plan))
    traffic, measured = run(plan, keep_alive=True)
    assert within(traffic.bytes_by_movement) == within(dict(measured.by_movement)) == within(predicted)
    assert measured.total_bytes == traffic.total_bytes == sum(predicted.values()) > 0
    assert measured.elsewhere_bytes == 0


@pytest.mark.parametrize(
    "splits",
    [
        {"l": 2, "s": 2},
        {"l": 2, "d": 2},
        {"d": 2, "e": 3},
        pytest.param({"l": 2, "s": 2, "e": 2}, marks=pytest.mark.slow),
        pytest.param({"d": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_executed_bytes_are_those_predicted(splits: dict[str, int]) -> None:
    check(make_plan(network(), prod(splits.values()), {"lstm": splits}))


def test_with_any_devices_and_replicas() -> None:
    plan = random_plan(network(), 8, 0)
    check(plan)
    # An ordinary step leaves out what nobody uses.
    predicted = bytes_by_movement(flows(plan))
    traffic, measured = run(plan, keep_alive=False)
    assert traffic.total_bytes == sum(predicted.values())
    assert all(size <= within(predicted)[layer] for layer, size in within(dict(measured.by_movement)).items())


def tensors(**splits: int) -> dict[str, int]:
    """Bytes within the layer by tensor, without those of the weights' gradients."""
    found: dict[str, int] = {}
    for flow in flows(make_plan(network(), prod(splits.values()), {"lstm": splits})):
        if flow.movement.producer == flow.movement.consumer == "lstm" and flow.tensor[-2:] not in (" w", " u", "as"):
            found[flow.tensor] = found.get(flow.tensor, 0) + flow.total_bytes
    return found


def test_a_wavefront_written_out() -> None:
    """Two groups of one layer, two parts of two steps: what goes on across each of the two boundaries."""
    hidden, state = B * S * UNITS * ITEMSIZES, B * UNITS * ITEMSIZES
    assert tensors(l=2, s=2) == {
        # To the second layer, and back.
        "hidden": hidden,
        "hidden_gradient": hidden,
        # Each layer's, to the second half of the sequence, and back.
        "state": 2 * LAYERS * state,
        "cell": 2 * LAYERS * state,
        # Programs hold input and output with both groups: one sends, and the other's gradient is added.
        "y": hidden,
        "gradient of x": 2 * hidden,
    }


def test_units_written_out() -> None:
    """d = 2 and e = 3: device (d, e) has units 4e to 4e + 4 of a state and reads units 6d to 6d + 6 of it."""
    written = [set(range(4 * e, 4 * e + 4)) for e in range(3)]
    read = [set(range(6 * d, 6 * d + 6)) for d in range(2)]
    times = LAYERS * S * B * ITEMSIZES
    assert tensors(d=2, e=3) == {
        "gates": 2 * (2 - 1) * 4 * UNITS * times,
        "hidden": times * sum(len(read[d] - written[e]) for d, e in np.ndindex(2, 3)),
        # Added up along e, then brought back.
        "hidden_gradient": times * (2 * (3 - 1) * UNITS + sum(len(written[e] - read[d]) for d, e in np.ndindex(2, 3))),
        "gradient of x": 2 * (3 - 1) * S * B * UNITS * ITEMSIZES,
    }
