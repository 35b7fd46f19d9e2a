"""Placement: which device holds which part of each layer (PaSE section II).

A device number is written in digits whose bases are the prime factors of p, the most significant first. Each
layer gives every digit to one prime factor of one of its splits, or to its replicas. Two layers that give a
digit to the same cut of the tensor between them leave that cut where it is, so that placing a layer is
matching its splits to the digits where its producers have theirs: small work even for thousands of devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pase.costs.layouts import components, split_columns, splits_of
from pase.costs.overlap import shared_splits
from pase.graph import Edge, Graph, Operator, Part, Window

Slot = tuple[str, int]
"""A prime factor of a dim's split: (dim, position among the split's factors, the coarsest first)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """digits: for each digit of a device number, the slot that it selects; None for a replica."""

    digits: tuple[Slot | None, ...]


def place(graph: Graph, num_devices: int, splits: Sequence[Mapping[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each layer, the device of each of its parts, [p].

    splits: for each layer, the split factor of each iteration dim; their product divides num_devices. Parts are
    counted row-major over the dims that are split, in the order of the iteration space, then the replicas.
    Layers are placed in topological order, each as close to its producers as they allow, the largest tensors
    first (the paper's greedy assignment that maximises locality).
    """
    bases = prime_factors(num_devices)
    placed: dict[str, Placement] = {}
    into: dict[str, list[Edge]] = {operator.name: [] for operator in graph.operators}
    for edge in graph.edges:
        into[edge.consumer].append(edge)
    by_name = dict(zip(graph.index, splits, strict=True))
    result = []
    for operator, split in zip(graph.operators, splits, strict=True):
        wishes = _wishes(graph, into[operator.name], placed, by_name)
        placement = _assign(operator, split, bases, wishes)
        placed[operator.name] = placement
        result.append(_devices(operator, split, bases, placement))
    return tuple(result)


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number of 1 or more, ascending, with repetitions."""
    factors, factor = [], 2
    while number > 1:
        if factor * factor > number:
            factor = number
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)


def _wishes(
    graph: Graph, edges: Sequence[Edge], placed: Mapping[str, Placement], splits: Mapping[str, Mapping[str, int]]
) -> dict[tuple[Slot, int], float]:
    """Return, for a slot of the consumer and a digit, the elements of tensors that would stay where they are."""
    wishes: dict[tuple[Slot, int], float] = {}
    for edge in edges:
        producer, consumer = graph[edge.producer], graph[edge.consumer]
        digit_of = {slot: digit for digit, slot in enumerate(placed[producer.name].digits) if slot is not None}
        size = producer.writes[edge.output].size
        for theirs, ours in _same_cuts(producer, splits[producer.name], consumer, splits[consumer.name], edge):
            key = ours, digit_of[theirs]
            wishes[key] = wishes.get(key, 0.0) + size
    return wishes


def _same_cuts(
    producer: Operator, u_splits: Mapping[str, int], consumer: Operator, v_splits: Mapping[str, int], edge: Edge
) -> list[tuple[Slot, Slot]]:
    """Return the pairs (producer's slot, consumer's slot) that cut the tensor of an edge at the same bounds."""
    sides = []
    for operator, split, access in (
        (producer, u_splits, producer.writes[edge.output]),
        (consumer, v_splits, consumer.reads[edge.input]),
    ):
        parts = components(access.shape, access.axes, operator.extents)
        row = np.array([list(split.values())], dtype=np.int32)
        sides.append((parts, split_columns(parts, splits_of(operator, row))[0]))
    (u, u_row), (v, v_row) = sides
    pairs: list[tuple[Slot, Slot]] = []
    for shared in shared_splits(u, u_row, v, v_row):
        u_first, v_first = len(prime_factors(shared.u_above)), len(prime_factors(shared.v_above))
        u_primes, v_primes = prime_factors(shared.u_factor), prime_factors(shared.v_factor)
        for level, (a, b) in enumerate(zip(u_primes, v_primes, strict=False)):
            if a != b:
                break
            pairs.append(((_dim(u[shared.u].axis), u_first + level), (_dim(v[shared.v].axis), v_first + level)))
    return pairs


def _dim(axis: str | Window | Part | None) -> str:
    match axis:
        case str():
            return axis
        case Window():
            return axis.out
    raise AssertionError(f"{axis} is never split in a shared cut")


def _assign(
    operator: Operator, split: Mapping[str, int], bases: tuple[int, ...], wishes: Mapping[tuple[Slot, int], float]
) -> Placement:
    """Give every digit to a slot of its base, or to a replica: the largest wishes first, the rest in order."""
    primes = {(dim, i): prime for dim in operator.extents for i, prime in enumerate(prime_factors(split[dim]))}
    digits: list[Slot | None] = [None] * len(bases)
    open_slots = dict(primes)
    for (slot, digit), _ in sorted(wishes.items(), key=lambda item: (-item[1], item[0][1], item[0][0])):
        if slot in open_slots and digits[digit] is None and bases[digit] == primes[slot]:
            digits[digit] = slot
            del open_slots[slot]
    for slot, prime in open_slots.items():
        digit = next(i for i, base in enumerate(bases) if digits[i] is None and base == prime)
        digits[digit] = slot
    return Placement(digits=tuple(digits))


def _devices(
    operator: Operator, split: Mapping[str, int], bases: tuple[int, ...], placement: Placement
) -> tuple[int, ...]:
    """Return the device of each part, row-major over the split dims and the replicas."""
    weights = [prod(bases[i + 1 :]) for i in range(len(bases))]
    shape = [k for k in (split[dim] for dim in operator.extents) if k > 1]
    names = [dim for dim in operator.extents if split[dim] > 1]
    replicas = prod(bases) // prod(shape)
    index = np.indices((*shape, replicas)).reshape(len(shape) + 1, -1)
    device = np.zeros(index.shape[1], dtype=np.int64)
    for dim, position in zip(names, index[:-1], strict=True):
        primes = prime_factors(split[dim])
        for level, prime in enumerate(primes):
            digit = placement.digits.index((dim, level))
            device += position // prod(primes[level + 1 :]) % prime * weights[digit]
    free = [i for i, slot in enumerate(placement.digits) if slot is None]
    for rank, digit in enumerate(free):
        device += index[-1] // prod(bases[i] for i in free[rank + 1 :]) % bases[digit] * weights[digit]
    assert sorted(device.tolist()) == list(range(prod(bases))), f"placement of {operator.name} is no permutation"
    return tuple(device.tolist())
