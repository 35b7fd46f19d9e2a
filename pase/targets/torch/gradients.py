"""`Gradients`: parts of weights' gradients are added once, in buckets, while the backward pass goes on.

A weight's local tensor gets its gradient from PyTorch. Where ranks that hold the same part of the weight have parts of
its gradient, these are added over them: in buckets of neighbours, as soon as all of a bucket is there and in the same
order on all ranks. At the end of the backward pass every parameter has its gradient as its `grad`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pase.targets.torch.collectives import Group, Groups, Traffic, ring_bytes
from pase.targets.torch.launch import naming_lost_ranks
from pase.targets.torch.program import WeightSum

BUCKET_BYTES = 25 * 2**20
"""How large a bucket may become before the next one is begun, as `DistributedDataParallel` has it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A weight whose gradient is brought together.

    parameter: that gets it. local: this rank's part of that. sum: what brings the gradient together. wrapped: of a
    rank's part of the gradient, what the parameter's `grad` is.
    """

    parameter: Any
    local: Any
    sum: WeightSum
    wrapped: Callable[[Any], Any] = lambda gradient: gradient


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Neighbouring weights that are summed over one group, and their gradients end to end.

    views: of the buffer, by weight. arrived: which weights' gradients are there.
    """

    group: Group
    entries: list[Entry]
    buffer: Any
    views: list[Any]
    grads: list[Any]
    arrived: dict[int, Any] = field(default_factory=dict)
    work: Any = None
    total: Any = None


class Gradients:
    """Brings the gradients of weights together. entries: in the order in which layers use them."""

    def __init__(self, entries: Sequence[Entry], groups: Groups, traffic: Traffic) -> None:
        self._traffic, self._rank = traffic, groups.rank
        self._is_held = self._is_queued = False
        self._next = 0
        self._waiting: dict[int, Any] = {}
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._places: dict[int, tuple[_Bucket, int]] = {}
        # The last layers' gradients come first.
        open_buckets: dict[Any, list[Entry]] = {}
        ordered: list[tuple[Group, list[Entry]]] = []
        for entry in reversed(entries):
            group, local = groups.of(entry.sum.groups), entry.local
            if len(group.ranks) == 1 or not entry.parameter.requires_grad:
                continue
            key = (group.ranks, local.dtype, local.device)
            held = open_buckets.get(key)
            if held is None or sum(map(_bytes, held)) + _bytes(entry) > BUCKET_BYTES:
                held = open_buckets[key] = []
                ordered.append((group, held))
            held.append(entry)
        self._buckets = [self._bucket(group, held) for group, held in ordered]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave parts of gradients where they are: the next backward pass outside adds them up with its own."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def _bucket(self, group: Group, entries: list[Entry]) -> _Bucket:
        buffer = entries[0].local.new_zeros(sum(entry.local.numel() for entry in entries))
        views, at = [], 0
        for entry in entries:
            views.append(buffer[at : at + entry.local.numel()].view(entry.local.shape))
            at += entry.local.numel()
        grads = [entry.wrapped(view) for entry, view in zip(entries, views, strict=True)]
        bucket = _Bucket(group=group, entries=entries, buffer=buffer, views=views, grads=grads)
        for place, entry in enumerate(entries):
            self._places[id(entry.parameter)] = bucket, place
        return bucket

    def arrived(self, parameter: Any, gradient: Any) -> None:
        """Take a rank's part of a parameter's gradient that the backward pass has finished."""
        key = id(parameter)
        before = self._waiting.pop(key, None)
        gradient = gradient if before is None else before.add_(gradient)
        if self._is_held:
            self._waiting[key] = gradient
            return
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        found = self._places.get(key)
        if found is None:
            _give(self._entries[key], gradient, None)
            return
        bucket, place = found
        bucket.arrived[place] = gradient
        # In the order of the buckets, whatever comes first on a rank.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if len(bucket.arrived) < len(bucket.entries):
                return
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        places = sorted(bucket.arrived)
        is_first = all(bucket.entries[place].parameter.grad is None for place in places)
        is_whole = len(places) == len(bucket.entries)
        if is_first and is_whole:
            total, views = bucket.buffer, bucket.views
        else:
            # What was there before, and other weights' gradients, are not summed again.
            total = torch.empty(
                sum(bucket.views[place].numel() for place in places),
                dtype=bucket.buffer.dtype,
                device=bucket.buffer.device,
            )
            views, at = [], 0
            for place in places:
                shape = bucket.views[place].shape
                views.append(total[at : at + shape.numel()].view(shape))
                at += shape.numel()
        torch._foreach_copy_(views, [bucket.arrived[place] for place in places])
        bucket.total = total
        with naming_lost_ranks():
            bucket.work = dist.all_reduce(total, group=bucket.group.handle, async_op=True)
        if self._traffic.is_counted:
            number = bucket.group.ranks.index(self._rank)
            for place in places:
                entry = bucket.entries[place]
                self._traffic.add(
                    entry.sum.label, entry.sum.phase, ring_bytes(entry.local, len(bucket.group.ranks), number)
                )

    def _finish(self) -> None:
        """Give every parameter its gradient: the backward pass is at its end."""
        for bucket in self._buckets[self._next :]:
            if bucket.arrived:
                self._launch(bucket)
        for bucket in self._buckets:
            if bucket.work is None:
                continue
            with naming_lost_ranks():
                bucket.work.wait()
            places = sorted(bucket.arrived)
            if bucket.total is bucket.buffer:
                for entry, gradient in zip(bucket.entries, bucket.grads, strict=True):
                    entry.parameter.grad = gradient
                    _tell(entry)
            else:
                at = 0
                for place in places:
                    shape = bucket.views[place].shape
                    part = bucket.total[at : at + shape.numel()].view(shape)
                    at += shape.numel()
                    _give(bucket.entries[place], part, (bucket.views[place], bucket.grads[place]))
            bucket.work, bucket.total = None, None
            bucket.arrived.clear()
        self._next, self._is_queued = 0, False


def _give(entry: Entry, gradient: Any, own: tuple[Any, Any] | None) -> None:
    """Add a gradient to what a parameter has; own: the place of the bucket that is its gradient, and that wrapped."""
    parameter = entry.parameter
    if parameter.grad is not None:
        with torch.no_grad():
            if own is not None and parameter.grad is own[1]:
                own[0].add_(gradient)
            else:
                parameter.grad.add_(entry.wrapped(gradient))
    elif own is None:
        parameter.grad = entry.wrapped(gradient)
    else:
        own[0].copy_(gradient)
        parameter.grad = own[1]
    _tell(entry)


def _tell(entry: Entry) -> None:
    """Run what is to be run once a parameter has its gradient, where autograd does not."""
    if entry.parameter is not entry.local:
        for hook in list((entry.parameter._post_accumulate_grad_hooks or {}).values()):
            hook(entry.parameter)


def _bytes(entry: Entry) -> int:
    return int(entry.local.numel()) * int(entry.local.element_size())
