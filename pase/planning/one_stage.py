"""A step of one stage: its choices as one problem of costs, which the solver decides exactly, within the memory limit.

A plain strategy is such a step, of one micro-batch whose layers have one mode.
"""

from dataclasses import replace
from math import inf
from time import perf_counter

import numpy as np

from pase.costs import StepMemory
from pase.planning.memory_limit import MemoryLimit, NothingFoundError, cheapest_within
from pase.planning.stage_problem import CRITERIA, Choice, StageProblem
from pase.solver import NothingFitsError, solve
from pase.tables.cost_tables import CostTables, Hiding


def choice_tables(problem: StageProblem) -> CostTables:
    """Return what a step of one stage costs at least by the choices of its layers.

    What streams in each micro-batch counts once, as if it were hidden in all but the last: a strategy of which it is
    costs no more.
    """
    counted = {"repeated": problem.weight, "streamed": 1.0, "once": 1.0, "summed": 1.0}
    tables, _ = problem.weighed(np.array([counted.get(name, 0.0) for name in CRITERIA]))
    if not problem.tables.hides:
        return tables
    layers = {id(layer): layer.figures for layer in problem.tables.layers}
    # Behind the edges are those that join parts of a graph that stand apart.
    is_weight = dict(zip(tables.edge_table, (edge.is_weight for edge in problem.tables.edges), strict=False))
    hiding = Hiding(
        hideable=tuple(own.streamed + own.summed for own in layers.values()),
        cover=tuple(own.cover for own in layers.values()),
        edges=tuple(table.values if is_weight.get(number) else None for number, table in enumerate(tables.edge_tables)),
    )
    return replace(tables, hiding=hiding)


def solve_one_stage(problem: StageProblem, memory: StepMemory) -> tuple[Choice, float]:
    """Return the cheapest step of one stage, none where none is known to fit, and a bound on all.

    Args:
        problem: The stage, of all choices.
        memory: What these have in memory.
    """
    tables = choice_tables(problem)
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
