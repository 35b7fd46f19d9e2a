"""The two-pass rule of junction trees in the min-sum semiring: min-marginals of every choice in two passes.

Elimination sends costs one way. Eliminating w leaves the table R_w: for each choice of w's dependent set D, the least
cost of w and of everything eliminated into it. Read the other way, the same tables give the least cost of all *other*
vertices. Where w's table entered the step of p, the first of D to be eliminated,

    M_w[x_D] = min over the other vertices of that step of [ cost_p + Σ factors + M_p ] − R_w[x_D]

with M of a last vertex the optimum of what is not connected with it. Then cost_w(c) + Σ factors(c, x_D) + M_w[x_D] is
the least cost of the whole for each choice of a step's vertices. Its least over x_D is the cost of the cheapest
strategy in which w has configuration c (a min-marginal): two passes answer what would take one search for each vertex
and configuration.

The same totals bound a constrained elimination, which finds the cheapest strategy up to a target cost within a limit
on usage, with its proof. It follows Eq. 4 (`elimination`), but an entry of a table is a front instead of one minimum:
the Pareto-optimal partial strategies, in cost and usage, for one choice of the dependent vertices. Fronts stay small
because a partial strategy is dropped when no completion of it is within the limits. With a price λ on usage, the least
priced cost (cost + λ usage) of any completion is known exactly.

Proof: let x be a strategy of cost at most C and usage at most W, and so of priced cost at most C + λ W. Follow its
partial strategies through the steps. Each is dropped only where another with the same choices for the rest stays, that
uses no more and is dearer by less than the slack; put that one in its place. After all of at most `num_thinnings` such
exchanges the strategy uses at most W and costs less than C + num_thinnings × slack: where `Limits` allow that much,
none of them was dropped for exceeding these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.solver.elimination import Check, EliminationPlan, EliminationStep, Operand, plan_elimination
from pase.solver.ordering import AUTO, choose_ordering, min_fill, min_weight, report_order
from pase.solver.pairwise import ClassAlgebra, ClassArray, Edge, Mask, PairwiseModel, Partition
from pase.solver.solution import RELATIVE_TOLERANCE, SearchBudget
from pase.tables.cost_tables import CostTables, FloatArray


def least_totals(plan: EliminationPlan, optimum: float, outer: list[FloatArray], check: Check) -> Iterator[FloatArray]:
    """Pass down a filled plan; yield each step's least total costs, from the last step to the first.

    Args:
        plan: The plan, filled.
        optimum: Optimum of the whole problem.
        outer: Receives M of each step, for later calls of `least_total`.
        check: Called between units of work.
    """
    outer[:] = [np.empty(0)] * len(plan.steps)
    for number in range(len(plan.steps) - 1, -1, -1):
        check(0)
        step = plan.steps[number]
        if len(step.scope) == 1:
            outer[number] = np.array(optimum - float(step.kernel.result.filled()))
        total = least_total(step, outer[number])
        for factor, operand in zip(step.factors, step.kernel.operands, strict=True):
            if factor.producer is not None:
                outer[factor.producer] = _seen_by(operand, total) - factor.table.filled()
        yield total


def least_total(step: EliminationStep, outer: FloatArray, rows: Sequence[ClassArray] | None = None) -> FloatArray:
    """Return, over the joint classes of a step's scope, the least cost of the whole with each combination.

    Args:
        step: The step.
        outer: M of the step.
        rows: For each vertex of the scope the classes to evaluate; None for all.
    """
    costs = step.kernel.costs
    if rows is not None:
        costs, outer = costs[rows[0]], np.asarray(outer[np.ix_(*rows[1:])])
    # Sum small tables first, then add them in place to one large array: allocating such arrays dominates the time.
    total = outer[None] + costs.reshape(-1, *(1,) * outer.ndim)
    for operand in sorted([operand.aligned(rows) for operand in step.kernel.operands], key=np.size):
        if np.broadcast_shapes(total.shape, operand.shape) == total.shape:
            total += operand
        else:
            total = total + operand
    return total


def _seen_by(operand: Operand, total: FloatArray) -> FloatArray:
    """Return the least of a step's costs for each entry of one of its tables."""
    others = tuple(a for a in range(total.ndim) if a not in operand.axes)
    least = total.min(axis=others) if others else total
    for axis, of in operand.maps:
        least = _class_minima_along(least, of, operand.table.partitions[axis].num_classes, axis)
    return least


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
    """Result of `min_marginals`.

    Attributes:
        costs: [V] arrays of [K], the cost of the cheapest strategy in which a vertex has each configuration.
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
        """Return a cheapest strategy in which a vertex has a configuration; ties go to one close to the reference."""
        choice = list(self._reference)
        for v, c in self.changes(vertex, configuration).items():
            choice[v] = c
        return tuple(choice)

    def changes(self, vertex: int, configuration: int) -> dict[int, int]:
        """Return where a cheapest strategy in which a vertex has a configuration differs from the reference.

        Ties go to a strategy close to the reference. Vertices that need not change are not evaluated.
        """
        if configuration == self._reference[vertex]:
            return {}
        changes = {vertex: configuration}
        path = [self._step_of[vertex]]
        step = self._steps[path[0]]
        rows = _all_classes(step)
        rows[0] = step.kernel.partitions[0].of[[configuration]]
        classes = self._decide(path[0], rows, changes)
        while classes is not None:
            number = self._parent[path[-1]]
            classes = self._decide(number, _agreeing(self._steps[number], path[-1], classes), changes)
            path.append(number)
        for number, above in zip(path, [None, *path], strict=False):
            self._descend(number, above, changes)
        return changes

    def _decide(self, number: int, rows: Sequence[ClassArray], changes: dict[int, int]) -> tuple[int, ...] | None:
        """Choose a step's vertex among some combinations; return its dependents' classes, None for the reference's.

        Args:
            number: Number of the step.
            rows: For each vertex of the scope its possible joint classes, ascending. Ties go to those of the reference,
                or of changes already made.
            changes: Configurations that differ from the reference; extended here.
        """
        step = self._steps[number]
        vertex, partitions = step.scope[0], step.kernel.partitions
        now = [changes.get(vertex, self._reference[vertex]), *(self._reference[x] for x in step.scope[1:])]
        present = tuple(int(p.of[c]) for p, c in zip(partitions, now, strict=True))
        total = least_total(step, self._outer[number], rows)
        is_least = total <= float(total.min()) + self._slack
        places = [np.flatnonzero(own == c) for own, c in zip(rows, present, strict=True)]  # at most one entry each
        if is_least[np.ix_(*places)].any():
            return None
        if is_least[places[0]].any():
            is_least[np.arange(len(is_least)) != places[0]] = False
        found = tuple(int(own[i]) for own, i in zip(rows, _first(is_least), strict=True))
        if found[0] != present[0]:
            changes[vertex] = int(np.where(partitions[0].of == found[0], step.costs, np.inf).argmin())
        return None if found[1:] == present[1:] else found[1:]

    def _descend(self, number: int, above: int | None, changes: dict[int, int]) -> None:
        """Decide the vertices eliminated into a step, where a vertex that it depends on differs from the reference."""
        waiting = [factor.producer for factor in self._steps[number].factors if factor.producer not in (None, above)]
        while waiting:
            current = waiting.pop()
            assert current is not None
            step = self._steps[current]
            if changes.keys().isdisjoint(step.scope[1:]):
                continue
            vertex = step.scope[0]
            total = step.conditional_costs(lambda x: changes.get(x, self._reference[x]))
            waiting += [factor.producer for factor in step.factors if factor.producer is not None]
            if total[self._reference[vertex]] > float(total.min()) + self._slack:
                changes[vertex] = int(total.argmin())


def min_marginals(
    tables: CostTables,
    reference: Sequence[int],
    *,
    max_cells: int,
    ceiling: float = np.inf,
    check: Check = lambda _: None,
) -> Marginals | None:
    """Return the min-marginals of a problem, or None where a pass would evaluate more than `max_cells` combinations.

    Args:
        tables: The cost tables.
        reference: [V] a cheapest strategy; alternatives are chosen close to it.
        max_cells: Limit on the combinations of a pass.
        ceiling: Higher costs are lowered to this; must be finite if some of the tables' costs are infinite.
        check: Called between units of work.
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


