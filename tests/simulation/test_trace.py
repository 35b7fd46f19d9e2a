"""The Chrome trace: what its viewers need, and the same figures as the simulation's own."""

import json
from itertools import pairwise
from typing import Any

import pytest

from pase.analysis.simulation.simulation import Simulation, chrome_trace, simulate
from pase.analysis.simulation.step import COLLECTIVES
from tests.runtime.networks import small
from tests.runtime.plans import random_plan
from tests.simulation.machines import machine


@pytest.fixture(params=COLLECTIVES)
def step(request: pytest.FixtureRequest) -> Simulation:
    levels = ((2, 1e-6, 1e9), (0, 3e-6, 0.6e9))
    return simulate(random_plan(small("transformer"), 4, 7), machine=machine(*levels), collectives=request.param)


def test_a_trace_names_devices_and_tracks(step: Simulation) -> None:
    document = json.loads(chrome_trace(step))
    named = [event for event in document["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"] for event in named if event["name"] == "process_name"] == [
        f"device {device}" for device in range(4)
    ]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if "tid" in event}
    assert threads == {
        (device, i): name for device in range(4) for i, name in enumerate(("compute", "send", "receive"))
    }


def tracks(step: Simulation) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the events of each device's tracks, by their begin."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    events = [event for event in json.loads(chrome_trace(step))["traceEvents"] if event["ph"] == "X"]
    for event in sorted(events, key=lambda event: (event["ts"], event["dur"])):
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def test_events_of_one_track_do_not_overlap_and_add_up_to_what_devices_do(step: Simulation) -> None:
    found = tracks(step)
    assert set(found) == {(device, track) for device in range(4) for track in range(3)}
    for (number, track), events in found.items():
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
        assert events[-1]["ts"] + events[-1]["dur"] <= step.step_time_s * 1e6 + 1e-6
        device = step.devices[number]
        spent_s = (device.computing_s, device.sending_s, device.receiving_s)[track]
        assert sum(event["dur"] for event in events) == pytest.approx(spent_s * 1e6)


def test_messages_say_how_many_bytes_cross_which_level(step: Simulation) -> None:
    found = tracks(step)
    sent = [event["args"] for (_, track), events in found.items() for event in events if track == 1]
    assert sum(arguments["bytes"] for arguments in sent) == pytest.approx(step.levels[0].moved_bytes)
    assert {arguments["level"] for arguments in sent} == {"level0", "level1"}
    assert all(event["args"] == {} for (_, track), events in found.items() for event in events if track == 0)
