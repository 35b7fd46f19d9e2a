"""Least priced costs of whole strategies, for every choice of the vertices of each step of an elimination.

One pass up the elimination's tree (Eq. 4) gives the least cost of what lies below a step, one pass down that of all
else; their sum is the least cost of any strategy that makes the choice. Vertices are looked at by *state*:
configurations that every neighbour sees alike are in one state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pase.solver.effort import Effort
from pase.solver.network import Network
from pase.solver.ordering import Neighbours, Ordering, dependent_sets, min_fill, min_weight
from pase.tables.cost_tables import FloatArray

Pairs = Mapping[tuple[int, int], FloatArray]
"""Transfer costs of each two neighbours by state, [S_u, S_v], either way round."""

MAX_CELLS = 1 << 24
"""Choices of one step's vertices: with more, the network is to be split first."""

MAX_AXES = 32
"""NumPy's own limit, for vertices of one state, too."""

BYTES_PER_CELL = 16
"""Least priced cost of a whole strategy, and up to as much again of what lies below and of what does not."""

ORDERINGS = (min_weight, min_fill)
"""Of which the one with the fewest choices in all is taken."""


class TooWideError(Exception):
    """A step has too many choices."""


@dataclass(slots=True, eq=False)
class Step:
    """The elimination of one vertex.

    scope: the vertex, then those that it leaves a table over, in the sequence of their elimination. children: numbers
    of the steps whose tables enter. total: [states of scope] least priced cost, of the part below at first and of
    a whole strategy at last. up, down: [states of scope[1:]] of what lies below, and of what does not.
    """

    scope: tuple[int, ...]
    children: list[int]
    total: FloatArray
    up: FloatArray
    down: FloatArray


def completed(network: Network, least: Mapping[int, FloatArray], pairs: Pairs, effort: Effort) -> list[Step]:
    """Return the steps of an elimination, with the least cost of any strategy for every choice.

    least: for each live vertex, the [S] least costs of its states. Raises TooWideError.
    """
    steps = _ascend(network, least, pairs, effort)
    _descend(network, steps, effort)
    return steps


def _ascend(
    network: Network,
    least: Mapping[int, FloatArray],
    pairs: Pairs,
    effort: Effort,
) -> list[Step]:
    """Return the steps, with the least priced cost of what lies below each."""
    live = network.live
    if not live:
        return []
    around, _ = network.neighbours()
    sizes = [len(least[v]) for v in live]
    scopes, cells = min((_scopes(order, around, sizes) for order in ORDERINGS), key=lambda found: sum(found[1]))
    if (
        max(map(len, scopes)) > MAX_AXES
        or max(cells) > MAX_CELLS
        or BYTES_PER_CELL * sum(cells) > effort.memory_limit_bytes
    ):
        raise TooWideError
    steps: list[Step] = []
    waiting: dict[int, list[int]] = {}
    for number, places in enumerate(scopes):
        effort.check()
        scope = tuple(live[i] for i in places)
        total = np.zeros([sizes[i] for i in places])
        total += _spread(least[scope[0]], (0,), scope)
        for axis, d in enumerate(scope[1:], 1):
            if (scope[0], d) in pairs:
                total += _spread(pairs[scope[0], d], (0, axis), scope)
        children = waiting.pop(scope[0], [])
        for child in children:
            total += _spread(steps[child].up, axes_of(steps[child], scope), scope)
        steps.append(Step(scope, children, total, total.min(axis=0), np.zeros(0)))
        if len(scope) > 1:
            waiting.setdefault(scope[1], []).append(number)
    return steps


def _scopes(ordering: Ordering, around: Neighbours, sizes: Sequence[int]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the scope of each step of an ordering, and how many choices it has."""
    sets = dependent_sets(around, ordering(around, sizes))
    position = {i: rank for rank, i in enumerate(sets.order)}
    scopes = [(i, *sorted(d, key=position.__getitem__)) for i, d in zip(sets.order, sets.dependent, strict=True)]
    return scopes, [prod(float(sizes[i]) for i in scope) for scope in scopes]


def _descend(network: Network, steps: list[Step], effort: Effort) -> None:
    """Pass down the least priced cost of what does not lie below each step."""
    roots = [step for step in steps if len(step.scope) == 1]
    whole = network.offset + sum(float(step.up) for step in roots)
    for step in roots:
        step.down = np.array(whole - float(step.up))
    for step in reversed(steps):
        effort.check()
        step.total += step.down[None]
        for number in step.children:
            child, axes = steps[number], axes_of(steps[number], step.scope)
            others = tuple(axis for axis in range(len(step.scope)) if axis not in axes)
            child.down = (step.total - _spread(child.up, axes, step.scope)).min(axis=others)


def axes_of(child: Step, scope: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the vertices of a child's table stand in its parent's scope; the sequence is the same."""
    return tuple(scope.index(v) for v in child.scope[1:])


def _spread(values: FloatArray, axes: Sequence[int], scope: tuple[int, ...]) -> FloatArray:
    """Return values with an axis for each vertex of a scope, of extent 1 where they have none."""
    shape = [1] * len(scope)
    for axis, extent in zip(axes, values.shape, strict=True):
        shape[axis] = extent
    return values.reshape(shape)
