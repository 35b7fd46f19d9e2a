"""Pipelines: the stages of which a rank has a part, the transfers between stages, and the order of a step's passes.

The output of a stage is sent to the ranks of the next one in the layout in which that reads it: each rank sends its
boxes to those that need them, and the gradient is sent back by the adjoint. Sends are asynchronous. Two stages have one
process group for both directions, for which NCCL creates one communicator: where both send at the same time, each
starts the send in one call with its next receive from the other (`paired_sends`).
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pase.planning.stages import Action, actions, paired_sends
from pase.sharding.layouts import DeviceMesh, Layout
from pase.sharding.reshard import ReshardStep
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.collectives import (
    Exchange,
    Group,
    Groups,
    Traffic,
    assembled,
    carried,
    end_to_end,
    exchange,
    host_group,
    made_once,
    make_waiting,
    new_group,
)
from pase.targets.torch.failures import naming_lost_ranks
from pase.targets.torch.messages import told_by, told_by_all
from pase.targets.torch.program import Program, Received
from pase.targets.torch.states import Gradients
from pase.targets.torch.tensor import Dim, LayerMesh, Tensor, resolved

P = TypeVar("P", bound=Program)

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a program, in order.

    Attributes:
        stages: Functions that declare their layers: each takes the program and the previous stage's result, and returns
            the next stage's input, the last one the loss.
        schedule, micro_batches, num_groups: As in a plan.
    """

    stages: tuple[Callable[..., Tensor], ...]
    schedule: str
    micro_batches: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """A stage as a rank computes it.

    Attributes:
        compute: Computes the next stage's input, or the loss, from the number of a micro-batch and the previous stage's
            output.
        leaves: Tensors whose gradients are those of the weights.
        collect: Receives their gradients.
        gradients: Reduces these.
    """

    compute: Callable[[int, Sequence[Any]], Any]
    leaves: Callable[[], list[Any]]
    collect: Callable[[], None]
    gradients: Gradients


@dataclass(frozen=True, slots=True)
class _Sent:
    """Description of a stage's output for the next one."""

    layer: str
    mesh: DeviceMesh
    dims: tuple[Dim, ...]
    is_index: bool

    @classmethod
    def of(cls, x: Tensor) -> "_Sent":
        return cls(x.mesh.layer, x.mesh.devices, x.dims, x.is_index)

    def on(self, program: Program) -> Tensor:
        """Return it as a program receives it; its devices are numbered after the program's."""
        devices = tuple(program.num_devices + device for device in self.mesh.devices)
        mesh = LayerMesh(self.layer, replace(self.mesh, devices=devices), program)
        return Tensor(value=None, mesh=mesh, dims=self.dims, is_index=self.is_index)


@dataclass(frozen=True, slots=True)
class Copy:
    """A group of ranks with a copy of a weight.

    Attributes:
        layer: Layer that reads it.
        layout: Layout on ranks counted from the group's first.
    """

    layer: str
    layout: Layout


