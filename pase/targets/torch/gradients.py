"""`Gradients`: parts of weights' gradients are added once, in buckets, while the backward pass goes on.

A weight's local tensor gets its gradient from PyTorch. Where ranks that hold the same part of the weight have parts of
its gradient, these are added over them: in buckets of neighbours, as soon as all of a bucket is there and in the same
order on all ranks. At the end of the backward pass every parameter has its gradient as its `grad`.

Of a weight that ranks hold in pieces (`states.py`) the sums are shared out: each rank has that of its own piece, and
what others have of theirs goes as soon as the next bucket is on its way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from pase.costs.liveness import bucket_limit
from pase.targets.torch.collectives import Group, Groups, Traffic, begun, ring_bytes, scattered
from pase.targets.torch.parameters import local_of
from pase.targets.torch.program import WeightSum
from pase.targets.torch.states import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A weight whose gradient is brought together.

    parameter: that gets it. sum: what brings the gradient together. pieces: what this rank's part of the parameter is
    one of, None where it is none.
    """

    parameter: Any
    sum: WeightSum
    pieces: Pieces | None = None

    @property
    def local(self) -> Any:
        """This rank's part of the parameter."""
        return local_of(self.parameter)

    @property
    def bytes(self) -> int:
        """Of the gradient that this rank has before it is brought together."""
        size = int(self.local.numel()) * int(self.local.element_size())
        return size if self.pieces is None else size * self.pieces.count

    @property
    def is_held(self) -> bool:
        return self.pieces is None or not self.pieces.is_summed_each_time


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Neighbouring weights that are summed over one group.

    arrived: the gradients that are there, by the weights' places. sums: waits for their sums, which lie end to end.
    parts: whose they are, and the shapes of what this rank has of them.
    """

    group: Group
    entries: list[Entry]
    arrived: dict[int, Any] = field(default_factory=dict)
    parts: list[tuple[Entry, tuple[int, ...]]] = field(default_factory=list)
    sums: Callable[[], Any] | None = None

    @property
    def is_in_pieces(self) -> bool:
        return self.entries[0].pieces is not None


class Gradients:
    """Brings the gradients of weights together. entries: in the order in which layers use them.

    give: adds a rank's part of a whole gradient to what a parameter has. num_passes: after how many backward passes all
    gradients were brought together.
    """

    def __init__(
        self, entries: Sequence[Entry], groups: Groups, traffic: Traffic, give: Callable[[Any, Any], None]
    ) -> None:
        self._traffic, self._rank, self.give = traffic, groups.rank, give
        self._is_held = self._is_queued = False
        self.num_passes = 0
        self._next = 0
        self._waiting: dict[int, Any] = {}
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._places: dict[int, tuple[_Bucket, int]] = {}
        self._buckets: list[_Bucket] = []
        summed = [
            entry for entry in entries if entry.parameter.requires_grad and len(groups.of(entry.sum.groups).ranks) > 1
        ]
        limit = bucket_limit(sum(entry.bytes for entry in summed))
        # The last layers' gradients come first.
        open_buckets: dict[Any, _Bucket] = {}
        for entry in reversed(summed):
            group, local = groups.of(entry.sum.groups), entry.local
            key = (group.ranks, local.dtype, local.device, entry.pieces is None, entry.is_held)
            bucket = open_buckets.get(key)
            if bucket is None or sum(other.bytes for other in bucket.entries) + entry.bytes > limit:
                bucket = open_buckets[key] = _Bucket(group=group, entries=[])
                self._buckets.append(bucket)
            self._places[id(entry.parameter)] = bucket, len(bucket.entries)
            bucket.entries.append(entry)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave parts of gradients where they are: the next backward pass outside adds them up with its own.

        Those of which ranks keep pieces alone are brought together nevertheless.
        """
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def arrived(self, parameter: Any, gradient: Any) -> None:
        """Take a rank's part of a parameter's gradient that the backward pass has finished; it is ours from now on."""
        key = id(parameter)
        before = self._waiting.pop(key, None)
        gradient = gradient if before is None else before.add_(gradient)
        if self._is_held and self._entries[key].is_held:
            self._waiting[key] = gradient
            return
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        found = self._places.get(key)
        if found is None:
            self.give(parameter, gradient)
            return
        bucket, place = found
        bucket.arrived[place] = gradient
        # In the order of the buckets, whatever comes first on a rank.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not (self._is_held and bucket.entries[0].is_held):
                if len(bucket.arrived) < len(bucket.entries):
                    return
                self._launch(bucket)
            self._next += 1

    def flush(self) -> None:
        """Add up what was left where it is (`held`), and give every parameter its gradient."""
        waiting, self._waiting = self._waiting, {}
        with self.finished():
            for key, gradient in waiting.items():
                self.arrived(self._entries[key].parameter, gradient)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Take gradients that arrive within while no backward pass is at work, whose end would finish this."""
        self._is_queued = True
        yield
        self._finish()

    def _launch(self, bucket: _Bucket) -> None:
        gradients = [bucket.arrived[place] for place in sorted(bucket.arrived)]
        entries = [bucket.entries[place] for place in sorted(bucket.arrived)]
        bucket.arrived.clear()
        if bucket.is_in_pieces:
            # What others sent of the one before, and what went to them, need lie nowhere any more.
            for other in self._buckets:
                if other.is_in_pieces:
                    self._give(other)
            bucket.parts = [(entry, tuple(entry.local.shape)) for entry in entries]
            rows = [e.pieces.stacked(g) for e, g in zip(entries, gradients, strict=True) if e.pieces is not None]
            gradients.clear()
            whole = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)
            rows.clear()
            bucket.sums = scattered(whole, bucket.group)
            for entry in entries:
                if entry.pieces is not None:
                    entry.pieces.count_bytes(self._traffic, entry.sum.movement.phase, entry.local.element_size())
            return
        bucket.parts = [(e, tuple(gradient.shape)) for e, gradient in zip(entries, gradients, strict=True)]
        flat = [gradient.reshape(-1) for gradient in gradients]
        # One alone is summed where it is.
        total = flat[0] if len(flat) == 1 else torch.cat(flat)
        reduce = partial(dist.all_reduce, total, group=bucket.group.handle, async_op=True)
        bucket.sums = begun(reduce, lambda: total)
        if self._traffic.is_counted:
            number = bucket.group.ranks.index(self._rank)
            for entry in entries:
                sent = ring_bytes(entry.local, len(bucket.group.ranks), number)
                self._traffic.add(entry.sum.movement, sent)

    def _give(self, bucket: _Bucket) -> None:
        if bucket.sums is None:
            return
        sums = bucket.sums().split([prod(shape) for _, shape in bucket.parts])
        for (entry, shape), total in zip(bucket.parts, sums, strict=True):
            self.give(entry.parameter, total.view(shape))
        bucket.sums, bucket.parts = None, []

    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            if bucket.arrived:
                self._launch(bucket)
        for bucket in self._buckets:
            self._give(bucket)
        self._next, self._is_queued = 0, False
        self.num_passes += not self._is_held
