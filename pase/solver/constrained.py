"""Find the cheapest strategy within a limit on a resource such as memory: exactly, or with a proven bound and a gap.

If the unconstrained optimum fits, it is the answer. Otherwise Lagrangian relaxation gives a bound. A price λ ≥ 0 adds
λ × usage to every cost, which leaves an ordinary problem. Its optimum less λ × limit is a lower bound on every strategy
within the limit. The remaining gap between this bound and the best known strategy is closed from below: configurations
that occur in no strategy up to a target cost are dropped (`reductions`, on the priced costs). Elimination with fronts
(`two_pass`) then finds the cheapest strategy up to the target, or shows that there is none. Targets rise from the
bound, so the first strategy found is the optimum. Where fronts grow too large, the problem is split on one vertex: the
one whose usage differs most between the two strategies that tie at the price. Each subproblem has a better price of its
own.

A peak is the maximum of a group, so peaks do not add up. A strategy whose greatest peak is T uses at least its sum plus
any lower bound on T. Subtract that bound from the limit, and drop configurations whose peak exceeds an upper bound on
T: the problem without peaks then bounds all strategies with T between the two. If its optimum fits with its actual
peak, it is the optimum of that range. Otherwise the range is split at that peak. Strategies with lower T lose
configurations, those with higher T lose some of the limit, so neither part contains the rejected optimum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import chain, count
from math import fsum
from time import perf_counter

import numpy as np

from pase.errors import SolverError
from pase.solver.pairwise import Edge, Mask, PairwiseModel
from pase.solver.reductions import tighten_bounds
from pase.solver.search import default_solver_memory_bytes, solve
from pase.solver.solution import RELATIVE_TOLERANCE, Outcome, OutOfTimeError, Progress, SearchBudget, Solution
from pase.solver.two_pass import Limits, TooManyError, TooWideError, cheapest_within, num_thinnings
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, joint_classes

LARGEST_SUM = 2.0**53
"""Sums of whole numbers up to this are exact."""
ROUNDING = 1e-12
"""Relative to a priced cost: improvements smaller than this do not count as improvements."""
SUM_ROUNDING = 1e-13
"""Relative to a priced cost: by how much two summations of it may differ."""
EXACT_SHARE = 0.1
"""Share of the rounding allowance that the slacks of one elimination may use up in total."""
FEW_LEFT = 2
"""Live configurations per live vertex below which fronts are small enough."""
MAX_PRICES = 100
MAX_ROUNDS = 20
"""Maximum number of rounds of coordinate descent, which changes one vertex after the other."""
FIRST_TARGET = 1 / 64
"""Height of the first target above the bound, as a share of the gap."""
MANY_ENTRIES = 100_000
"""An elimination with more entries than this takes so long that targets rise more slowly after it."""
MAX_FAILURES = 4
"""A part is split after this many targets that left too much for tables, each halfway to the one before."""
MANY_VERTICES = 600
"""Number of vertices from which on passes reuse messages of repeated layers before fronts are computed."""
MAX_PARTS = 200
"""Without a time limit, a problem is split into at most this many parts."""

Choice = tuple[int, ...]
CostOf = Callable[[FloatArray, FloatArray | None], FloatArray]
"""Maps (costs, their resource usage or None for zero usage) to other costs."""


class NothingFitsError(SolverError):
    """No strategy of finite cost is within the limit."""


class CutShortError(SolverError):
    """There was no time to find any strategy that fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ConstrainedProblem:
    """Cost tables, the resource usage of every configuration, and a limit on the usage of a strategy.

    The usage of a strategy is the sum over its configurations and its edges, plus, for each group of peaks, the
    greatest peak among its configurations.

    Attributes:
        resource_usage: [V] arrays of [K], the usage of each configuration of a vertex, in whole numbers. Vertices may
            share an array.
        limit: Largest usage allowed.
        edge_usage: [E] usage of each edge, in the form of its cost table; None for an edge without usage, () where no
            edge has any.
        peaks: `[groups][V]` arrays of [K], the peaks of each vertex's configurations. The maximum of each group over a
            strategy is part of its usage.
    """

    tables: CostTables
    resource_usage: tuple[FloatArray, ...]
    limit: float
    edge_usage: tuple[EdgeTable | None, ...] = ()
    peaks: tuple[tuple[FloatArray, ...], ...] = ()

    def usage(self, choice: Sequence[int]) -> float:
        """Return the usage of a strategy."""
        own = [float(usage[c]) for usage, c in zip(self.resource_usage, choice, strict=True)]
        of_edges = [t.cost(choice[u], choice[v]) for (u, v), t in self.using_edges]
        return fsum([*own, *of_edges, *self.greatest(choice)])

    def greatest(self, choice: Sequence[int]) -> tuple[float, ...]:
        """Return [groups] the greatest peak of a strategy's configurations."""
        return tuple(max(float(p[c]) for p, c in zip(group, choice, strict=True)) for group in self.peaks)

    def changes(self, vertex: int, choice: Sequence[int]) -> FloatArray:
        """Return the [K] changes of a choice's usage, without peaks, by configuration of a vertex."""
        own = self.resource_usage[vertex]
        for e in self.tables.incident[vertex] if self.edge_usage else ():
            usage = self.edge_usage[e]
            if usage is not None:
                u, v = self.tables.edges[e]
                own = own + (usage.column(choice[v]) if u == vertex else usage.row(choice[u]))
        changes: FloatArray = own - own[choice[vertex]]
        return changes

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether a strategy is within the limit."""
        return self.usage(choice) <= self.limit

    @cached_property
    def least_usage(self) -> float:
        """Lower bound on the usage of any strategy."""
        return fsum([float(u.min()) for u in (*self.resource_usage, *(t.values for _, t in self.using_edges))])

    def above_least(self) -> "ConstrainedProblem":
        """Return the same problem with the least usage of every vertex and edge subtracted, also from the limit.

        This keeps sums of priced usage as small as possible, so that little of the costs is lost to rounding.
        """
        own = {id(usage): usage - usage.min() for usage in self.resource_usage}
        of_edges = {id(t): t and replace(t, values=t.values - t.values.min()) for t in self.edge_usage}
        return replace(
            self,
            resource_usage=tuple(own[id(usage)] for usage in self.resource_usage),
            edge_usage=tuple(of_edges[id(table)] for table in self.edge_usage),
            limit=self.limit - self.least_usage,
        )

    def priced(self, price: float) -> CostTables:
        """Return the tables with `price` × usage added to the costs; shared arrays remain shared."""
        return self._with_costs(lambda costs, usage: costs if usage is None else costs + price * usage)

    def usage_alone(self) -> CostTables:
        """Return tables whose costs are the usage, infinite where the cost is infinite, without overlap."""
        alone = replace(self, tables=replace(self.tables, hiding=None))
        return alone._with_costs(
            lambda costs, usage: np.where(np.isfinite(costs), 0.0 if usage is None else usage, np.inf)
        )

    def with_alone(self, vertex: int, keep: Mask) -> "ConstrainedProblem":
        """Return the problem with only some configurations of one vertex; the numbering does not change."""
        return self._kept(lambda v: keep if v == vertex else None)

    def without_peaks(self, low: Sequence[float], high: Sequence[float]) -> "ConstrainedProblem | None":
        """Return the problem of the strategies whose greatest peaks are in a range, each counted as the lower end.

        Strategies with lower peaks are included.

        Args:
            low: [groups] lower end of each range.
            high: [groups] upper end of each range.

        Returns:
            The problem, or None if all configurations of some vertex exceed the upper end.
        """
        known: dict[tuple[int, ...], Mask] = {}

        def keep(v: int) -> Mask:
            key = tuple([id(group[v]) for group in self.peaks])
            if key not in known:
                known[key] = np.logical_and.reduce(
                    [group[v] <= most for group, most in zip(self.peaks, high, strict=True)]
                )
            return known[key]

        masks = [keep(v) if self.peaks else None for v in range(self.tables.num_vertices)]
        if not all(mask is None or mask.any() for mask in masks):
            return None
        return replace(self._kept(masks.__getitem__), limit=self.limit - fsum(low), peaks=())

    def _kept(self, keep: Callable[[int], Mask | None]) -> "ConstrainedProblem":
        """Return the problem with some configurations of each vertex (None: all); shared arrays remain shared."""
        tables = self.tables
        known: dict[tuple[int, int, int], tuple[int, FloatArray, Mask | None]] = {}
        costs: list[FloatArray] = []
        found, first = [], []
        for v, (table, own) in enumerate(zip(tables.vertex_table, self.resource_usage, strict=True)):
            mask = keep(v)
            key = table, id(own), id(mask)
            if key not in known:
                # Dropped configurations must not lower the least usage.
                least = own if mask is None else np.where(mask, own, own[mask].max())
                known[key] = len(costs), least, mask
                layer_costs = tables.vertex_costs[table]
                costs.append(layer_costs if mask is None else np.where(mask, layer_costs, np.inf))
                first.append(table)
            found.append(known[key])
        references = tuple(number for number, *_ in found)
        hiding = tables.hiding and replace(
            tables.hiding,
            hideable=tuple(tables.hiding.hideable[table] for table in first),
            cover=tuple(tables.hiding.cover[table] for table in first),
        )
        return replace(
            self,
            tables=replace(tables, vertex_costs=tuple(costs), vertex_table=references, hiding=hiding),
            resource_usage=tuple(usage for _, usage, _ in found),
        )

    @cached_property
    def using_edges(self) -> tuple[tuple[tuple[int, int], EdgeTable], ...]:
        """The end points and the usage of the edges that have any."""
        edges = zip(self.tables.edges, self.edge_usage, strict=False)
        return tuple((ends, table) for ends, table in edges if table is not None)

    def _with_costs(self, cost_of: CostOf) -> CostTables:
        """Return the tables with costs computed from costs and usage, for configurations and for pairs of layouts."""
        tables = self.tables
        numbers: dict[tuple[int, int], int] = {}
        costs: list[FloatArray] = []
        for table, usage in zip(tables.vertex_table, self.resource_usage, strict=True):
            if (table, id(usage)) not in numbers:
                numbers[table, id(usage)] = len(costs)
                costs.append(cost_of(tables.vertex_costs[table], usage))
        pairs = zip(tables.vertex_table, map(id, self.resource_usage), strict=True)
        joined, edge_table = self._joined
        return replace(
            tables,
            vertex_costs=tuple(costs),
            vertex_table=tuple(numbers[pair] for pair in pairs),
            edge_tables=tuple(replace(table, values=cost_of(table.values, usage)) for table, usage in joined),
            edge_table=edge_table,
        )

    @cached_property
    def _joined(self) -> tuple[list[tuple[EdgeTable, FloatArray | None]], tuple[int, ...]]:
        """Return costs and usage of the distinct edges over their common layouts, and [E] the index of each."""
        numbers: dict[tuple[int, int], int] = {}
        found: list[tuple[EdgeTable, FloatArray | None]] = []
        edge_table = []
        usage_of = self.edge_usage or (None,) * len(self.tables.edges)
        for number, usage in zip(self.tables.edge_table, usage_of, strict=True):
            if (number, id(usage)) not in numbers:
                numbers[number, id(usage)] = len(found)
                table = self.tables.edge_tables[number]
                if usage is None:
                    found.append((table, None))
                else:
                    row_class, rows, usage_rows = joint_classes(table.row_class, usage.row_class)
                    col_class, cols, usage_cols = joint_classes(table.col_class, usage.col_class)
                    joint = EdgeTable(row_class=row_class, col_class=col_class, values=table.values[rows][:, cols])
                    found.append((joint, usage.values[usage_rows][:, usage_cols]))
            edge_table.append(numbers[number, id(usage)])
        return found, tuple(edge_table)


def _verify(problem: ConstrainedProblem) -> None:
    """Raise SolverError unless there is a whole number for every configuration, and a limit."""
    tables = problem.tables
    sizes = list(tables.domain_sizes)
    if any([len(of_vertex) for of_vertex in group] != sizes for group in (problem.resource_usage, *problem.peaks)):
        raise SolverError("weights must be one for each configuration of each vertex; make them for these tables")
    shapes = [None if table is None else table.shape for table in problem.edge_usage]
    expected = [(sizes[u], sizes[v]) for u, v in tables.edges]
    if shapes and (
        len(shapes) != len(expected) or any(s not in (None, e) for s, e in zip(shapes, expected, strict=True))
    ):
        raise SolverError("weights of edges must be one for each pair of configurations; make them for these tables")
    if not problem.limit >= 0:
        raise SolverError(f"the limit on weight is {problem.limit}; give a number of 0 or more")
    summed = [*problem.resource_usage, *(table.values for table in problem.edge_usage if table is not None)]
    for usage in {id(usage): usage for usage in (*summed, *chain(*problem.peaks))}.values():
        if not (np.isfinite(usage).all() and (usage >= 0).all() and (usage == np.floor(usage)).all()):
            raise SolverError("a weight is not a whole number of 0 or more; give bytes, or scale them")
    greatest = (max(float(peaks.max()) for peaks in group) for group in problem.peaks)
    if fsum([*(float(usage.max()) for usage in summed), *greatest]) > LARGEST_SUM:
        raise SolverError(f"the weights add up to more than {LARGEST_SUM:.0f}; scale them")


# -- the search


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedSolution:
    """A strategy within the limit, and the optimum without it.

    Attributes:
        solution: The strategy; its certificate holds among the strategies within the limit.
        unlimited: Result of the search without a limit.
        usage: Usage of the strategy.
        limit: Limit on the usage.
    """

    solution: Solution
    unlimited: Solution
    usage: float
    limit: float


def solve_limited(
    problem: ConstrainedProblem,
    *,
    ordering: str = "auto",
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
    gap: float = 0.0,
    max_parts: int = MAX_PARTS,
) -> LimitedSolution:
    """Return the cheapest strategy that uses no more than the limit, with its proof or a gap.

    Arguments are as for `solve`; strategies in `known` that do not fit are ignored.

    Args:
        gap: Relative gap at which the search may stop. The result then has a bound instead of a proof.
        max_parts: Maximum number of parts into which the problem is split without a time limit.

    Returns:
        The solution, which always fits.

    Raises:
        NothingFitsError: No strategy fits.
        SolverError: The search was interrupted before it found a strategy that fits.
    """
    _verify(problem)
    started_s = perf_counter()
    budget = SearchBudget(
        started_s=started_s,
        deadline_s=None if time_limit_s is None else started_s + time_limit_s,
        solver_memory_bytes=default_solver_memory_bytes() if solver_memory_bytes is None else solver_memory_bytes,
        on_progress=on_progress,
    )
    start = [tuple(choice) for choice in known]
    if problem.peaks:
        start = [choice for choice in (*start, *_modest(problem)) if problem.fits(choice)]
    unlimited = solve(
        problem.tables,
        ordering=ordering,
        solver_memory_bytes=solver_memory_bytes,
        time_limit_s=time_limit_s,
        known=start,
        on_progress=on_progress,
    )
    outcome = Outcome(tables=problem.tables, ordering=unlimited.ordering, lower_bound=unlimited.lower_bound)
    search = LimitedSearch(
        problem if problem.peaks else problem.above_least(), ordering, budget, outcome, gap, max_parts
    )
    with suppress(OutOfTimeError, KeyboardInterrupt):
        search.run((*start, unlimited.choice), unlimited)
    choice, cost = outcome.choice, outcome.cost
    if not np.isfinite(cost) and outcome.exact:
        raise NothingFitsError(
            f"no strategy of finite cost weighs {problem.limit:.0f} or less: the lightest configurations of all "
            f"vertices weigh {problem.least_usage:.0f} together; raise the limit"
        )
    if not np.isfinite(cost):
        raise CutShortError(
            "the search was cut short before it found any strategy that fits the limit; give it more time, or a higher "
            "limit"
        )
    before = unlimited.statistics
    solution = replace(
        unlimited,
        cost=cost,
        lower_bound=cost if outcome.exact else max(0.0, min(cost, outcome.lower_bound * (1 - RELATIVE_TOLERANCE))),
        exact=outcome.exact,
        choice=choice,
        time_s=perf_counter() - started_s,
        peak_memory_bytes=max(unlimited.peak_memory_bytes, budget.peak_bytes + problem.tables.num_bytes),
        statistics=replace(
            before,
            sweeps=before.sweeps + budget.sweeps,
            operations=before.operations + budget.operations,
            nodes=before.nodes + budget.nodes,
        ),
    )
    return LimitedSolution(solution=solution, unlimited=unlimited, usage=problem.usage(choice), limit=problem.limit)


def lightest_strategy(problem: ConstrainedProblem) -> Choice:
    """Return a strategy of finite cost with the least usage, ignoring the limit; SolverError where there is none."""
    best: list[Choice] = []

    def lightest(part: ConstrainedProblem, low: Sequence[float]) -> tuple[Choice, float] | None:
        try:
            found = solve(part.usage_alone())
        except SolverError:  # every strategy has an infinite cost
            return None
        best[:] = [min([*best, found.choice], key=problem.usage)]
        return found.choice, found.lower_bound + sum(low)

    _search_ranges(problem, 0.0, lambda: problem.usage(best[0]) if best else np.inf, lightest)
    if not best:
        raise SolverError("every strategy has an infinite cost; nothing can be weighed")
    return best[0]


def _search_ranges(
    problem: ConstrainedProblem,
    bound: float,
    enough: Callable[[], float],
    search: Callable[[ConstrainedProblem, Sequence[float]], tuple[Choice | None, float] | None],
) -> float:
    """Search ranges of greatest peaks, lowest bound first, until the lowest bound reaches `enough()`.

    Args:
        search: Takes a range's problem without peaks and the lower ends of the range. Returns the optimum and a bound
            on the range; no strategy if it was interrupted; None if the range need not be searched.

    Returns:
        A lower bound on the ranges that remain.
    """
    least = tuple(max(float(peaks.min()) for peaks in group) for group in problem.peaks)
    ranges = [(bound, least, (np.inf,) * len(least))]
    while ranges and ranges[0][0] < enough():
        bound, low, high = ranges[0]
        part = problem.without_peaks(low, high)
        found = None if part is None else search(part, low)
        if found is not None and found[0] is None:
            heapreplace(ranges, (max(bound, found[1]), low, high))
            break
        heappop(ranges)
        if found is None or not low:
            continue
        choice, own = found
        assert choice is not None
        greatest = problem.greatest(choice)
        g = max(range(len(low)), key=lambda g: greatest[g] - low[g])
        if greatest[g] > low[g]:  # otherwise it is already counted
            below = max(float(peaks.max(initial=0.0, where=peaks < greatest[g])) for peaks in problem.peaks[g])
            heappush(ranges, (max(bound, own), (*low[:g], greatest[g], *low[g + 1 :]), high))
            heappush(ranges, (max(bound, own), low, (*high[:g], below, *high[g + 1 :])))
    return ranges[0][0] if ranges else np.inf


def _modest(problem: ConstrainedProblem) -> Iterator[Choice]:
    """Yield strategies that are likely to fit: each vertex's lightest configuration by sum, by peak, and by both."""
    for of_sum, of_peak in ((1, 0), (0, 1), (1, 1)):
        yield tuple(
            int((of_sum * usage + of_peak * sum(group[v] for group in problem.peaks)).argmin())
            for v, usage in enumerate(problem.resource_usage)
        )


