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
from functools import cache
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

BLOCK_CELLS = 1 << 16  # sums computed in one block; they fit the second-level cache
RESULT_CELLS = 1 << 11  # cells of the result that one block is reduced into; they fit the first-level cache

Check = Callable[[int], None]
"""Called before each unit of work with the number of table cells it evaluates; an exception ends the work."""
Ordered = Callable[[PairwiseModel], Sequence[int]]
"""Returns the order in which to eliminate the live vertices of a model."""


@dataclass(slots=True, eq=False)
class Table:
    """Values over layout classes, one axis for each vertex of a scope.

    Attributes:
        partitions: The classes on each axis.
        values: None until a planned table is filled.
    """

    partitions: tuple[Partition, ...]
    values: FloatArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of classes on each axis."""
        return tuple([p.num_classes for p in self.partitions])

    def filled(self) -> FloatArray:
        """Return the values of a table that was filled."""
        assert self.values is not None
        return self.values


class Factor(NamedTuple):
    """One term of the objective: a table over the layout classes of the vertices in `scope`.

    Attributes:
        scope: Vertices in elimination order, so that no step has to transpose a table.
        table: Table of the term; terms with identical arrays share one.
        edge: The edge whose costs these are; None for the result of a step.
        producer: Number of the step that produces this table; None for an edge.
    """

    scope: tuple[int, ...]
    table: Table
    edge: Edge | None = None
    producer: int | None = None


class Operand(NamedTuple):
    """One input table of a step, whose axes are the vertex (0) followed by its dependent set.

    Attributes:
        table: The table; its axes have the same relative order as the step's.
        axes: For each axis of the table, the axis of the step.
        maps: Table axes on which the step distinguishes more classes, each with the table's class of each of the
            step's classes.
        expansion: Index that gives the table one axis for each of the step's, of extent 1 where the table lacks it.
    """

    table: Table
    axes: tuple[int, ...]
    maps: tuple[tuple[int, ClassArray], ...]
    expansion: tuple[slice | None, ...]

    def aligned(self, rows: Sequence[ClassArray] | None = None) -> FloatArray:
        """Return the table's values with one axis for each of the step's, in its order.

        Args:
            rows: The classes to read on each of the step's axes; None for all.
        """
        values = self.table.filled()
        if rows is not None:
            return values[np.ix_(*self.cells_of(rows))][self.expansion]
        for axis, classes in self.maps:
            values = values.take(classes, axis=axis)
        return values[self.expansion]

    def cells_of(self, cells: Sequence[ClassArray]) -> tuple[ClassArray, ...]:
        """Return the table's classes for some classes on each of the step's axes."""
        index = [cells[a] for a in self.axes]
        for axis, classes in self.maps:
            index[axis] = classes[index[axis]]
        return tuple(index)


@cache
def _expansion(num_axes: int, axes: tuple[int, ...]) -> tuple[slice | None, ...]:
    return tuple([slice(None) if a in axes else None for a in range(num_axes)])


class Kernel(NamedTuple):
    """The computation of one distinct step.

    Attributes:
        costs: [G] the cheapest layer cost in each joint class of the vertex.
        operands: Tables that are added.
        partitions: Joint classes of the vertex and of its dependents; the axes of the step.
        result: The table over all axes but the first.
        num_cells: Number of combinations of joint classes.
        coarse: Index of the operand that distinguishes fewer classes of the vertex than the others, if minimising
            within each of these classes first saves work; else None.
    """

    costs: FloatArray
    operands: tuple[Operand, ...]
    partitions: tuple[Partition, ...]
    result: Table
    num_cells: int
    coarse: int | None

    @property
    def operations(self) -> int:
        """Combinations times the terms added for each; terms over the same axes are added together beforehand."""
        direct = self.num_cells * max(len({operand.axes for operand in self.operands}), 1)
        return direct if self.coarse is None else self._operations_by_class(self.coarse)

    def _operations_by_class(self, coarse: int) -> int:
        sizes = [p.num_classes for p in self.partitions]
        others = {operand.axes for i, operand in enumerate(self.operands) if i != coarse}
        seen = prod(sizes[axis] for axis in {0}.union(*others))
        return seen * len(others) + 2 * self.operands[coarse].table.shape[0] * (self.num_cells // sizes[0])

    def with_coarse(self) -> "Kernel":
        """Return the same computation, minimising within the classes of one operand first where that saves work."""
        if self.num_cells <= BLOCK_CELLS:
            return self
        own = [i for i, operand in enumerate(self.operands) if 0 in dict(operand.maps)]
        ways = [self, *(self._replace(coarse=i) for i in own)]
        return min(ways, key=lambda way: way.operations)

    def fill(self, check: Check) -> None:
        """Compute the result from the tables that it depends on."""
        costs = self.costs[_expansion(len(self.partitions), (0,))]
        if self.num_cells <= BLOCK_CELLS:
            check(self.operations)
            self.result.values = np.minimum.reduce(_sum([costs, *(o.aligned() for o in self.operands)]), axis=0)
            return
        by_axes: dict[tuple[int, ...], list[FloatArray]] = {}
        for i, operand in enumerate(self.operands):
            if i != self.coarse:
                by_axes.setdefault(operand.axes, []).append(operand.aligned())
        operands = [_sum(own) for own in by_axes.values()]
        smallest = min(range(len(operands)), key=lambda i: operands[i].size)
        operands[smallest] = operands[smallest] + costs
        if self.coarse is not None:
            operands = self._by_class(self.operands[self.coarse], operands, check)
        out = np.empty(self.result.shape)
        _min_sum(out, operands, check)
        self.result.values = out

    def _by_class(self, coarse: Operand, others: Sequence[FloatArray], check: Check) -> list[FloatArray]:
        """Return an operand, and the others' least sum in each class of the vertex that it distinguishes."""
        maps = dict(coarse.maps)
        of = maps.pop(0)
        order = np.argsort(of, kind="stable")
        ends = np.cumsum(np.bincount(of)).tolist()
        least = np.empty((len(ends), *np.broadcast_shapes(*(other.shape[1:] for other in others))))
        for own, (first, stop) in zip(least, pairwise([0, *ends]), strict=True):
            rows = order[first:stop]
            _min_sum(own, [other[rows] for other in others], check)
        return [coarse._replace(maps=tuple(maps.items())).aligned(), least]


