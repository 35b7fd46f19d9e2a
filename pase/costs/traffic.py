"""What one layer computes and communicates in a training step, as arrays over its configurations, before any machine.

This is where accesses become numbers; a cost model turns them into cost.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pase.costs.layouts import (
    Component,
    FloatArray,
    IndexArray,
    IntArray,
    Splits,
    components,
    distinct_rows,
    even_bounds,
    halo_size,
    shard_size,
    split_columns,
    splits_of,
)
from pase.graph import Access, AllReduce, Exchange, Handoff, Operator, Pipeline, Relayout, Role, Window


class Pattern(StrEnum):
    """How a message travels."""

    ALL_REDUCE = "all-reduce"
    MOVE = "move"
    HALO = "halo"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """One communication inside a layer.

    tensor: what is sent. pattern: how. size_bytes: [K] on each device. group: [K] devices that take part.
    times: how often in one training step.
    """

    tensor: str
    pattern: Pattern
    size_bytes: FloatArray
    group: IntArray
    times: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTraffic:
    """flop: [K] of one training step on the busiest device, waiting in a pipeline included. messages: the rest."""

    flop: FloatArray
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraits:
    """What the graph around a layer says of one of its reads.

    has_gradient: the backward pass computes its gradient. is_fed: another layer produces it (training data is
    delivered as it is needed, halos included). is_owned: no earlier layer uses the same weight; where one
    does, what its gradient costs depends on both (`sharing`).
    """

    has_gradient: bool
    is_fed: bool
    is_owned: bool


def layer_traffic(
    operator: Operator, values: IndexArray, reads: tuple[ReadTraits, ...], *, word_bytes: int
) -> LayerTraffic:
    """Return what a layer does under each of its configurations, values: [K, D]; reads: what the graph says of each."""
    splits = splits_of(operator, values)
    messages: list[Message] = []
    for access in operator.writes:
        messages += _partial_sums(operator, access, splits, word_bytes, "")
    for access, read in zip(operator.reads, reads, strict=True):
        if read.has_gradient and read.is_owned:
            messages += _partial_sums(operator, access, splits, word_bytes, "gradient of ")
        if read.is_fed and any(isinstance(axis, Window) for axis in access.axes):
            halo = halo_size(access, splits) * word_bytes
            times = 2 if read.has_gradient else 1
            messages.append(
                Message(tensor=access.tensor, pattern=Pattern.HALO, size_bytes=halo, group=_two(halo), times=times)
            )
    for exchange in operator.exchanges:
        messages.append(_exchange(exchange, splits, word_bytes))
    return LayerTraffic(
        flop=_flop(operator, splits, tuple(read.has_gradient for read in reads)),
        messages=tuple(m for m in messages if np.any(m.size_bytes)),
    )


def memory_bytes(operator: Operator, values: IndexArray, *, word_bytes: int) -> FloatArray:
    """Return the [K] bytes that a layer keeps on each device during a step.

    Weights and their gradients, outputs and theirs. Inputs are the producer's outputs; buffers and optimiser
    state are left out.
    """
    splits = splits_of(operator, values)
    kept = (*operator.writes, *(a for a in operator.reads if a.role is Role.PARAMETER))
    total = np.zeros(len(values))
    for access in kept:
        total += 2 * word_bytes * shard_size(access.shape, access.axes, splits)
    return total


def _flop(operator: Operator, splits: Splits, has_gradient: tuple[bool, ...]) -> FloatArray:
    total = np.zeros(len(splits.values))
    for work in operator.work:
        passes = 1 + sum(has_gradient[i] for i in work.inputs)
        points = np.ones(len(splits.values))
        for dim in work.dims:
            points *= np.ceil(splits.extents[dim] / splits.of(dim))
        total += work.flop_per_point * passes * points
    if operator.pipeline:
        total *= _pipeline_factor(operator.pipeline, splits)
    return total


def _pipeline_factor(pipeline: Pipeline, splits: Splits) -> FloatArray:
    """Return by how much a wavefront over (stage, sequence) is longer than one device's own work.

    A device works through n stages of m steps each, one point at a time, after the stages and the steps before
    it. Stage by stage, the next group of stages starts (n - 1) m + 1 points later and the next part of the
    sequence m points later; step by step, n and (m - 1) n + 1 later. The better of the two orders counts.
    """
    groups, parts = splits.of(pipeline.stage).astype(np.int64), splits.of(pipeline.sequence).astype(np.int64)
    stages = np.ceil(splits.extents[pipeline.stage] / groups)
    steps = np.ceil(splits.extents[pipeline.sequence] / parts)
    stage_by_stage = (groups - 1) * ((stages - 1) * steps + 1) + (parts - 1) * steps
    step_by_step = (groups - 1) * stages + (parts - 1) * ((steps - 1) * stages + 1)
    factor: FloatArray = 1 + np.minimum(stage_by_stage, step_by_step) / (stages * steps)
    return factor


def _partial_sums(operator: Operator, access: Access, splits: Splits, word_bytes: int, what: str) -> list[Message]:
    group = splits.product(operator.partial_dims(access))
    size = shard_size(access.shape, access.axes, splits) * word_bytes * (group > 1)
    name = f"{what}{access.tensor}"
    return [Message(tensor=name, pattern=Pattern.ALL_REDUCE, size_bytes=size, group=group, times=1)]


def _exchange(exchange: Exchange, splits: Splits, word_bytes: int) -> Message:
    match exchange:
        case AllReduce():
            group = splits.product(exchange.over)
            size = shard_size(exchange.shape, exchange.axes, splits) * (group > 1)
            pattern = Pattern.ALL_REDUCE
        case Relayout():
            size = _relayout_size(exchange, splits)
            group, pattern = _two(size), Pattern.MOVE
        case Handoff():
            crossing = splits.of(exchange.across) > 1
            size = shard_size(exchange.shape, exchange.axes, splits) * crossing
            group, pattern = _two(size), Pattern.MOVE
    return Message(
        tensor=exchange.tensor, pattern=pattern, size_bytes=size * word_bytes, group=group, times=exchange.times
    )


def _relayout_size(exchange: Relayout, splits: Splits) -> FloatArray:
    """Return the [K] elements that the worst-placed device fetches.

    Unlike on an edge nothing is left to place: a device's part of every dim is given, so that where the two
    layouts split a tensor dim by different iteration dims, some device needs the part that it has least of.
    """
    needed, kept = np.ones(len(splits.values)), np.ones(len(splits.values))
    written = components(exchange.shape, exchange.written, splits.extents)
    read = components(exchange.shape, exchange.read, splits.extents)
    for ours, theirs in zip(read, written, strict=True):
        columns = split_columns((ours, theirs), splits)
        rows, inverse = distinct_rows(columns)
        pieces = np.array([_piece(ours, theirs, int(a), int(b)) for a, b in rows])[inverse]
        needed *= pieces[:, 0]
        kept *= pieces[:, 1]
    return needed - kept


def _piece(read: Component, written: Component, read_split: int, written_split: int) -> tuple[float, float]:
    """Return (needed, of which held) of one tensor dim for the device that lacks most of it."""
    need = -(-read.length // read_split)
    if read.axis == written.axis:
        return float(need), float(need)
    a, b = even_bounds(read.length, read_split), even_bounds(read.length, written_split)
    common = np.minimum(a[1:, None], b[None, 1:]) - np.maximum(a[:-1, None], b[None, :-1])
    return float(need), float(np.clip(common, 0, None).min())


def _two(like: FloatArray) -> IntArray:
    return np.full(len(like), 2, dtype=np.int64)