class _Linked(Groups):
    """Gives the ranks of two stages that have anything for each other; handle: their process group."""

    def __init__(self, rank: int, num_ranks: int, handle: Any) -> None:
        super().__init__(rank, num_ranks)
        self._handle = handle

    def of(self, groups: Iterable[Sequence[int]]) -> Group:
        own = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        return Group(tuple(sorted(own)), self._handle, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A transfer from one stage to another, as a participating rank executes it.

    Attributes:
        before: Steps among the senders.
        across: Step from the senders to the receivers.
        after: Steps among the receivers.
        movement: Owner of its bytes.
    """

    before: tuple[Exchange, ...]
    across: Exchange
    after: tuple[Exchange, ...]
    movement: Movement


_Begun = list[tuple[Any, Any]]
"""Sends or receives that have begun: what each is waited for by, and the tensors that have to live until then."""


@dataclass(slots=True, kw_only=True, eq=False)
class Handover:
    """The transfer from one stage to the next, and of its gradient back, for one rank of either.

    Attributes:
        received: Input of the next stage.
        there: The forward transfer.
        back: The backward transfer.
        paired: Micro-batches whose send this rank starts together with its next receive from the other stage.
        tag: Tag of the first message of a step, which gives type and gradient of the following ones.
        traffic: Counts sent bytes.
        device: Device of the tensors.
        dtype: Type of the received tensor.
        has_gradient: Whether a gradient of it is sent back.
    """

    received: Received
    there: _Way
    back: _Way
    paired: frozenset[int]
    tag: int
    traffic: Traffic
    device: Any
    dtype: Any = None
    has_gradient: bool = False
    _arriving: deque[tuple[Any, _Begun]] = field(default_factory=deque)

    def send(self, y: Any, micro_batch: int) -> _Begun:
        """Start to send a stage's output for a micro-batch."""
        told = [] if micro_batch else self._tell(y)
        receiving = self.back if micro_batch in self.paired and y.requires_grad else None
        return told + self.give(y.detach(), self.there, receiving)

    def receive(self, micro_batch: int) -> Any:
        if not micro_batch:
            self._hear()
        x = self.take(self.there, self.dtype, self.received.fill).reshape(self.received.made)
        return x.requires_grad_(self.has_gradient)

    def send_back(self, gradient: Any, micro_batch: int) -> _Begun:
        """Start to send the gradient of a stage's input for a micro-batch."""
        return self.give(gradient, self.back, self.there if micro_batch in self.paired else None)

    def receive_back(self, y: Any) -> Any:
        return self.take(self.back, y.dtype).reshape(y.shape)

    def give(self, x: Any, way: _Way, receiving: _Way | None = None) -> _Begun:
        """Begin to send what this rank has along a way, and with it the next receive along another one."""
        x = self._carried(x, way, way.before, 0.0).reshape(way.across.held)
        peers = zip(way.across.group.ranks, way.across.sends, strict=True)
        pieces = [(peer, end_to_end(x, cuts)) for peer, cuts in peers if cuts]
        if self.traffic.is_counted:
            self.traffic.add(way.movement, sum(piece.numel() * piece.element_size() for _, piece in pieces))
        sends = [_op(dist.isend, piece, peer, way.across) for peer, piece in pieces]
        buffer, receives = (None, []) if receiving is None else self._receives(receiving, x.dtype)
        sent, arriving = _begin(sends, receives)
        if receiving is not None:
            self._arriving.append((buffer, arriving))
        return sent

    def take(self, way: _Way, dtype: Any, fill: float = 0.0) -> Any:
        """Return what comes along a way; its receive may have begun with a send."""
        if self._arriving:
            buffer, arriving = self._arriving.popleft()
        else:
            buffer, receives = self._receives(way, dtype)
            _, arriving = _begin([], receives)
        wait_for(arriving)
        return self._carried(assembled(way.across, buffer, buffer, fill), way, way.after, fill)

    def _receives(self, way: _Way, dtype: Any) -> tuple[Any, list[Any]]:
        counts = _counts(way.across, 1)
        buffer = torch.empty(sum(count for _, count in counts), dtype=dtype, device=self.device)
        parts = zip(counts, buffer.split([count for _, count in counts]), strict=True)
        return buffer, [_op(dist.irecv, part, peer, way.across) for (peer, count), part in parts if count]

    def _tell(self, y: Any) -> _Begun:
        """Start to send type and gradient flag of a stage's output, from CPU to CPU: without waiting for a device."""
        told = torch.tensor([TYPES.index(y.dtype), y.requires_grad])
        peers = [peer for peer, count in _counts(self.there.across, 0) if count]
        sent, _ = _begin([dist.P2POp(dist.isend, told, peer, host_group(), self.tag) for peer in peers], [])
        return sent

    def _hear(self) -> None:
        peers = [peer for peer, count in _counts(self.there.across, 1) if count]
        told = [(torch.empty(2, dtype=torch.int64), peer) for peer in peers]
        _, arriving = _begin([], [dist.P2POp(dist.irecv, own, peer, host_group(), self.tag) for own, peer in told])
        wait_for(arriving)
        kind, has_gradient = told[0][0].tolist() if told else (0, False)
        self.dtype, self.has_gradient = TYPES[kind], bool(has_gradient)

    def _carried(self, x: Any, way: _Way, steps: Sequence[Exchange], fill: float) -> Any:
        count = partial(self.traffic.add, way.movement)
        return carried(x, steps, fill, count if self.traffic.is_counted else None)


def _counts(step: Exchange, way: int) -> list[tuple[int, int]]:
    return list(zip(step.group.ranks, step.counts[way], strict=True))


def _op(operation: Any, tensor: Any, peer: int, step: Exchange) -> Any:
    return dist.P2POp(operation, tensor, peer, group=step.group.handle)


def _begin(sends: list[Any], receives: list[Any]) -> tuple[_Begun, _Begun]:
    """Begin sends and receives in one call."""
    ops = [*sends, *receives]
    if not ops:
        return [], []
    with naming_lost_ranks():
        works = dist.batch_isend_irecv(ops)
    if len(works) < len(ops):
        # NCCL has one for all.
        begun = [(work, ops) for work in works]
        return begun, begun
    begun = list(zip(works, ops, strict=True))
    return begun[: len(sends)], begun[len(sends) :]


def wait_for(begun: Iterable[tuple[Any, Any]]) -> None:
    """Wait until sends or receives are done."""
    with naming_lost_ranks():
        for work, _ in begun:
            work.wait()


@dataclass(slots=True)
class _Flight:
    """A micro-batch in a stage between its passes.

    Attributes:
        put_off: Inputs of the deferred gradients of weights.
        sent: Sends of its output, which have completed when its gradient arrives.
    """

    received: list[Any]
    output: Any
    sent: list[Any]
    gradient: Any = None
    put_off: Any = None


@dataclass(slots=True, kw_only=True, eq=False)
class Stages:
    """The stages of a pipeline of which a rank has a part.

    Attributes:
        pipeline: All stages.
        rank, num_ranks: Global.
        traffic: Counts the bytes sent to other stages.
        device: Device of tensors.
        done: Called with every action, if given.
    """

    pipeline: Pipeline
    rank: int
    num_ranks: int
    traffic: Traffic
    device: Any
    done: Callable[[Action], None] | None = None
    _loss_type: torch.dtype | None = None
    _given: dict[int, _Sent] = field(default_factory=dict)
    _links: dict[int, list[Handover]] = field(default_factory=dict)
    _asked: list[Groups] = field(default_factory=list)
    _copies: dict[str, dict[tuple[int, int], Handover]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.num_ranks // self.pipeline.num_groups

    @property
    def group(self) -> int:
        return self.rank // self.size

    @property
    def first(self) -> int:
        return self.group * self.size

    @property
    def last(self) -> int:
        """The number of the last stage, which has the loss."""
        return len(self.pipeline.stages) - 1

    @property
    def numbers(self) -> range:
        return range(self.group, self.last + 1, self.pipeline.num_groups)

    def groups(self) -> Groups:
        """Return the object that creates process groups of ranks of a stage."""
        asked = Groups(self.rank - self.first, self.size, first=self.first)
        self._asked.append(asked)
        return asked

    def connect(self) -> None:
        """Create the requested process groups; all ranks call it."""
        make_waiting(self._asked)

    def first_of(self, number: int) -> int:
        return number % self.pipeline.num_groups * self.size

    def declare(self, program_of: Callable[[int], P]) -> dict[int, tuple[P, Tensor]]:
        """Return the program of each own stage, and its result; all ranks call it.

        Stages are declared one after the other: each receives from the previous one the layout of its output.
        """
        found = {}
        host_group()
        for number in range(self.last + 1):
            own: Any = None
            if number in self.numbers:
                program = program_of(number)
                made = self.built(number, program)
                found[number] = program, made
                own = (tuple(program.received.values()), _Sent.of(resolved(made)))
            received, self._given[number + 1] = told_by(self.first_of(number), own)
            if number:
                ends, key = (self.first_of(number - 1), self.first_of(number)), ("from stage", number - 1)
                paired = self._paired(number)
                found_links = [self.handover(each, *ends, key, paired=paired, tag=number) for each in received]
                self._links[number] = [link for link in found_links if link is not None]
        return found

    def _order(self, group: int) -> tuple[Action, ...]:
        """Return the actions of a group of ranks in a step, in order."""
        pipeline = self.pipeline
        return actions(
            pipeline.schedule,
            group=group,
            num_groups=pipeline.num_groups,
            num_stages=self.last + 1,
            micro_batches=pipeline.micro_batches,
        )

    def _paired(self, number: int) -> frozenset[int]:
        """Return the micro-batches of which this rank begins a send with a receive, between a stage and that before."""
        numbers = (number - 1, number)
        orders = [[each for each in self._order(n % self.pipeline.num_groups) if each.stage == n] for n in numbers]
        before, after = paired_sends(*orders)
        return after if self.group == number % self.pipeline.num_groups else before

    def built(self, number: int, program: Program) -> Tensor:
        given = [self._given[number].on(program)] if number else []
        return self.pipeline.stages[number](program, *given)

    def handover(
        self,
        received: Received,
        sender: int,
        reader: int,
        key: Hashable,
        *,
        paired: frozenset[int] = frozenset(),
        tag: int = 0,
        movement_back: Movement | None = None,
    ) -> Handover | None:
        """Return the transfer between ranks, None on ranks that do not participate; all ranks call it.

        Args:
            received: Input of the reader.
            sender: First rank of the sender.
            reader: First rank of the reader.
            key: Key of its process group.
            paired: See `Handover`.
            tag: See `Handover`.
            movement_back: Owner of the bytes sent back; default: that of the forward transfer, in the backward pass.
        """
        size = self.size
        ranks = sorted([*range(sender, sender + size), *range(reader, reader + size)])
        handle = made_once((key, *ranks), partial(new_group, ranks))
        if self.rank not in ranks:
            return None
        linked = _Linked(self.rank, self.num_ranks, handle)

        def among_all(device: int) -> int:
            return reader + device if device < size else sender + device - size

        steps = received.steps
        at = next(i for i, step in enumerate(steps) if min(step.source.devices) >= size > max(step.target.devices))
        before = [_numbered(step, lambda device: device - size) for step in steps[:at]]
        across, after = _numbered(steps[at], among_all), steps[at + 1 :]
        is_sender = self.rank in range(sender, sender + size)
        own = self.groups()

        def ways(these: Iterable[ReshardStep], is_own: bool) -> tuple[Exchange, ...]:
            return tuple(exchange(step, own) for step in these) if is_own else ()

        return Handover(
            received=received,
            there=_Way(
                before=ways(before, is_sender),
                across=exchange(across, linked),
                after=ways(after, not is_sender),
                movement=received.movement,
            ),
            back=_Way(
                before=ways([step.adjoint for step in reversed(after)], not is_sender),
                across=exchange(across.adjoint, linked),
                after=ways([step.adjoint for step in reversed(before)], is_sender),
                movement=movement_back or replace(received.movement, phase=Phase.BACKWARD),
            ),
            paired=paired,
            tag=tag,
            traffic=self.traffic,
            device=self.device,
        )

    # -- weights of which several stages have copies

    def link_copies(self, copies: Mapping[str, Copy]) -> frozenset[str]:
        """Return which of this group's weights others have, too; all ranks call it. copies: of weights, by name."""
        told = told_by_all(dict(copies) if self.rank == self.first else {})
        of_groups: list[Mapping[str, Copy]] = told[:: self.size]
        for name in sorted(set().union(*of_groups)):
            holders = [group for group, own in enumerate(of_groups) if name in own]
            for giver, taker in combinations(holders, 2):
                given, taken = of_groups[giver][name], of_groups[taker][name]
                source = replace(given.layout, devices=tuple(self.size + device for device in given.layout.devices))
                received = Received(
                    steps=(ReshardStep(source, taken.layout),),
                    made=(),
                    fill=0.0,
                    movement=Movement(producer=given.layer, consumer=taken.layer, phase=Phase.BACKWARD),
                )
                movement_back = Movement(producer=taken.layer, consumer=given.layer, phase=Phase.BACKWARD)
                ends = giver * self.size, taker * self.size
                link = self.handover(received, *ends, ("copies", *ends), movement_back=movement_back)
                if link is not None:
                    self._copies.setdefault(name, {})[giver, taker] = link
        return frozenset(self._copies)

    def copies_summed(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sums of the gradients of copies; gradients: of this group's, summed over its ranks, by name."""
        under_way, found = [], {}
        # In one order on all ranks.
        for name, own in sorted(gradients.items()):
            links, parts = self._copies[name], {self.group: own}
            for (giver, _), link in links.items():
                ways = (link.there, link.back) if giver == self.group else (link.back, link.there)
                under_way += link.give(own, *ways)
            for (giver, taker), link in links.items():
                other, way = (taker, link.back) if giver == self.group else (giver, link.there)
                parts[other] = link.take(way, own.dtype).reshape(own.shape)
            # In one order everywhere, so that copies stay equal to the last bit.
            first, *others = (parts[group] for group in sorted(parts))
            found[name] = sum(others, start=first)
        wait_for(under_way)
        return found

    # -- steps

    def known(self, loss: Any) -> torch.Tensor:
        """Return on every rank the loss that the last stage's ranks have, in the type that it has the first time."""
        source = self.first_of(self.last)
        if self._loss_type is None:
            self._loss_type = told_by(source, None if loss is None else loss.dtype)
        told = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.double().reshape(())
        with naming_lost_ranks():
            dist.broadcast(told, src=source)
        return told.to(self._loss_type)

    def train(self, stages: Mapping[int, RankStage]) -> Any:
        """Run the passes of a step's micro-batches; return the mean loss on the last stage's ranks.

        stages: by number. The ranks' gradients of weights, for the mean loss, are accumulated in place.
        """
        return self._taken(self._order(self.group), stages, self.pipeline.micro_batches)

    def evaluate(self, stages: Mapping[int, RankStage], micro_batches: int = 1) -> Any:
        """Take micro-batches forward; return the mean loss on the last stage's ranks."""
        order = [Action("forward", number, i) for i in range(micro_batches) for number in self.numbers]
        with torch.no_grad():
            return self._taken(order, stages, micro_batches)

    def _taken(self, order: Iterable[Action], stages: Mapping[int, RankStage], micro_batches: int) -> Any:
        flights: dict[tuple[int, int], _Flight] = {}
        losses: list[Any] = []
        # Sends not known to have completed, with their tensors.
        under_way: list[tuple[Any, Any]] = []
        for action in order:
            number, stage, key = action.stage, stages[action.stage], (action.stage, action.micro_batch)
            before, after = self._links.get(number, []), self._links.get(number + 1, [])
            if action.kind == "forward":
                received = [link.receive(action.micro_batch) for link in before]
                y = stage.compute(action.micro_batch, received)
                if number == self.last:
                    losses.append(y.detach())
                sent = [each for link in after for each in link.send(y, action.micro_batch)]
                if torch.is_grad_enabled():
                    flights[key] = _Flight(received, y, sent)
                else:
                    under_way += sent
                # Free tensors that are no longer needed before the next pass.
                del received, y, sent
            else:
                flight = flights[key] if action.kind == "inputs" else flights.pop(key)
                if action.kind != "weights":
                    if flight.output.requires_grad:
                        flight.gradient = self._gradient(flight.output, after, micro_batches)
                        wait_for(flight.sent)
                    else:
                        under_way += flight.sent
                    flight.sent = []
                _backward(action, stage, flight)
                if action.kind != "weights":
                    under_way += _returned(before, flight.received, action.micro_batch)
                del flight
            # Gloo does not tell before it is waited for.
            under_way = [each for each in under_way if not each[0].is_completed()]
            if self.done is not None:
                self.done(action)
        wait_for(under_way)
        return torch.stack(losses).mean(0) if losses else None

    def _gradient(self, output: Any, after: Sequence[Handover], micro_batches: int) -> Any:
        if not after:
            return torch.full_like(output, 1 / micro_batches)
        first, *others = [link.receive_back(output) for link in after]
        return sum(others, start=first)


def _backward(action: Action, stage: RankStage, flight: _Flight) -> None:
    """Run a stage's backward pass: all of it, or only for the gradient of its input, or only for those of weights."""
    if action.kind == "weights" and flight.put_off is not None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        with naming_lost_ranks():
            stage_backward_weight(iter(stage.leaves()), flight.put_off)
        with stage.gradients.held(), stage.gradients.finished():
            stage.collect()
        return
    y, needing = flight.output, [x for x in flight.received if x.requires_grad]
    if not y.requires_grad or (action.kind == "inputs" and not needing):
        return  # Without an input from another stage, the whole pass is that of the weights.
    with stage.gradients.held(), naming_lost_ranks():
        if action.kind == "inputs":
            # Here and not above: it loads torch.compile's modules, which takes longer than the rest of a rank's start.
            from torch.distributed.pipelining._backward import stage_backward_input

            # It is detached then, as no view can be.
            y = y.clone() if y._is_view() else y
            _, flight.put_off = stage_backward_input([y], [flight.gradient], needing, iter(stage.leaves()))
            flight.output = flight.gradient = None
        else:
            y.backward(flight.gradient)


def _returned(before: Sequence[Handover], received: Sequence[Any], micro_batch: int) -> _Begun:
    """Begin to send back the gradients of what was received of a micro-batch."""
    sent = []
    for link, x in zip(before, received, strict=True):
        if x.requires_grad:
            sent += link.send_back(torch.zeros_like(x) if x.grad is None else x.grad, micro_batch)
            x.grad = None
    return sent


def _numbered(step: ReshardStep, number: Callable[[int], int]) -> ReshardStep:
    source, target = (replace(end, devices=tuple(map(number, end.devices))) for end in (step.source, step.target))
    return ReshardStep(source, target)
