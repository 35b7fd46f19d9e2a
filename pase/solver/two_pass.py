"""The two-pass rule of junction trees, in the min-sum semiring: what every choice costs at least, in two passes.

Elimination sends costs one way: the table R_w that eliminating w leaves says, for each choice of w's dependent set D,
the least that w and what was eliminated into it cost. The same tables read the other way say what all *other* vertices
cost at least: where w's table entered the step of p, the first of D to be eliminated,

    M_w[x_D] = min over the other vertices of that step of [ cost_p + Σ factors + M_p ] − R_w[x_D]

with M of a last vertex the optimum of what is not connected with it. Then cost_w(c) + Σ factors(c, x_D) + M_w[x_D] is
the least cost of the whole for each choice of a step's vertices. Its least over x_D is the cost of the cheapest
strategy in which w has configuration c (a min-marginal): two passes answer what would take one search for each vertex
and configuration.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pase.solver.elimination import Check, EliminationPlan, EliminationStep, Factor, Operand, plan_elimination
from pase.solver.ordering import AUTO, choose_ordering
from pase.solver.pairwise import ClassArray, Mask, PairwiseModel
from pase.solver.solution import RELATIVE_TOLERANCE
from pase.tables.cost_tables import CostTables, FloatArray


def least_totals(plan: EliminationPlan, optimum: float, outer: list[FloatArray], check: Check) -> Iterator[FloatArray]:
    """Pass down a plan that was filled; yield each step's least costs of the whole, from the last step to the first.

    optimum: of the whole. outer: is filled with M of each step, to which `least_total` comes back later.
    """
    outer[:] = [np.empty(0)] * len(plan.steps)
    for number in range(len(plan.steps) - 1, -1, -1):
        check()
        step = plan.steps[number]
        if len(step.scope) == 1:
            outer[number] = np.array(optimum - float(step.kernel.result.filled()))
        total = least_total(step, outer[number])
        for factor, operand in zip(step.factors, step.kernel.operands, strict=True):
            if factor.producer is not None:
                outer[factor.producer] = _seen_by(factor, operand, total) - factor.table.filled()
        yield total


def least_total(step: EliminationStep, outer: FloatArray) -> FloatArray:
    """Return, over the joint classes of a step's scope, the least cost of the whole with each combination."""
    # Small tables are added up first, and all to one large array in place: making such arrays is most of the work.
    total = outer[None] + step.kernel.costs.reshape(-1, *(1,) * outer.ndim)
    for operand in sorted([operand.aligned() for operand in step.kernel.operands], key=np.size):
        if np.broadcast_shapes(total.shape, operand.shape) == total.shape:
            total += operand
        else:
            total = total + operand
    return total


def _seen_by(factor: Factor, operand: Operand, total: FloatArray) -> FloatArray:
    """Return the least of a step's costs for each entry of one of its factors, in the factor's order of axes."""
    others = tuple(a for a in range(total.ndim) if a not in operand.axes)
    least = total.min(axis=others) if others else total
    turned = operand.turned or tuple(range(least.ndim))
    for axis, (of, own) in enumerate(zip(operand.maps, turned, strict=True)):
        if of is not None:
            least = _class_minima_along(least, of, factor.partitions[own].num_classes, axis)
    return least.transpose(np.argsort(turned))


def _class_minima_along(values: FloatArray, of: ClassArray, num_classes: int, axis: int) -> FloatArray:
    """Return the least of each class along one axis; +inf for a class that does not occur."""
    order = np.argsort(of, kind="stable")
    ranked = of[order]
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    found = np.full([*values.shape[:axis], num_classes, *values.shape[axis + 1 :]], np.inf)
    found[(slice(None),) * axis + (ranked[first],)] = np.minimum.reduceat(
        values.take(order, axis=axis), first, axis=axis
    )
    return found


