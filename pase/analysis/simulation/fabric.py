"""`Fabric`: the links of a machine that devices share, and the ones that lie between two of them."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from pase.machine import Level, Machine


class Direction(StrEnum):
    """Of a link, as seen from the devices behind it; the two do not hinder each other."""

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

    def level_between(self, one: int, other: int) -> int:
        """Return the innermost level that has both devices in one group."""
        for number, level in enumerate(self.levels):
            if level.num_devices == 0 or one // level.num_devices == other // level.num_devices:
                return number
        return len(self.levels) - 1

    def path(self, sender: int, receiver: int) -> Path:
        """Return what a message takes from one device to another: out, level by level, and in again."""
        level = self.level_between(sender, receiver)
        out = [self.link(number, sender, Direction.OUT) for number in range(level + 1)]
        into = [self.link(number, receiver, Direction.IN) for number in reversed(range(level + 1))]
        return Path(
            level=level,
            links=(*out, *into),
            latency_s=self.levels[level].latency_s,
            s_per_byte=max(1 / crossed.bandwidth_bytes_per_s for crossed in self.levels[: level + 1]),
        )
