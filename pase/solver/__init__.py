"""Exact search for a cheapest strategy: cost tables in, a strategy with a proof out.

The solver knows no cost model, no graph and no framework.
"""

from pase.solver.effort import Progress
from pase.solver.recurrences import find_best_strategy, naive_recurrence
from pase.solver.search import solve
from pase.solver.solution import Solution, Statistics

__all__ = ["Progress", "Solution", "Statistics", "find_best_strategy", "naive_recurrence", "solve"]