def _all_classes(step: EliminationStep) -> list[ClassArray]:
    return [np.arange(p.num_classes, dtype=np.int32) for p in step.kernel.partitions]


def _agreeing(step: EliminationStep, child: int, classes: Sequence[int]) -> list[ClassArray]:
    """Return for each vertex of a step the joint classes that agree with given classes of one of the step's tables."""
    operand = step.kernel.operands[[factor.producer for factor in step.factors].index(child)]
    rows = _all_classes(step)
    maps = dict(operand.maps)
    for axis, (of_step, chosen) in enumerate(zip(operand.axes, classes, strict=True)):
        rows[of_step] = np.flatnonzero(maps.get(axis, rows[of_step]) == chosen).astype(np.int32)
    return rows


def _first(mask: Mask) -> tuple[int, ...]:
    """Return the index of the first entry that is true."""
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))


Numbers = NDArray[np.intp]

MAX_ENTRIES = 1 << 19
"""Maximum number of entries processed together; with more, the caller lowers the target."""
MAX_CELLS = 1 << 24
"""Maximum number of combinations of one step's vertices; with more, the problem must be split first."""
MAX_AXES = 32
"""NumPy's limit on axes, which also counts axes of extent 1."""
BYTES_PER_CELL = 16
"""Least priced cost of a whole strategy, plus as much for its parts inside and outside the step."""


