"""Min-marginals: for every vertex and configuration at once, the cheapest strategy in which the vertex has it.

Elimination (`elimination`) sends costs one way: the table R_w that eliminating w leaves says, for each choice of w's
dependent set D, the least that w and what was eliminated into it cost. The same tables read the other way say what all
*other* vertices cost at least: where w's table entered the step of p, the first of D to be eliminated,

    M_w[x_D] = min over the other vertices of that step of [ cost_p + Σ factors + M_p ] − R_w[x_D]

with M of a last vertex the optimum of what is not connected with it. Then cost_w(c) + Σ factors(c, x_D) + M_w[x_D],
least over x_D, is the cost of the cheapest strategy in which w has configuration c: two passes answer what would take
one search for each vertex and configuration (the two-pass rule of junction trees, in the min-sum semiring).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from pase.solver.classes import ClassAlgebra, ClassArray, Partition, class_minima
from pase.solver.effort import RELATIVE_TOLERANCE, Check
from pase.solver.elimination import Factor, Kernel, Planner, aligned, fill
from pase.solver.network import Network
from pase.solver.ordering import AUTO, choose_ordering
from pase.tables.cost_tables import CostTables, FloatArray


class _Entry(NamedTuple):
    """How a factor lies in a step.

    axes: of the step, for each vertex of its scope. maps: the factor's class for each of the step's, in the scope's
    order; None: the same. producer: the step whose table it is, or None.
    """

    factor: Factor
    axes: tuple[int, ...]
    maps: tuple[ClassArray | None, ...]
    producer: int | None


class _Step(NamedTuple):
    """One vertex's elimination. scope: it and its dependent set; partitions: their joint classes, the step's axes."""

    scope: tuple[int, ...]
    costs: FloatArray
    partitions: tuple[Partition, ...]
    kernel: Kernel
    entries: tuple[_Entry, ...]


@dataclass(slots=True, eq=False)
class Marginals:
    """What `min_marginals` returns.

    costs: [V] the [K] cost of the cheapest strategy in which a vertex has each configuration.
    """

    costs: tuple[FloatArray, ...]
    _reference: tuple[int, ...]
    _steps: tuple[_Step, ...]
    _outer: Mapping[int, FloatArray]
    _step_of: Mapping[int, int] = field(init=False)
    _parent: Mapping[int, int] = field(init=False)
    _slack: float = field(init=False)

    def __post_init__(self) -> None:
        """Index the steps."""
        self._step_of = {step.scope[0]: number for number, step in enumerate(self._steps)}
        self._parent = {
            entry.producer: number
            for number, step in enumerate(self._steps)
            for entry in step.entries
            if entry.producer is not None
        }
        least = min((float(costs.min()) for costs in self.costs), default=0.0)
        self._slack = RELATIVE_TOLERANCE * abs(least)

    def strategy(self, vertex: int, configuration: int) -> tuple[int, ...]:
        """Return a cheapest strategy in which a vertex has a configuration; of equals one near to the reference."""
        choice = list(self._reference)
        for v, c in self.changes(vertex, configuration).items():
            choice[v] = c
        return tuple(choice)

    def changes(self, vertex: int, configuration: int) -> dict[int, int]:
        """Return where a cheapest strategy in which a vertex has a configuration differs from the reference.

        Of equals one near to the reference. What need not change is not looked at.
        """
        if configuration == self._reference[vertex]:
            return {}
        changes = {vertex: configuration}
        path = [self._step_of[vertex]]
        classes = self._dependents(path[0], configuration)
        while classes is not None:
            number = self._parent[path[-1]]
            classes = self._decide(number, path[-1], classes, changes)
            path.append(number)
        for number, above in zip(path, [None, *path], strict=False):
            self._descend(number, above, changes)
        return changes

    def _dependents(self, number: int, configuration: int) -> tuple[int, ...] | None:
        """Return the best classes of a first vertex's dependent set, or None where those of the reference are."""
        step = self._steps[number]
        total = _total(step, self._outer[number])[int(step.partitions[0].of[configuration])]
        reference = self._reference_classes(number)[1:]
        least = float(total.min()) + self._slack
        return None if total[reference] <= least else _first(total <= least)

    def _decide(
        self, number: int, child: int, classes: tuple[int, ...], changes: dict[int, int]
    ) -> tuple[int, ...] | None:
        """Choose a step's vertex where the classes of one of its tables are given; return those of its dependents."""
        step = self._steps[number]
        (entry,) = (entry for entry in step.entries if entry.producer == child)
        total = _total(step, self._outer[number])
        allowed = np.zeros(total.shape, dtype=bool)
        wanted = {
            axis: np.flatnonzero(of == chosen) if of is not None else np.array([chosen])
            for axis, of, chosen in zip(entry.axes, entry.maps, classes, strict=True)
        }
        allowed[np.ix_(*(wanted.get(a, np.arange(size)) for a, size in enumerate(total.shape)))] = True
        total = np.where(allowed, total, np.inf)
        least = float(total.min()) + self._slack
        reference = self._reference_classes(number)
        if total[reference] <= least:
            found = reference
        elif (total[reference[0]] <= least).any():
            found = (reference[0], *_first(total[reference[0]] <= least))
        else:
            found = _first(total <= least)
        if found[0] != reference[0]:
            alike = step.partitions[0].of == found[0]
            changes[step.scope[0]] = int(np.where(alike, step.costs, np.inf).argmin())
        return None if found[1:] == reference[1:] else found[1:]

    def _reference_classes(self, number: int) -> tuple[int, ...]:
        """Return the joint classes of the reference in a step."""
        step = self._steps[number]
        return tuple(int(p.of[self._reference[x]]) for x, p in zip(step.scope, step.partitions, strict=True))

    def _descend(self, number: int, above: int | None, changes: dict[int, int]) -> None:
        """Decide what was eliminated into a step, where a vertex that it depends on is not as in the reference."""
        waiting = [entry.producer for entry in self._steps[number].entries if entry.producer not in (None, above)]
        while waiting:
            current = waiting.pop()
            assert current is not None
            step = self._steps[current]
            if changes.keys().isdisjoint(step.scope[1:]):
                continue
            vertex = step.scope[0]
            total = step.costs
            for factor, _, _, producer in step.entries:
                index = tuple(
                    slice(None) if x == vertex else p.of[changes.get(x, self._reference[x])]
                    for x, p in zip(factor.scope, factor.partitions, strict=True)
                )
                of = factor.partitions[factor.scope.index(vertex)].of
                total = total + factor.table.filled()[index].take(of)
                waiting += [] if producer is None else [producer]
            if total[self._reference[vertex]] > float(total.min()) + self._slack:
                changes[vertex] = int(total.argmin())


