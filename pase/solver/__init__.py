"""Exact search for a cheapest strategy: takes cost tables, returns a strategy with a proof of optimality.

The solver depends on no cost model, graph or framework.
"""

from pase.solver.constrained import (
    MAX_PARTS,
    ConstrainedProblem,
    CutShortError,
    LimitedSolution,
    NothingFitsError,
    lightest_strategy,
)
from pase.solver.overlap import solve, solve_limited
from pase.solver.reductions import near_optimal
from pase.solver.search import (
    WarmStart,
    check_limits,
    default_solver_memory_bytes,
    nearest,
    solve_again,
    warm_start,
    warm_start_from,
)
from pase.solver.solution import RELATIVE_TOLERANCE, Progress, Solution, Statistics
from pase.solver.two_pass import Marginals, min_marginals

__all__ = [
    "MAX_PARTS",
    "RELATIVE_TOLERANCE",
    "ConstrainedProblem",
    "CutShortError",
    "LimitedSolution",
    "Marginals",
    "NothingFitsError",
    "Progress",
    "Solution",
    "Statistics",
    "WarmStart",
    "check_limits",
    "default_solver_memory_bytes",
    "lightest_strategy",
    "min_marginals",
    "near_optimal",
    "nearest",
    "solve",
    "solve_again",
    "solve_limited",
    "warm_start",
    "warm_start_from",
]
