"""Communication between ranks: transfers of boxes and all-reduces, as modules with adjoints as their gradients.

A transfer is one exchange of all boxes between the ranks that send to each other; partial sums are all-reduced. All
ranks create all process groups, in the same order.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from pase.common.containers import connected
from pase.sharding.boxes import Box, Range, extents, offsets
from pase.sharding.reshard import ReshardStep, pieces
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.devices import carriers, current_device
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.messages import told_by_all

T = TypeVar("T")


# -- process groups


_MADE: "WeakKeyDictionary[Any, dict[Hashable, Any]]" = WeakKeyDictionary()
"""By the default process group."""


def made_once(key: Hashable, make: Callable[[], T]) -> T:
    """Return a cached object that all modules of a process share: process groups, meshes. Collective, in one order.

    Each process group has a thread (gloo) or buffers on a GPU (NCCL) of its own for as long as it exists.
    """
    made = _MADE.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    found: T = made[key]
    return found


def new_group(ranks: Sequence[int]) -> Any:
    """Create a process group, and connect its ranks; every rank calls it, in the same order.

    It carries tensors on the ranks' compute device; a group for other devices would need connections of its own.
    """
    handle = dist.new_group(list(ranks), backend=carriers().get(current_device().type))
    if dist.get_rank() in ranks:
        connect(handle)
    return handle


def connect(handle: Any = None) -> None:
    """Connect the ranks of a process group by a first collective in which all of them participate.

    NCCL creates a communicator in the first call of a group. If that call only sends between some ranks, the others do
    not call it, and it would wait for them forever.

    Args:
        handle: The process group, None for that of all ranks.
    """
    with naming_lost_ranks():
        dist.all_reduce(torch.zeros(1, device=current_device()), group=handle)


def host_group() -> Any:
    """Return a process group of all ranks that carries tensors of the CPU, None for the default one.

    The first time all ranks call it.
    """
    if "cpu" in carriers():
        return None
    return made_once("host", partial(dist.new_group, backend="gloo"))


# -- bytes sent


@dataclass(slots=True)
class Traffic:
    """Bytes that ranks pass to communication libraries, by owner; is_counted: whether they are recorded."""

    is_counted: bool = False
    sent: dict[Movement, int] = field(default_factory=dict)

    @torch._disable_dynamo
    def add(self, movement: Movement, num_bytes: int) -> None:
        self.sent[movement] = self.sent.get(movement, 0) + num_bytes


_NOT_MADE = object()
"""In place of a process group that all ranks are still to make."""


class Groups:
    """Process groups by their ranks. Every rank requests the same ones in the same order.

    Attributes:
        apart: Purpose of a separate set of groups, including that of all ranks: reductions and gathers start at other
            times on every rank than transfers between layers. "" for the latter.
        first: For the ranks of a stage, the global number of its first one. Other stages then request other groups,
            which are created later by all ranks together (`make_waiting`).
    """

    def __init__(self, rank: int, num_ranks: int, *, apart: str = "", first: int | None = None) -> None:
        self.rank, self.num_ranks, self._apart, self._first = rank, num_ranks, apart, first
        self.waiting: list[tuple[Group, tuple[str, str, tuple[int, ...]]]] = []

    def separate(self, apart: str) -> "Groups":
        found = Groups(self.rank, self.num_ranks, apart=apart, first=self._first)
        found.waiting = self.waiting
        return found

    def of(self, groups: Iterable[Sequence[int]]) -> "Group":
        """Return the group, of several disjoint ones, that this rank belongs to."""
        own = Group((self.rank,), None, self.rank)
        for ranks in map(tuple, map(sorted, groups)):
            handle = None
            if len(ranks) > 1 and self._first is None and (len(ranks) < self.num_ranks or self._apart):
                handle = made_once((self._apart, ranks), partial(new_group, ranks))
            if self.rank in ranks:
                own = Group(ranks, handle, self.rank)
        if self._first is not None and len(own.ranks) > 1:
            key = "stage", self._apart, tuple(self._first + rank for rank in own.ranks)
            own.handle = _MADE.get(dist.group.WORLD, {}).get(key, _NOT_MADE)
            if own.handle is _NOT_MADE:
                self.waiting.append((own, key))
        return own


def make_waiting(every: Iterable[Groups]) -> None:
    """Create the process groups that stages have requested; all ranks call it."""
    own = [each for groups in every for each in groups.waiting]
    of_ranks = told_by_all({key for _, key in own})
    made = {key: made_once(key, partial(new_group, key[-1])) for key in sorted(set().union(*of_ranks))}
    for group, key in own:
        group.handle = made[key]
    for groups in every:
        groups.waiting.clear()


@dataclass(slots=True, eq=False)
class Group:
    """Ranks, in order, that exchange something; handle: the process group, None for all ranks; rank: ours.

    That of a stage has its handle once all ranks have made it.
    """

    ranks: tuple[int, ...]
    handle: Any
    rank: int


def as_stored(x: Any) -> Any:
    """Return a tensor in a form to send: without lazy conjugation or negation."""
    return x.resolve_conj().resolve_neg()


def all_reduced(x: Any, group: Group, op: Any = None) -> Any:
    """Return the sum, or another reduction, of a tensor over the ranks of a group."""
    if torch.compiler.is_compiling():
        x = as_stored(x).contiguous()
        return functional.all_reduce(x, "sum" if op is None else "max", group.handle or dist.group.WORLD)
    # Copy, because an in-place reduction must not change a tensor that others use.
    total = x.clone(memory_format=torch.contiguous_format)
    with naming_lost_ranks():
        dist.all_reduce(total, op=dist.ReduceOp.SUM if op is None else op, group=group.handle)
    return total


def begun(begin: Callable[[], Any], found: Callable[[], Any]) -> Callable[[], Any]:
    """Start a collective, and return a function that waits for its result, once."""
    with naming_lost_ranks():
        work = [begin()]

    def waited() -> Any:
        with naming_lost_ranks():
            # What was sent is freed before what was found is computed with.
            work.pop().wait()
        return found()

    return waited


def exchanged(buffer: Any, received: list[int], sent: list[int], group: Group) -> Any:
    """Return what a rank receives when each rank of a group sends slices of its buffer to the others (all-to-all)."""
    if torch.compiler.is_compiling():
        return functional.all_to_all_single(buffer, received, sent, group.handle or dist.group.WORLD)
    return passing(buffer, received, sent, group)()


def passing(buffer: Any, received: list[int], sent: list[int], group: Group) -> Callable[[], Any]:
    """Begin to send pieces of a buffer to ranks of a group, and return what waits for what this one is sent."""
    arrived, options = buffer.new_empty(sum(received)), {"group": group.handle, "async_op": True}
    return begun(lambda: dist.all_to_all_single(arrived, buffer, received, sent, **options), lambda: arrived)


def gathered(piece: Any, group: Group, rows: Any = None) -> Callable[[], Any]:
    """Start an all-gather, and return a function that waits for it: [ranks, points]; rows: output buffer."""
    flat = piece.reshape(-1)
    if torch.compiler.is_compiling():
        found = functional.all_gather_tensor(flat[None], 0, group.handle or dist.group.WORLD)
        return lambda: found
    whole = flat.new_empty((len(group.ranks), len(flat))) if rows is None else rows
    # The second is what older versions of PyTorch call it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return begun(lambda: gather(whole.view(-1), flat, group=group.handle, async_op=True), lambda: whole)


def scattered(rows: Any, group: Group) -> Callable[[], Any]:
    """Begin to add up what ranks have, [ranks, points], and return what waits for the sum of this rank's row."""
    options = {"group": group.handle, "async_op": True}
    if rows.device.type == "cpu":
        # What gloo has for it sums all rows on all ranks.
        every = torch.empty_like(rows)
        return begun(lambda: dist.all_to_all_single(every, rows, **options), lambda: every.sum(0))
    scatter, own = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, torch.empty_like(rows[0])
    return begun(lambda: scatter(own, rows.view(-1), **options), lambda: own)


