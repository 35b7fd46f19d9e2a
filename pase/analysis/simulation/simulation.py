"""`simulate`: one training step of a placed plan on a machine, and what there is to say of it.

The critical path is what the step waited for, from its end back to its beginning, without a gap.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pase.analysis.simulation.engine import (
    NONE,
    Collective,
    Compute,
    Direction,
    Fabric,
    Join,
    Label,
    PointToPoint,
    Schedule,
    Task,
    TaskGraph,
    run,
)
from pase.analysis.simulation.step import COLLECTIVES, FabricTasks, build_step, layer_work
from pase.common.documents import StrPath
from pase.errors import PlanError, SimulationError, unknown_name
from pase.machine import Machine, load_machine
from pase.planning.plan import Plan
from pase.sharding.traffic import Phase


class Activity(StrEnum):
    """What a part of the critical path is spent on."""

    FORWARD = "forward computation"
    BACKWARD = "backward computation"
    UPDATE = "updates"
    TRANSFER = "bytes on links"
    LATENCY = "latencies"
    QUEUE = "links taken by others"


_COMPUTING = {Phase.FORWARD: Activity.FORWARD, Phase.BACKWARD: Activity.BACKWARD, Phase.UPDATE: Activity.UPDATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """A part of the critical path. label: whose task it is: of a link that was taken, whose bytes were on it.

    device: that computed, or sent (the first of a group). level: the outermost that was crossed, None for computation.
    """

    activity: Activity
    label: Label
    device: int
    level: int | None
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def critical_path(graph: TaskGraph, schedule: Schedule) -> tuple[PathStep, ...]:
    """Return what the step consists of, in order: each part begins where the one before it ends; they fill the step."""
    if not graph.tasks:
        return ()
    end_s = schedule.end_s
    task = max(range(len(end_s)), key=lambda number: (end_s[number], -number))
    walk = _Walk(graph, schedule)
    while task != NONE:
        task = walk.before(task)
    return tuple(reversed(walk.steps))


class _Walk:
    """A walk from the end of the step to its beginning. steps: the parts, the latest first."""

    def __init__(self, graph: TaskGraph, schedule: Schedule) -> None:
        self._tasks, self._schedule = graph.tasks, schedule
        self.steps: list[PathStep] = []

    def before(self, task: int) -> int:
        """Add what a task took, and return the one whose end it started at."""
        found, schedule = self._tasks[task], self._schedule
        start_s, end_s = schedule.start_s[task], schedule.end_s[task]
        match found:
            case Compute():
                self._add(_COMPUTING[found.label.phase], found, start_s, end_s)
                is_free = start_s <= schedule.ready_s[task]
                return schedule.awaited[task] if is_free else schedule.before[task]
            case Join():
                return schedule.awaited[task]
            case _:
                sent_s = max(start_s, end_s - found.latency_s)
                self._add(Activity.LATENCY, found, sent_s, end_s)
                self._add(Activity.TRANSFER, found, start_s, sent_s)
                # The link that it began on last.
                places = reversed(range(len(schedule.positions[task])))
                return self._queue(task, next(place for place in places if self._begin_s(task, place) == start_s))

    def _queue(self, task: int, place: int) -> int:
        """Add who was on the links before, as long as it was links that were waited for; return the task awaited.

        place: which of the task's links. Whoever waited for it began when the one before released it.
        """
        schedule = self._schedule
        while True:
            links, positions = self._links(task), schedule.positions[task]
            occupancy = schedule.occupancy[links[place]]
            begin_s = occupancy.begin_s[positions[place]]
            if begin_s <= schedule.ready_s[task]:
                return schedule.awaited[task]
            if isinstance(self._tasks[task], PointToPoint) and place and begin_s <= self._begin_s(task, place - 1):
                place -= 1
                continue
            link, position = links[place], positions[place] - 1
            task = occupancy.tasks[position]
            self._add(Activity.QUEUE, self._tasks[task], occupancy.begin_s[position], begin_s)
            place = self._links(task).index(link)

    def _links(self, task: int) -> tuple[int, ...]:
        found = self._tasks[task]
        assert isinstance(found, PointToPoint | Collective)
        return found.links

    def _begin_s(self, task: int, place: int) -> float:
        link = self._links(task)[place]
        return self._schedule.occupancy[link].begin_s[self._schedule.positions[task][place]]

    def _add(self, activity: Activity, found: Task, begin_s: float, end_s: float) -> None:
        if end_s > begin_s and not isinstance(found, Join):
            self.steps.append(
                PathStep(
                    activity=activity,
                    label=found.label,
                    device=found.device,
                    level=None if isinstance(found, Compute) else found.level,
                    begin_s=begin_s,
                    end_s=end_s,
                )
            )


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


def link_bytes(graph: TaskGraph, fabric: Fabric) -> list[float]:
    """Return [links] what goes over each of them in a step."""
    total = [0.0] * len(fabric.links)
    for found in graph.tasks:
        if isinstance(found, PointToPoint | Collective):
            for link, size in zip(found.links, found.link_bytes, strict=True):
                total[link] += size
    return total


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


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated training step.

    collectives: how sums travelled, by name. overlaps: whether gradients of weights were summed while the backward
    pass went on. fabric: the links. tasks, schedule: what was done, and when.
    """

    plan: Plan
    machine: Machine
    collectives: str
    overlaps: bool
    fabric: Fabric
    tasks: TaskGraph
    schedule: Schedule

    @property
    def step_time_s(self) -> float:
        """From the first task's start to the last one's end."""
        return self.schedule.step_time_s

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """Return what the step's time consists of, in order, without gaps."""
        return critical_path(self.tasks, self.schedule)

    @cached_property
    def activities(self) -> dict[Activity, float]:
        """Seconds of the critical path by what they are spent on; together the step's time."""
        total = dict.fromkeys(Activity, 0.0)
        for step in self.critical_path:
            total[step.activity] += step.duration_s
        return total

    @cached_property
    def devices(self) -> tuple[DeviceTime, ...]:
        """How each device spends the step."""
        graph, schedule, fabric = self.tasks, self.schedule, self.fabric
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

    @cached_property
    def phases(self) -> tuple[PhaseTime, ...]:
        """What each phase takes."""
        graph, schedule, fabric = self.tasks, self.schedule, self.fabric
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
            elif isinstance(found, PointToPoint | Collective):
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

    @cached_property
    def levels(self) -> tuple[LevelUse, ...]:
        """How the links of each level are used, the innermost first."""
        schedule, fabric = self.schedule, self.fabric
        sizes = link_bytes(self.tasks, fabric)
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


