"""A step of one stage: its choices as one problem of costs, which the solver decides exactly, within the memory limit.

A plain strategy is such a step, of one micro-batch whose layers have one mode.
"""

from math import inf
from time import perf_counter

from pase.costs import StepMemory
from pase.planning.memory_limit import MemoryLimit, NothingFoundError, cheapest_within
from pase.planning.stage_problem import Choice, StageProblem
from pase.solver import NothingFitsError, solve


def solve_one_stage(problem: StageProblem, memory: StepMemory) -> tuple[Choice, float]:
    """Return the cheapest step of one stage, none where none is known to fit, and a bound on all.

    Args:
        problem: The stage, of all choices.
        memory: What these have in memory.
    """
    tables = problem.tables.of_one_stage(int(problem.weight))
    time_limit_s = None if problem.deadline_s == inf else max(problem.deadline_s - perf_counter(), 1e-9)
    try:
        if problem.limit_bytes == inf:
            found = solve(tables, time_limit_s=time_limit_s)
        else:
            limit = MemoryLimit(memory=memory, limit_bytes=int(problem.limit_bytes))
            found = cheapest_within(tables, limit, time_limit_s=time_limit_s).solution
    except NothingFitsError:
        return (), inf
    except NothingFoundError as nothing:
        return (), nothing.bound
    return found.choice, found.lower_bound
