"""Ranks of a PyTorch program as threads of this process, for quick tests of what they compute and what they send.

What goes between them goes through `Fabric`, which knows nothing of how `pase.targets.torch.collectives` puts movements
and sums together: each rank of a group hands over what it has, and takes what the others left for it. Whether all did
the same, in one order, is checked at each exchange.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed

from pase.sharding.traffic import Movement
from pase.targets.torch import collectives
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Tensor

T = TypeVar("T")

WAIT_S = 60.0

_DONE = SimpleNamespace(wait=lambda: None)
"""What waits for a collective, which is over."""


@dataclass(slots=True)
class Meeting:
    """Where the ranks of a group meet. left: what each of them brought, by its rank."""

    barrier: threading.Barrier
    left: dict[int, Any] = field(default_factory=dict)


class World:
    """The default process group, as one rank knows it."""


class Fabric:
    """Stands for `torch.distributed` where ranks are threads."""

    ReduceOp = torch.distributed.ReduceOp
    is_alone = False
    """Whether a single rank is there, and nothing comes of the others."""

    def __init__(self, num_ranks: int) -> None:
        self.world = tuple(range(num_ranks))
        self._own = threading.local()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()
        self.groups: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in self.world}

    def become(self, rank: int) -> None:
        """Have this thread be a rank."""
        self._own.rank, self._own.group = rank, SimpleNamespace(WORLD=World())

    def get_rank(self) -> int:
        rank: int = self._own.rank
        return rank

    @property
    def group(self) -> Any:
        """What the default process group is known by; each rank has one of its own, as processes have."""
        return self._own.group

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> tuple[int, ...]:
        # The process of the test may have a process group of its own, whose backend this one then has.
        assert backend in (None, "gloo")
        self.groups[self.get_rank()].append(tuple(ranks))
        return tuple(ranks)

    def all_reduce(
        self, x: Any, op: Any = ReduceOp.SUM, group: tuple[int, ...] | None = None, async_op: bool = False
    ) -> Any:
        assert x.is_contiguous()
        if self.is_alone:
            return None
        terms = self._exchange(group, "all_reduce", (str(op), tuple(x.shape), x.dtype), x.detach().clone())
        stacked = torch.stack([terms[rank] for rank in sorted(terms)])
        x.copy_(stacked.amax(0) if op == self.ReduceOp.MAX else stacked.sum(0))
        return _DONE if async_op else None

    def all_to_all_single(
        self,
        output: Any,
        x: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        ranks = self.world if group is None else group
        even = [len(x) // len(ranks)] * len(ranks)
        own = dict(zip(ranks, torch.split(x.detach().clone(), list(input_splits or even)), strict=True))
        found = self._exchange(group, "all_to_all", (x.dtype,), own)
        parts = [found[rank][self.get_rank()] for rank in ranks]
        assert [len(part) for part in parts] == list(output_splits or even)
        torch.cat(parts, out=output)
        return _DONE if async_op else None

    def all_gather_into_tensor(self, output: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
        found = self._exchange(group, "all_gather", (x.dtype, tuple(x.shape)), x.detach().clone())
        output.copy_(torch.cat([found[rank] for rank in sorted(found)]).view(output.shape))
        return _DONE if async_op else None

    def _exchange(self, group: Any, what: str, alike: tuple[Any, ...], brought: T) -> dict[int, T]:
        """Return what each rank of a group brought to an exchange."""
        ranks = self.world if group is None else group
        with self._lock:
            meeting = self._meetings.setdefault(ranks, Meeting(threading.Barrier(len(ranks))))
        meeting.left[self.get_rank()] = (what, alike, brought)
        meeting.barrier.wait(WAIT_S)
        found = dict(meeting.left)
        meeting.barrier.wait(WAIT_S)
        assert len({each[:2] for each in found.values()}) == 1, {rank: each[:2] for rank, each in found.items()}
        return {rank: each[2] for rank, each in found.items()}

    def _break(self) -> None:
        with self._lock:
            for meeting in self._meetings.values():
                meeting.barrier.abort()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return what a function of the rank gives on each of them."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def of_rank(rank: int) -> None:
            self.become(rank)
            try:
                results[rank] = function(rank)
            # Whatever it is, the test is to see it.
            except BaseException as error:  # noqa: BLE001
                errors[rank] = error
                self._break()

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in self.world]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = next((e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)), None)
        if first is None and errors:
            raise AssertionError(f"ranks wait for each other: {errors}")
        if first is not None:
            raise first
        assert all(groups == self.groups[0] for groups in self.groups.values()), "groups are made in one order"
        return [results[rank] for rank in self.world]


@contextmanager
def fabric(num_ranks: int) -> Iterator[Fabric]:
    """Have collectives of this process go through a fabric."""
    found = Fabric(num_ranks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "dist", found)
        yield found


Build = Callable[[Program], Mapping[str, Tensor]]
"""Declares the layers of a program and returns its outputs; that named "loss" is one number."""

Placed = Mapping[str, tuple[tuple[int, ...], Any, Any]]
"""Parts of tensors by name, each with the shape of the whole and its box."""

Sent = Mapping[Movement, int]
"""Bytes by whose they are."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What the ranks of a program found, put together. Copies of a part are checked to be equal.

    outputs, gradients, kept: by name, whole: of the program, of each weight that is trained, of each statistic.
    """

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    kept: Mapping[str, Any]
    sent: Sent


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What ranks found in some steps. gradients, sent: of the first one. weights: after the last one."""

    losses: list[float]
    gradients: Mapping[str, Any]
    weights: Mapping[str, Any]
    sent: Sent