class TooManyError(Exception):
    """There are too many entries."""


class TooWideError(Exception):
    """A step has too many choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on the strategies to consider.

    Attributes:
        priced: Largest cost + price × usage.
        usage: Largest usage.
        price: λ, cost per unit of usage.
        slack: By how much an entry of a front may cost more than an entry that it replaces.
    """

    priced: float
    usage: float
    price: float
    slack: float

    def front(self, group: Numbers, priced: FloatArray, usage: FloatArray) -> Numbers:
        """Return the numbers of a front of entries for each group."""
        return front(group, priced - self.price * usage, usage, self.slack)


@dataclass(frozen=True, slots=True, eq=False)
class _Fronts:
    """The fronts of a step's table, stored one after the other.

    Attributes:
        start, count: [cells] position and size of each front.
        own: Configuration of the step's vertex.
        below: For each input step, by number, the entry of its table.
    """

    start: Numbers
    count: Numbers
    priced: FloatArray
    usage: FloatArray
    own: Numbers
    below: Mapping[int, Numbers]


def num_thinnings(num_vertices: int) -> int:
    """Return how often the slack can accumulate: for each vertex in its own front, in its table and in joins."""
    return 4 * num_vertices + 1


def front(group: Numbers, cost: FloatArray, usage: FloatArray, slack: float) -> Numbers:
    """Return the numbers of a front for each group, by group and then by usage.

    For every entry its group's front has one that uses no more and costs less than `slack` more.
    """
    order = np.lexsort((cost, usage, group))
    if len(order) < 2:
        return order
    group, cost = group[order], cost[order]
    ranked = np.argsort(cost, kind="stable")
    rank = np.empty(len(cost), dtype=np.int64)
    rank[ranked] = np.arange(len(cost))
    is_first = np.ones(len(cost), dtype=bool)
    is_first[1:] = group[1:] != group[:-1]
    # Ranks are lower for every later group, so that one running minimum serves all of them.
    shift = (np.cumsum(is_first) - 1) * len(cost)
    least = np.minimum.accumulate(rank - shift)
    best = cost[ranked[least[:-1] + shift[:-1]]]  # least cost among those with less usage in the same group
    keep = is_first
    keep[1:] |= cost[1:] < best
    order, group, cost = order[keep], group[keep], cost[keep]
    if slack > 0:
        # Along a front cost falls as usage rises: of those in one step of cost the first uses least.
        step = np.floor(cost / slack)
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = (step[1:] != step[:-1]) | (group[1:] != group[:-1])
        order = order[keep]
    return order


