"""Ranks of a PyTorch program as threads of this process, for quick tests of what they compute and what they send.

What goes between them goes through `Fabric`, which knows nothing of how `pase.targets.torch.collectives` puts movements
and sums together: each rank of a group hands over what it has, and takes what the others left for it. Whether all did
the same, in one order, is checked at each exchange.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed

from pase.targets.torch import collectives
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Tensor

T = TypeVar("T")

WAIT_S = 60.0


@dataclass(slots=True)
class Meeting:
    """Where the ranks of a group meet. left: what each of them brought, by its rank."""

    barrier: threading.Barrier
    left: dict[int, Any] = field(default_factory=dict)


class Fabric:
    """Stands for `torch.distributed` where ranks are threads."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, num_ranks: int) -> None:
        self.world = tuple(range(num_ranks))
        self._own = threading.local()
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()
        self.groups: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in self.world}

    def get_rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def new_group(self, ranks: Sequence[int]) -> tuple[int, ...]:
        self.groups[self.get_rank()].append(tuple(ranks))
        return tuple(ranks)

    def all_reduce(self, x: Any, op: Any = ReduceOp.SUM, group: tuple[int, ...] | None = None) -> None:
        assert x.is_contiguous()
        terms = self._exchange(group, "all_reduce", (str(op), tuple(x.shape), x.dtype), x.detach().clone())
        stacked = torch.stack([terms[rank] for rank in sorted(terms)])
        x.copy_(stacked.amax(0) if op == self.ReduceOp.MAX else stacked.sum(0))

    def all_to_all_single(
        self, output: Any, x: Any, output_splits: Sequence[int], input_splits: Sequence[int], group: Any = None
    ) -> None:
        ranks = self.world if group is None else group
        own = dict(zip(ranks, torch.split(x.detach().clone(), list(input_splits)), strict=True))
        found = self._exchange(group, "all_to_all", (x.dtype,), own)
        parts = [found[rank][self.get_rank()] for rank in ranks]
        assert [part.numel() for part in parts] == list(output_splits)
        torch.cat(parts, out=output)

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
            self._own.rank = rank
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


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What the ranks of a program found, put together. Copies of a part are checked to be equal.

    outputs, gradients, kept: by name, whole: of the program, of each weight that is trained, of each statistic. sent:
    bytes by (producer, consumer, phase).
    """

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    kept: Mapping[str, Any]
    sent: Mapping[tuple[str, str, Any], int]


Build = Callable[[Program], Mapping[str, Tensor]]
"""Declares the layers of a program and returns its outputs; that named "loss" is one number."""


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
        upstream: gradients of the outputs, whole; of a loss by default 1. Without any nothing flows back.
        trains: as the program is told.
        key: of random masks.
    """
    with fabric(num_ranks) as between:
        found = between.run(lambda rank: _of_rank(build, rank, num_ranks, values, upstream, trains, key))
    outputs: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    sent: dict[tuple[str, str, Any], int] = {}
    for own in found:
        for whole, parts in ((outputs, own.outputs), (gradients, own.gradients), (kept, own.kept)):
            for name, (shape, box, part) in parts.items():
                _put(whole, name, shape, box, part)
        for what, count in own.sent.items():
            sent[what] = sent.get(what, 0) + count
    return Computed(outputs=outputs, gradients=gradients, kept=kept, sent=sent)


@dataclass(frozen=True, kw_only=True)
class _OfRank:
    """The same of one rank: the whole shape, the part's box, the part."""

    outputs: dict[str, Any]
    gradients: dict[str, Any]
    kept: dict[str, Any]
    sent: Mapping[tuple[str, str, Any], int]


def _of_rank(
    build: Build,
    rank: int,
    num_ranks: int,
    values: Mapping[str, Any],
    upstream: Mapping[str, Any] | None,
    trains: bool,
    key: Any,
) -> _OfRank:
    program = Program(rank=rank, num_devices=num_ranks, trains=trains)
    results = dict(build(program))
    loss = results.pop("loss", None)
    traced = program.traced(loss, results)
    leaves, shards = {}, []
    for name in traced.arguments:
        if name == "mask_key":
            shards.append(key)
        elif name in traced.inputs:
            shards.append(values[name])
        else:
            weight = traced.weights[name]
            part = _part(values[name], weight.tensor, rank)
            leaves[name] = part.requires_grad_(weight.is_trained and part.is_floating_point())
            shards.append(leaves[name])
    program.traffic.is_counted = True
    loss_value, found, kept = traced.module(*shards)
    given: dict[str, tuple[Tensor, Any]] = {
        name: (tensor, x) for (name, tensor), x in zip(traced.results.items(), found, strict=True)
    }
    ends = [(x, _part(upstream[name], tensor, rank)) for name, (tensor, x) in given.items() if name in (upstream or {})]
    if loss_value is not None:
        given["loss"] = (loss, loss_value)
        ends.append((loss_value, torch.ones_like(loss_value)))
    if ends:
        torch.autograd.backward(*map(list, zip(*ends, strict=True)))
    gradients = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            tensor = traced.weights[name].tensor
            whole = leaf.grad
            if (own := traced.sums.get(name)) is not None and own.groups:
                group = program.groups.of(own.groups)
                whole = collectives.all_reduced(whole, group)
            gradients[name] = (*_place(tensor, rank), whole)
    return _OfRank(
        outputs={name: (*_place(tensor, rank), x.detach()) for name, (tensor, x) in given.items()},
        gradients=gradients,
        kept={
            name: (*_place(traced.weights[name].tensor, rank), x.detach())
            for (name, _), x in zip(traced.keeps, kept, strict=True)
        },
        sent=dict(program.traffic.sent),
    )


def _place(x: Tensor, rank: int) -> tuple[tuple[int, ...], Any]:
    if not x.dims:
        return (), ()
    return tuple(dim.size for dim in x.dims), x.layout.by_device[rank]


def _part(whole: Any, x: Tensor, rank: int) -> Any:
    shape, box = _place(x, rank)
    return whole.reshape(shape)[tuple(slice(low, high) for low, high in box)].contiguous().clone()


def _put(whole: dict[str, Any], name: str, shape: tuple[int, ...], box: Any, part: Any) -> None:
    """Put a part into a tensor that is made of nothing at first; parts that are there already are equal."""
    if name not in whole:
        whole[name] = torch.full(shape, torch.nan, dtype=torch.float64)
    place = tuple(slice(low, high) for low, high in box)
    before = whole[name][place].clone()
    assert tuple(part.shape) == tuple(before.shape), (name, part.shape, before.shape)
    held = ~before.isnan()
    torch.testing.assert_close(part.double()[held], before[held], rtol=1e-13, atol=1e-15)
    whole[name][place] = part.double()