def min_marginals(
    tables: CostTables,
    reference: Sequence[int],
    *,
    max_cells: int,
    ceiling: float = np.inf,
    check: Check = lambda: None,
) -> Marginals | None:
    """Return the min-marginals of a problem, or None where a pass would look at more than `max_cells` combinations.

    reference: [V] a cheapest strategy, of which alternatives are to be variations. ceiling: costs above it count as it,
    which must be finite where the tables are not.
    """
    network = Network.of_tables(tables, ceiling)
    ordering = choose_ordering(AUTO, *network.neighbours())
    steps = _plan(network, ordering.order, max_cells)
    if steps is None:
        return None
    done: set[int] = set()
    for step in steps:
        if id(step.kernel) not in done:
            fill(step.kernel, check)
            done.add(id(step.kernel))
    whole = sum(float(step.kernel.result.filled()) for step in steps if not step.kernel.result.shape)
    outer: dict[int, FloatArray] = {}
    costs: list[FloatArray] = [np.empty(0)] * tables.num_vertices
    for number in range(len(steps) - 1, -1, -1):
        check()
        step = steps[number]
        if number not in outer:  # a last vertex
            outer[number] = np.array(whole - float(step.kernel.result.filled()))
        total = _total(step, outer[number])
        of = step.partitions[0].of
        least = class_minima(step.costs, of, step.partitions[0].num_classes)
        costs[step.scope[0]] = total.reshape(len(total), -1).min(axis=1)[of] + (step.costs - least[of])
        for entry in step.entries:
            if entry.producer is not None:
                outer[entry.producer] = _seen_by(entry, total) - entry.factor.table.filled()
    return Marginals(tuple(costs), tuple(reference), steps, outer)