class Rank:
    """A program on one rank. leaves: its parts of weights, by name."""

    def __init__(self, build: Build, rank: int, num_ranks: int, values: Mapping[str, Any], *, trains: bool) -> None:
        self.rank, self.values = rank, values
        self.program = Program(rank=rank, num_devices=num_ranks, trains=trains)
        results = dict(build(self.program))
        self.loss = results.pop("loss", None)
        self.traced = self.program.traced(self.loss, results)
        self.leaves = {}
        for name, weight in self.traced.weights.items():
            part = self.part(values[name], weight.tensor)
            self.leaves[name] = part.requires_grad_(weight.is_trained and part.is_floating_point())

    def run(self, inputs: Mapping[str, Any], key: Any, upstream: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the outputs and the values of statistics, and leave the gradients of the leaves as they shall be."""
        known = {f"input {name}": x for name, x in inputs.items()} | {"mask_key": key}
        known |= {f"weight {name}": leaf for name, leaf in self.leaves.items()}
        loss, found, kept = self.traced.module(*map(known.__getitem__, self.traced.arguments))
        outputs = dict(zip(self.traced.results, found, strict=True))
        tensors = self.traced.results
        ends = [(outputs[name], self.part(dy, tensors[name])) for name, dy in upstream.items()]
        if loss is not None:
            outputs["loss"] = loss
            ends.append((loss, torch.ones_like(loss)))
        if ends:
            torch.autograd.backward(*map(list, zip(*ends, strict=True)))
        for name, own in self.traced.sums.items():
            leaf, group = self.leaves[name], self.program.groups.of(own.groups)
            if leaf.grad is not None:
                adder = collectives.Adder(own.movement.consumer, group, self.program.traffic)
                leaf.grad = adder.summed(leaf.grad, own.movement.phase)
        return outputs, list(kept)

    def place(self, x: Tensor | None) -> tuple[tuple[int, ...], Any]:
        """Return the shape of a tensor and the box of it that is here."""
        if x is None or not x.dims:
            return (), ()
        return tuple(dim.size for dim in x.dims), x.layout.by_device[self.rank]

    def part(self, whole: Any, x: Tensor) -> Any:
        """Return this rank's part of a tensor."""
        shape, box = self.place(x)
        return whole.reshape(shape)[tuple(slice(low, high) for low, high in box)].contiguous().clone()

    def placed(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return parts of outputs or of weights, each with the shape of the whole and where it is."""
        tensors = {name: weight.tensor for name, weight in self.traced.weights.items()} | dict(self.traced.results)
        return {name: (*self.place(tensors.get(name)), x.detach().clone()) for name, x in parts.items()}

    def gradients(self) -> dict[str, Any]:
        return self.placed({name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None})


def computed(
    build: Build,
    num_ranks: int,
    values: Mapping[str, Any],
    *,
    upstream: Mapping[str, Any] | None = None,
    trains: bool = True,
    key: Any = None,
) -> Computed:
    """Return what ranks compute.

    Args:
        build: the program.
        num_ranks: how many.
        values: whole ones, of inputs and of weights, by name.
        upstream: gradients of the outputs, whole; of a loss it is 1.
        trains: as the program is told.
        key: of random masks.
    """

    def of_rank(number: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Sent]:
        rank = Rank(build, number, num_ranks, values, trains=trains)
        rank.program.traffic.is_counted = True
        outputs, kept = rank.run({name: values[name] for name in rank.traced.inputs}, key, upstream or {})
        statistics = {name: x for (name, _), x in zip(rank.traced.keeps, kept, strict=True)}
        return rank.placed(outputs), rank.gradients(), rank.placed(statistics), dict(rank.program.traffic.sent)

    with fabric(num_ranks) as between:
        columns = list(zip(*between.run(of_rank), strict=True))
    outputs, gradients, kept = map(put_together, columns[:3])
    return Computed(outputs=outputs, gradients=gradients, kept=kept, sent=added(columns[3]))


def trained(
    build: Build,
    num_ranks: int,
    values: Mapping[str, Any],
    batches: Sequence[Mapping[str, Any]],
    optimizer: Callable[[Sequence[Any]], Any],
    *,
    keys: Sequence[Any] = (),
) -> Trained:
    """Return what ranks find in steps of training, one for each batch. optimizer: of PyTorch, of a rank's parts."""

    def of_rank(number: int) -> tuple[list[float], dict[str, Any], dict[str, Any], Sent]:
        rank = Rank(build, number, num_ranks, values, trains=True)
        rule = optimizer([leaf for leaf in rank.leaves.values() if leaf.requires_grad])
        losses, first = [], {}
        for step, batch in enumerate(batches):
            rank.program.traffic.is_counted = not step
            outputs, kept = rank.run(batch, keys[step] if keys else None, {})
            losses.append(outputs["loss"].item())
            first = first if step else rank.gradients()
            rule.step()
            rule.zero_grad()
            with torch.no_grad():
                for (name, momentum), x in zip(rank.traced.keeps, kept, strict=True):
                    rank.leaves[name].lerp_(x, momentum)
        return losses, first, rank.placed(rank.leaves), dict(rank.program.traffic.sent)

    with fabric(num_ranks) as between:
        columns = list(zip(*between.run(of_rank), strict=True))
    # Groups of ranks that sum the same parts each sum them for themselves: in an order of their own.
    assert all(losses == pytest.approx(columns[0][0], rel=1e-14) for losses in columns[0])
    return Trained(
        losses=columns[0][0],
        gradients=put_together(columns[1]),
        weights=put_together(columns[2]),
        sent=added(columns[3]),
    )


def declared(build: Build, num_ranks: int) -> Program:
    """Return the program as one of the ranks has it, to see what it declares."""
    program = Program(rank=0, num_devices=num_ranks)
    with fabric(num_ranks) as between:
        between.is_alone = True
        between.become(0)
        build(program)
    return program


COPIES = 1e-12
"""By how much copies of a part may differ, relative to the largest number of its layer's tensors.

What each rank computes for itself may differ by the order of a sum: by so many roundings of its largest terms. Where
these cancel, that is no small part of the sum itself: an attention's scores do not depend on what is added to all keys,
so that the gradient of a bias of the keys is 0, and what is found for it are roundings alone.
"""


def layer_of(name: str) -> str:
    """Return the layer of a tensor: "fc1" of "fc1/w"."""
    return name.rpartition("/")[0] or name


def layer_sizes(tensors: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Return the largest number among the tensors of each layer; a tensor may come several times, in parts."""
    sizes: dict[str, float] = {}
    for name, x in tensors:
        if x.numel():
            sizes[layer_of(name)] = max(sizes.get(layer_of(name), 0.0), float(x.abs().max()))
    return sizes


def put_together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tensors of which each rank has a part; where several have one it is equal."""
    found: dict[str, Any] = {}
    sizes = layer_sizes((name, part) for own in parts for name, (_, _, part) in own.items())
    for own in parts:
        for name, (shape, box, part) in own.items():
            whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            at = tuple(slice(low, high) for low, high in box)
            before = whole[at].clone()
            assert tuple(part.shape) == tuple(before.shape), (name, part.shape, before.shape)
            held = ~before.isnan()
            allowed = COPIES * sizes.get(layer_of(name), 0.0)
            torch.testing.assert_close(part.double()[held], before[held], rtol=0, atol=allowed, msg=name)
            whole[at] = part.double()
    return found


def added(sent: Sequence[Sent]) -> dict[Movement, int]:
    """Return the bytes of all ranks."""
    total: dict[Movement, int] = {}
    for own in sent:
        for what, count in own.items():
            total[what] = total.get(what, 0) + count
    return total