def ring_bytes(x: Any, num_ranks: int, rank: int) -> int:
    """Return the bytes that one rank sends in an all-reduce: its shares to the others, then the sum of its own."""
    points = x.numel()
    share = points // num_ranks + (rank < points % num_ranks)
    return int((points - share) + (num_ranks - 1) * share) * int(x.element_size())


@dataclass(frozen=True, slots=True, eq=False)
class Adder:
    """All-reduces tensors over the ranks of a group, for a layer, by its name.

    Attributes:
        of: Weights whose gradients it reduces, if any.
        shared: Those of them that several layers share.
        is_exchange: Whether gradients are of tensors that the layer has already reduced.
    """

    layer: str
    group: Group
    traffic: Traffic
    of: frozenset[str] = frozenset()
    shared: Set[str] = frozenset()
    is_exchange: bool = False

    @property
    def phase(self) -> Phase:
        """The part of a step that sums of gradients belong to."""
        if self.of:
            return Phase.BACKWARD if self.of & self.shared else Phase.UPDATE
        # Exchanges within a layer's computation count as forward, in either pass.
        return Phase.FORWARD if self.is_exchange else Phase.BACKWARD

    def summed(self, x: Any, phase: Phase) -> Any:
        return self._reduced(x, phase, None)

    def greatest(self, x: Any, phase: Phase) -> Any:
        return self._reduced(x, phase, dist.ReduceOp.MAX)

    def _reduced(self, x: Any, phase: Phase, op: Any) -> Any:
        ranks = self.group.ranks
        if len(ranks) == 1:
            return x
        if self.traffic.is_counted:
            sent = ring_bytes(x, len(ranks), ranks.index(self.group.rank))
            self.traffic.add(Movement.within(self.layer, phase), sent)
        return all_reduced(x, self.group, op)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Any, adder: Adder) -> Any:
        return adder.summed(x, Phase.FORWARD)

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> tuple[Any, None]:
        return dy, None