Optima = dict[float, Solution]
"""Optima of a problem by price on usage; the price +inf denotes minimising usage alone."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A problem with a limit and its Lagrangian bound.

    Attributes:
        bound: Lower bound on the cost of every strategy that fits, given by the price.
        light, heavy: The strategies that tie at the price; `light` fits.
        optima: Optima found so far, including those of an enclosing problem: an optimum of that one within this part
            is also an optimum of this part.
    """

    problem: ConstrainedProblem
    bound: float
    price: float
    light: Choice
    heavy: Choice
    optima: Optima = field(default_factory=dict)

    @cached_property
    def priced(self) -> CostTables:
        """The problem's tables at the price."""
        return self.problem.priced(self.price)


_EXACT = 1 - RELATIVE_TOLERANCE


@dataclass(slots=True)
class LimitedSearch:
    """State of one search: its problem, its budget, and its best result."""

    problem: ConstrainedProblem
    ordering: str
    budget: SearchBudget
    outcome: Outcome
    gap: float = 0.0
    max_parts: int = MAX_PARTS

    def run(self, known: Iterable[Choice], unlimited: Solution) -> None:
        """Search until the outcome is proven; OutOfTimeError where the budget does not suffice."""
        problem, outcome = self.problem, self.outcome
        for choice in known:
            self.offer(choice)
        if problem.peaks:
            left = _search_ranges(problem, outcome.lower_bound, self.enough, self.within_range)
            outcome.raise_bound(left)
            if left >= self.enough():
                self.finish()
            return
        light = outcome.choice if np.isfinite(outcome.cost) else self.lightest(problem, {})
        if light is None:
            outcome.prove()
            return
        self.offer(light)
        self.offer(improved(problem, outcome.choice))
        if not unlimited.exact:
            raise OutOfTimeError
        if outcome.lower_bound >= self.enough():
            self.finish()
            return
        whole = self.relaxed(problem, outcome.choice, {0.0: unlimited})
        outcome.raise_bound(whole.bound)
        for choice in crossings(problem, whole.light, whole.heavy):
            self.offer(improved(problem, choice))
        self.branch([whole])
        self.finish()

    def finish(self) -> None:
        """Record that no strategy is better than the best known one by more than the gap."""
        outcome = self.outcome
        if self.gap and np.isfinite(outcome.cost):
            outcome.raise_bound(self.enough())
        if not self.gap or not np.isfinite(outcome.cost) or outcome.lower_bound >= outcome.cost * _EXACT:
            outcome.prove()

    def offer(self, choice: Sequence[int]) -> None:
        """Adopt a strategy if it fits and is cheaper."""
        if self.problem.fits(choice):
            self.outcome.offer(dict(enumerate(choice)))

    def enough(self) -> float:
        """Return the cost from which on a strategy does not improve on the best known, up to rounding or the gap."""
        return self.outcome.cost * (1 - max(RELATIVE_TOLERANCE, self.gap))

    def time_left_s(self, least_s: float) -> float | None:
        """Return the seconds until the deadline, at least `least_s`; None without a deadline."""
        deadline_s = self.budget.deadline_s
        return None if deadline_s is None else max(least_s, deadline_s - perf_counter())

    def spent(self, solution: Solution) -> Solution:
        """Add the effort of another search to the statistics and return its solution."""
        self.budget.sweeps += solution.statistics.sweeps
        self.budget.operations += solution.statistics.operations
        return solution

    def optimum(self, problem: ConstrainedProblem, price: float, optima: Optima) -> Solution:
        """Return the optimum at a price and offer its strategy; OutOfTimeError where the time is up.

        Args:
            optima: Known optima of the problem; the result is added.
        """
        if price in optima:
            return optima[price]
        self.budget.check()
        if price == 0:
            tables = problem.tables
        else:
            tables = problem.priced(price) if np.isfinite(price) else problem.usage_alone()
        self.budget.progress("weighing cost against weight", 1 - self.outcome.gap)
        solution = self.spent(
            solve(
                tables,
                ordering=self.ordering,
                solver_memory_bytes=self.budget.solver_memory_bytes,
                time_limit_s=self.time_left_s(1e-3),
            )
        )
        self.offer(solution.choice)
        if not solution.exact:
            raise OutOfTimeError
        optima[price] = solution
        return solution

    def within_range(self, part: ConstrainedProblem, low: Sequence[float]) -> tuple[Choice | None, float] | None:
        """Search a range of peaks (see `_search_ranges`); its strategies that fit are offered."""
        if part.limit < 0:
            return None
        outcome = self.outcome
        try:
            found = solve_limited(
                part,
                ordering=self.ordering,
                solver_memory_bytes=self.budget.solver_memory_bytes,
                time_limit_s=self.time_left_s(1e-9),
                known=[outcome.choice] if np.isfinite(outcome.cost) else (),
                on_progress=self.budget.on_progress,
                gap=self.gap,
                max_parts=self.max_parts,
            ).solution
        except CutShortError:
            return None, 0.0
        except SolverError:  # no strategy fits, or those that fit have infinite cost
            return None
        self.spent(found)
        self.offer(found.choice)
        if found.lower_bound >= self.enough():
            return None
        if not found.exact and found.lower_bound < found.cost * (1 - self.gap) * (1 - 2 * RELATIVE_TOLERANCE):
            return None, found.lower_bound
        return None if self.problem.fits(found.choice) else (found.choice, found.lower_bound)

    def lightest(self, problem: ConstrainedProblem, optima: Optima) -> Choice | None:
        """Return a light strategy that fits, None if the lightest is too heavy.

        Each vertex takes the cheapest of its lightest configurations. If that strategy has infinite cost, or does not
        fit because of edge usage, a search for the least usage replaces it.
        """
        if problem.least_usage > problem.limit:
            return None
        choice = []
        for v, usage in enumerate(problem.resource_usage):
            least = np.flatnonzero(usage == usage.min())
            choice.append(int(least[problem.tables.layer_costs(v)[least].argmin()]))
        if problem.fits(choice) and np.isfinite(problem.tables.evaluate(choice)):
            return tuple(choice)
        found = self.optimum(problem, np.inf, optima).choice
        return found if problem.fits(found) else None

    def relaxed(self, problem: ConstrainedProblem, light: Choice, optima: Optima) -> Relaxation:
        """Return the best bound that a price on usage gives, or the first that reaches the best known cost.

        As a function of the price, the least priced cost over all strategies is the lower envelope of one line per
        strategy, cost + price × usage. Less price × limit it bounds every strategy that fits. The bound is best where a
        rising and a falling line meet. The search follows the envelope to that point, one optimisation for each price.

        Args:
            light: A strategy that fits.
            optima: Known optima, among them the unconstrained one, which does not fit.
        """
        tables = problem.tables
        above, bound = optima[0.0].choice, optima[0.0].lower_bound
        best = Relaxation(problem=problem, bound=bound, price=0.0, light=light, heavy=above, optima=optima)
        for _ in range(MAX_PRICES):
            if best.bound >= self.enough():
                break
            cost, usage = tables.evaluate(above), problem.usage(above)
            price = max(0.0, (tables.evaluate(light) - cost) / (usage - problem.usage(light)))
            found = self.optimum(problem, price, optima)
            bound = found.lower_bound - price * problem.limit - SUM_ROUNDING * (found.cost + price * problem.limit)
            if bound > best.bound:
                best = replace(best, bound=bound, price=price)
            if found.cost >= (cost + price * usage) * (1 - ROUNDING):
                break
            if problem.fits(found.choice):
                light = found.choice
            else:
                above = found.choice
        self.offer(improved(self.problem, light))
        return replace(best, light=light, heavy=above)

    def branch(self, wholes: Iterable[Relaxation]) -> None:
        """Solve problems, lowest bound first, splitting those that are too large."""
        number = count()
        parts = [(whole.bound, next(number), whole) for whole in wholes]
        while parts:
            _, _, part = heappop(parts)
            bound, is_settled = self.settle(part, is_last=not parts)
            if not is_settled:
                if self.budget.deadline_s is None and self.budget.nodes >= self.max_parts:
                    self.outcome.raise_bound(min([bound, *(b for b, _, _ in parts)]))
                    raise OutOfTimeError
                for piece in self.split(part):
                    heappush(parts, (max(bound, piece.bound), next(number), piece))
            parts = sorted(entry for entry in parts if entry[0] < self.enough())  # a sorted list is a heap
            if parts:
                self.outcome.raise_bound(parts[0][0])

    def settle(self, part: Relaxation, *, is_last: bool) -> tuple[float, bool]:
        """Raise the target cost until a strategy is found within it, or the best known cost is reached.

        Args:
            is_last: Whether no other part is open, so that this part's bound holds for all strategies.

        Returns:
            A bound on the strategies of a part, and whether none of them is cheaper than the best known.
        """
        bound, reached, unreached, failures = part.bound, 0.0, np.inf, 0
        distance = FIRST_TARGET * (self.outcome.cost - bound)
        while bound < self.enough():
            self.budget.progress(f"closing a gap of {self.outcome.gap:.2%}", 1 - self.outcome.gap)
            before = self.budget.operations
            distance = min(distance, self.outcome.cost - part.bound)
            try:
                found, choice = _cheapest_up_to(part.bound + distance, part, self.budget)
            except TooManyError:
                return bound, False
            except TooWideError:
                failures, unreached = failures + 1, distance
                if failures == MAX_FAILURES:
                    return bound, False
                distance = (reached + unreached) / 2
                continue
            bound = max(bound, found)
            if choice is not None:
                self.offer(choice)
            if is_last:
                self.outcome.raise_bound(bound)
            reached = distance
            distance *= 2 if self.budget.operations - before > MANY_ENTRIES else 4
            if distance >= unreached:
                distance = (reached + unreached) / 2
        return bound, True

    def split(self, part: Relaxation) -> list[Relaxation]:
        """Split a part; return the subproblems in which some strategy may beat the best known."""
        problem = part.problem
        first, second = part.light, part.heavy

        def difference(v: int) -> float:
            return abs(float(problem.changes(v, first)[second[v]]))

        v = max(range(len(first)), key=lambda v: (difference(v), first[v] != second[v], -v))
        usage = problem.resource_usage[v]
        is_light = usage <= (usage[first[v]] + usage[second[v]]) / 2
        if usage[first[v]] == usage[second[v]]:
            # The two strategies differ in the usage of edges only.
            is_light = np.arange(len(usage)) == first[v]
        allowed = np.isfinite(problem.tables.layer_costs(v))
        pieces = []
        for keep in (is_light & allowed, ~is_light & allowed):
            self.budget.nodes += 1
            piece = problem.with_alone(v, keep)
            optima = {price: found for price, found in part.optima.items() if keep[found.choice[v]]}
            light = self.lightest(piece, optima)
            if light is None:
                continue
            best = self.optimum(piece, 0.0, optima)
            if best.lower_bound >= self.enough() or piece.fits(best.choice):
                continue
            relaxation = self.relaxed(piece, light, optima)
            if relaxation.bound < self.enough():
                pieces.append(relaxation)
        return pieces


