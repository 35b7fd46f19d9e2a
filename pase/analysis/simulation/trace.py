"""The timeline of a simulated step, and the same as a Chrome trace."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from pase.analysis.simulation.fabric import Direction
from pase.analysis.simulation.simulation import Simulation
from pase.analysis.simulation.tasks import Collective, Compute, Join, Message


class Track(IntEnum):
    """What a device does side by side; the numbers are those of threads in a trace."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that a device did. level: the outermost that a message crossed, "" for computation."""

    device: int
    track: Track
    name: str
    phase: str
    begin_s: float
    end_s: float
    size_bytes: float
    level: str


def timeline(simulation: Simulation) -> Iterator[TimelineEvent]:
    """Yield what every device computed, and what was on its own link, out and in; nothing on one track overlaps."""
    schedule, levels = simulation.schedule, simulation.fabric.levels
    for task, found in enumerate(simulation.tasks.tasks):
        match found:
            case Compute():
                yield TimelineEvent(
                    device=found.device,
                    track=Track.COMPUTE,
                    name=found.label.text,
                    phase=found.label.phase,
                    begin_s=schedule.start_s[task],
                    end_s=schedule.end_s[task],
                    size_bytes=0.0,
                    level="",
                )
            case Message() | Collective():
                yield from _on_links(simulation, task, found, levels[found.level].name)
            case Join():
                pass


def _on_links(simulation: Simulation, task: int, found: Message | Collective, level: str) -> Iterator[TimelineEvent]:
    schedule = simulation.schedule
    links = found.path.links if isinstance(found, Message) else found.links
    sizes = (found.size_bytes,) * len(links) if isinstance(found, Message) else found.link_bytes
    for link, size_bytes, position in zip(links, sizes, schedule.positions[task], strict=True):
        taken = simulation.fabric.links[link]
        if taken.level == 0:
            yield TimelineEvent(
                device=taken.devices[0],
                track=Track.SEND if taken.direction is Direction.OUT else Track.RECEIVE,
                name=found.label.text,
                phase=found.label.phase,
                begin_s=schedule.occupancy[link].begin_s[position],
                end_s=schedule.occupancy[link].release_s[position],
                size_bytes=size_bytes,
                level=level,
            )


def chrome_trace(simulation: Simulation) -> str:
    """Return the timeline in the format of chrome://tracing and Perfetto: a process for each device, times in µs."""
    events: list[dict[str, object]] = []
    for device in range(simulation.fabric.num_devices):
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": device, "tid": int(track), "args": {"name": track.name.lower()}}
            for track in Track
        ]
    for event in timeline(simulation):
        arguments = {"bytes": event.size_bytes, "level": event.level} if event.level else {}
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.phase,
                "pid": event.device,
                "tid": int(event.track),
                "ts": event.begin_s * 1e6,
                "dur": (event.end_s - event.begin_s) * 1e6,
                "args": arguments,
            }
        )
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": simulation.plan.graph.name,
            "machine": simulation.machine.name,
            "collectives": simulation.collectives,
        },
    }
    return json.dumps(document, separators=(",", ":"))
