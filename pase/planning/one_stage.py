"""A step of one stage: its choices as one problem of costs, which the solver decides exactly, within the memory limit.

A plain strategy is such a step, of one micro-batch whose layers have one mode.
"""

from collections.abc import Iterable, Sequence
from math import inf
from time import perf_counter

import numpy as np

from pase.costs import StepMemory
from pase.costs.modes import EdgeModes, ModeTables
from pase.planning.memory_limit import MemoryLimit, NothingFoundError, cheapest_within
from pase.planning.stage_problem import Choice, StageProblem, joins
from pase.solver import NothingFitsError, solve
from pase.tables.cost_tables import CostTables, EdgeTable, FloatArray, Hiding


def choice_tables(tables: ModeTables, micro_batches: int) -> CostTables:
    """Return what a step of one stage costs at least by the choices of its layers.

    What streams in each micro-batch counts once, as if it were hidden in all but the last: a strategy of which it is
    costs no more.
    """
    layers = {id(layer): layer.figures for layer in tables.layers}
    edges = {id(edge): edge for edge in tables.edges}
    numbers = {key: number for number, key in enumerate(layers)}
    edge_numbers = {key: number for number, key in enumerate(edges)}
    costs = tuple(micro_batches * own.repeated + own.once + own.streamed + own.summed for own in layers.values())
    edge_tables = [_times(edge, 1 if edge.is_weight and tables.hides else micro_batches) for edge in edges.values()]
    ends, edge_table = list(tables.ends), [edge_numbers[id(edge)] for edge in tables.edges]
    hidden: list[FloatArray | None] = [edge.cost.values if edge.is_weight else None for edge in edges.values()]
    for first, other in joins(tables):
        # Nothing lies between parts of a graph that stand apart.
        rows, cols = (np.zeros(len(tables.layers[v]), dtype=np.int32) for v in (first, other))
        ends.append((first, other))
        edge_table.append(len(edge_tables))
        edge_tables.append(EdgeTable(row_class=rows, col_class=cols, values=np.zeros((1, 1))))
        hidden.append(None)
    hiding = Hiding(
        hideable=tuple(own.streamed + own.summed for own in layers.values()),
        cover=tuple(own.cover for own in layers.values()),
        edges=tuple(hidden),
    )
    return CostTables(
        vertex_names=tuple(operator.name for operator in tables.graph.operators),
        vertex_costs=costs,
        vertex_table=tuple(numbers[id(layer)] for layer in tables.layers),
        edges=tuple(ends),
        edge_tables=tuple(edge_tables),
        edge_table=tuple(edge_table),
        hiding=hiding if tables.hides else None,
    )


def _times(edge: EdgeModes, count: int) -> EdgeTable:
    cost = edge.cost
    return EdgeTable(row_class=cost.row_class, col_class=cost.col_class, values=count * cost.values)


def solve_one_stage(
    problem: StageProblem, memory: StepMemory, known: Iterable[Sequence[int]] = ()
) -> tuple[Choice, float]:
    """Return the cheapest step of one stage, none where none is known to fit, and a bound on all.

    Args:
        problem: The stage, of all choices.
        memory: What these have in memory.
        known: Choices to begin with.
    """
    tables = choice_tables(problem.tables, memory.micro_batches)
    time_limit_s = None if problem.deadline_s == inf else max(problem.deadline_s - perf_counter(), 1e-9)
    try:
        if problem.limit_bytes == inf:
            found = solve(tables, known=known, time_limit_s=time_limit_s)
        else:
            limit = MemoryLimit(memory=memory, limit_bytes=int(problem.limit_bytes))
            found = cheapest_within(tables, limit, known=known, time_limit_s=time_limit_s).solution
    except NothingFitsError:
        return (), inf
    except NothingFoundError as nothing:
        return (), nothing.bound
    return found.choice, found.lower_bound
