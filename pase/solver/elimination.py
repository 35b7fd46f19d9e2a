"""Variable elimination, planned before any table is filled.

Eliminating vertex w replaces every factor that mentions it by one table over its dependent set D:

    R[x_D] = min over c of [ cost_w(c) + Σ over factors f of w of f(c, x_D) ]                     (Eq. 4)

which leaves the optimum of the rest unchanged, because w occurs in no other term. Three things keep it cheap. R is
indexed by *joint layout classes* of the vertices in D, not by their configurations, for two configurations in one
class of every factor of w get the same value. Configurations of w in one class of every factor are merged to the
cheapest before the minimum is taken. And a step whose inputs are the same arrays as another's (a repeated layer) is
planned and filled once.

A plan costs microseconds a vertex and tells the exact number of operations and bytes, so that the caller can choose
another way while nothing is spent yet. It is what every walk over an elimination follows: least costs (`run_plan`),
both ways, and with fronts of cost and resource instead of one number (`two_pass`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from pase.solver.pairwise import (
    ClassAlgebra,
    ClassArray,
    Edge,
    PairwiseModel,
    Partition,
    by_configuration,
    class_minima,
)
from pase.solver.solution import Outcome, SearchBudget
from pase.tables.cost_tables import FloatArray

BLOCK_CELLS = 1 << 15  # a block and its operands stay in the second-level cache

Check = Callable[[int], None]
"""Called before each step of work with how many cells of tables that looks at; what it raises ends the work."""
Ordered = Callable[[PairwiseModel], Sequence[int]]
"""Gives the sequence in which to eliminate the live vertices of a model."""


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
    """One term of the objective: a table over the layout classes of the vertices in `scope`.

    edge: whose costs these are, or producer: the number of the step that leaves this table.
    """

    scope: tuple[int, ...]
    partitions: tuple[Partition, ...]
    table: Table
    edge: Edge | None = None
    producer: int | None = None


class Operand(NamedTuple):
    """How one table enters a step, whose axes are the vertex (0) and then D.

    turned: the table's axes in the step's order; None: as they are. The rest is in that order. axes: of the step.
    maps: for each class of the step's axis, that of the table; None: the same. shape: with one axis for each of the
    step's; extent 1 where the table lacks it.
    """

    table: Table
    turned: tuple[int, ...] | None
    axes: tuple[int, ...]
    maps: tuple[ClassArray | None, ...]
    shape: tuple[int, ...]

    def aligned(self, rows: Sequence[ClassArray] | None = None) -> FloatArray:
        """Return the table's values with one axis for each of the step's, in its order.

        rows: the classes on each of the step's axes that are looked at; None: all.
        """
        values = self.table.filled()
        if self.turned is not None:
            values = values.transpose(self.turned)
        if rows is not None:
            chosen = [rows[a] if m is None else m[rows[a]] for a, m in zip(self.axes, self.maps, strict=True)]
            return values[np.ix_(*chosen)].reshape([len(rows[a]) if a in self.axes else 1 for a in range(len(rows))])
        for axis, classes in enumerate(self.maps):
            if classes is not None:
                values = values.take(classes, axis=axis)
        return values.reshape(self.shape)

    def cells_of(self, cells: Sequence[ClassArray]) -> tuple[ClassArray, ...]:
        """Return where the table has some cells of the step; cells: the classes on each of the step's axes."""
        found = [cells[a] if m is None else m[cells[a]] for a, m in zip(self.axes, self.maps, strict=True)]
        return tuple(found) if self.turned is None else tuple([found[k] for k in np.argsort(self.turned)])


class Kernel(NamedTuple):
    """The computation of one distinct step.

    costs: [G] the cheapest layer cost in each joint class of the vertex. partitions: joint classes of the vertex and of
    its dependent ones, the axes of the step. result: the table over all but the first.
    """

    costs: FloatArray
    operands: tuple[Operand, ...]
    result: Table
    partitions: tuple[Partition, ...]
    operations: int

    def fill(self, check: Check) -> None:
        """Compute the result from the tables that it depends on."""
        operands = [o.aligned() for o in self.operands]
        out = np.empty(self.result.shape)
        costs = self.costs.reshape(-1, *(1,) * out.ndim)
        if operands:
            smallest = min(range(len(operands)), key=lambda i: operands[i].size)
            operands[smallest] = operands[smallest] + costs
        else:
            operands = [costs]
        _min_sum(out, operands, check)
        self.result.values = out


