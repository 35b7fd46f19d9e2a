"""The critical path: what the step waited for, from its end back to its beginning, without a gap."""

from dataclasses import dataclass
from enum import StrEnum

from pase.analysis.simulation.engine import NONE, Schedule
from pase.analysis.simulation.tasks import Collective, Compute, Join, Label, Message, Task, TaskGraph
from pase.targets.mesh_tensorflow.runtime.traffic import Phase


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
        """How long it took."""
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
                return self._queue(task, self._last_link(task, start_s))

    def _queue(self, task: int, place: int) -> int:
        """Add who was on the links before, as long as it was links that were waited for; return the task awaited.

        place: which of the task's links. Whoever waited for it began when the one before released it.
        """
        schedule = self._schedule
        while True:
            links, positions = _links(self._tasks[task]), schedule.positions[task]
            occupancy = schedule.occupancy[links[place]]
            begin_s = occupancy.begin_s[positions[place]]
            if begin_s <= schedule.ready_s[task]:
                return schedule.awaited[task]
            if isinstance(self._tasks[task], Message) and place and begin_s <= self._begin_s(task, place - 1):
                place -= 1
                continue
            link, position = links[place], positions[place] - 1
            task = occupancy.tasks[position]
            self._add(Activity.QUEUE, self._tasks[task], occupancy.begin_s[position], begin_s)
            place = _links(self._tasks[task]).index(link)

    def _begin_s(self, task: int, place: int) -> float:
        link = _links(self._tasks[task])[place]
        return self._schedule.occupancy[link].begin_s[self._schedule.positions[task][place]]

    def _last_link(self, task: int, start_s: float) -> int:
        """Return which of its links a task began on last."""
        places = range(len(self._schedule.positions[task]))
        return next(place for place in reversed(places) if self._begin_s(task, place) == start_s)

    def _add(self, activity: Activity, found: Task, begin_s: float, end_s: float) -> None:
        assert not isinstance(found, Join)
        if end_s > begin_s:
            self.steps.append(
                PathStep(
                    activity=activity,
                    label=found.label,
                    device=_device(found),
                    level=None if isinstance(found, Compute) else found.level,
                    begin_s=begin_s,
                    end_s=end_s,
                )
            )


def _links(found: Task) -> tuple[int, ...]:
    assert isinstance(found, Message | Collective)
    return found.path.links if isinstance(found, Message) else found.links


def _device(found: Compute | Message | Collective) -> int:
    match found:
        case Compute():
            return found.device
        case Message():
            return found.sender
        case Collective():
            return found.devices[0]