def cheapest_within(
    model: PairwiseModel,
    usage: Mapping[int, FloatArray],
    edge_usage: Mapping[Edge, FloatArray],
    decided_usage: float,
    limits: Limits,
    budget: SearchBudget,
) -> dict[int, int] | None:
    """Return a strategy within the limits, as configuration numbers in the tables; None if there is none.

    No strategy whose usage is within the limits, and whose priced cost is within them by num_thinnings × slack, is
    cheaper than the result by that amount or more.

    Args:
        model: Model of the priced tables, with finite costs and no vertex eliminated.
        usage: Usage of each live vertex's configurations.
        edge_usage: Usage of edges, in the shape of an edge's values.
        decided_usage: Usage of the vertices that are not live.
        limits: Bounds on the strategy.
        budget: Limits of the search.

    Raises:
        TooWideError: A step has too many combinations.
        TooManyError: Fronts grow too large.
    """
    plan = _narrowest_plan(model, budget)
    optimum = model.offset + plan.fill(budget.check)
    outer: list[FloatArray] = []
    # Combinations of a step's classes that occur in some strategy within the limits.
    cells = [np.nonzero(total <= limits.priced) for total in least_totals(plan, optimum, outer, budget.check)][::-1]
    own_bytes, held_bytes = model.own_bytes(), 2 * plan.table_bytes + sum(array.nbytes for at in cells for array in at)
    least = {v: float(usage[v].min()) for v in model.live}
    rest = limits.usage - decided_usage - sum(least.values())
    below: list[float] = []
    tables: list[_Fronts] = []
    for step, at, outer_costs in zip(plan.steps, cells, outer, strict=True):
        budget.check()
        v = step.scope[0]
        below.append(least[v] + sum(below[f.producer] for f in step.factors if f.producer is not None))
        found = _eliminate(step, at, outer_costs, tables, usage[v], edge_usage, limits, rest + below[-1])
        tables.append(found)
        if not len(found.priced):
            return None
        held_bytes += 8 * len(found.priced) * (3 + len(found.below))
        if held_bytes > budget.solver_memory_bytes:
            raise TooManyError
        budget.holds(own_bytes + held_bytes)
        budget.operations += len(found.priced)
    return _decide(model, plan, tables, limits, decided_usage)


def _narrowest_plan(model: PairwiseModel, budget: SearchBudget) -> EliminationPlan:
    """Return the plan with the fewest combinations; TooWideError where these are too many."""
    algebra = ClassAlgebra()
    sizes = []
    for v in model.live:
        seen = [Partition(edge.of[side], edge.values.shape[side]) for edge, side in model.incident[v]]
        sizes.append(algebra.join(seen)[0].num_classes if seen else 1)
    around, _ = model.neighbours()
    reports = [report_order("", around, sizes, ordering(around, sizes)) for ordering in (min_weight, min_fill)]
    narrowest = min(reports, key=lambda report: report.operations)
    plan = plan_elimination(model.costs, model.edges(), [model.live[i] for i in narrowest.order])
    cells = [step.cells() for step in plan.steps]
    if (
        narrowest.largest_dependent_set >= MAX_AXES
        or max(cells, default=0) > MAX_CELLS
        or BYTES_PER_CELL * sum(cells) > budget.solver_memory_bytes
    ):
        raise TooWideError
    return plan


