"""The `alpha_beta` cost model: seconds, every message α + n β, collectives by their closed forms, level by level.

What it adds to Eq. 1 of PaSE: latencies, the levels of the machine and the links that devices share, the algorithm of
a collective by its size (Gholami 2018, section 2.2, takes one), tensors that are touched rather than computed (a
device's memory bandwidth), and sums of which the next layer needs a part alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from types import MappingProxyType

import numpy as np

from pase.common.containers import FrozenDict
from pase.costs.collectives import Link, hierarchical_all_gather, hierarchical_all_reduce, hierarchical_reduce_scatter
from pase.costs.kernels import pass_seconds
from pase.costs.traffic import Communication, LayerTraffic, PassWork, Pattern
from pase.graph.precision import FLOAT32, Precision
from pase.machine import Kernels, Machine
from pase.machine.machine import BY_LEVEL, RING
from pase.sharding.levels import group_members
from pase.sharding.overlap import Redistribution
from pase.sharding.shards import FloatArray, IndexArray, IntArray

PAIRWISE = "pairwise"
"""How sums go where each of k devices exchanges a k-th with each of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBetaCostModel:
    """Seconds of a step in which layers and edges follow one another, as in Eq. 1; nothing overlaps.

    flop_per_s: of one device. product_flop_per_s: of products, by the type that they multiply in, where it is another.
    memory_bytes_per_s: what it reads and writes; infinite where the machine does not say.
    links: for each level in use, from the inside out, what one device has of the link while all those behind it use
    it; levels of equal links are one. fanouts: groups of the level before in one group of each level. sharing: devices
    behind each level's link. sums: how all-reduces go: `BY_LEVEL`; in one `RING` each, as gloo sums, and a ring of
    NCCL; or `PAIRWISE`, as programs for Mesh-TensorFlow send them. overlap: ω of the machine; kernels: what they reach
    of its peaks, None for all; kernels_flop_per_s: the peak for the type that their figures are of.
    """

    flop_per_s: float
    memory_bytes_per_s: float
    links: tuple[Link, ...]
    fanouts: tuple[int, ...]
    sharing: tuple[int, ...]
    product_flop_per_s: Mapping[str, float] = field(default_factory=FrozenDict)
    unit: str = "s"
    sums: str = BY_LEVEL
    overlap: float = 0.0
    kernels: Kernels | None = None
    kernels_flop_per_s: float = 0.0

    @classmethod
    def of(
        cls, machine: Machine, num_devices: int, precision: Precision = FLOAT32, *, sums: str = BY_LEVEL
    ) -> "AlphaBetaCostModel":
        """Return the model for some devices of a machine; MachineError where they do not fill its groups.

        precision: that the network is trained in; MachineError where the machine gives no peak for its products.
        """
        levels = machine.levels_for(num_devices)
        all_fanouts = level_fanouts([level.num_devices for level in levels[:-1]], num_devices)
        links: list[Link] = []
        fanouts: list[int] = []
        for level, fanout in zip(levels, all_fanouts, strict=True):
            link = Link(latency_s=level.latency_s, s_per_byte=1 / level.bandwidth_bytes_per_s).shared(prod(fanouts))
            if links and link.is_close_to(links[-1]):
                # Where a device has as much of either link, the two levels are one.
                fanouts[-1] *= fanout
            else:
                links.append(link)
                fanouts.append(fanout)
        return cls(
            flop_per_s=machine.peak_flop_per_s(),
            product_flop_per_s={
                dtype: machine.peak_flop_per_s(dtype) for dtype in precision.multiplied if dtype != FLOAT32.products
            },
            memory_bytes_per_s=machine.device.memory_bandwidth_bytes_per_s or float("inf"),
            links=tuple(links),
            fanouts=tuple(fanouts),
            sharing=(1, *accumulate(fanouts[:-1], mul)),
            sums=sums,
        )

    @property
    def sums_by_level(self) -> bool:
        """Whether all-reduces add within a node before they go between nodes."""
        return self.sums == BY_LEVEL

    def work(self, work: PassWork) -> FloatArray:
        """Return the time of a pass's kernels; where nothing is told of them the longer of computing and touching.

        What is no product is computed at the peak of float32.
        """
        if self.kernels is not None and work.kernels is not None:
            return pass_seconds(
                work.kernels,
                self.kernels,
                touched_bytes=work.touched_bytes,
                product_flop_per_s=self.product_flop_per_s.get(work.product, self.flop_per_s),
                figures_flop_per_s=self.kernels_flop_per_s,
                flop_per_s=self.flop_per_s,
                bytes_per_s=self.memory_bytes_per_s,
            )
        computing = work.flop / self.flop_per_s
        if work.product_flop is not None:
            others = np.maximum(work.flop - work.product_flop, 0.0)
            computing = work.product_flop / self.product_flop_per_s[work.product] + others / self.flop_per_s
        return np.maximum(computing, work.touched_bytes / self.memory_bytes_per_s)

    def messages(self, traffic: LayerTraffic, more: Sequence[Communication] = ()) -> tuple[FloatArray, ...]:
        """Return the time of each message; they follow one another. A sum that ends on an edge is scattered alone.

        Where the layer's devices lie nowhere in particular, its axes lie as suits `traffic`, whatever more there is.
        """
        every = (*traffic.messages, *more)
        return tuple(
            self._exposed(message, traffic, _PATTERNS[message.pattern](self, message, members))
            for message, members in zip(every, message_members(every, traffic, self.fanouts), strict=True)
        )

    def _exposed(self, message: Communication, traffic: LayerTraffic, time: FloatArray) -> FloatArray:
        """Return the time of a message, as often as it is sent; of a ring, what is longer than it computes meanwhile.

        A device computes with the piece that it has while the next one comes, but for the last of its pieces.
        """
        if not message.is_ring:
            return message.times * time
        beside = 1 - 1 / traffic.splits.product(message.over)
        forward_times = min(message.forward_times, message.times)
        there = forward_times * time - beside * self.work(traffic.forward)
        back = (message.times - forward_times) * time - beside * self.work(traffic.backward)
        return np.maximum(there, 0.0) + np.maximum(back, 0.0)

    def sum_members(self, traffic: LayerTraffic, message: Communication) -> IntArray:
        """Return how the devices of a sum lie over the levels; no columns where its edge has nothing left to do."""
        (found,) = message_members((message,), traffic, self.fanouts)
        return found.T if self.sums_by_level or not message.ends_on_edge else found.T[:, :0]

    def transfer(self, fetch: Redistribution) -> FloatArray:
        """Return the time to fetch what a device lacks, from the nearest devices that can have it.

        What a sum has left on several devices is gathered among these, as far as the wanted layout needs it: a
        reduce-scatter where every device needs its own part alone, an all-reduce where each needs the whole.
        """
        return self._nearest(fetch) + self._gathering(fetch)

    def _all_reduce(self, message: Communication, members: IntArray) -> FloatArray:
        """Return the time of a sum; by levels, of one that ends on an edge that of the reduce-scatter alone."""
        size, links = message.size_bytes, self.links
        if self.sums == PAIRWISE:
            return pairwise_all_reduce(size, list(members), links)
        if self.sums == RING:
            # Gradients of many weights are added at once, in buckets: one weight's has no latency of its own.
            links = tuple(replace(link, latency_s=0.0) for link in links) if message.is_of_weight else links
            return ring_all_reduce(size, list(members), links)
        collective = hierarchical_reduce_scatter if message.ends_on_edge else hierarchical_all_reduce
        return collective(size, list(members), links)

    def _half_all_reduce(self, message: Communication, members: IntArray) -> FloatArray:
        """Return the time of a reduce-scatter or of an all-gather, of which a sum that goes on consists."""
        if not self.sums_by_level:
            return 0.5 * self._all_reduce(message, members)
        is_sum = message.pattern is Pattern.REDUCE_SCATTER
        collective = hierarchical_reduce_scatter if is_sum else hierarchical_all_gather
        return collective(message.size_bytes, list(members), self.links)

    def _neighbours(self, message: Communication, members: IntArray) -> FloatArray:
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

    def _move(self, message: Communication, members: IntArray) -> FloatArray:
        """Return the time in which a device fetches pieces from the other devices of its group."""
        reached = np.cumprod(members, axis=0).astype(np.float64)
        return self._pieces(message.size_bytes, reached)

    def _nearest(self, fetch: Redistribution) -> FloatArray:
        if fetch.reached is not None:
            return self._pieces(fetch.moved_bytes, np.moveaxis(fetch.reached, -1, 0))
        sources = fetch.messages + 1
        reached = np.stack([np.minimum(sources, capacity) for capacity in accumulate(self.fanouts, mul)])
        return self._pieces(fetch.moved_bytes, reached)

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

    def _gathering(self, fetch: Redistribution) -> FloatArray:
        count = np.prod(fetch.sum_members, axis=-1)
        if fetch.sum_members.shape[-1] == 0 or not np.any(count > 1):
            return np.zeros(fetch.needed_bytes.shape)
        size, held = fetch.kept_bytes, np.maximum(fetch.held_bytes, 1.0)
        if fetch.reached is not None:
            # Where devices are given, what goes on to others is brought together before it does.
            size = np.minimum(fetch.needed_bytes, fetch.held_bytes)
        # Of its part a device has a count-th of what it held, or all of it where it needs no more than that; it gets
        # the rest from as many others as hold so much.
        factor = np.maximum(size * count / held, 1.0)
        left = np.ceil(np.minimum(factor, count) * (1 - 1e-12))
        members = []
        for level in range(fetch.sum_members.shape[-1]):
            taken = np.minimum(fetch.sum_members[..., level], left)
            members.append(taken)
            left = np.ceil(left / taken)
        return hierarchical_all_gather(size, members, self.links)


