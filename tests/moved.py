"""What really moves between two placed layers, counted from the sets of elements that every device holds and needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.graph import Access, Edge, Graph, SliceOf, Window

Splits = Mapping[str, int]


def coordinates(extents: Mapping[str, int], split: Splits, num_devices: int) -> NDArray[np.int64]:
    """[p, D] index of each logical part along each iteration dim: row-major over the dims, then the replicas."""
    counts = [split.get(dim, 1) for dim in extents]
    replicas = num_devices // prod(counts)
    every = np.indices((*counts, replicas)).reshape(len(counts) + 1, -1)
    return every[:-1].T


@cache
def _part_at(extent: int, parts: int) -> tuple[int, ...]:
    """Return the balanced part that holds each position: the first extent % parts get one more."""
    small, extra = divmod(extent, parts)
    return tuple(part for part in range(parts) for _ in range(small + (part < extra)))


def _axis_columns(extents: Mapping[str, int], access: Access) -> list[tuple[int, str | None, int, int]]:
    """(length, iteration dim, extent that is split, offset in it) of each factor of each tensor dim."""
    found: list[tuple[int, str | None, int, int]] = []
    for length, axis in zip(access.shape, access.index_map, strict=True):
        match axis:
            case None:
                found.append((length, None, length, 0))
            case Window():
                found.append((length, axis.out, length, 0))
            case SliceOf():
                found.append((length, axis.dim, extents[axis.dim], axis.offset))
            case str():
                found.append((length, axis, length, 0))
            case _:
                found.extend((extents[d], d, extents[d], 0) for d in axis)
    return found


@dataclass(frozen=True)
class Holdings:
    """Which elements each logical part holds: factors [length of each], owned[f][part] = boolean over the factor."""

    lengths: list[int]
    owned: list[NDArray[np.bool_]]


def holdings(extents: Mapping[str, int], access: Access, split: Splits, num_devices: int) -> Holdings:
    parts = coordinates(extents, split, num_devices)
    names = list(extents)
    lengths, owned = [], []
    for length, dim, extent, offset in _axis_columns(extents, access):
        ways = 1 if dim is None else split.get(dim, 1)
        labels = np.array(_part_at(extent, ways)[offset : offset + length])
        index = np.zeros(len(parts), dtype=np.int64) if dim is None else parts[:, names.index(dim)]
        lengths.append(length)
        owned.append(labels[None, :] == index[:, None])
    return Holdings(lengths, owned)


def _joined(h: Holdings, first: int, last: int) -> NDArray[np.bool_]:
    """[p, product of lengths] elements of consecutive factors that each part holds."""
    result = np.ones((h.owned[0].shape[0], 1), dtype=bool)
    for owned in h.owned[first:last]:
        result = (result[:, :, None] & owned[:, None, :]).reshape(len(result), -1)
    return result


def overlaps(u: Holdings, v: Holdings) -> NDArray[np.float64]:
    """[v's parts, u's parts] number of elements in common."""
    result = np.ones((len(v.owned[0]), len(u.owned[0])))
    i = j = 0
    while i < len(u.lengths) or j < len(v.lengths):
        i2, j2 = min(i + 1, len(u.lengths)), min(j + 1, len(v.lengths))
        while prod(u.lengths[i:i2]) != prod(v.lengths[j:j2]):
            if prod(u.lengths[i:i2]) < prod(v.lengths[j:j2]):
                i2 += 1
            else:
                j2 += 1
        a, b = _joined(u, i, i2).astype(np.float32), _joined(v, j, j2).astype(np.float32)
        result *= (b @ a.T).astype(np.float64)
        i, j = i2, j2
    return result


def sizes(h: Holdings) -> NDArray[np.float64]:
    """[p] elements that each part holds."""
    return np.prod([owned.sum(axis=1) for owned in h.owned], axis=0).astype(np.float64)


@dataclass(frozen=True)
class EdgeOverlap:
    edge: Edge
    common: NDArray[np.float64]
    produced: NDArray[np.float64]
    consumed: NDArray[np.float64]


def edge_overlaps(graph: Graph, splits: Sequence[Splits], num_devices: int) -> list[EdgeOverlap]:
    by_name = dict(zip(graph.index, splits, strict=True))
    found = []
    for edge in graph.edges:
        producer, consumer = graph[edge.producer], graph[edge.consumer]
        u = holdings(producer.extents, producer.writes[edge.output], by_name[edge.producer], num_devices)
        v = holdings(consumer.extents, consumer.reads[edge.input], by_name[edge.consumer], num_devices)
        found.append(EdgeOverlap(edge, overlaps(u, v), sizes(u), sizes(v)))
    return found


def moved(
    graph: Graph, common: Sequence[EdgeOverlap], devices: Sequence[Sequence[int]]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """For each edge the elements that each device fetches, forward and backward; devices: of each logical part."""
    found = []
    for item in common:
        u = np.argsort(devices[graph.index[item.edge.producer]])
        v = np.argsort(devices[graph.index[item.edge.consumer]])
        kept = item.common[v, u]
        found.append((item.consumed[v] - kept, item.produced[u] - kept))
    return found
