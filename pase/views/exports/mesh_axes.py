"""One named mesh for all layers of a plan: its axes, and for each layer the axes that split each of its dims."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod

import numpy as np

from pase.placement import prime_factors
from pase.planning.plan import Plan
from pase.views.exports.mesh_digits import Demand, Digit, Way, combined, common_digits

_Axis = tuple[Digit, ...]
"""Digits that make one axis of the mesh, the coarsest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A layer on the mesh: for each dim that it splits, the names of the axes, the coarsest first.

    keeps_devices: whether each device holds the part that the plan gives it; otherwise it holds another.
    """

    axes: Mapping[str, tuple[str, ...]]
    keeps_devices: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """A mesh of devices.

    names, sizes: of its axes. devices: [p] row-major over the axes. layers: in the plan's order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    layers: tuple[Assignment, ...]


def mesh_axes(plan: Plan) -> MeshAxes:
    """Return a mesh on which all layers are said, with the plan's devices where their digits agree (`common_digits`).

    A layer whose digits do not agree with the others' keeps its splits, on other devices. An axis is one digit or
    several that all layers use together; axes are in the order in which layers use them, from coarse to fine, as far as
    there is one.
    """
    demands = [Demand(tuple(s for s in layer.splits.items() if s[1] > 1), layer.devices) for layer in plan.layers]
    counts = Counter(demands)
    digits = sorted(
        common_digits([demand for demand, _ in counts.most_common()], plan.num_devices),
        key=lambda digit: -digit.weight,
    )
    exact = {demand: demand.way_on(digits) for demand in counts}
    ways = {demand: _elsewhere(demand, digits) if way is None else way for demand, way in exact.items()}
    order: Counter[tuple[Digit, Digit]] = Counter()
    for demand, way in ways.items():
        for of_dim in way.values():
            order.update(dict.fromkeys(combinations(of_dim, 2), counts[demand]))
    axes = _ordered(_joined(digits, list(ways.values())), order)
    names = {digit: f"m{number}" for number, axis in enumerate(axes) for digit in axis}
    layers = {
        demand: Assignment(
            axes={dim: tuple(dict.fromkeys(names[digit] for digit in of_dim)) for dim, of_dim in way.items()},
            keeps_devices=exact[demand] is not None,
        )
        for demand, way in ways.items()
    }
    position = combined([digit for axis in axes for digit in axis], plan.num_devices)
    return MeshAxes(
        names=tuple(names[axis[0]] for axis in axes),
        sizes=tuple(prod(digit.size for digit in axis) for axis in axes),
        devices=tuple(np.argsort(position).tolist()),
        layers=tuple(layers[demand] for demand in demands),
    )


def _elsewhere(demand: Demand, digits: Sequence[Digit]) -> Way:
    """Return digits whose sizes make a layer's splits; dims whose own digits are among them keep these."""
    # Two dims of a layer never have a digit in common, so that what one keeps is free of the others.
    chosen: dict[str, tuple[Digit, ...]] = {}
    for dim, _ in demand.splits:
        own = [way[dim] for way in demand.ways if set(way[dim]) <= set(digits)]
        if own:
            chosen[dim] = own[0]
    free = [digit for digit in digits if all(digit not in of_dim for of_dim in chosen.values())]
    for dim, split in demand.splits:
        if dim not in chosen:
            chosen[dim] = tuple(_taken(free, prime) for prime in prime_factors(split))
    return chosen


def _taken(free: list[Digit], size: int) -> Digit:
    # Splits divide the number of devices, so that there is a digit left for each of their prime factors.
    return free.pop(next(i for i, digit in enumerate(free) if digit.size == size))


def _joined(digits: Sequence[Digit], ways: Sequence[Way]) -> list[_Axis]:
    """Return the digits in runs that each layer uses as a whole or not at all; those that no layer uses are one run."""
    tuples = [of_dim for way in ways for of_dim in way.values()]
    uses = Counter(digit for of_dim in tuples for digit in of_dim)
    follows = Counter(pair for of_dim in tuples for pair in pairwise(of_dim))
    unused = pairwise(digit for digit in digits if digit not in uses)
    after = {a: b for (a, b), count in follows.items() if count == uses[a] == uses[b]} | dict(unused)
    runs = []
    for first in digits:
        if first not in after.values():
            run = [first]
            while run[-1] in after:
                run.append(after[run[-1]])
            runs.append(tuple(run))
    return runs


def _ordered(axes: Iterable[_Axis], order: Mapping[tuple[Digit, Digit], int]) -> list[_Axis]:
    """Return the axes so that few layers use them in another order; order: how many use a digit before another."""

    def before(first: _Axis, second: _Axis) -> int:
        return sum(order.get((a, b), 0) for a in first for b in second)

    left, found = sorted(axes, key=lambda axis: -axis[-1].weight), []
    while left:
        best = min(left, key=lambda axis: sum(before(other, axis) for other in left if other is not axis))
        left.remove(best)
        found.append(best)
    return found