class _GradientSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, adder: Adder) -> Any:
        ctx.adder = adder
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, None]:
        return ctx.adder.summed(dy, ctx.adder.phase), None


class _Collective(nn.Module):
    """A module that performs a collective for a layer or an edge."""

    function: Any

    def __init__(self, adder: Adder) -> None:
        super().__init__()
        self.adder = adder

    def forward(self, x: Any) -> Any:
        return self.function.apply(x, self.adder)


class Sum(_Collective):
    """The sums of which the ranks' values are parts; everybody's gradient is that of the sums."""

    function = _Sum


class GradientSum(_Collective):
    """An identity that all-reduces its gradient."""

    function = _GradientSum


class Greatest(_Collective):
    """The greatest of the ranks' values, of which no gradient flows back."""

    def forward(self, x: Any) -> Any:
        return self.adder.greatest(x.detach(), Phase.FORWARD)


# -- moves


Cut = tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One step of a transfer as a rank executes it.

    Attributes:
        held: Shape of this rank's part before the step.
        counts: [ranks of the group] points sent to and received from each.
        sends, receives: [ranks of the group] slices of the part, and (slice, shape) in the result.
        kept: (slice of the part, slice of the result) for points that stay.
        made: Shape of the result, None if this rank has no part of it.
        is_added: Whether received boxes overlap and must be added.
        is_filled: Whether some points are padding.
    """

    group: Group
    held: tuple[int, ...]
    counts: tuple[list[int], list[int]]
    sends: tuple[tuple[Cut, ...], ...]
    receives: tuple[tuple[tuple[Cut, tuple[int, ...]], ...], ...]
    kept: tuple[tuple[Cut, Cut], ...]
    made: tuple[int, ...]
    is_added: bool
    is_filled: bool

    @property
    def is_whole(self) -> bool:
        """Whether the rank keeps its part, and no rank sends anything."""
        nothing = not any(self.sends) and not any(self.receives)
        return nothing and self.made == self.held and len(self.kept) == 1 and not self.is_filled


def exchange(step: ReshardStep, groups: Groups) -> Exchange:
    """Return a step of a transfer for this rank; all ranks request the same steps in the same order."""
    rank, source, target = groups.rank, step.source, step.target
    group = groups.of(_together(step, groups.num_ranks))
    place = {other: number for number, other in enumerate(group.ranks)}
    sends: list[list[Cut]] = [[] for _ in group.ranks]
    receives: list[list[tuple[Cut, tuple[int, ...]]]] = [[] for _ in group.ranks]
    kept: list[tuple[Cut, Cut]] = []
    held: tuple[int, ...] = (0,)
    for device, box in zip(source.devices, source.boxes, strict=True):
        held = extents(box) if device == rank else held
    made: tuple[int, ...] = (0,)
    own: list[Box] = []
    for device, box, taken in zip(target.devices, target.boxes, pieces(step), strict=True):
        if device == rank:
            made, own = extents(box), [piece.box for piece in taken]
        for piece in taken:
            sender = source.devices[piece.source]
            there, here = _cut(piece.box, source.boxes[piece.source]), _cut(piece.box, box)
            if sender == device == rank:
                kept.append((there, here))
            elif sender == rank:
                sends[place[device]].append(there)
            elif device == rank:
                receives[place[sender]].append((here, extents(piece.box)))
    covered = sum(prod(extents(box)) for box in own)
    is_added = any(_overlap(a, b) for i, a in enumerate(own) for b in own[:i])
    return Exchange(
        group=group,
        held=held,
        counts=(
            [sum(prod(part.stop - part.start for part in cut) for cut in cuts) for cuts in sends],
            [sum(prod(shape) for _, shape in cuts) for cuts in receives],
        ),
        sends=tuple(map(tuple, sends)),
        receives=tuple(map(tuple, receives)),
        kept=tuple(kept),
        made=made,
        is_added=is_added,
        is_filled=is_added or covered < prod(made),
    )


def _cut(box: Box, origin: Box) -> Cut:
    lows = offsets(box, origin)
    return tuple(slice(low, low + extent) for low, extent in zip(lows, extents(box), strict=True))


def _overlap(a: Box, b: Box) -> bool:
    return all(max(i[0], j[0]) < min(i[1], j[1]) for i, j in zip(a, b, strict=True))


def _together(step: ReshardStep, num_ranks: int) -> list[list[int]]:
    """Return the ranks in groups of those that send each other anything, directly or by others."""
    sources = step.source.devices
    taken = zip(step.target.devices, pieces(step), strict=True)
    return connected(range(num_ranks), ((device, sources[piece.source]) for device, own in taken for piece in own))


def carried(x: Any, steps: Iterable[Exchange], fill: float, count: Callable[[int], None] | None) -> Any:
    """Return this rank's part of a tensor after some steps; count: called with the bytes that it sends."""
    x = as_stored(x)
    for step in steps:
        x = x.reshape(step.held) if tuple(x.shape) != step.held else x
        if step.is_whole:
            continue
        arrived = x.new_empty(0)
        sent, received = step.counts
        if any(sent) or any(received):
            buffer = end_to_end(x, (cut for cuts in step.sends for cut in cuts))
            arrived = exchanged(buffer, received, sent, step.group)
            if count is not None:
                count(buffer.numel() * buffer.element_size())
        x = assembled(step, x, arrived, fill)
    return x