class EliminationStep(NamedTuple):
    """The elimination of one vertex; `scope` is the vertex followed by its dependent set."""

    scope: tuple[int, ...]
    costs: FloatArray
    factors: tuple[Factor, ...]
    kernel: Kernel

    def cells(self) -> int:
        """Return the number of combinations of joint classes that the step evaluates."""
        return self.kernel.num_cells

    def conditional_costs(self, choice: Callable[[int], int]) -> FloatArray:
        """Return the cost of each configuration of the vertex, with all eliminated into it, given its dependents."""
        total = self.costs
        for scope, table, _, _ in self.factors:
            partitions = table.partitions
            # With one class of each dependent vertex chosen, a vector over the vertex's classes remains.
            index = [p.of[choice(x)] for x, p in zip(scope[1:], partitions[1:], strict=True)]
            total = total + by_configuration(table.filled()[:, *index], partitions[0].of)
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EliminationPlan:
    """The work of eliminating every vertex in one sequence.

    Attributes:
        operations: Combinations to evaluate, times the terms added for each; repeated steps count once.
        table_bytes: Memory of all tables to fill.
        steps: One for each vertex, in sequence.
        kernels: The distinct computations, in an order that respects their dependencies.
    """

    operations: int
    table_bytes: int
    steps: tuple[EliminationStep, ...]
    kernels: tuple[Kernel, ...]

    def fill(self, check: Check, on_done: Callable[[float], None] = lambda _: None) -> float:
        """Fill the planned tables and return the optimum.

        Args:
            check: Called between blocks of work; an exception ends the run.
            on_done: Called with the fraction of the work that is complete.
        """
        done = 0
        for kernel in self.kernels:
            kernel.fill(check)
            done += kernel.operations
            on_done(done / self.operations)
        return sum(float(step.kernel.result.filled()) for step in self.steps if len(step.scope) == 1)


@dataclass(slots=True, eq=False)
class Planner:
    """Plans steps, each distinct one once, and counts their operations and bytes."""

    algebra: ClassAlgebra = field(default_factory=ClassAlgebra)
    known: dict[tuple[object, ...], EliminationStep] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    partitions: dict[int, Partition] = field(default_factory=dict)
    tables: dict[tuple[int, ...], tuple[Table, FloatArray]] = field(default_factory=dict)

    def factor(self, edge: Edge, first: int) -> Factor:
        """Return an edge as a factor; equal arrays become one table.

        Args:
            edge: An edge.
            first: Side (0 or 1) of the end that is eliminated before the other.
        """
        values, (rows, cols) = edge.values, edge.of
        key = (id(values), id(rows), id(cols), first)
        if key not in self.tables:
            ends = self._partition(rows, len(values)), self._partition(cols, values.shape[1])
            table = Table(ends, values) if first == 0 else Table(ends[::-1], values.T)
            self.tables[key] = table, values  # keeps the values alive, so that their id is not reused
        return Factor(edge.ends if first == 0 else edge.ends[::-1], self.tables[key][0], edge)

    def _partition(self, of: ClassArray, num_classes: int) -> Partition:
        if id(of) not in self.partitions:
            self.partitions[id(of)] = Partition(of, num_classes)
        return self.partitions[id(of)]

    def eliminate(self, scope: tuple[int, ...], costs: FloatArray, factors: Sequence[Factor]) -> EliminationStep:
        """Return the step that takes the first vertex of a scope out; nothing is computed yet."""
        axis_of = scope.index
        axes = [tuple([axis_of(x) for x in f.scope]) for f in factors]
        key = (id(costs), *[id(f.table) for f in factors], *axes)
        step = self.known.get(key)
        if step is None:  # the inputs stay alive with the result, so that their ids are not reused
            kernel = self._kernel(len(scope), axes, costs, factors)
            step = self.known[key] = EliminationStep(scope, costs, tuple(factors), kernel)
            return step
        return EliminationStep(scope, costs, tuple(factors), step.kernel)

    def _kernel(
        self, num_axes: int, axes: list[tuple[int, ...]], costs: FloatArray, factors: Sequence[Factor]
    ) -> Kernel:
        joint: dict[int, Partition] = {}
        mixed: set[int] = set()
        operands = []
        for f, own in zip(factors, axes, strict=True):
            for a, p in zip(own, f.table.partitions, strict=True):
                if joint.setdefault(a, p) is not p:
                    mixed.add(a)
            operands.append(Operand(f.table, own, (), _expansion(num_axes, own)))
        if not factors:
            joint[0] = Partition(np.zeros(len(costs), dtype=np.intp), 1)
        for a in mixed:
            readers = [(i, own.index(a)) for i, own in enumerate(axes) if a in own]
            joint[a], maps = self.algebra.join([factors[i].table.partitions[axis] for i, axis in readers])
            for (i, axis), classes in zip(readers, maps, strict=True):
                if classes is not None:
                    operands[i] = operands[i]._replace(maps=(*operands[i].maps, (axis, classes)))
        partitions = tuple([joint[a] for a in range(num_axes)])
        num_cells = prod([p.num_classes for p in partitions])
        least = class_minima(costs, partitions[0].of, partitions[0].num_classes)
        kernel = Kernel(least, tuple(operands), partitions, Table(partitions[1:]), num_cells, None).with_coarse()
        self.kernels.append(kernel)
        return kernel


