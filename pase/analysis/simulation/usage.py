"""What devices, phases and links did during a simulated step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pase.analysis.simulation.engine import Schedule
from pase.analysis.simulation.fabric import Direction, Fabric
from pase.analysis.simulation.tasks import Collective, Compute, Message, TaskGraph
from pase.targets.mesh_tensorflow.runtime.traffic import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How a device spends the step, in seconds: computing, communicating while it does not compute, and waiting.

    sending_s, receiving_s: how long its own link is taken, out and in, also while it computes.
    """

    device: int
    computing_s: float
    communicating_s: float
    waiting_s: float
    sending_s: float
    receiving_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase of the step, as its computation goes. begin_s, end_s: of the first task and the last; phases overlap.

    computing_s: of the busiest device. moved_bytes: that leave a device, of all devices together.
    """

    phase: Phase
    begin_s: float
    end_s: float
    computing_s: float
    moved_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelUse:
    """The links of one level. num_links: in either direction. moved_bytes: over all that lead out.

    busiest_s: how long the one is taken that is taken longest. utilisation: the share of the step in which a link is
    taken, in the mean.
    """

    name: str
    num_links: int
    moved_bytes: float
    busiest_s: float
    utilisation: float


def device_times(graph: TaskGraph, schedule: Schedule, fabric: Fabric) -> tuple[DeviceTime, ...]:
    """Return how each device spends the step."""
    computed: list[list[tuple[float, float]]] = [[] for _ in range(fabric.num_devices)]
    for task, found in enumerate(graph.tasks):
        if isinstance(found, Compute):
            computed[found.device].append((schedule.start_s[task], schedule.end_s[task]))
    times = []
    for device, computing in enumerate(computed):
        out, into = (_taken(schedule, fabric.link(0, device, direction)) for direction in Direction)
        busy = np.array(computing, dtype=np.float64).reshape(-1, 2)
        computing_s = _covered_s(busy)
        active_s = max(_covered_s(np.concatenate([busy, out, into])), computing_s)
        times.append(
            DeviceTime(
                device=device,
                computing_s=computing_s,
                communicating_s=active_s - computing_s,
                waiting_s=max(schedule.step_time_s - active_s, 0.0),
                sending_s=_covered_s(out),
                receiving_s=_covered_s(into),
            )
        )
    return tuple(times)


def phase_times(graph: TaskGraph, schedule: Schedule, fabric: Fabric) -> tuple[PhaseTime, ...]:
    """Return what each phase takes."""
    computing_s = {phase: [0.0] * fabric.num_devices for phase in Phase}
    moved_bytes = dict.fromkeys(Phase, 0.0)
    begins: dict[Phase, float] = {}
    ends: dict[Phase, float] = {}
    is_port_out = [link.level == 0 and link.direction is Direction.OUT for link in fabric.links]
    for task, found in enumerate(graph.tasks):
        if isinstance(found, Compute):
            phase = found.label.phase
            computing_s[phase][found.device] += found.duration_s
            begins[phase] = min(begins.get(phase, schedule.start_s[task]), schedule.start_s[task])
            ends[phase] = max(ends.get(phase, 0.0), schedule.end_s[task])
        elif isinstance(found, Message):
            moved_bytes[found.label.phase] += found.size_bytes
        elif isinstance(found, Collective):
            sizes = zip(found.links, found.link_bytes, strict=True)
            moved_bytes[found.label.phase] += sum(size for link, size in sizes if is_port_out[link])
    return tuple(
        PhaseTime(
            phase=phase,
            begin_s=begins.get(phase, 0.0),
            end_s=ends.get(phase, 0.0),
            computing_s=max(computing_s[phase]),
            moved_bytes=moved_bytes[phase],
        )
        for phase in Phase
    )


def link_bytes(graph: TaskGraph, fabric: Fabric) -> list[float]:
    """Return [links] what goes over each of them in a step."""
    total = [0.0] * len(fabric.links)
    for found in graph.tasks:
        if isinstance(found, Message):
            for link in found.path.links:
                total[link] += found.size_bytes
        elif isinstance(found, Collective):
            for link, size in zip(found.links, found.link_bytes, strict=True):
                total[link] += size
    return total


def level_uses(graph: TaskGraph, schedule: Schedule, fabric: Fabric) -> tuple[LevelUse, ...]:
    """Return how the links of each level are used, the innermost first."""
    sizes = link_bytes(graph, fabric)
    found = []
    for number, level in enumerate(fabric.levels):
        own = [i for i, link in enumerate(fabric.links) if link.level == number]
        taken = [float((_taken(schedule, i) @ [-1.0, 1.0]).sum()) for i in own]
        found.append(
            LevelUse(
                name=level.name,
                num_links=len(own) // len(Direction),
                moved_bytes=sum(sizes[i] for i in own if fabric.links[i].direction is Direction.OUT),
                busiest_s=max(taken),
                utilisation=sum(taken) / len(taken) / schedule.step_time_s if schedule.step_time_s else 0.0,
            )
        )
    return tuple(found)


def _taken(schedule: Schedule, link: int) -> NDArray[np.float64]:
    """Return [times that a link was taken, 2] the begin and the end."""
    occupancy = schedule.occupancy[link]
    return np.array([occupancy.begin_s, occupancy.release_s], dtype=np.float64).T.reshape(-1, 2)


def _covered_s(intervals: NDArray[np.float64]) -> float:
    """Return how long at least one of some intervals [intervals, 2] lasts."""
    if not len(intervals):
        return 0.0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.maximum(ordered[1:, 0], reached[:-1])
    return float(reached[0] - ordered[0, 0] + np.clip(ordered[1:, 1] - begins, 0.0, None).sum())
