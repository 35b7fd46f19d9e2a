"""The tasks of a training step and what each one waits for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pase.analysis.simulation.fabric import Path
from pase.targets.mesh_tensorflow.runtime.traffic import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Whose task it is, one for many tasks. producer, consumer: equal within a layer. tensor: "" for computation."""

    producer: str
    consumer: str
    tensor: str
    phase: Phase

    @property
    def text(self) -> str:
        """What people read."""
        layers = self.producer if self.producer == self.consumer else f"{self.producer} → {self.consumer}"
        return f"{layers}: {self.tensor}" if self.tensor else f"{layers} {self.phase}"


class Compute(NamedTuple):
    """Work of one device."""

    label: Label
    device: int
    duration_s: float


class Message(NamedTuple):
    """Bytes from one device to another; latency_s: of all messages that it stands for, one after the other."""

    label: Label
    sender: int
    receiver: int
    path: Path
    size_bytes: float
    latency_s: float

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


class Join(NamedTuple):
    """Nothing but the waiting for several tasks."""


Task = Compute | Message | Collective | Join


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