# -- strategies up to a target cost


def _cheapest_up_to(target: float, part: Relaxation, budget: SearchBudget) -> tuple[float, Choice | None]:
    """Return a bound on the cost of every strategy that fits, and the cheapest if there is one up to a target cost.

    The bound is the target where there is none, otherwise that strategy's cost less a rounding allowance. The strategy
    may cost more than the target.

    Raises:
        TooWideError: A step has too many combinations.
        TooManyError: Fronts grow too large.
    """
    problem = part.problem
    allowance = EXACT_SHARE * RELATIVE_TOLERANCE * target
    most = target * (1 + RELATIVE_TOLERANCE) + part.price * problem.limit
    # Any cost above the limits, infinite ones included, can be lowered to a ceiling: no strategy within them has it.
    model = PairwiseModel.of_tables(part.priced, 2 * most)
    # Fronts of usage grow with every remaining configuration: only large problems accept weaker bounds for quicker
    # passes.
    model.may_repeat = len(model.live) > MANY_VERTICES
    if tighten_bounds(model, budget, limit=most, little=FEW_LEFT) > most:
        return target, None
    limits = Limits(
        priced=most + SUM_ROUNDING * most,
        usage=problem.limit,
        price=part.price,
        slack=allowance / num_thinnings(problem.tables.num_vertices),
    )
    found = cheapest_within(model, *_usage_left(model, problem), limits, budget)
    if found is None:
        return target, None
    choice = tuple(found[v] for v in range(len(found)))
    return min(target, problem.tables.evaluate(choice) - allowance), choice