def _eliminate(
    step: EliminationStep,
    at: tuple[Numbers, ...],
    outer: FloatArray,
    tables: list[_Fronts],
    usage: FloatArray,
    edge_usage: Mapping[Edge, FloatArray],
    limits: Limits,
    most_usage: float,
) -> _Fronts:
    """Return a step's fronts; `most_usage` limits the usage of its subtree, given the least usage elsewhere."""
    kernel = step.kernel
    shape = kernel.result.shape
    cell = np.ravel_multi_index(at[1:], shape) if shape else np.zeros(len(at[0]), dtype=np.intp)
    # Lower bounds on what an entry does not contain yet.
    missing = outer.reshape(-1)[cell]
    edges, edges_usage = np.zeros(len(cell)), np.zeros(len(cell))
    children = []
    for factor, operand in zip(step.factors, kernel.operands, strict=True):
        index = operand.cells_of(at)
        least = factor.table.filled()[index]
        missing = missing + least
        if factor.producer is not None:
            children.append((factor.producer, np.ravel_multi_index(index, factor.table.shape), least))
            continue
        edges += least
        if factor.edge is not None and factor.edge in edge_usage:
            is_first = factor.scope == factor.edge.ends
            edges_usage += edge_usage[factor.edge][index if is_first else index[::-1]]

    classes, num_classes = kernel.partitions[0].of, kernel.partitions[0].num_classes
    first = limits.front(classes, step.costs, usage)
    row, own = _expanded(at[0], *_runs(classes[first], num_classes))
    own = first[own]
    kept = np.flatnonzero(step.costs[own] + missing[row] <= limits.priced)
    row, own = row[kept], own[kept]
    priced, usage = step.costs[own], usage[own]
    below: dict[int, Numbers] = {}
    for number, of, least in children:
        table = tables[number]
        missing = missing - least
        before, entry = _expanded(of[row], table.start, table.count)
        row, priced, usage = row[before], priced[before] + table.priced[entry], usage[before] + table.usage[entry]
        kept = np.flatnonzero((priced + missing[row] <= limits.priced) & (usage <= most_usage))
        kept = kept[limits.front(row[kept], priced[kept], usage[kept])]
        row, priced, usage = row[kept], priced[kept], usage[kept]
        own, below = own[before[kept]], {n: b[before[kept]] for n, b in below.items()} | {number: entry[kept]}
    priced, usage = priced + edges[row], usage + edges_usage[row]
    kept = np.flatnonzero(usage <= most_usage)
    kept = kept[limits.front(cell[row[kept]], priced[kept], usage[kept])]
    start, count = _runs(cell[row[kept]], prod(shape))
    return _Fronts(start, count, priced[kept], usage[kept], own[kept], {n: b[kept] for n, b in below.items()})


def _decide(
    model: PairwiseModel, plan: EliminationPlan, tables: list[_Fronts], limits: Limits, decided_usage: float
) -> dict[int, int] | None:
    """Join the fronts of the parts that are not connected, and follow the cheapest entry back."""
    priced, usage = np.array([model.offset]), np.array([decided_usage])
    taken: dict[int, Numbers] = {}
    for number, (step, table) in enumerate(zip(plan.steps, tables, strict=True)):
        if len(step.scope) > 1:
            continue
        before, entry = _expanded(np.zeros(len(priced), dtype=np.intp), table.start, table.count)
        priced, usage = priced[before] + table.priced[entry], usage[before] + table.usage[entry]
        kept = np.flatnonzero(usage <= limits.usage)
        kept = kept[limits.front(np.zeros(len(kept), dtype=np.intp), priced[kept], usage[kept])]
        priced, usage = priced[kept], usage[kept]
        taken = {n: t[before[kept]] for n, t in taken.items()} | {number: entry[kept]}
    if not len(priced) or usage[0] > limits.usage:
        return None
    best = int((priced - limits.price * usage).argmin())
    chosen: dict[int, int] = {}
    waiting = [(number, int(entries[best])) for number, entries in taken.items()]
    while waiting:
        number, place = waiting.pop()
        chosen[plan.steps[number].scope[0]] = int(tables[number].own[place])
        waiting += [(child, int(b[place])) for child, b in tables[number].below.items()]
    return model.complete(chosen)


def _runs(keys: Numbers, num_keys: int) -> tuple[Numbers, Numbers]:
    """Return where the run of each key starts among sorted keys, and its length; [num_keys] each."""
    count = np.bincount(keys, minlength=num_keys)
    return np.cumsum(count) - count, count


def _expanded(keys: Numbers, start: Numbers, count: Numbers) -> tuple[Numbers, Numbers]:
    """Return, for each entry of each key's run, the key's position and the entry; TooManyError above MAX_ENTRIES."""
    times = count[keys]
    total = int(times.sum())
    if total > MAX_ENTRIES:
        raise TooManyError
    position = np.repeat(np.arange(len(keys)), times)
    first = np.repeat(start[keys] - (np.cumsum(times) - times), times)
    return position, first + np.arange(total)
