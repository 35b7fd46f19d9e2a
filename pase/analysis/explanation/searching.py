"""One way to search for all that an explanation looks at: with the plan's own limit on memory, where it has one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pase.costs import Problem, memory_tables
from pase.planning.memory_limit import weighted_problem
from pase.planning.plan import Plan
from pase.solver import Progress, Solution, Weighted, solve, solve_limited
from pase.tables.cost_tables import CostTables

LIMITED_TIME_S = 0.5
"""Of one search under a memory limit, unless another is given: such a search may take long, and there are many."""
PATIENT_TIME_S = 10.0
"""The same for a search whose proof decides how far flips are known; there are few."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Searching:
    """What every search of an explanation keeps to.

    limited: a problem with the bytes that its strategies take on each device, and the limit; None: no limit.
    time_limit_s: of one search.
    """

    limited: Weighted | None = None
    time_limit_s: float | None = None

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether a strategy is within the limit."""
        return self.limited is None or self.limited.fits(choice)

    def weighted(self, tables: CostTables) -> Weighted | None:
        """Return a problem of the same configurations with their weights; None where there is no limit."""
        return self.limited and replace(self.limited, tables=tables)

    def cheapest(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy that fits; SolverError where none does."""
        weighted = self.weighted(tables)
        if weighted is None:
            return self.unlimited(tables, known, on_progress)
        time_limit_s = self.time_limit_s or PATIENT_TIME_S
        return solve_limited(weighted, known=known, time_limit_s=time_limit_s, on_progress=on_progress).solution

    def unlimited(
        self, tables: CostTables, known: Iterable[Sequence[int]] = (), on_progress: Progress | None = None
    ) -> Solution:
        """Return the cheapest strategy whether it fits or not.

        Without a time limit a search ends unproven when it is interrupted, and so does all of the explanation then.
        """
        solution = solve(tables, known=known, time_limit_s=self.time_limit_s, on_progress=on_progress)
        if not solution.exact and self.time_limit_s is None:
            raise KeyboardInterrupt
        return solution


def searching(plan: Plan, problem: Problem, time_limit_s: float | None = None) -> Searching:
    """Return how to search for what is compared with a plan."""
    limit = plan.memory_limit_bytes_per_device
    if limit is None:
        return Searching(time_limit_s=time_limit_s)
    memory = memory_tables(problem, optimiser=plan.optimiser)
    return Searching(limited=weighted_problem(problem.tables, memory, limit), time_limit_s=time_limit_s)