def end_to_end(x: Any, cuts: Iterable[Cut]) -> Any:
    """Return pieces of a tensor end to end; a single one, where that can be, as a view of it."""
    parts = [x[cut].reshape(-1) for cut in cuts]
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(parts) if parts else x.new_empty(0)


def assembled(step: Exchange, x: Any, arrived: Any, fill: float) -> Any:
    """Return a rank's result, from its own part and the received boxes, concatenated in the order of ranks."""
    parts, at = [(here, x[there]) for there, here in step.kept], 0
    for here, shape in (cut for cuts in step.receives for cut in cuts):
        parts.append((here, arrived[at : at + prod(shape)].view(shape)))
        at += prod(shape)
    if len(parts) == 1 and not step.is_filled:
        return parts[0][1]
    whole = arrived.new_full(step.made, fill) if step.is_filled else arrived.new_empty(step.made)
    for here, part in parts:
        if step.is_added:
            whole[here] += part
        else:
            whole[here] = part
    return whole


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: "Move") -> Any:
        ctx.module = module
        return module.carried(x, module.there, module.fill, Phase.FORWARD).reshape(module.made)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, None]:
        module = ctx.module
        return module.carried(dy, module.back, 0.0, module.phase_back).reshape(module.held), None


class Move(nn.Module):
    """Transfers a tensor from one layout to another; its gradient is transferred by the adjoint steps.

    Attributes:
        movement: Owner of the forward transfer.
        held, made: Shapes of the shard before and after.
        there, back: Steps of either direction.
        fill: Value of padding.
        phase_back: Phase of the backward transfer.
    """

    def __init__(
        self,
        *,
        movement: Movement,
        traffic: Traffic,
        held: Sequence[int],
        made: Sequence[int],
        there: Sequence[Exchange],
        back: Sequence[Exchange],
        fill: float = 0.0,
        phase_back: Phase = Phase.BACKWARD,
    ) -> None:
        super().__init__()
        self.movement, self.traffic, self.fill, self.phase_back = movement, traffic, fill, phase_back
        self.held, self.made = tuple(held), tuple(made)
        self.there, self.back = tuple(there), tuple(back)

    @property
    def is_still(self) -> bool:
        """Whether every rank keeps its part in both directions, as far as this rank knows."""
        return all(step.is_whole for step in (*self.there, *self.back))

    def forward(self, x: Any) -> Any:
        return _Move.apply(x, self)

    def carried(self, x: Any, steps: Sequence[Exchange], fill: float, phase: Phase) -> Any:
        """Execute steps on a shard."""

        def count(sent: int) -> None:
            self.traffic.add(replace(self.movement, phase=phase), sent)

        return carried(x, steps, fill, count if self.traffic.is_counted else None)