class EliminationStep(NamedTuple):
    """The elimination of one vertex: of what, and how. scope: the vertex and its dependent set."""

    scope: tuple[int, ...]
    costs: FloatArray
    factors: tuple[Factor, ...]
    kernel: Kernel

    def cells(self) -> int:
        """Return how many combinations of joint classes the step looks at."""
        return prod(p.num_classes for p in self.kernel.partitions)

    def beside(self, choice: Callable[[int], int]) -> FloatArray:
        """Return the cost of each configuration of the vertex, with what was eliminated into it, given the rest."""
        vertex, total = self.scope[0], self.costs
        for scope, partitions, table, *_ in self.factors:
            # One number for each dependent vertex leaves a vector over the vertex's classes.
            index = [slice(None) if x == vertex else p.of[choice(x)] for x, p in zip(scope, partitions, strict=True)]
            total = total + table.filled()[tuple(index)].take(partitions[scope.index(vertex)].of)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EliminationPlan:
    """What eliminating every vertex in one sequence will do.

    operations: combinations that will be looked at, times the terms added for each; repeated steps count once.
    table_bytes: memory of all the tables that it will fill.
    steps: one for each vertex, in sequence.
    kernels: the distinct computations, in the order in which they can be done.
    """

    operations: int
    table_bytes: int
    steps: tuple[EliminationStep, ...]
    kernels: tuple[Kernel, ...]

    def fill(self, check: Check, on_done: Callable[[float], None] = lambda _: None) -> float:
        """Fill the planned tables; return the optimum.

        check: called between blocks of work; what it raises ends the run. on_done: called with the part that is done.
        """
        done = 0
        for kernel in self.kernels:
            kernel.fill(check)
            done += kernel.operations
            on_done(done / self.operations)
        return sum(float(step.kernel.result.filled()) for step in self.steps if len(step.scope) == 1)


@dataclass(slots=True, eq=False)
class Planner:
    """Plans steps, each distinct one once, and counts what they will take."""

    algebra: ClassAlgebra = field(default_factory=ClassAlgebra)
    known: dict[tuple[object, ...], EliminationStep] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    partitions: dict[int, Partition] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)

    def factor(self, edge: Edge) -> Factor:
        """Return an edge as a factor; equal arrays become equal partitions and tables."""
        values = edge.values
        ends = []
        for of, size in zip(edge.of, values.shape, strict=True):
            if id(of) not in self.partitions:
                self.partitions[id(of)] = Partition(of, size)
            ends.append(self.partitions[id(of)])
        if id(values) not in self.tables:
            self.tables[id(values)] = Table(values.shape, values)
        return Factor(edge.ends, (ends[0], ends[1]), self.tables[id(values)], edge)

    def eliminate(self, w: int, costs: FloatArray, factors: Sequence[Factor]) -> EliminationStep:
        """Return the step that takes a vertex out; nothing is computed yet."""
        others = {x for f in factors for x in f.scope}
        others.discard(w)
        scope = (w, *sorted(others))
        axis = {x: i for i, x in enumerate(scope)}
        axes = [tuple([axis[x] for x in f.scope]) for f in factors]
        key = (id(costs), *[(id(f.table), a, *map(id, f.partitions)) for f, a in zip(factors, axes, strict=True)])
        step = self.known.get(key)
        if step is None:  # the inputs are kept with the result, so that their ids stay theirs
            kernel = self._kernel(len(axis), axes, costs, factors)
            step = self.known[key] = EliminationStep(scope, costs, tuple(factors), kernel)
            return step
        return EliminationStep(scope, costs, tuple(factors), step.kernel)

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
            if any(a > b for a, b in pairwise(own)):
                turned = tuple(sorted(range(len(own)), key=own.__getitem__))
                own = tuple([own[t] for t in turned])
            maps = tuple([next(next_map[a]) for a in own])
            shape = tuple([n if a in own else 1 for a, n in enumerate(extents)])
            operands.append(Operand(f.table, turned, own, maps, shape))
        result = Table(tuple(extents[1:]))
        operations = prod(extents) * max(len(factors), 1)
        least = class_minima(costs, partitions[0].of, extents[0])
        kernel = Kernel(least, tuple(operands), result, partitions, operations)
        self.kernels.append(kernel)
        return kernel


def plan_elimination(costs: Sequence[FloatArray], edges: Iterable[Edge], order: Sequence[int]) -> EliminationPlan:
    """Plan the elimination of the vertices in `order`, which must hold every vertex that an edge joins.

    costs: [V] layer costs of each vertex, over the configurations that its edges' classes speak of; those of vertices
    that are not in `order` are not looked at.
    """
    planner = Planner()
    of_vertex: dict[int, list[Factor]] = {v: [] for v in order}
    for edge in edges:
        factor = planner.factor(edge)
        for x in edge.ends:
            of_vertex[x].append(factor)
    steps: list[EliminationStep] = []
    for number, w in enumerate(order):
        step = planner.eliminate(w, costs[w], of_vertex.pop(w))
        steps.append(step)
        dependent = step.scope[1:]
        new = Factor(dependent, step.kernel.partitions[1:], step.kernel.result, producer=number)
        gone = set(map(id, step.factors))
        for x in dependent:
            of_vertex[x] = [*[f for f in of_vertex[x] if id(f) not in gone], new]
    return EliminationPlan(
        operations=sum(kernel.operations for kernel in planner.kernels),
        table_bytes=8 * sum(prod(kernel.result.shape) for kernel in planner.kernels),
        steps=tuple(steps),
        kernels=tuple(planner.kernels),
    )


