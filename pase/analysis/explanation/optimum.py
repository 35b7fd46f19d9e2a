"""A plan as a strategy of its search problem, and the cheapest strategy beside it."""

from collections.abc import Sequence
from dataclasses import replace

from pase.analysis.explanation.nearest import TIE, nearest
from pase.analysis.explanation.searching import Searching
from pase.costs import Problem
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.planning.planner import Progress
from pase.solver import Solution
from pase.tables.cost_tables import CostTables


def planned_choice(plan: Plan, problem: Problem) -> tuple[int, ...]:
    """Return a plan's strategy by configuration index."""
    choice = []
    for vertex, layer in enumerate(plan.layers):
        found = problem.choice(vertex, tuple(layer.splits.values()))
        if found is None:
            raise PlanError(
                f"layer {layer.name!r} has the configuration {layer.splits}, which a search on {plan.num_devices} "
                "devices does not look at: there is nothing to compare it with; search again"
            )
        choice.append(found)
    return tuple(choice)


def present_optimum(
    plan: Plan, tables: CostTables, choice: Sequence[int], search: Searching, on_progress: Progress | None = None
) -> Solution:
    """Return the cheapest strategy that fits, nearest to a plan; searched for again unless that takes long.

    Under a memory limit it does: there a plan whose file says that it is proven is taken at its word.
    """
    if search.limited is None or not plan.exact:
        return optimum_near(tables, choice, search, on_progress)
    return claimed_optimum(plan, tables, choice)


def claimed_optimum(plan: Plan, tables: CostTables, choice: Sequence[int]) -> Solution:
    """Return the plan as the cheapest strategy that its file says it is."""
    cost = tables.evaluate(choice)
    return Solution(
        cost=cost,
        lower_bound=cost,
        exact=True,
        choice=tuple(choice),
        ordering=plan.search.ordering,
        largest_dependent_set=plan.search.largest_dependent_set,
        time_s=plan.search.time_s,
        peak_memory_bytes=plan.search.peak_memory_bytes,
    )


def optimum_near(
    tables: CostTables, choice: Sequence[int], search: Searching, on_progress: Progress | None = None
) -> Solution:
    """Return the cheapest strategy that fits, of equals the one that differs least from a given one, which fits."""
    solution = search.cheapest(tables, [choice], on_progress)
    own = tables.evaluate(choice)
    if own <= solution.cost * (1 + TIE):
        return replace(solution, choice=tuple(choice), cost=own, lower_bound=min(solution.lower_bound, own))
    near = nearest([tables], choice, solution.choice)
    return replace(solution, choice=near) if search.fits(near) else solution