def simulate(
    plan: Plan, *, machine: Machine | StrPath | None = None, collectives: str | None = None, overlaps: bool = True
) -> Simulation:
    """Return one training step of a placed plan, task by task; the same arguments always give the same step.

    machine: a `Machine`, the name of a preset or a machine file; by default the plan's own. collectives: a name in
    `COLLECTIVES`; by default the machine's own. overlaps: whether gradients of weights are summed while the backward
    pass goes on. Raises SimulationError for an unknown name, MachineError where the plan's devices do not fill the
    machine's groups, ProgramError or EmitError where a layer's splits fit no mesh; PlanError for a plan with
    micro-batches, stages or modes of layers, which `simulate_stages` takes.
    """
    if plan.has_parts:
        raise PlanError(
            "the plan has micro-batches, stages or modes of layers, whose step is not simulated message by message; "
            "pase.analysis.simulation.pipeline.simulate_stages simulates it pass by pass"
        )
    if machine is None:
        machine = plan.machine
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    collectives = collectives or machine.collectives
    if collectives not in COLLECTIVES:
        raise SimulationError(unknown_name("way of collectives", collectives, COLLECTIVES))
    fabric = Fabric.of(machine, plan.num_devices)
    network = FabricTasks(TaskGraph(), fabric)
    tasks = build_step(plan, layer_work(plan, machine), network, COLLECTIVES[collectives], overlaps=overlaps)
    return Simulation(
        plan=plan,
        machine=machine,
        collectives=collectives,
        overlaps=overlaps,
        fabric=fabric,
        tasks=tasks,
        schedule=run(tasks, fabric.links, plan.num_devices),
    )


TRACKS = ("compute", "send", "receive")
"""What a device does side by side, in the order of the numbers of threads in a trace."""


def chrome_trace(simulation: Simulation) -> str:
    """Return what every device computed, and what was on its own link, out and in; nothing on one track overlaps.

    The format is that of chrome://tracing and Perfetto: a process for each device, times in µs.
    """
    events: list[dict[str, object]] = []
    for device in range(simulation.fabric.num_devices):
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": device, "tid": track, "args": {"name": name}}
            for track, name in enumerate(TRACKS)
        ]
    others = {"machine": simulation.machine.name, "collectives": simulation.collectives}
    return trace_text(simulation.plan, [*events, *_events(simulation)], others)


def trace_text(plan: Plan, events: list[dict[str, object]], others: dict[str, str]) -> str:
    """Return events as the document that viewers of traces read."""
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": plan.graph.name, **others}}
    return json.dumps(document, separators=(",", ":"))


def trace_event(
    name: str, category: str, process: int, thread: int, begin_s: float, end_s: float, arguments: dict[str, object]
) -> dict[str, object]:
    """Return something that lasts, as an event of a trace."""
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, **times, "args": arguments}


def _events(simulation: Simulation) -> Iterator[dict[str, object]]:
    schedule, fabric = simulation.schedule, simulation.fabric
    for task, found in enumerate(simulation.tasks.tasks):
        if isinstance(found, Join):
            continue
        name, phase = found.label.text, found.label.phase
        if isinstance(found, Compute):
            yield trace_event(name, phase, found.device, 0, schedule.start_s[task], schedule.end_s[task], {})
            continue
        level = fabric.levels[found.level].name
        for number, size_bytes, position in zip(found.links, found.link_bytes, schedule.positions[task], strict=True):
            link, taken = fabric.links[number], schedule.occupancy[number]
            if link.level == 0:
                track = 1 if link.direction is Direction.OUT else 2
                times_s = taken.begin_s[position], taken.release_s[position]
                yield trace_event(name, phase, link.devices[0], track, *times_s, {"bytes": size_bytes, "level": level})