def run_plan(
    plan: EliminationPlan, check: Check, on_done: Callable[[float], None] = lambda _: None
) -> tuple[float, dict[int, int]]:
    """Fill the planned tables; return the optimum and each vertex's configuration (the lowest index among equals).

    Arguments as for `EliminationPlan.fill`.
    """
    optimum = plan.fill(check, on_done)
    choice: dict[int, int] = {}
    for step in reversed(plan.steps):
        choice[step.scope[0]] = int(step.beside(choice.__getitem__).argmin())
    return optimum, choice


def optimal_strategy(
    model: PairwiseModel, ordered: Ordered, max_operations: int, budget: SearchBudget
) -> tuple[float, dict[int, int]] | None:
    """Return the least cost of a model and a strategy that has it, by elimination; None if beyond the limits."""
    if not model.live:
        return model.offset, model.complete({})
    plan = plan_elimination(model.costs, model.edges(), ordered(model))
    held_bytes = model.own_bytes() + plan.table_bytes
    if held_bytes > budget.solver_memory_bytes or plan.operations > max_operations:
        return None
    budget.holds(held_bytes)
    budget.operations += plan.operations
    message = f"eliminating {len(model.live)} layers"
    optimum, chosen = run_plan(plan, budget.check, lambda fraction: budget.progress(message, fraction))
    return optimum + model.offset, model.complete(chosen)


def eliminate_exactly(
    model: PairwiseModel, ordered: Ordered, max_operations: int, budget: SearchBudget, outcome: Outcome
) -> bool:
    """Eliminate what is left if that is within the limits; return whether it was: the best strategy is optimal.

    ordered: gives the sequence in which to eliminate the live vertices of a model.
    """
    outcome.num_configurations_left, outcome.num_vertices_left = model.num_configurations(), len(model.live)
    best = optimal_strategy(model, ordered, max_operations, budget)
    if best is None:
        return False
    outcome.settle(best[1])
    return True


def eliminate_tree(model: PairwiseModel, order: Sequence[int], check: Check) -> tuple[float, dict[int, int]] | None:
    """Return the least cost and a strategy that has it; None if the model is not a tree.

    This is the elimination where no dependent set has two vertices, with nothing to plan: each vertex, leaves first,
    sends its only later neighbour one vector. order: the live vertices, each with at most one neighbour after it. Ties
    go to the lowest index. The model's layer costs are used up.
    """
    waiting = set(order)
    towards: dict[int, tuple[Edge, int]] = {}
    cost = model.offset
    for v in order:
        waiting.remove(v)
        costs = model.costs[v]
        ahead = [(edge, side) for edge, side in model.incident[v] if edge.ends[1 - side] in waiting]
        if not ahead:
            cost += float(costs.min())
            continue
        if len(ahead) > 1:
            return None
        edge, side = towards[v] = ahead[0]
        check(edge.values.size)
        least = class_minima(costs, edge.of[side], edge.values.shape[side])
        sent = (edge.values + (least[:, None] if side == 0 else least)).min(axis=side)
        w = edge.ends[1 - side]
        model.costs[w] = model.costs[w] + by_configuration(sent, edge.of[1 - side])
    chosen: dict[int, int] = {}
    for v in reversed(order):
        total = model.costs[v]
        if v in towards:
            edge, side = towards[v]
            total = total + edge.seen_from(1 - side, chosen[edge.ends[1 - side]])
        chosen[v] = int(total.argmin())
    return cost, model.complete(chosen)


def _min_sum(out: FloatArray, operands: list[FloatArray], check: Check) -> None:
    """Set out[x…] = min over g of the sum of the operands at [g, x…], a cache-sized block at a time."""
    if out.size > BLOCK_CELLS:
        axis = max(range(out.ndim), key=lambda a: out.shape[a])
        half = out.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            index = (slice(None),) * axis + (part,)
            _min_sum(out[index], [o[(slice(None), *index)] if o.shape[axis + 1] > 1 else o for o in operands], check)
        return
    groups = max(o.shape[0] for o in operands)
    check(out.size * groups * len(operands))
    step = max(1, BLOCK_CELLS // max(out.size, 1))
    for first in range(0, groups, step):
        total, *others = [o[first : first + step] if o.shape[0] > 1 else o for o in operands]
        for more in others:
            total = total + more
        if first == 0:
            np.minimum.reduce(total, axis=0, out=out)
        else:
            np.minimum(out, np.minimum.reduce(total, axis=0), out=out)