@dataclass(slots=True, eq=False)
class Marginals:
    """What `min_marginals` returns.

    costs: [V] the [K] cost of the cheapest strategy in which a vertex has each configuration.
    """

    costs: tuple[FloatArray, ...]
    _reference: tuple[int, ...]
    _steps: tuple[EliminationStep, ...]
    _outer: Sequence[FloatArray]
    _step_of: Mapping[int, int] = field(init=False)
    _parent: Mapping[int, int] = field(init=False)
    _slack: float = field(init=False)

    def __post_init__(self) -> None:
        """Index the steps."""
        self._step_of = {step.scope[0]: number for number, step in enumerate(self._steps)}
        self._parent = {
            factor.producer: number
            for number, step in enumerate(self._steps)
            for factor in step.factors
            if factor.producer is not None
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
        step = self._steps[path[0]]
        allowed = np.zeros([p.num_classes for p in step.kernel.partitions], dtype=bool)
        allowed[step.kernel.partitions[0].of[configuration]] = True
        classes = self._decide(path[0], allowed, changes)
        while classes is not None:
            number = self._parent[path[-1]]
            classes = self._decide(number, _agreeing(self._steps[number], path[-1], classes), changes)
            path.append(number)
        for number, above in zip(path, [None, *path], strict=False):
            self._descend(number, above, changes)
        return changes

    def _decide(self, number: int, allowed: Mask, changes: dict[int, int]) -> tuple[int, ...] | None:
        """Choose a step's vertex among some combinations; return the classes of its dependents, None: the reference's.

        allowed: [joint classes of the scope]. Of equals those of the reference, or of what has changed already.
        """
        step = self._steps[number]
        vertex, partitions = step.scope[0], step.kernel.partitions
        now = [changes.get(vertex, self._reference[vertex]), *(self._reference[x] for x in step.scope[1:])]
        present = tuple(int(p.of[c]) for p, c in zip(partitions, now, strict=True))
        total = np.where(allowed, least_total(step, self._outer[number]), np.inf)
        least = float(total.min()) + self._slack
        if total[present] <= least:
            return None
        if (total[present[0]] <= least).any():
            found = (present[0], *_first(total[present[0]] <= least))
        else:
            found = _first(total <= least)
        if found[0] != present[0]:
            changes[vertex] = int(np.where(partitions[0].of == found[0], step.costs, np.inf).argmin())
        return None if found[1:] == present[1:] else found[1:]

    def _descend(self, number: int, above: int | None, changes: dict[int, int]) -> None:
        """Decide what was eliminated into a step, where a vertex that it depends on is not as in the reference."""
        waiting = [factor.producer for factor in self._steps[number].factors if factor.producer not in (None, above)]
        while waiting:
            current = waiting.pop()
            assert current is not None
            step = self._steps[current]
            if changes.keys().isdisjoint(step.scope[1:]):
                continue
            vertex = step.scope[0]
            total = step.beside(lambda x: changes.get(x, self._reference[x]))
            waiting += [factor.producer for factor in step.factors if factor.producer is not None]
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
    model = PairwiseModel.of_tables(tables, ceiling)
    plan = plan_elimination(model.costs, model.edges(), choose_ordering(AUTO, *model.neighbours()).order)
    if sum(step.cells() for step in plan.steps) > max_cells:
        return None
    outer: list[FloatArray] = []
    costs: list[FloatArray] = [np.empty(0)] * tables.num_vertices
    totals = least_totals(plan, plan.fill(check), outer, check)
    for step, total in zip(reversed(plan.steps), totals, strict=True):
        own, least = step.kernel.partitions[0], step.kernel.costs
        costs[step.scope[0]] = total.reshape(len(total), -1).min(axis=1)[own.of] + (step.costs - least[own.of])
    return Marginals(tuple(costs), tuple(reference), plan.steps, outer)


def _agreeing(step: EliminationStep, child: int, classes: Sequence[int]) -> Mask:
    """Return which combinations of a step's joint classes are those of given ones of one of its tables."""
    operand = step.kernel.operands[[factor.producer for factor in step.factors].index(child)]
    wanted = classes if operand.turned is None else [classes[t] for t in operand.turned]
    allowed = np.ones([p.num_classes for p in step.kernel.partitions], dtype=bool)
    for axis, of, chosen in zip(operand.axes, operand.maps, wanted, strict=True):
        size = allowed.shape[axis]
        agrees = np.arange(size) == chosen if of is None else of == chosen
        allowed &= agrees.reshape([size if a == axis else 1 for a in range(allowed.ndim)])
    return allowed


def _first(mask: Mask) -> tuple[int, ...]:
    """Return the index of the first entry that is true."""
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))
