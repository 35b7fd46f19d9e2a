"""A step of one stage: its choices as one problem of costs, which the solver decides exactly, within the memory limit.

A plain plan is such a step, of one micro-batch whose layers have one mode.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Unpack

import numpy as np

from pase.costs import Allowance, Problem, cost_model
from pase.costs.choice_tables import KnownChoices, choice_tables
from pase.graph import Graph, Operator
from pase.planning.constraints import allowed, with_ties
from pase.planning.memory_limit import SolverOptions, cheapest_within, limit_of
from pase.planning.spans import Setting
from pase.planning.stage_problem import StageProblem, StageSums
from pase.sharding.shards import IndexArray
from pase.solver import LimitedSolution, solve


def problem_of_setting(
    setting: Setting,
    micro_batches: int = 1,
    *,
    allowance: Allowance | None = None,
    only: Callable[[Graph, Operator], IndexArray] | None = None,
    known: KnownChoices | None = None,
    recomputed: frozenset[str] = frozenset(),
    is_whole: bool | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Problem:
    """Return the problem of steps of one stage.

    Args:
        setting: What is searched for.
        micro_batches: Of a step.
        allowance: Of time and memory for tables; TimeUpError or SolverError is raised beyond that.
        only: Returns the configurations that are considered of a layer, of which constraints leave some; None: all.
        known: Of tables of the same graph, devices, cost model, number of micro-batches and `is_whole`.
        recomputed: Layers that may be recomputed though they end runs of such layers.
        is_whole: Whether choices stay that others beat in all costs and sums, and what they hold is worked out; None:
            within a memory limit, as their peaks may be lower.
        on_progress: Called with what is being done and the fraction that is done.
    """
    batch, devices = setting.of_micro_batch(micro_batches, 1), setting.num_devices
    graph = batch.graph
    is_whole = setting.limit_bytes < inf if is_whole is None else is_whole
    left = allowed(setting.constraints, graph, devices, only)
    if only is None:
        configurations = left.mapping(graph)
    else:
        configurations = {operator.name: left.configurations(graph, operator) for operator in graph.operators}
    # Absurd figures of a machine overflow; the tables are then refused.
    with np.errstate(over="ignore", invalid="ignore"):
        tables = choice_tables(
            graph,
            devices,
            cost_model(setting.cost_model, setting.machine, devices, graph.precision),
            setting.space,
            known=known or KnownChoices(),
            keeps=batch.keeps if is_whole and not setting.space.is_plain else None,
            fixed=batch.fixed - recomputed if setting.space.recompute else frozenset(),
            only=configurations,
            micro_batches=micro_batches,
            is_whole=is_whole,
            allowance=allowance,
            on_progress=on_progress,
        )
        problem = Problem.of(tables, micro_batches)
    return with_ties(problem, (names for _, names in left.ties))


def search_one_stage(
    setting: Setting,
    problem: Problem,
    *,
    known: Iterable[Sequence[int]] = (),
    time_limit_s: float | None = None,
    **options: Unpack[SolverOptions],
) -> LimitedSolution:
    """Return the cheapest step of one stage within the memory limit, and the cheapest without.

    Args:
        setting: What is searched for.
        problem: Of the setting.
        known: Choices to begin with.
        time_limit_s: Of the search.
        **options: Of the solver.

    Raises:
        NothingFitsError: Nothing does (`pase.planning.memory_limit.nothing_fits` says by how much).
        CutShortError: Nothing is known to fit.
    """
    if setting.limit_bytes == inf:
        solution = solve(problem.tables, known=known, time_limit_s=time_limit_s, **options)
        return LimitedSolution(solution=solution, unlimited=solution, usage=0, limit=inf)
    limit = limit_of(problem, int(setting.limit_bytes), setting.optimiser)
    return cheapest_within(problem.tables, limit, known=known, time_limit_s=time_limit_s, **options)


def sums_of(problem: Problem, choice: Sequence[int]) -> StageSums:
    """Return what a step takes."""
    stage = StageProblem(tables=problem.choices, weight=1.0, in_flight=1, limit_bytes=inf)
    return stage.sums(choice)


def step_cost(problem: Problem, choice: Sequence[int]) -> float:
    """Return what a step costs.

    Of several micro-batches what overlaps in the backward pass of all but the last is not what the tables assume.
    """
    if problem.micro_batches == 1:
        return problem.tables.evaluate(choice)
    sums = sums_of(problem, choice)
    return problem.micro_batches * sums.micro_batch + sums.step
