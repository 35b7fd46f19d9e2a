"""Find the cheapest strategy where communication overlaps with computation: exactly, or with a bound and a gap.

Let S be the sum of a strategy's costs, A the part that is overlappable communication and B the computation that it can
overlap with. The strategy costs T = S - min(A, B), the larger of the two sums f0 = S - A and f1 = S - B. For each share
λ from 0 to 1, minimising (1 - λ) f0 + λ f1 is an ordinary problem whose optimum is a lower bound on every T. If the
optimum at λ = 0 has A ≤ B, or the one at λ = 1 has A ≥ B, it is the answer. Otherwise the best λ is between: as a
function of λ the minimum is the lower envelope of one line per strategy, which is followed to its peak from both ends.

The remaining gap between that bound and the best known strategy is closed exactly. Every strategy has A ≤ B and costs
f0, or has A ≥ B and costs f1. These are two problems with a limit on a resource (`constrained`): the resource is A - B
or B - A, and its limit is 0. At the price λ, or 1 - λ, they have the same bound. Both are solved together, lower bound
first, and each benefits from the other's strategies.

A - B is counted in whole units, fine enough that any strategy's total is within `LARGEST_SUM`: the rounding error is
orders of magnitude below `RELATIVE_TOLERANCE` of the cost.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from pase.solver import constrained, search
from pase.solver.constrained import (
    LARGEST_SUM,
    MAX_PARTS,
    MAX_PRICES,
    ROUNDING,
    SUM_ROUNDING,
    Choice,
    ConstrainedProblem,
    LimitedSearch,
    LimitedSolution,
    Relaxation,
    crossings,
    improved,
)
from pase.solver.ordering import AUTO
from pase.solver.search import check_limits, default_solver_memory_bytes
from pase.solver.solution import RELATIVE_TOLERANCE, Outcome, OutOfTimeError, Progress, SearchBudget, Solution
from pase.tables.cost_tables import CostTables, FloatArray, verify_tables

Cheapest = Callable[[CostTables, Sequence[Choice]], Solution]
"""Maps (an additive problem, known strategies) to the cheapest strategy of those it searches."""


def solve(
    tables: CostTables,
    *,
    ordering: str = AUTO,
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
) -> Solution:
    """Return a cheapest strategy with its proof, whether costs are additive or overlap.

    Arguments and errors as for `pase.solver.search.solve`.
    """
    if tables.hiding is None:
        return search.solve(
            tables,
            ordering=ordering,
            solver_memory_bytes=solver_memory_bytes,
            time_limit_s=time_limit_s,
            known=known,
            on_progress=on_progress,
        )
    verify_tables(tables)
    budget = _budget(solver_memory_bytes, time_limit_s, on_progress)
    found = _Overlapped(tables, ordering, budget, Outcome(tables=tables, ordering=ordering))

    def cheapest(weighed: CostTables, also: Sequence[Choice]) -> Solution:
        return search.solve(
            weighed,
            ordering=ordering,
            solver_memory_bytes=budget.solver_memory_bytes,
            time_limit_s=found.time_left_s(),
            known=also,
            on_progress=on_progress,
        )

    with suppress(OutOfTimeError, KeyboardInterrupt):
        found.relax(cheapest, map(tuple, known))
        found.close()
    return found.solution()


def solve_limited(
    problem: ConstrainedProblem,
    *,
    ordering: str = AUTO,
    solver_memory_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
    gap: float = 0.0,
    max_parts: int = MAX_PARTS,
) -> LimitedSolution:
    """Return the cheapest strategy within a limit, whether costs are additive or overlap.

    With overlap and a binding limit, the result is proven if the bound of some share λ is reached, and has a gap
    otherwise. Arguments and errors as for `pase.solver.constrained.solve_limited`.
    """
    tables = problem.tables
    if tables.hiding is None:
        return constrained.solve_limited(
            problem,
            ordering=ordering,
            solver_memory_bytes=solver_memory_bytes,
            time_limit_s=time_limit_s,
            known=known,
            on_progress=on_progress,
            gap=gap,
            max_parts=max_parts,
        )
    budget = _budget(solver_memory_bytes, time_limit_s, on_progress)
    start: list[Choice] = [tuple(choice) for choice in known]
    unlimited = solve(
        tables,
        ordering=ordering,
        solver_memory_bytes=budget.solver_memory_bytes,
        time_limit_s=time_limit_s,
        known=start,
        on_progress=on_progress,
    )
    found = _Overlapped(tables, ordering, budget, Outcome(tables=tables, ordering=ordering), gap=gap)

    def cheapest(weighed: CostTables, also: Sequence[Choice]) -> Solution:
        return constrained.solve_limited(
            replace(problem, tables=weighed),
            ordering=ordering,
            solver_memory_bytes=budget.solver_memory_bytes,
            time_limit_s=found.time_left_s(),
            known=also,
            on_progress=on_progress,
            gap=gap,
            max_parts=max_parts,
        ).solution

    fitting = [choice for choice in (*start, unlimited.choice) if problem.fits(choice)]
    found.outcome.raise_bound(unlimited.lower_bound)
    with suppress(OutOfTimeError, KeyboardInterrupt):
        found.relax(cheapest, fitting)
    solution = found.solution()
    return LimitedSolution(
        solution=replace(solution, time_s=perf_counter() - budget.started_s),
        unlimited=unlimited,
        usage=problem.usage(solution.choice),
        limit=problem.limit,
    )


def _budget(solver_memory_bytes: int | None, time_limit_s: float | None, on_progress: Progress | None) -> SearchBudget:
    check_limits(solver_memory_bytes, time_limit_s)
    started_s = perf_counter()
    return SearchBudget(
        started_s=started_s,
        deadline_s=None if time_limit_s is None else started_s + time_limit_s,
        solver_memory_bytes=default_solver_memory_bytes() if solver_memory_bytes is None else solver_memory_bytes,
        on_progress=on_progress,
    )


class _Closing(LimitedSearch):
    """Solves both limited problems together: a strategy found in either is costed by its own overlap."""

    def offer(self, choice: Sequence[int]) -> None:
        """Adopt a strategy if it is cheaper."""
        self.outcome.offer(dict(enumerate(choice)))


@dataclass(slots=True)
class _Overlapped:
    """State of one search: its problem, its budget, and its best result.

    Attributes:
        last: Solution of the last problem solved.
        share, bound: The best λ, and its bound.
        rising, falling: The strategies with A > B and with A < B that tie at that share; None until both are known.
    """

    tables: CostTables
    ordering: str
    budget: SearchBudget
    outcome: Outcome
    last: Solution | None = None
    share: float = 0.0
    bound: float = -np.inf
    rising: Choice = ()
    falling: Choice = ()
    gap: float = 0.0

    def time_left_s(self) -> float | None:
        """Return the seconds until the deadline, at least a small amount; None without a deadline."""
        deadline_s = self.budget.deadline_s
        return None if deadline_s is None else max(1e-3, deadline_s - perf_counter())

    def excess(self, choice: Sequence[int]) -> float:
        """Return A - B."""
        hideable, cover = self.tables.hidden(choice)
        return hideable - cover

    def is_proven(self) -> bool:
        """Return whether the best strategy is optimal, up to rounding or the gap; if so, record the proof."""
        if self.outcome.lower_bound >= self.outcome.cost * (1 - RELATIVE_TOLERANCE):
            self.outcome.prove()
        return self.outcome.exact or self.outcome.lower_bound >= self.outcome.cost * (1 - self.gap)

    def at(self, share: float, cheapest: Cheapest) -> Solution:
        """Return the cheapest strategy at a share and offer it; OutOfTimeError where its optimality is not proven."""
        if self.last is not None:
            self.budget.check()
        known = [self.outcome.choice] if np.isfinite(self.outcome.cost) else []
        found = self.last = cheapest(self.tables.weighed(share), known)
        self.budget.sweeps += found.statistics.sweeps
        self.budget.operations += found.statistics.operations
        self.budget.nodes += found.statistics.nodes
        self.outcome.offer(dict(enumerate(found.choice)))
        # Sums in another order may differ in their last digits.
        bound = found.lower_bound * (1 - SUM_ROUNDING)
        if bound > self.bound:
            self.share, self.bound = share, bound
        self.outcome.raise_bound(bound)
        if not found.exact and found.lower_bound < found.cost * (1 - self.gap - RELATIVE_TOLERANCE):
            raise OutOfTimeError
        return found

    def relax(self, cheapest: Cheapest, known: Iterable[Choice]) -> None:
        """Find the best bound that a share gives."""
        for choice in known:
            self.outcome.offer(dict(enumerate(choice)))
        # Try first the end that is likely to be the answer.
        first = 1.0 if self.outcome.choice and self.excess(self.outcome.choice) > 0 else 0.0
        ends = {}
        for share in (first, 1.0 - first):
            ends[share] = self.at(share, cheapest).choice
            if self.is_proven():
                return
        self.rising, self.falling = ends[0.0], ends[1.0]
        low = self.tables.weighed(0.0)
        for _ in range(MAX_PRICES):
            start, slope = low.evaluate(self.rising), self.excess(self.rising)
            share = (low.evaluate(self.falling) - start) / (slope - self.excess(self.falling))
            found = self.at(share, cheapest)
            if self.is_proven() or found.cost >= (start + share * slope) * (1 - ROUNDING):
                return
            if self.excess(found.choice) > 0:
                self.rising = found.choice
            else:
                self.falling = found.choice

    def close(self) -> None:
        """Close the remaining gap between the bound and the best known strategy; OutOfTimeError where time runs out."""
        if self.is_proven():
            return
        within, beyond = _sides(self.tables, self.outcome.cost)
        search = _Closing(within[0], self.ordering, self.budget, self.outcome)
        wholes = []
        for (problem, unit), share, light, heavy in (
            (within, self.share, self.falling, self.rising),
            (beyond, 1 - self.share, self.rising, self.falling),
        ):
            for choice in (light, *crossings(problem, light, heavy)):
                search.offer(improved(problem, choice))
            wholes.append(Relaxation(problem=problem, bound=self.bound, price=share * unit, light=light, heavy=heavy))
        search.branch(wholes)
        self.outcome.prove()

    def solution(self) -> Solution:
        """Return the best solution found."""
        outcome, budget, last = self.outcome, self.budget, self.last
        assert last is not None, "an interrupted search still returns a solution"
        bound = outcome.lower_bound * (1 - RELATIVE_TOLERANCE)
        return replace(
            last,
            cost=outcome.cost,
            lower_bound=outcome.cost if outcome.exact else max(0.0, min(outcome.cost, bound)),
            exact=outcome.exact,
            choice=outcome.choice,
            time_s=perf_counter() - budget.started_s,
            peak_memory_bytes=max(last.peak_memory_bytes, budget.peak_bytes + self.tables.num_bytes),
            statistics=replace(last.statistics, sweeps=budget.sweeps, operations=budget.operations, nodes=budget.nodes),
        )


def _sides(
    tables: CostTables, known: float
) -> tuple[tuple[ConstrainedProblem, float], tuple[ConstrainedProblem, float]]:
    """Return the limited problems for A ≤ B and for A ≥ B, each with the size of one unit of its resource.

    Args:
        known: Cost of a known strategy. A and B are parts of a strategy's cost, so no strategy that costs at most this
            has a part of A or B above it: larger entries are clamped to it.
    """
    hiding = tables.hiding
    assert hiding is not None
    excess = [np.clip(a - b, -known, known) for a, b in zip(hiding.hideable, hiding.cover, strict=True)]
    of_edges = [None if a is None else np.minimum(a, known) for a in hiding.edges]
    largest = [float(np.ptp(values)) + known / LARGEST_SUM for values in excess]
    most = sum(largest[t] for t in tables.vertex_table)
    most += sum(float(np.ptp(values)) for t in tables.edge_table if (values := of_edges[t]) is not None)
    # Half of the exact range, to leave room for rounding; a power of two, so that scaling is exact.
    unit = 2.0 ** np.ceil(np.log2(2 * most / LARGEST_SUM)) if most > 0 else 1.0
    return _side(tables, excess, of_edges, unit, 1), _side(tables, excess, of_edges, unit, -1)


def _side(
    tables: CostTables, excess: Sequence[FloatArray], of_edges: Sequence[FloatArray | None], unit: float, sign: int
) -> tuple[ConstrainedProblem, float]:
    """Return the problem of the strategies whose excess times `sign` is at most 0."""
    units = [np.rint(sign * values / unit) for values in excess]
    edge_units = [None if values is None else np.rint(sign * values / unit) for values in of_edges]
    # Usage is stored relative to the least entry of each table, and the limit likewise.
    least = [float(values.min()) for values in units]
    edge_least = [0.0 if values is None else float(values.min()) for values in edge_units]
    usage = [values - low for values, low in zip(units, least, strict=True)]
    edge_usage = [
        None if values is None else replace(table, values=values - low)
        for table, values, low in zip(tables.edge_tables, edge_units, edge_least, strict=True)
    ]
    limit = -sum(least[t] for t in tables.vertex_table) - sum(edge_least[t] for t in tables.edge_table)
    problem = ConstrainedProblem(
        tables=tables.weighed(0.0 if sign > 0 else 1.0),
        resource_usage=tuple(usage[t] for t in tables.vertex_table),
        edge_usage=tuple(edge_usage[t] for t in tables.edge_table),
        limit=limit,
    )
    return problem, unit
