"""The discrete-event engine: when every task of a step runs, where devices and links do one thing at a time.

A device computes one task at a time: of those that are ready, the one that comes first in the program. A link carries
one message at a time, in the order in which they reach it (in program order where they do so at once). A message takes
the links of its path one after the other, without being stored on the way: it holds each of them for its bytes over
that link's bandwidth, waits where the next one is taken, and has arrived α and its bytes over the slowest bandwidth
after it began on the last one. A collective asks for all links of its members at once, holds each of them for its bytes
from when it is free, and starts when it has got the last one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from pase.machine import Level, Machine
from pase.machine.machine import level_between
from pase.sharding.traffic import Phase


class Direction(StrEnum):
    """Direction of a link, as seen from the devices behind it; the two do not hinder each other."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLink:
    """One direction of what attaches a group of devices (one device, at the innermost level) to its level.

    level: position, the innermost first. devices: those behind it, first and one past the last.
    """

    level: int
    direction: Direction
    devices: tuple[int, int]
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """From one device to another. links: numbers, in the order in which they come.

    level: the outermost that is crossed. latency_s: α of that level. s_per_byte: of the slowest link.
    """

    level: int
    links: tuple[int, ...]
    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links that some devices of a machine use. levels: the innermost first."""

    num_devices: int
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, machine: Machine, num_devices: int) -> "Fabric":
        """Return the fabric of the first devices of a machine; MachineError where its levels do not hold them."""
        return cls(num_devices=num_devices, levels=machine.levels_for(num_devices))

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """[levels] devices behind one link of each level."""
        return (1, *(level.num_devices for level in self.levels[:-1]))

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """[levels + 1] number of the first link of each level, two for each group."""
        first = [0]
        for behind in self.behind:
            first.append(first[-1] + 2 * -(-self.num_devices // behind))
        return tuple(first)

    @cached_property
    def links(self) -> tuple[FabricLink, ...]:
        """Every link, by its number."""
        return tuple(
            FabricLink(
                level=number,
                direction=direction,
                devices=(start, min(start + behind, self.num_devices)),
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s,
            )
            for number, (level, behind) in enumerate(zip(self.levels, self.behind, strict=True))
            for start in range(0, self.num_devices, behind)
            for direction in Direction
        )

    def link(self, level: int, device: int, direction: Direction) -> int:
        """Return the number of the link of a level behind which a device is."""
        return self._first[level] + 2 * (device // self.behind[level]) + (direction is Direction.IN)

    def path(self, sender: int, receiver: int) -> Path:
        """Return what a message takes from one device to another: out, level by level, and in again."""
        level = level_between(self.levels, sender, receiver)
        out = [self.link(number, sender, Direction.OUT) for number in range(level + 1)]
        into = [self.link(number, receiver, Direction.IN) for number in reversed(range(level + 1))]
        return Path(
            level=level,
            links=(*out, *into),
            latency_s=self.levels[level].latency_s,
            s_per_byte=max(1 / crossed.bandwidth_bytes_per_s for crossed in self.levels[: level + 1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Whose task it is, one for many tasks. producer, consumer: equal within a layer. tensor: "" for computation."""

    producer: str
    consumer: str
    tensor: str
    phase: Phase

    @property
    def text(self) -> str:
        layers = self.producer if self.producer == self.consumer else f"{self.producer} → {self.consumer}"
        return f"{layers}: {self.tensor}" if self.tensor else f"{layers} {self.phase}"


class Compute(NamedTuple):
    """Work of one device."""

    label: Label
    device: int
    duration_s: float


class PointToPoint(NamedTuple):
    """Bytes from one device to another; latency_s: of all messages that it stands for, one after the other."""

    label: Label
    sender: int
    receiver: int
    path: Path
    size_bytes: float
    latency_s: float

    @property
    def device(self) -> int:
        """Return the device that sends."""
        return self.sender

    @property
    def links(self) -> tuple[int, ...]:
        """Return the links that the message takes, one after the other."""
        return self.path.links

    @property
    def link_bytes(self) -> tuple[float, ...]:
        return (self.size_bytes,) * len(self.path.links)

    @property
    def level(self) -> int:
        """The outermost level that it crosses."""
        return self.path.level

    @property
    def duration_s(self) -> float:
        """On links that are free."""
        return self.latency_s + self.size_bytes * self.path.s_per_byte