def _usage_left(
    model: PairwiseModel, problem: ConstrainedProblem
) -> tuple[dict[int, FloatArray], dict[Edge, FloatArray], float]:
    """Return the usage of live vertices (including edges to decided ones), of live edges, and of decided vertices."""
    fixed, origin = model.fixed, model.origin
    usage = {v: problem.resource_usage[v][origin[v]] for v in model.live}
    of_edges: dict[Edge, FloatArray] = {}
    decided = sum(float(problem.resource_usage[v][c]) for v, c in fixed.items())
    live_edges = iter(model.edges())
    # The model has its edges by their first end.
    for (u, v), table in sorted(
        zip(problem.tables.edges, problem.edge_usage, strict=False), key=lambda entry: entry[0][0]
    ):
        edge = next(live_edges) if u in usage and v in usage else None
        if table is None:
            continue
        if edge is not None:  # configurations of one class use the same
            rows, cols = [
                origin[end][np.unique(of, return_index=True)[1]] for end, of in zip((u, v), edge.of, strict=True)
            ]
            of_edges[edge] = table.values[table.row_class[rows]][:, table.col_class[cols]]
        elif u in usage:
            usage[u] = usage[u] + table.column(fixed[v])[origin[u]]
        elif v in usage:
            usage[v] = usage[v] + table.row(fixed[u])[origin[v]]
        else:
            decided += table.cost(fixed[u], fixed[v])
    return usage, of_edges, decided


