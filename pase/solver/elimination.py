"""Exact min-sum variable elimination, planned before any table is filled.

Eliminating vertex w replaces every factor that mentions it by one table over its dependent set D:

    R[x_D] = min over c of [ cost_w(c) + Σ over factors f of w of f(c, x_D) ]                     (Eq. 4)

which leaves the optimum of the rest unchanged, because w occurs in no other term. Three things keep it cheap. R is
indexed by *joint layout classes* of the vertices in D, not by their configurations, for two configurations in one
class of every factor of w get the same value. Configurations of w in one class of every factor are merged to the
cheapest before the minimum is taken. And a step whose inputs are the same arrays as another's (a repeated layer) is
planned and filled once.

A plan costs microseconds a vertex and tells the exact number of operations and bytes, so that the caller can choose
another way while nothing is spent yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from pase.solver.classes import ClassAlgebra, ClassArray, Partition, class_minima
from pase.tables.cost_tables import FloatArray

BLOCK_CELLS = 1 << 15  # a block and its operands stay in the second-level cache

Check = Callable[[], None]


@dataclass(slots=True, eq=False)
class Table:
    """Values over classes; a planned table has a shape at once and values after it was filled."""

    shape: tuple[int, ...]
    values: FloatArray | None = None

    def filled(self) -> FloatArray:
        """Return the values of a table that was filled."""
        assert self.values is not None
        return self.values


class Factor(NamedTuple):
    """One term of the objective: a table over the layout classes of the vertices in `scope`."""

    scope: tuple[int, ...]
    partitions: tuple[Partition, ...]
    table: Table


class _Operand(NamedTuple):
    """How one table enters a step, whose axes are the vertex (0) and then D."""

    table: Table
    turned: tuple[int, ...] | None  # the table's axes in the step's order; None: as they are
    maps: tuple[ClassArray | None, ...]  # for each of these, the class for each class of the step; None: the identity
    shape: tuple[int, ...]  # with one axis for each of the step's; extent 1 where the table lacks it


class Kernel(NamedTuple):
    """The computation of one distinct step."""

    costs: FloatArray  # [G] the cheapest layer cost in each joint class of the vertex
    operands: tuple[_Operand, ...]
    result: Table
    partitions: tuple[Partition, ...]  # of the dependent vertices' configurations, axes of `result`
    operations: int


class _Step(NamedTuple):
    vertex: int
    costs: FloatArray
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What eliminating every vertex in one sequence will do.

    operations: combinations that will be looked at, times the terms added for each; repeated steps count once.
    table_bytes: memory of all the tables that it will fill.
    steps: for each vertex in sequence, what it takes to decide it once the later ones are.
    kernels: the distinct computations, in the order in which they can be done.
    constants: the tables without axes, whose sum is the optimum.
    """

    operations: int
    table_bytes: int
    steps: tuple[_Step, ...]
    kernels: tuple[Kernel, ...]
    constants: tuple[Table, ...]


@dataclass(slots=True, eq=False)
class Planner:
    """Plans steps, each distinct one once, and counts what they will take."""

    algebra: ClassAlgebra
    known: dict[tuple[object, ...], tuple[Kernel, object]] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    operations: int = 0
    cells: int = 0

    def eliminate(self, w: int, costs: FloatArray, factors: Sequence[Factor]) -> tuple[tuple[int, ...], Kernel]:
        """Return the dependent set of a vertex and the computation that takes it out; nothing is computed yet."""
        others = {x for f in factors for x in f.scope}
        others.discard(w)
        dependent = tuple(sorted(others))
        axis = {x: i for i, x in enumerate(dependent, 1)}
        axis[w] = 0
        axes = [tuple([axis[x] for x in f.scope]) for f in factors]
        key = (id(costs), *[(id(f.table), a, *map(id, f.partitions)) for f, a in zip(factors, axes, strict=True)])
        known = self.known.get(key)
        if known is None:  # the inputs are kept with the result, so that their ids stay theirs
            known = self.known[key] = (self._kernel(len(axis), axes, costs, factors), (costs, tuple(factors)))
        return dependent, known[0]

    def _kernel(
        self, num_axes: int, axes: list[tuple[int, ...]], costs: FloatArray, factors: Sequence[Factor]
    ) -> Kernel:
        seen: list[list[Partition]] = [[] for _ in range(num_axes)]
        for f, own in zip(factors, axes, strict=True):
            for a, p in zip(own, f.partitions, strict=True):
                seen[a].append(p)
        if not factors:
            seen[0].append(Partition(np.zeros(len(costs), dtype=np.intp), 1))
        joint = [self.algebra.join(ps) for ps in seen]
        partitions = tuple([p for p, _ in joint])
        extents = [p.num_classes for p in partitions]
        next_map = [iter(maps) for _, maps in joint]
        operands = []
        for f, own in zip(factors, axes, strict=True):
            turned = None
            if len(own) > 1:
                order = sorted(range(len(own)), key=own.__getitem__)
                if order != list(range(len(own))):
                    turned = tuple(order)
                    own = tuple([own[t] for t in order])
            maps = tuple([next(next_map[a]) for a in own])
            shape = tuple([n if a in own else 1 for a, n in enumerate(extents)])
            operands.append(_Operand(f.table, turned, maps, shape))
        result = Table(tuple(extents[1:]))
        cells = prod(result.shape)
        self.cells += cells
        operations = cells * extents[0] * max(len(factors), 1)
        self.operations += operations
        least = class_minima(costs, partitions[0].of, extents[0])
        kernel = Kernel(least, tuple(operands), result, partitions[1:], operations)
        self.kernels.append(kernel)
        return kernel


