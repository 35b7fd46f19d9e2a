"""How sums within a layer travel: the ways to choose from, one function and one line here for each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pase.analysis.simulation.fabric import Direction, Fabric, Path
from pase.analysis.simulation.tasks import Collective, Label, Message, TaskGraph
from pase.costs.collectives import Link, hierarchical_all_reduce
from pase.pairs import Stage, all_reduce_stages

Front = list[tuple[int, ...]]
"""[devices] the tasks after which each one has what is spoken of."""

AllReduce = Callable[["Network", Label, Sequence[int], int, int, int, Front], None]
"""(network, label, group, points, bytes of a point, times, front) → adds tasks, moves the front on."""

DEFAULT_COLLECTIVES = "hierarchical"


class Network:
    """Adds what moves over a fabric to a task graph."""

    def __init__(self, tasks: TaskGraph, fabric: Fabric) -> None:
        self.tasks, self.fabric = tasks, fabric
        self._paths: dict[tuple[int, int], Path] = {}
        self._times: dict[tuple[float, tuple[int, ...]], float] = {}

    def send(self, label: Label, stage: Stage, point_bytes: int, times: int, front: Front) -> None:
        """Send points between devices, each one when its sender has what it sends."""
        count = self.fabric.num_devices
        # Nearest neighbours first, then those next to them: no device is everyone's first receiver.
        pairs = sorted(stage, key=lambda pair: ((pair[0][1] - pair[0][0]) % count, pair[0][0]))
        ready: dict[int, tuple[int, ...]] = {}
        arrived: dict[int, list[int]] = {}
        for (sender, receiver), points in pairs:
            if not points:
                continue
            if sender not in ready:
                ready[sender] = self.tasks.joined(front[sender])
            path = self._paths.get((sender, receiver))
            if path is None:
                path = self._paths[sender, receiver] = self.fabric.path(sender, receiver)
            message = Message(
                label, sender, receiver, path, points * point_bytes * times, path.latency_s * times
            )  # positional: there may be a million of them
            arrived.setdefault(receiver, []).append(self.tasks.add(message, ready[sender]))
        for receiver, messages in arrived.items():
            front[receiver] = (*front[receiver], *messages)

    def all_reduce_s(self, size_bytes: float, members: tuple[int, ...]) -> float:
        """Return the closed form's time of an all-reduce of a group that has the links to itself."""
        key = size_bytes, members
        if key not in self._times:
            links, behind, slowest = [], 1, 0.0
            for level, count in zip(self.fabric.levels, members, strict=True):
                slowest = max(slowest, behind / level.bandwidth_bytes_per_s)
                links.append(Link(latency_s=level.latency_s, s_per_byte=slowest))
                behind *= count
            self._times[key] = float(hierarchical_all_reduce(size_bytes, members, links))
        return self._times[key]


def as_programs_do(
    network: Network, label: Label, group: Sequence[int], points: int, point_bytes: int, times: int, front: Front
) -> None:
    """Each device of a group adds a k-th of the shards and hands the sum to the others; small ones one device adds."""
    for stage in all_reduce_stages(group, points):
        network.send(label, stage, point_bytes, times, front)


def hierarchically(
    network: Network, label: Label, group: Sequence[int], points: int, point_bytes: int, times: int, front: Front
) -> None:
    """Reduce-scatter within nodes, all-reduce across them, gather within: all together, in the closed form's time.

    Each link carries what a ring sends over it, the least that is possible.
    """
    if not points:
        return
    fabric = network.fabric
    size_bytes = float(points * point_bytes)
    members = group_members(fabric, group)
    sent = link_bytes(size_bytes, members)
    links: dict[int, float] = {}
    for device in group:
        for level, level_bytes in enumerate(sent):
            for direction in Direction if level_bytes else ():
                links[fabric.link(level, device, direction)] = level_bytes * times
    last = max(level for level, count in enumerate(members) if count > 1)
    closed_s = network.all_reduce_s(size_bytes, members)
    busy_s = max(level_bytes / fabric.levels[level].bandwidth_bytes_per_s for level, level_bytes in enumerate(sent))
    duration_s = max(closed_s, busy_s) * times
    collective = Collective(
        label=label,
        devices=tuple(group),
        links=tuple(links),
        link_bytes=tuple(links.values()),
        duration_s=duration_s,
        latency_s=duration_s - busy_s * times,
        level=last,
    )
    number = network.tasks.add(collective, {before for device in group for before in front[device]})
    for device in group:
        front[device] = (number,)


COLLECTIVES: Mapping[str, AllReduce] = MappingProxyType({"hierarchical": hierarchically, "program": as_programs_do})
"""How sums travel: what adds one of them to a task graph."""


def group_members(fabric: Fabric, group: Sequence[int]) -> tuple[int, ...]:
    """Return [levels] how many groups of the level before take part in a group of each level: in the fullest one."""
    members, inner = [], list(group)
    for level in fabric.levels:
        outer: dict[int, int] = {}
        for device in inner:
            place = device // level.num_devices if level.num_devices else 0
            outer[place] = outer.get(place, 0) + 1
        members.append(max(outer.values()))
        # One device stands for each group from here on.
        inner = [place * level.num_devices for place in outer]
    return tuple(members)


def link_bytes(size_bytes: float, members: Sequence[int]) -> tuple[float, ...]:
    """Return [levels] the bytes over each link of a level, one way, in a ring at every level: 2 (k - 1) / k of a share.

    Whatever goes over an outer level goes over the inner ones too, a share behind each of their links. No level beyond
    the last one with several members carries anything.
    """
    found = []
    for level in range(len(members)):
        share, total = size_bytes, 0.0
        for count in members[level:]:
            total += 2 * (count - 1) / count * share
            share /= count
        found.append(total)
    return tuple(found)