# -- better strategies by moves from known ones: no proof, and quick


def improved(problem: ConstrainedProblem, choice: Choice) -> Choice:
    """Return a local optimum reached from a strategy that fits: no admissible change of one vertex improves it."""
    chosen = list(choice)
    usage = problem.usage(choice)
    for _ in range(MAX_ROUNDS):
        is_changed = False
        for v in range(problem.tables.num_vertices):
            with_each = usage + problem.changes(v, chosen)
            cost = np.where(with_each <= problem.limit, problem.tables.costs_beside(v, chosen), np.inf)
            best = int(cost.argmin())
            if cost[best] < cost[chosen[v]]:
                usage = float(with_each[best])
                chosen[v] = best
                is_changed = True
        if not is_changed:
            break
    return tuple(chosen)


def crossings(problem: ConstrainedProblem, light: Choice, cheap: Choice) -> list[Choice]:
    """Return the cheapest strategies that fit and follow one of two up to a vertex and the other from there on.

    Args:
        light: A strategy that fits.
        cheap: The other strategy.

    Returns:
        At most two strategies, one for each order of the pair.
    """
    found = []
    for first, second in ((light, cheap), (cheap, light)):
        chosen = list(second)
        cost, usage = problem.tables.evaluate(second), problem.usage(second)
        costs = [cost if usage <= problem.limit else np.inf]
        for v, c in enumerate(first):
            changed = problem.tables.costs_beside(v, chosen)
            usage += float(problem.changes(v, chosen)[c])
            # Infinite costs cancel to NaN in these differences: such strategies are ignored.
            with np.errstate(invalid="ignore"):
                cost += float(changed[c] - changed[chosen[v]])
            chosen[v] = c
            costs.append(cost if usage <= problem.limit and np.isfinite(cost) else np.inf)
        k = int(np.argmin(costs))
        if np.isfinite(costs[k]):
            found.append((*first[:k], *second[k:]))
    return found