def plan_elimination(
    costs: Sequence[FloatArray], factors: Sequence[Factor], order: Sequence[int], algebra: ClassAlgebra
) -> Plan:
    """Plan the elimination of the vertices in `order`, which must hold every vertex that a factor mentions.

    costs: [V] layer costs of each vertex, over the configurations that its factors' partitions speak of; those of
    vertices that are not in `order` are not looked at.
    """
    planner = Planner(algebra)
    of_vertex: dict[int, list[Factor]] = {v: [] for v in order}
    for f in factors:
        for x in f.scope:
            of_vertex[x].append(f)
    steps: list[_Step] = []
    constants: list[Table] = []
    for w in order:
        used = of_vertex.pop(w)
        dependent, kernel = planner.eliminate(w, costs[w], used)
        steps.append(_Step(w, costs[w], tuple(used)))
        if not dependent:
            constants.append(kernel.result)
            continue
        new = Factor(dependent, kernel.partitions, kernel.result)
        gone = set(map(id, used))
        for x in dependent:
            of_vertex[x] = [*[f for f in of_vertex[x] if id(f) not in gone], new]
    return Plan(
        operations=planner.operations,
        table_bytes=8 * planner.cells,
        steps=tuple(steps),
        kernels=tuple(planner.kernels),
        constants=tuple(constants),
    )


def run_plan(plan: Plan, check: Check, on_done: Callable[[float], None] | None = None) -> tuple[float, dict[int, int]]:
    """Fill the planned tables; return the optimum and each vertex's configuration (the lowest index among equals).

    check: called between blocks of work; what it raises ends the run. on_done: called with the part that is done.
    """
    done = 0
    for kernel in plan.kernels:
        fill(kernel, check)
        done += kernel.operations
        if on_done is not None:
            on_done(done / plan.operations)
    optimum = sum(float(t.filled()) for t in plan.constants)
    choice: dict[int, int] = {}
    for step in reversed(plan.steps):
        total = step.costs
        for f in step.factors:
            # One number for each dependent vertex leaves a vector over the vertex's classes.
            index = [
                slice(None) if x == step.vertex else p.of[choice[x]] for x, p in zip(f.scope, f.partitions, strict=True)
            ]
            of = f.partitions[f.scope.index(step.vertex)].of
            total = total + f.table.filled()[tuple(index)].take(of)
        choice[step.vertex] = int(total.argmin())
    return optimum, choice


def fill(kernel: Kernel, check: Check) -> None:
    """Compute a planned table from those it depends on."""
    operands = [aligned(o) for o in kernel.operands]
    out = np.empty(kernel.result.shape)
    costs = kernel.costs.reshape(-1, *(1,) * out.ndim)
    if operands:
        smallest = min(range(len(operands)), key=lambda i: operands[i].size)
        operands[smallest] = operands[smallest] + costs
    else:
        operands = [costs]
    _min_sum(out, operands, check)
    kernel.result.values = out


def aligned(o: _Operand) -> FloatArray:
    """Return the operand with one axis for each of the step's, in its order; extent 1 where the table lacks it."""
    values = o.table.filled()
    if o.turned is not None:
        values = values.transpose(o.turned)
    for axis, classes in enumerate(o.maps):
        if classes is not None:
            values = values.take(classes, axis=axis)
    return values.reshape(o.shape)


def _min_sum(out: FloatArray, operands: list[FloatArray], check: Check) -> None:
    """Set out[x…] = min over g of the sum of the operands at [g, x…], a cache-sized block at a time."""
    if out.size > BLOCK_CELLS:
        axis = max(range(out.ndim), key=lambda a: out.shape[a])
        half = out.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            index = (slice(None),) * axis + (part,)
            _min_sum(out[index], [o[(slice(None), *index)] if o.shape[axis + 1] > 1 else o for o in operands], check)
        return
    check()
    groups = max(o.shape[0] for o in operands)
    step = max(1, BLOCK_CELLS // max(out.size, 1))
    for first in range(0, groups, step):
        block = [o[first : first + step] if o.shape[0] > 1 else o for o in operands]
        total = block[0]
        if len(block) > 1:
            total = block[0] + block[1]
            for more in block[2:]:
                total = total + more
        if first == 0:
            np.minimum.reduce(total, axis=0, out=out)
        else:
            np.minimum(out, np.minimum.reduce(total, axis=0), out=out)
