"""The cheapest strategy within a limit on weight: exact, or with a proven bound and a gap.

The optimum without the limit is the answer where it fits. Otherwise a price on weight gives a bound (`pricing`). What
is left between that and the best strategy known is closed from below: configurations that no strategy up to a target
cost can have are dropped (`bounds`, with the priced costs), and the elimination with fronts finds the cheapest
strategy up to the target, or shows that there is none. Targets rise from the bound, so that the first strategy found
is the optimum. Where fronts grow too large, the problem is split over the vertex that weighs most differently in the
two strategies between which the price cannot decide; each part has a better price of its own.

Peaks, of which the greatest of a group counts, make no sum. Whatever the greatest peak T of a strategy, it weighs at
least its sum and a lower bound on T: with that bound taken off the limit, and configurations with higher peaks than an
upper bound dropped, the problem without peaks bounds all strategies whose T is between the two. Where its optimum fits
with its own peak, it is the optimum of these. Otherwise the range is split at that peak: strategies whose T is lower
lose configurations, the others some of the limit. What the optimum was is then in neither.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np

from pase.errors import SolverError
from pase.solver.completions import TooWideError
from pase.solver.effort import RELATIVE_TOLERANCE, Effort, Incumbent, Outcome, OutOfTimeError, Progress
from pase.solver.fronts import TooManyError
from pase.solver.moves import Choice, crossings, improved
from pase.solver.pricing import Relaxation, lightest, relax
from pase.solver.search import default_memory_limit_bytes, solve
from pase.solver.solution import Solution
from pase.solver.targets import cheapest_up_to
from pase.solver.weighted import Weighted, verify_weighted
from pase.tables.cost_tables import CostTables

FIRST_TARGET = 1 / 64
"""Of the gap: how far above the bound the first target is."""
MANY_ENTRIES = 100_000
"""An elimination with more entries than this takes so long that targets rise more slowly after it."""
MAX_FAILURES = 4
"""A part is split after this many targets that left too much for tables, each halfway to the one before."""
MAX_PARTS = 200
"""Without a time limit, a problem is split into no more parts than this."""
CUT_SHORT = (
    "the search was cut short before it found any strategy that fits the limit; give it more time, or a higher limit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedSolution:
    """A strategy within the limit, and the optimum without it.

    solution: its certificate holds among the strategies within the limit. unlimited: the search without one.
    weight: of the strategy. limit: on it.
    """

    solution: Solution
    unlimited: Solution
    weight: float
    limit: float


def solve_limited(
    problem: Weighted,
    *,
    ordering: str = "auto",
    memory_limit_bytes: int | None = None,
    time_limit_s: float | None = None,
    known: Iterable[Sequence[int]] = (),
    on_progress: Progress | None = None,
) -> LimitedSolution:
    """Return the cheapest strategy that weighs no more than the limit, with its proof or a gap.

    Arguments as for `solve`; of the strategies that are known those that do not fit are passed over. The answer always
    fits: NothingFitsError where nothing does, SolverError where the search was cut short before anything was found that
    does.
    """
    verify_weighted(problem)
    if problem.peaks:
        return _with_peaks(problem, ordering, memory_limit_bytes, time_limit_s, known, on_progress)
    started_s = perf_counter()
    effort = Effort(
        started_s=started_s,
        deadline_s=None if time_limit_s is None else started_s + time_limit_s,
        memory_limit_bytes=default_memory_limit_bytes() if memory_limit_bytes is None else memory_limit_bytes,
        on_progress=on_progress,
    )
    start = [tuple(choice) for choice in known]
    unlimited = solve(
        problem.tables,
        ordering=ordering,
        memory_limit_bytes=memory_limit_bytes,
        time_limit_s=time_limit_s,
        known=start,
        on_progress=on_progress,
    )
    if problem.least_weight > problem.limit:
        raise _nothing_fits(problem)
    outcome = Outcome(
        incumbent=Incumbent(problem.tables),
        ordering=unlimited.ordering,
        lower_bound=unlimited.lower_bound,
    )
    search = _Search(problem.above_least(), ordering, effort, outcome)
    try:
        for choice in (*start, unlimited.choice):
            search.offer(choice)
        search.run(unlimited)
    except _NothingFitsError:
        raise _nothing_fits(problem) from None
    except (OutOfTimeError, KeyboardInterrupt):
        pass
    return _answer(problem, unlimited, effort, outcome)


def _with_peaks(
    problem: Weighted,
    ordering: str,
    memory_limit_bytes: int | None,
    time_limit_s: float | None,
    known: Iterable[Sequence[int]],
    on_progress: Progress | None,
) -> LimitedSolution:
    """Return the cheapest strategy whose sum and greatest peaks are within the limit, range of peaks by range."""
    started_s = perf_counter()

    def options() -> dict[str, Any]:
        left_s = None if time_limit_s is None else max(1e-9, started_s + time_limit_s - perf_counter())
        return {
            "ordering": ordering, "memory_limit_bytes": memory_limit_bytes, "time_limit_s": left_s,
            "on_progress": on_progress,
        }  # fmt: skip

    fitting = [choice for choice in (*map(tuple, known), *_light(problem)) if problem.fits(choice)]
    unlimited = solve(problem.tables, known=fitting, **(options() | {"time_limit_s": time_limit_s}))
    if problem.fits(unlimited.choice):
        fitting.append(unlimited.choice)
    number = count()
    least = tuple(max(float(peaks.min()) for peaks in group) for group in problem.peaks)
    ranges = [(unlimited.lower_bound, next(number), least, (np.inf,) * len(least))]
    is_cut_short, operations = False, unlimited.statistics.operations

    def best() -> float:
        return min(map(problem.tables.evaluate, fitting), default=np.inf)

    while ranges and not is_cut_short and ranges[0][0] < best() * (1 - RELATIVE_TOLERANCE):
        bound, _, low, high = heappop(ranges)
        part = problem.without_peaks(low, high)
        if part is None or part.limit < 0:
            continue
        try:
            found = solve_limited(part, known=fitting, **options()).solution
        except _CutShortError:
            is_cut_short = True
            heappush(ranges, (bound, next(number), low, high))
            continue
        except SolverError:  # nothing fits, or what does has an infinite cost
            continue
        bound, is_cut_short = max(bound, found.lower_bound), not found.exact
        operations += found.statistics.operations
        if problem.fits(found.choice):
            fitting.append(found.choice)
        if is_cut_short:
            heappush(ranges, (bound, next(number), low, high))
        elif not problem.fits(found.choice):
            for part_of_range in _split_range(problem, found.choice, bound, number, low, high):
                heappush(ranges, part_of_range)
    if not fitting and is_cut_short:
        raise _CutShortError(CUT_SHORT)
    if not np.isfinite(best()):
        raise _nothing_fits(problem)
    choice = min(fitting, key=problem.tables.evaluate)
    cost = best()
    is_exact = not ranges or ranges[0][0] >= cost * (1 - RELATIVE_TOLERANCE)
    solution = replace(
        unlimited,
        cost=cost,
        lower_bound=cost if is_exact else max(0.0, min(cost, ranges[0][0])),
        exact=is_exact,
        choice=choice,
        time_s=perf_counter() - started_s,
        statistics=replace(unlimited.statistics, operations=operations),
    )
    return LimitedSolution(solution=solution, unlimited=unlimited, weight=problem.weight(choice), limit=problem.limit)


def lightest_strategy(problem: Weighted) -> Choice:
    """Return a strategy of finite cost that weighs least, whatever the limit; SolverError where there is none."""
    least = tuple(max(float(peaks.min()) for peaks in group) for group in problem.peaks)
    number = count()
    ranges = [(0.0, next(number), least, (np.inf,) * len(least))]
    best: Choice | None = None
    while ranges and (best is None or ranges[0][0] < problem.weight(best)):
        _, _, low, high = heappop(ranges)
        part = problem.without_peaks(low, high)
        if part is None:
            continue
        try:
            found = solve(part.weight_alone())
        except SolverError:  # every strategy has an infinite cost
            continue
        best = found.choice if best is None else min(best, found.choice, key=problem.weight)
        bound = found.lower_bound + sum(low)
        ranges += _split_range(problem, found.choice, bound, number, low, high)
        heapify(ranges)
    if best is None:
        raise SolverError("every strategy has an infinite cost; nothing can be weighed")
    return best


Range = tuple[float, int, tuple[float, ...], tuple[float, ...]]
"""A bound on the strategies of a range, its number, and between what their greatest peaks lie, by group."""


def _split_range(
    problem: Weighted,
    choice: Choice,
    bound: float,
    number: Iterator[int],
    low: tuple[float, ...],
    high: tuple[float, ...],
) -> list[Range]:
    """Return the two parts of a range of peaks, at the greatest peak of a strategy; none where it counts already."""
    greatest = problem.greatest(choice)
    g = max(range(len(low)), key=lambda g: greatest[g] - low[g], default=0)
    if not low or greatest[g] <= low[g]:
        return []
    below = max(float(peaks.max(initial=0.0, where=peaks < greatest[g])) for peaks in problem.peaks[g])
    return [
        (bound, next(number), (*low[:g], greatest[g], *low[g + 1 :]), high),
        (bound, next(number), low, (*high[:g], below, *high[g + 1 :])),
    ]


def _light(problem: Weighted) -> Iterator[Choice]:
    """Yield strategies that are likely to fit: each vertex's lightest, by sum, by peak, and by both."""
    for of_sum, of_peak in ((1, 0), (0, 1), (1, 1)):
        yield tuple(
            int((of_sum * weights + of_peak * sum(group[v] for group in problem.peaks)).argmin())
            for v, weights in enumerate(problem.weights)
        )