_PATTERNS: Mapping[Pattern, Callable[[AlphaBetaCostModel, Communication, IntArray], FloatArray]] = MappingProxyType(
    {
        Pattern.ALL_REDUCE: AlphaBetaCostModel._all_reduce,
        Pattern.REDUCE_SCATTER: AlphaBetaCostModel._half_all_reduce,
        Pattern.ALL_GATHER: AlphaBetaCostModel._half_all_reduce,
        Pattern.HALO: AlphaBetaCostModel._neighbours,
        Pattern.HANDOFF: AlphaBetaCostModel._neighbours,
        Pattern.MOVE: AlphaBetaCostModel._move,
    }
)


# -- how the axes of a layer lie over the levels: what communicates most lies innermost
#
# The number of devices that a configuration splits a dim over is taken apart into one factor for each level: how many
# groups of the level before lie within one group of it. Dims are served in the order of the bytes in which they take
# part, so that the heaviest collectives stay within a node as far as they fit.


def level_members(values: IndexArray, weight: FloatArray, fanouts: Sequence[int]) -> IntArray:
    """Return [levels, K, D]: the factor of each split at each level; their product over the levels is the split.

    values: [K, D] split factors. weight: [K, D] what decides which dims come first, the largest innermost; ties go to
    the later dim, so that the batch stays outside. fanouts: for each level, the groups of the level before in one
    of its groups. The outermost level takes what is left.
    """
    num_rows, num_dims = values.shape
    left = values.astype(np.int64)
    members = np.ones((len(fanouts), num_rows, num_dims), dtype=np.int64)
    rows = np.arange(num_rows)
    # Sorted from behind: a stable sort then leaves the later of equal dims first.
    order = num_dims - 1 - np.argsort(-weight[:, ::-1], axis=1, kind="stable")
    for level, fanout in enumerate(fanouts[:-1]):
        free = np.full(num_rows, fanout, dtype=np.int64)
        for rank in range(num_dims):
            dims = order[:, rank]
            taken = np.gcd(left[rows, dims], free)
            members[level, rows, dims] = taken
            left[rows, dims] //= taken
            free //= taken
    members[-1] = left
    return members


