"""The `alpha_beta` cost model: seconds, every message α + n β, collectives by their closed forms, level by level.

What it adds to Eq. 1 of PaSE: latencies, the levels of the machine and the links that devices share, the algorithm of
a collective by its size (Gholami 2018, section 2.2, takes one), tensors that are touched rather than computed (a
device's memory bandwidth), and sums of which the next layer needs a part alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from types import MappingProxyType

import numpy as np

from pase.costs.collectives import (
    Link,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from pase.costs.layouts import FloatArray, IntArray
from pase.costs.levels import group_members, layer_members, level_rooms
from pase.costs.movement import Fetch
from pase.costs.traffic import LayerTraffic, Message, PassWork, Pattern
from pase.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBetaCostModel:
    """Seconds of a step in which layers and edges follow one another, as in Eq. 1; nothing overlaps.

    flop_per_s: of one device. memory_bytes_per_s: what it reads and writes; infinite where the machine does not say.
    links: for each level in use, from the inside out, what one device has of the link while all those behind it use
    it; levels of equal links are one. rooms: groups of the level before in one group of each level. sharing: devices
    behind each level's link.
    """

    flop_per_s: float
    memory_bytes_per_s: float
    links: tuple[Link, ...]
    rooms: tuple[int, ...]
    sharing: tuple[int, ...]
    unit: str = "s"
    sums_by_level: bool = True

    @classmethod
    def of(cls, machine: Machine, num_devices: int) -> "AlphaBetaCostModel":
        """Return the model for some devices of a machine; MachineError where they do not fill its groups."""
        levels = machine.levels_for(num_devices)
        all_rooms = level_rooms([level.num_devices for level in levels[:-1]], num_devices)
        links: list[Link] = []
        rooms: list[int] = []
        for level, room in zip(levels, all_rooms, strict=True):
            link = Link(latency_s=level.latency_s, s_per_byte=1 / level.bandwidth_bytes_per_s).shared(prod(rooms))
            if links and link.is_close_to(links[-1]):
                # Where a device has as much of either link, the two levels are one.
                rooms[-1] *= room
            else:
                links.append(link)
                rooms.append(room)
        return cls(
            flop_per_s=machine.peak_flop_per_s(),
            memory_bytes_per_s=machine.device.memory_bandwidth_bytes_per_s or float("inf"),
            links=tuple(links),
            rooms=tuple(rooms),
            sharing=(1, *accumulate(rooms[:-1], mul)),
        )

    def work(self, work: PassWork) -> FloatArray:
        """Return the longer of computing and touching (the roofline)."""
        return np.maximum(work.flop / self.flop_per_s, work.touched_bytes / self.memory_bytes_per_s)

    def messages(self, traffic: LayerTraffic) -> tuple[FloatArray, ...]:
        """Return the time of each message; they follow one another. A sum that ends on an edge is scattered alone."""
        return self.messages_over(traffic, layer_members(traffic, self.rooms))

    def messages_over(self, traffic: LayerTraffic, members: IntArray) -> tuple[FloatArray, ...]:
        """Return the time of each message where axes lie over the levels as given, [levels, K, D]."""
        return tuple(
            message.times * _PATTERNS[message.pattern](self, message, group_members(message, traffic, members))
            for message in traffic.messages
        )

    def sum_members(self, traffic: LayerTraffic, message: Message) -> IntArray:
        """Return how the devices of a sum lie over the levels."""
        return group_members(message, traffic, layer_members(traffic, self.rooms)).T

    def transfer(self, fetch: Fetch) -> FloatArray:
        """Return the time to fetch what a device lacks, from the nearest devices that can have it.

        What a sum has left on several devices is gathered among these, as far as the wanted layout needs it: a
        reduce-scatter where every device needs its own part alone, an all-reduce where each needs the whole.
        """
        return self._nearest(fetch) + self._gathering(fetch)

    def all_reduce(self, message: Message, members: IntArray) -> FloatArray:
        """Return the time of a sum; of one that ends on an edge, that of the reduce-scatter alone."""
        collective = hierarchical_reduce_scatter if message.ends_on_edge else hierarchical_all_reduce
        return collective(message.size_bytes, list(members), self.links)

    def _neighbours(self, message: Message, members: IntArray) -> FloatArray:
        """Return the time of an exchange between neighbours: on the outermost link that some of them are apart.

        Where the split goes on beyond a group, one device of it in so many exchanges with another group.
        """
        size = message.size_bytes
        total: FloatArray = np.zeros(len(size))
        inside = np.ones(len(size))
        for count, link, behind in zip(members, self.links, self.sharing, strict=True):
            share = 1.0 / np.minimum(inside, behind)
            time = message.num_pieces * link.latency_s + size * link.s_per_byte * share
            total = np.where((count > 1) & (size > 0), np.maximum(total, time), total)
            inside = inside * count
        return total

    def _move(self, message: Message, members: IntArray) -> FloatArray:
        """Return the time in which a device fetches pieces from the other devices of its group."""
        reached = np.cumprod(members, axis=0).astype(np.float64)
        return self._pieces(message.size_bytes, reached)

    def _nearest(self, fetch: Fetch) -> FloatArray:
        moved, kept = fetch.moved_bytes, fetch.kept_bytes
        held = np.maximum(fetch.held_bytes, 1.0)
        # A device brings together as many pieces as its part is larger than what it has of it.
        sources = np.where(kept > 0, fetch.needed_bytes / np.maximum(kept, 1.0), moved / held + 1)
        sources = np.clip(np.ceil(sources), 2, np.prod(self.rooms))
        reached = np.stack([np.minimum(sources, capacity) for capacity in accumulate(self.rooms, mul)])
        return self._pieces(moved, reached)

    def _pieces(self, size: FloatArray, reached: FloatArray) -> FloatArray:
        """Return the time for pieces from so many devices, [levels, …], oneself included, that each level reaches."""
        total: FloatArray = np.zeros(size.shape)
        others = np.maximum(reached[-1] - 1, 1)
        within = np.ones(size.shape)
        for reach, link in zip(reached, self.links, strict=True):
            senders = np.maximum(reach - within, 0)
            total = total + senders * link.latency_s + size * senders / others * link.s_per_byte
            within = np.maximum(reach, within)
        return np.where(size > 0, total, 0.0)

    def _gathering(self, fetch: Fetch) -> FloatArray:
        count = np.prod(fetch.sum_members, axis=-1)
        if fetch.sum_members.shape[-1] == 0 or not np.any(count > 1):
            return np.zeros(fetch.needed_bytes.shape)
        # Of its part a device has a count-th of what it held, or all of it where it needs no more than that; it gets
        # the rest from as many others as hold so much.
        factor = np.maximum(fetch.kept_bytes * count / np.maximum(fetch.held_bytes, 1.0), 1.0)
        left = np.ceil(np.minimum(factor, count) * (1 - 1e-12))
        members = []
        for level in range(fetch.sum_members.shape[-1]):
            taken = np.minimum(fetch.sum_members[..., level], left)
            members.append(taken)
            left = np.ceil(left / taken)
        return hierarchical_all_gather(fetch.kept_bytes, members, self.links)


_PATTERNS: Mapping[Pattern, Callable[[AlphaBetaCostModel, Message, IntArray], FloatArray]] = MappingProxyType(
    {
        Pattern.ALL_REDUCE: lambda model, message, members: model.all_reduce(message, members),
        Pattern.HALO: AlphaBetaCostModel._neighbours,
        Pattern.HANDOFF: AlphaBetaCostModel._neighbours,
        Pattern.MOVE: AlphaBetaCostModel._move,
    }
)