class NothingFitsError(SolverError):
    """No strategy of finite cost is within the limit."""


class _CutShortError(SolverError):
    """There was no time to find any strategy that fits."""


class _NothingFitsError(Exception):
    """The same, where the search finds it out."""


@dataclass(slots=True)
class _Search:
    """One search: what it was asked, what it has used, and what it has found."""

    problem: Weighted
    ordering: str
    effort: Effort
    outcome: Outcome

    def run(self, unlimited: Solution) -> None:
        """Search until there is a proof; OutOfTimeError where the limits do not suffice."""
        problem, outcome = self.problem, self.outcome
        light = lightest(problem, self.solved) if not np.isfinite(outcome.incumbent.cost) else outcome.incumbent.choice
        if light is None:
            raise _NothingFitsError
        self.offer(light)
        self.offer(improved(problem, outcome.incumbent.choice))
        if not unlimited.exact:
            raise OutOfTimeError
        if self.is_proven():
            return
        whole = self.relaxed(problem, outcome.incumbent.choice, unlimited)
        outcome.raise_bound(whole.bound)
        for choice in crossings(problem, whole.light, whole.heavy):
            self.offer(improved(problem, choice))
        self._branch(whole)
        outcome.prove()

    def offer(self, choice: Sequence[int]) -> None:
        """Take a strategy over if it fits and is cheaper."""
        if self.problem.fits(choice):
            self.outcome.incumbent.offer(dict(enumerate(choice)))

    def enough(self) -> float:
        """Return the cost from which on a strategy is no better than the one that is known, up to rounding."""
        return self.outcome.incumbent.cost * (1 - RELATIVE_TOLERANCE)

    def is_proven(self) -> bool:
        """Return whether the bound has reached the best strategy, and note it."""
        if self.outcome.lower_bound >= self.enough():
            self.outcome.prove()
        return self.outcome.exact

    def solved(self, tables: CostTables) -> Solution:
        """Return the optimum of other tables, whose strategy is offered; OutOfTimeError where the time is up."""
        self.effort.check()
        deadline_s = self.effort.deadline_s
        self.effort.progress("weighing cost against weight", 1 - self.outcome.gap)
        solution = solve(
            tables,
            ordering=self.ordering,
            memory_limit_bytes=self.effort.memory_limit_bytes,
            time_limit_s=None if deadline_s is None else max(1e-3, deadline_s - perf_counter()),
        )
        self.effort.sweeps += solution.statistics.sweeps
        self.effort.operations += solution.statistics.operations
        self.offer(solution.choice)
        if not solution.exact:
            raise OutOfTimeError
        return solution

    def relaxed(self, problem: Weighted, light: Choice, heavy: Solution) -> Relaxation:
        """Return a problem's bound, and offer the strategies that it comes with."""
        found = relax(problem, light, heavy, self.solved, self.enough)
        self.offer(improved(self.problem, found.light))
        return found

    def _branch(self, whole: Relaxation) -> None:
        """Settle a problem, in parts where it is too large, the part with the least bound first."""
        number = count()
        parts = [(whole.bound, next(number), whole)]
        while parts:
            _, _, part = heappop(parts)
            bound, is_settled = self._settle(part)
            if not is_settled:
                if self.effort.deadline_s is None and self.effort.nodes >= MAX_PARTS:
                    self.outcome.raise_bound(min([bound, *(b for b, _, _ in parts)]))
                    raise OutOfTimeError
                for piece in self._split(part):
                    heappush(parts, (max(bound, piece.bound), next(number), piece))
            parts = [entry for entry in parts if entry[0] < self.enough()]
            parts.sort()  # a sorted list is a heap
            if parts:
                self.outcome.raise_bound(parts[0][0])

    def _settle(self, part: Relaxation) -> tuple[float, bool]:
        """Return a bound on the strategies of a part, and whether none is cheaper than what is known by now.

        The target cost rises until a strategy is found up to it, or the best known one is reached.
        """
        bound, reached, beyond, failures = part.bound, 0.0, np.inf, 0
        distance = FIRST_TARGET * (self.outcome.incumbent.cost - bound)
        while bound < self.enough():
            self.effort.progress(f"closing a gap of {self.outcome.gap:.2%}", 1 - self.outcome.gap)
            before = self.effort.operations
            distance = min(distance, self.outcome.incumbent.cost - part.bound)
            try:
                found, choice = cheapest_up_to(part.bound + distance, part, self.effort)
            except TooManyError:
                return bound, False
            except TooWideError:
                failures, beyond = failures + 1, distance
                if failures == MAX_FAILURES:
                    return bound, False
                distance = (reached + beyond) / 2
                continue
            bound = max(bound, found)
            if choice is not None:
                self.offer(choice)
            if part.problem is self.problem:
                self.outcome.raise_bound(bound)
            reached = distance
            distance *= 2 if self.effort.operations - before > MANY_ENTRIES else 4
            if distance >= beyond:
                distance = (reached + beyond) / 2
        return bound, True

    def _split(self, part: Relaxation) -> list[Relaxation]:
        """Return the parts of a part in which some strategy may be better than what is known."""
        problem = part.problem
        first, second = part.light, part.heavy

        def difference(v: int) -> float:
            return abs(float(problem.changes(v, first)[second[v]]))

        v = max(range(len(first)), key=lambda v: (difference(v), first[v] != second[v], -v))
        weights = problem.weights[v]
        is_light = weights <= (weights[first[v]] + weights[second[v]]) / 2
        if weights[first[v]] == weights[second[v]]:
            # They differ by what edges weigh.
            is_light = np.arange(len(weights)) == first[v]
        allowed = np.isfinite(problem.tables.layer_costs(v))
        pieces = []
        for keep in (is_light & allowed, ~is_light & allowed):
            self.effort.nodes += 1
            piece = problem.with_alone(v, keep)
            light = lightest(piece, self.solved)
            if light is None:
                continue
            best = self.solved(piece.tables)
            if best.lower_bound >= self.enough() or piece.fits(best.choice):
                continue
            found = self.relaxed(piece, light, best)
            if found.bound < self.enough():
                pieces.append(found)
        return pieces