def plan_elimination(costs: Sequence[FloatArray], edges: Iterable[Edge], order: Sequence[int]) -> EliminationPlan:
    """Plan the elimination of vertices in one sequence.

    Args:
        costs: [V] layer costs of each vertex, over the configurations that its edges' classes describe. Those of
            vertices that are not in `order` are not read.
        edges: Terms over two vertices each.
        order: The sequence; it must hold every vertex that an edge joins.
    """
    planner = Planner()
    position = {v: i for i, v in enumerate(order)}
    # A factor is needed once, when the first vertex of its scope is eliminated.
    factors_of: list[list[Factor]] = [[] for _ in order]
    for edge in edges:
        a, b = position[edge.ends[0]], position[edge.ends[1]]
        if a < b:
            factors_of[a].append(planner.factor(edge, 0))
        else:
            factors_of[b].append(planner.factor(edge, 1))
    steps: list[EliminationStep] = []
    for number, (w, factors) in enumerate(zip(order, factors_of, strict=True)):
        scope = factors[0].scope if factors else (w,)
        if len(factors) > 1:
            scope = tuple(sorted(set().union(*[f.scope for f in factors]), key=position.__getitem__))
        step = planner.eliminate(scope, costs[w], factors)
        steps.append(step)
        if len(scope) > 1:
            remaining = Factor(scope[1:], step.kernel.result, None, number)
            factors_of[position[scope[1]]].append(remaining)
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
        choice[step.scope[0]] = int(step.conditional_costs(choice.__getitem__).argmin())
    return optimum, choice


def optimal_strategy(
    model: PairwiseModel, ordered: Ordered, max_operations: int, budget: SearchBudget
) -> tuple[float, dict[int, int]] | None:
    """Return the least cost of a model and a strategy that attains it, by elimination; None above the limits."""
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
    """Eliminate the remaining vertices if that is within the limits.

    Args:
        ordered: Returns the order in which to eliminate the live vertices of a model.

    Returns:
        Whether elimination was done, so that the best strategy is optimal.
    """
    outcome.num_configurations_left, outcome.num_vertices_left = model.num_configurations(), len(model.live)
    best = optimal_strategy(model, ordered, max_operations, budget)
    if best is None:
        return False
    outcome.settle(best[1])
    return True


def eliminate_tree(model: PairwiseModel, order: Sequence[int], check: Check) -> tuple[float, dict[int, int]] | None:
    """Return the least cost and a strategy that attains it; None if the model is not a tree.

    On a tree no dependent set has two vertices, so nothing needs planning. Each vertex, leaves first, sends one vector
    to its only later neighbour. Ties go to the lowest index. The model's layer costs are overwritten.

    Args:
        order: The live vertices, each with at most one neighbour after it.
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
    groups = max(o.shape[0] for o in operands)
    if out.size > max(RESULT_CELLS, BLOCK_CELLS // groups):
        axis = max(range(out.ndim), key=lambda a: out.shape[a])
        half = out.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            index = (slice(None),) * axis + (part,)
            _min_sum(out[index], [o[(slice(None), *index)] if o.shape[axis + 1] > 1 else o for o in operands], check)
        return
    check(out.size * groups * len(operands))
    step = max(1, BLOCK_CELLS // max(out.size, 1))
    for first in range(0, groups, step):
        total = _sum([o[first : first + step] if o.shape[0] > 1 else o for o in operands])
        if first == 0:
            np.minimum.reduce(total, axis=0, out=out)
        else:
            np.minimum(out, np.minimum.reduce(total, axis=0), out=out)


def _sum(terms: Sequence[FloatArray]) -> FloatArray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
