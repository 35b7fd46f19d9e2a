"""Elimination with two numbers: the cheapest strategy up to a cost that a limit on usage allows, with its proof.

This is Eq. 4 (`elimination`), where an entry of a table is not one minimum but a front: the partial strategies for one
choice of the dependent vertices of which none is beaten in cost and in usage by another. Fronts stay small because
partial strategies go as soon as no completion is of interest. With a price λ on usage, the least priced cost
(cost + λ usage) of any completion is known exactly (`two_pass`).

Proof: let x be a strategy of cost at most C and usage at most W, and so of priced cost at most C + λ W. Follow its
partial strategies through the steps. Each is dropped only where another with the same choices for the rest stays, that
uses no more and is dearer by less than the slack; put that one in its place. After all of at most `num_thinnings` such
exchanges the strategy uses at most W and costs less than C + num_thinnings × slack: where `Limits` allow that much,
none of them was dropped for exceeding these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from pase.solver.elimination import EliminationPlan, EliminationStep, plan_elimination
from pase.solver.ordering import min_fill, min_weight, report_order
from pase.solver.pairwise import ClassAlgebra, Edge, PairwiseModel, Partition
from pase.solver.solution import SearchBudget
from pase.solver.two_pass import least_totals
from pase.tables.cost_tables import FloatArray

Numbers = NDArray[np.intp]

MAX_ENTRIES = 1 << 19
"""Entries that are looked at together: with more, the caller asks for less."""
MAX_CELLS = 1 << 24
"""Choices of one step's vertices: with more, the model is to be split first."""
MAX_AXES = 32
"""NumPy's own limit, for vertices of one class, too."""
BYTES_PER_CELL = 16
"""Least priced cost of a whole strategy, and up to as much again of what lies below and of what does not."""


class TooManyError(Exception):
    """There are too many entries."""


class TooWideError(Exception):
    """A step has too many choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a strategy is of interest for.

    priced: most of cost + price × usage. usage: most of that. price: λ, cost for a unit of usage. slack: by which an
    entry of a front may be dearer than one that it stands for.
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
    """The fronts that a step leaves, one after the other; start, count: [cells] where each is.

    own: configuration of the vertex. below: entry of the table of each step that enters, by its number.
    """

    start: Numbers
    count: Numbers
    priced: FloatArray
    usage: FloatArray
    own: Numbers
    below: Mapping[int, Numbers]


def num_thinnings(num_vertices: int) -> int:
    """Return how often the slack can add up: in each vertex's own front, its table's, and where these are joined."""
    return 4 * num_vertices + 1


def front(group: Numbers, cost: FloatArray, usage: FloatArray, slack: float) -> Numbers:
    """Return the numbers of a front for each group, by group and then by usage.

    Every entry has one in its group's front that uses no more, and is dearer by less than `slack`, if at all.
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
    best = cost[ranked[least[:-1] + shift[:-1]]]  # of those that use less, in the group of the one before
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

    No strategy of a priced cost within the limits less num_thinnings × slack, that uses no more than they allow, is
    cheaper than it by that or more. model: of the priced tables, no vertex eliminated; their costs are finite there.
    usage: of each live vertex's configurations. edge_usage: in the shape of an edge's values. decided_usage: of the
    vertices that are not live. Raises TooWideError, and TooManyError where fronts grow too large.
    """
    plan = _narrowest_plan(model, budget)
    optimum = model.offset + plan.fill(budget.check)
    outer: list[FloatArray] = []
    # Which combinations of a step's classes some strategy within the limits has.
    cells = [np.nonzero(total <= limits.priced) for total in least_totals(plan, optimum, outer, budget.check)][::-1]
    held_bytes = 2 * plan.table_bytes + sum(array.nbytes for at in cells for array in at)
    least = {v: float(usage[v].min()) for v in model.live}
    rest = limits.usage - decided_usage - sum(least.values())
    below: list[float] = []
    tables: list[_Fronts] = []
    for step, at, beyond in zip(plan.steps, cells, outer, strict=True):
        budget.check()
        v = step.scope[0]
        below.append(least[v] + sum(below[f.producer] for f in step.factors if f.producer is not None))
        found = _eliminate(step, at, beyond, tables, usage[v], edge_usage, limits, rest + below[-1])
        tables.append(found)
        if not len(found.priced):
            return None
        held_bytes += 8 * len(found.priced) * (3 + len(found.below))
        if held_bytes > budget.solver_memory_bytes:
            raise TooManyError
        budget.holds(model.own_bytes() + held_bytes)
        budget.operations += len(found.priced)
    return _decide(model, plan, tables, limits, decided_usage)


def _narrowest_plan(model: PairwiseModel, budget: SearchBudget) -> EliminationPlan:
    """Return the plan with the fewest choices in all; TooWideError where these are too many."""
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
    """Return a step's fronts. most_usage: of what lies below, with the least usage of all else."""
    kernel = step.kernel
    shape = kernel.result.shape
    cell = np.ravel_multi_index(at[1:], shape) if shape else np.zeros(len(at[0]), dtype=np.intp)
    # What is added to an entry to bound it: what it does not hold yet, at the least.
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
            edges_usage += edge_usage[factor.edge][index]

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
    """Return, for each entry of each key's run, the key's position and the entry; TooManyError beyond MAX_ENTRIES."""
    times = count[keys]
    total = int(times.sum())
    if total > MAX_ENTRIES:
        raise TooManyError
    position = np.repeat(np.arange(len(keys)), times)
    first = np.repeat(start[keys] - (np.cumsum(times) - times), times)
    return position, first + np.arange(total)