class Collective(NamedTuple):
    """What a group does together. links, link_bytes: the links that it takes, and what goes over each of them.

    duration_s, latency_s: on links that are free; the part of it that is left without bytes. level: the outermost.
    """

    label: Label
    devices: tuple[int, ...]
    links: tuple[int, ...]
    link_bytes: tuple[float, ...]
    duration_s: float
    latency_s: float
    level: int

    @property
    def device(self) -> int:
        """Return the first device of the group."""
        return self.devices[0]


class Join(NamedTuple):
    """Nothing but the waiting for several tasks."""


Task = Compute | PointToPoint | Collective | Join


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks under construction, then the step: numbers are in the order of the program.

    tasks: [tasks]. num_awaited: [tasks] how many others each one waits for. followers: [tasks] those that wait for it.
    """

    tasks: list[Task] = field(default_factory=list)
    num_awaited: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)

    def add(self, task: Task, after: Iterable[int]) -> int:
        """Add a task that waits for others, and return its number."""
        number = len(self.tasks)
        self.tasks.append(task)
        self.followers.append([])
        awaited = set(after)
        for before in awaited:
            self.followers[before].append(number)
        self.num_awaited.append(len(awaited))
        return number

    def joined(self, after: Sequence[int]) -> tuple[int, ...]:
        """Return one task, or none, to wait for in place of several."""
        return tuple(after) if len(after) < 2 else (self.add(Join(), after),)


_END, _ARRIVAL = 0, 1

NONE = -1
"""The number that stands for no task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What a link carried: [tasks of the link] in order, each from begin_s to release_s."""

    tasks: list[int] = field(default_factory=list)
    begin_s: list[float] = field(default_factory=list)
    release_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When each task of a step ran.

    ready_s: [tasks] when the last of those that it waits for ended; awaited: [tasks] that one, `NONE` at the start of
    the step. start_s: on a device, or on the last of its links. end_s: of it. before: [tasks] of a computation, the one
    that its device did before. occupancy: [links]. positions: for what takes links, its place in the occupancy of each.
    """

    ready_s: list[float]
    awaited: list[int]
    start_s: list[float]
    end_s: list[float]
    before: list[int]
    occupancy: list[Occupancy]
    positions: list[list[int]]

    @property
    def step_time_s(self) -> float:
        return max(self.end_s, default=0.0)


def run(graph: TaskGraph, links: Sequence[FabricLink], num_devices: int) -> Schedule:
    """Return when the tasks run; the same graph always gives the same schedule."""
    running = _Run(graph, links, num_devices)
    running.play()
    assert running.num_ended == len(graph.tasks), "tasks wait for one another in a circle"
    return running.schedule