class Take(nn.Module):
    """A slice of an input of the model.

    Attributes:
        shape: Shape of the whole input as the layer reads it.
        box: Box of the slice, which may extend past the input.
        made: Shape of the result.
        fill: Value of padding.
        rows: Rows of the input's first dim that the rank has, None for all of them.
    """

    rows: Range | None = None

    def __init__(self, *, shape: Sequence[int], box: Box, made: Sequence[int], fill: float = 0.0) -> None:
        super().__init__()
        self.shape, self.box, self.made, self.fill = tuple(shape), tuple(box), tuple(made), fill
        inside = tuple((max(low, 0), min(high, extent)) for (low, high), extent in zip(box, shape, strict=True))
        self.inside = tuple((low, max(low, high)) for low, high in inside)
        self.pads = tuple((low - first, last - high) for (low, high), (first, last) in zip(inside, box, strict=True))

    def forward(self, x: Any) -> Any:
        inside, shape = self.inside, self.shape
        if self.rows is not None:
            first, stop = self.rows
            shape = (stop - first, *shape[1:])
            inside = ((inside[0][0] - first, inside[0][1] - first), *inside[1:])
        part = x.reshape(shape)[tuple(slice(low, high) for low, high in inside)]
        if any(any(pad) for pad in self.pads):
            part = nn.functional.pad(part, [n for pad in reversed(self.pads) for n in pad], value=self.fill)
        return part.reshape(self.made)