def _plan(network: Network, order: Sequence[int], max_cells: int) -> tuple[_Step, ...] | None:
    """Return the steps of an elimination, with no table filled; None if they have more than `max_cells` entries."""
    planner = Planner(ClassAlgebra())
    of_vertex: dict[int, list[tuple[Factor, int | None]]] = {v: [] for v in order}
    for factor in network.factors():
        for x in factor.scope:
            of_vertex[x].append((factor, None))
    steps: list[_Step] = []
    cells = 0
    for number, w in enumerate(order):
        used = of_vertex.pop(w)
        factors = [factor for factor, _ in used]
        dependent, kernel = planner.eliminate(w, network.costs[w], factors)
        scope = (w, *dependent)
        axis = {x: i for i, x in enumerate(scope)}
        axes = [tuple(axis[x] for x in factor.scope) for factor in factors]
        own, maps = _classes(planner.algebra, network.costs[w], factors, axes)
        partitions = (own, *kernel.partitions)
        cells += prod(p.num_classes for p in partitions)
        if cells > max_cells:
            return None
        entries = tuple(_Entry(f, a, m, producer) for (f, producer), a, m in zip(used, axes, maps, strict=True))
        steps.append(_Step(scope, network.costs[w], partitions, kernel, entries))
        gone = {id(factor) for factor in factors}
        new = Factor(dependent, kernel.partitions, kernel.result)
        for x in dependent:
            of_vertex[x] = [*[pair for pair in of_vertex[x] if id(pair[0]) not in gone], (new, number)]
    return tuple(steps)


def _classes(
    algebra: ClassAlgebra, costs: FloatArray, factors: Sequence[Factor], axes: Sequence[tuple[int, ...]]
) -> tuple[Partition, list[tuple[ClassArray | None, ...]]]:
    """Return the joint classes of a step's vertex and, for each factor, its class for each joint class of its scope."""
    seen: dict[int, list[Partition]] = {0: []}
    for factor, own in zip(factors, axes, strict=True):
        for a, p in zip(own, factor.partitions, strict=True):
            seen.setdefault(a, []).append(p)
    if not factors:
        return Partition(np.zeros(len(costs), dtype=np.intp), 1), []
    joined = {a: algebra.join(partitions) for a, partitions in seen.items()}
    following = {a: iter(maps) for a, (_, maps) in joined.items()}
    return joined[0][0], [tuple(next(following[a]) for a in own) for own in axes]


def _total(step: _Step, outer: FloatArray) -> FloatArray:
    """Return, over the joint classes of a step's scope, the least cost of the whole with each combination."""
    num_axes = len(step.partitions)
    least = class_minima(step.costs, step.partitions[0].of, step.partitions[0].num_classes)
    # Small tables are added up first, and all to one large array in place: making such arrays is most of the work.
    total = outer[None] + least.reshape(-1, *(1,) * (num_axes - 1))
    for operand in sorted(map(aligned, step.kernel.operands), key=np.size):
        if np.broadcast_shapes(total.shape, operand.shape) == total.shape:
            total += operand
        else:
            total = total + operand
    return total


def _seen_by(entry: _Entry, total: FloatArray) -> FloatArray:
    """Return the least of a step's costs for each entry of one of its factors, in the factor's order of axes."""
    others = tuple(a for a in range(total.ndim) if a not in entry.axes)
    least = total.min(axis=others) if others else total
    ranked = sorted(entry.axes)
    for position, axis in enumerate(ranked):
        of = entry.maps[entry.axes.index(axis)]
        if of is not None:
            size = entry.factor.partitions[entry.axes.index(axis)].num_classes
            least = _class_minima_along(least, of, size, position)
    return least.transpose([ranked.index(axis) for axis in entry.axes])


def _class_minima_along(values: FloatArray, of: ClassArray, num_classes: int, axis: int) -> FloatArray:
    """Return the least of each class along one axis; +inf for a class that does not occur."""
    order = np.argsort(of, kind="stable")
    ranked = of[order]
    first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    shape = list(values.shape)
    shape[axis] = num_classes
    found = np.full(shape, np.inf)
    index = [slice(None)] * values.ndim
    at: list[slice | ClassArray] = list(index)
    at[axis] = ranked[first]
    found[tuple(at)] = np.minimum.reduceat(values.take(order, axis=axis), first, axis=axis)
    return found


def _first(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[int, ...]:
    """Return the index of the first entry that is true."""
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))