def _nothing_fits(problem: Weighted) -> NothingFitsError:
    return NothingFitsError(
        f"no strategy of finite cost weighs {problem.limit:.0f} or less: the lightest configurations of all vertices "
        f"weigh {problem.least_weight:.0f} together; raise the limit"
    )


def _answer(problem: Weighted, unlimited: Solution, effort: Effort, outcome: Outcome) -> LimitedSolution:
    choice = outcome.incumbent.choice
    if not np.isfinite(outcome.incumbent.cost):
        raise _CutShortError(CUT_SHORT)
    cost = outcome.incumbent.cost
    statistics = unlimited.statistics
    solution = replace(
        unlimited,
        cost=cost,
        lower_bound=cost if outcome.exact else max(0.0, min(cost, outcome.lower_bound * (1 - RELATIVE_TOLERANCE))),
        exact=outcome.exact,
        choice=choice,
        time_s=perf_counter() - effort.started_s,
        peak_memory_bytes=max(unlimited.peak_memory_bytes, effort.peak_bytes + problem.tables.num_bytes),
        statistics=replace(
            statistics,
            sweeps=statistics.sweeps + effort.sweeps,
            operations=statistics.operations + effort.operations,
            nodes=statistics.nodes + effort.nodes,
        ),
    )
    return LimitedSolution(solution=solution, unlimited=unlimited, weight=problem.weight(choice), limit=problem.limit)
