"""The Chrome trace: what its viewers need, and the same figures as the simulation's own."""

import json
from itertools import pairwise
from typing import Any

import pytest

from pase.analysis.simulation.simulation import Simulation, Track, chrome_trace, simulate, timeline
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


def test_events_of_one_track_do_not_overlap(step: Simulation) -> None:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in json.loads(chrome_trace(step))["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(tracks) == {(device, int(track)) for device in range(4) for track in Track}
    for events in tracks.values():
        events.sort(key=lambda event: (event["ts"], event["dur"]))
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
        assert events[-1]["ts"] + events[-1]["dur"] <= step.step_time_s * 1e6 + 1e-6


def test_the_timeline_adds_up_to_what_devices_do(step: Simulation) -> None:
    for device in step.devices:
        spent = dict.fromkeys(Track, 0.0)
        for event in timeline(step):
            if event.device == device.device:
                spent[event.track] += event.end_s - event.begin_s
        assert [spent[track] for track in Track] == pytest.approx(
            [device.computing_s, device.sending_s, device.receiving_s]
        )


def test_messages_say_how_many_bytes_cross_which_level(step: Simulation) -> None:
    sent = sum(event.size_bytes for event in timeline(step) if event.track is Track.SEND)
    assert sent == pytest.approx(step.levels[0].moved_bytes)
    assert {event.level for event in timeline(step) if event.track is Track.SEND} == {"level0", "level1"}
    assert {event.level for event in timeline(step) if event.track is Track.COMPUTE} == {""}