def communicated_bytes(traffic: LayerTraffic) -> FloatArray:
    """Return [K, D]: the bytes of a layer's messages in which each dim's split takes part.

    Sums that stand on an edge are among them: whoever makes these, the layer's devices take part.
    """
    dims = list(traffic.splits.extents)
    weight = np.zeros(traffic.splits.values.shape)
    for message in (*traffic.messages, *traffic.joint_sums.values()):
        size = message.times * message.size_bytes * (2.0 if message.pattern is Pattern.ALL_REDUCE else 1.0)
        for dim in message.over:
            weight[:, dims.index(dim)] += size
    return weight


def layer_members(traffic: LayerTraffic, fanouts: Sequence[int]) -> IntArray:
    """Return [levels, K, D]: how a layer's axes lie over the levels under each of its configurations."""
    return level_members(traffic.splits.values, communicated_bytes(traffic), fanouts)


def message_members(
    messages: Sequence[Communication], traffic: LayerTraffic, fanouts: tuple[int, ...]
) -> Iterator[IntArray]:
    """Yield, for each message of a layer, [levels, K]: how the devices that take part in it lie over the levels."""
    if traffic.axes is not None:
        for message in messages:
            yield group_members(traffic.axes, message.over, fanouts)[:, None]
        return
    members, dims = layer_members(traffic, fanouts), tuple(traffic.splits.extents)
    for message in messages:
        yield members[:, :, [dims.index(dim) for dim in message.over]].prod(axis=-1)