class _Run:
    """The state of one run: the clock's events, what is left to wait for, what is taken until when."""

    def __init__(self, graph: TaskGraph, links: Sequence[FabricLink], num_devices: int) -> None:
        count = len(graph.tasks)
        self._tasks, self._followers = graph.tasks, graph.followers
        self._missing = list(graph.num_awaited)
        self._events: list[tuple[float, int, int, int]] = []
        self.schedule = Schedule(
            ready_s=[0.0] * count,
            awaited=[NONE] * count,
            start_s=[0.0] * count,
            end_s=[0.0] * count,
            before=[NONE] * count,
            occupancy=[Occupancy() for _ in links],
            positions=[[] for _ in range(count)],
        )
        self._s_per_byte = [1 / link.bandwidth_bytes_per_s for link in links]
        self._free_s = [0.0] * len(links)
        self._queues: list[list[int]] = [[] for _ in range(num_devices)]
        self._is_computing = [False] * num_devices
        self._last = [NONE] * num_devices
        self.num_ended = 0

    def play(self) -> None:
        """Let the clock run until nothing is left to happen."""
        events = self._events
        arrivals: list[tuple[int, int]] = []
        touched: set[int] = set()
        for task, missing in enumerate(self._missing):
            if not missing:
                self._release(task, NONE, 0.0, arrivals, touched)
        now_s = 0.0
        while True:
            # Those that come at one time are served in the order of the program.
            for task, stage in sorted(arrivals):
                self._send(task, stage, now_s)
            for device in touched:
                self._compute_next(device, now_s)
            if not events:
                return
            now_s = events[0][0]
            arrivals, touched = [], set()
            while events and events[0][0] == now_s:
                _, what, task, stage = heappop(events)
                if what == _ARRIVAL:
                    arrivals.append((task, stage))
                else:
                    self._end(task, now_s, arrivals, touched)

    def _end(self, task: int, now_s: float, arrivals: list[tuple[int, int]], touched: set[int]) -> None:
        """Record that a task has ended, and release what waited for it alone."""
        self.num_ended += 1
        self.schedule.end_s[task] = now_s
        found = self._tasks[task]
        if isinstance(found, Compute):
            self._is_computing[found.device] = False
            touched.add(found.device)
        for follower in self._followers[task]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._release(follower, task, now_s, arrivals, touched)

    def _release(
        self, task: int, awaited: int, now_s: float, arrivals: list[tuple[int, int]], touched: set[int]
    ) -> None:
        self.schedule.ready_s[task], self.schedule.awaited[task] = now_s, awaited
        found = self._tasks[task]
        match found:
            case Compute():
                heappush(self._queues[found.device], task)
                touched.add(found.device)
            case Join():
                self.schedule.start_s[task] = now_s
                self._end(task, now_s, arrivals, touched)
            case _:
                arrivals.append((task, 0))

    def _compute_next(self, device: int, now_s: float) -> None:
        queue = self._queues[device]
        if self._is_computing[device] or not queue:
            return
        task = heappop(queue)
        found = self._tasks[task]
        assert isinstance(found, Compute)
        self._is_computing[device] = True
        self.schedule.before[task], self._last[device] = self._last[device], task
        self.schedule.start_s[task] = now_s
        heappush(self._events, (now_s + found.duration_s, _END, task, 0))

    def _send(self, task: int, stage: int, now_s: float) -> None:
        found = self._tasks[task]
        if isinstance(found, PointToPoint):
            self._send_on(task, found, stage, now_s)
        else:
            assert isinstance(found, Collective)
            last_s = now_s
            for link, size_bytes in zip(found.links, found.link_bytes, strict=True):
                last_s = max(last_s, self._take(link, task, size_bytes, now_s))
            self.schedule.start_s[task] = last_s
            heappush(self._events, (last_s + found.duration_s, _END, task, 0))

    def _send_on(self, task: int, message: PointToPoint, stage: int, now_s: float) -> None:
        """Take the links from one stage of the path on; where one is not free, those behind it come later."""
        links = message.path.links
        begin_s = now_s
        for next_stage, link in enumerate(links[stage:], start=stage + 1):
            begin_s = self._take(link, task, message.size_bytes, now_s)
            if begin_s > now_s and next_stage < len(links):
                heappush(self._events, (begin_s, _ARRIVAL, task, next_stage))
                return
        self.schedule.start_s[task] = begin_s
        heappush(self._events, (begin_s + message.duration_s, _END, task, 0))

    def _take(self, link: int, task: int, size_bytes: float, now_s: float) -> float:
        begin_s = max(now_s, self._free_s[link])
        release_s = begin_s + size_bytes * self._s_per_byte[link]
        self._free_s[link] = release_s
        occupancy = self.schedule.occupancy[link]
        self.schedule.positions[task].append(len(occupancy.tasks))
        occupancy.tasks.append(task)
        occupancy.begin_s.append(begin_s)
        occupancy.release_s.append(release_s)
        return begin_s
