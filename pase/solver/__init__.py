"""Exact search for a cheapest strategy: cost tables in, a strategy with a proof out.

The solver knows no cost model, no graph and no framework.
"""

from pase.solver.effort import RELATIVE_TOLERANCE, Progress
from pase.solver.limited import LimitedSolution, NothingFitsError, lightest_strategy, solve_limited
from pase.solver.marginals import Marginals, min_marginals
from pase.solver.near_optimal import near_optimal
from pase.solver.recurrences import find_best_strategy, naive_recurrence
from pase.solver.search import check_limits, default_memory_limit_bytes, solve
from pase.solver.solution import Solution, Statistics
from pase.solver.weighted import Weighted

__all__ = [
    "RELATIVE_TOLERANCE",
    "LimitedSolution",
    "Marginals",
    "NothingFitsError",
    "Progress",
    "Solution",
    "Statistics",
    "Weighted",
    "check_limits",
    "default_memory_limit_bytes",
    "find_best_strategy",
    "lightest_strategy",
    "min_marginals",
    "naive_recurrence",
    "near_optimal",
    "solve",
    "solve_limited",
]