def level_fanouts(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Return, for each level, the groups of the level before in one of its groups; sizes: of all but the last level."""
    bounds = [1, *sizes, num_devices]
    fanouts = tuple(outer // inner for inner, outer in pairwise(bounds))
    assert prod(fanouts) == num_devices, f"levels of {list(sizes)} devices do not divide {num_devices}"
    return fanouts


def step_cost_model(machine: Machine, num_devices: int, precision: Precision = FLOAT32) -> AlphaBetaCostModel:
    """Return the model of a step in which sums of weights' gradients run beside the backward pass.

    Kernels reach what the machine says, and sums go as it says. What a strategy hides is taken off the sum of the costs
    (`pase.tables.cost_tables.Hiding`).
    """
    kernels = machine.kernels
    return replace(
        AlphaBetaCostModel.of(machine, num_devices, precision, sums=machine.collectives),
        overlap=machine.overlap.share if machine.overlap else 0.0,
        kernels=kernels,
        kernels_flop_per_s=machine.peak_flop_per_s(kernels.dtype) if kernels else 0.0,
    )


def ring_all_reduce(size_bytes: FloatArray, members: Sequence[IntArray], links: Sequence[Link]) -> FloatArray:
    """Return the time in which each of k devices hands a k-th of its n bytes to the next, 2 (k - 1) times.

    Neighbours in the ring are of one node where they can be: it crosses a node's link once, each way, however many
    devices of the node take part, and only as many rings share the link. The slowest link on the way counts.
    members, links: as for `collectives.hierarchical_all_reduce`.
    """
    size, group = _size_and_group(size_bytes, members)
    latency_s, s_per_byte, within = np.zeros(size.shape), np.zeros(size.shape), np.ones(size.shape)
    for count, link in zip(members, links, strict=True):
        is_crossed = within < group
        # Of the devices behind a link those of one ring are one sender.
        s_per_byte = np.where(is_crossed, np.maximum(s_per_byte, link.s_per_byte / within), s_per_byte)
        latency_s = np.where(is_crossed, link.latency_s, latency_s)
        within = within * count
    return np.where(size > 0, 2 * (group - 1) * (latency_s + size / group * s_per_byte), 0.0)


def _size_and_group(size_bytes: FloatArray, members: Sequence[IntArray]) -> tuple[FloatArray, FloatArray]:
    group = np.ones(np.shape(size_bytes))
    for count in members:
        group = group * count
    return np.asarray(size_bytes, dtype=np.float64), group


def pairwise_all_reduce(size_bytes: FloatArray, members: Sequence[IntArray], links: Sequence[Link]) -> FloatArray:
    """Return the time in which each of k devices exchanges a k-th of its n bytes with each of the others, twice.

    members, links: as for `collectives.hierarchical_all_reduce`.
    """
    size, group = _size_and_group(size_bytes, members)
    total, within = np.zeros(size.shape), np.ones(size.shape)
    for count, link in zip(members, links, strict=True):
        reached = within * count
        total = total + 2 * (reached - within) * (link.latency_s + size / group * link.s_per_byte)
        within = reached
    return np.where(size > 0, total, 0.0)
