"""What each configuration of each layer would cost in the whole strategy, and what else would change with it.

Min-marginals (`pase.solver.min_marginals`) of all layers at once, two passes over the tables. Where the whole problem
is too large for them, that of the strategies up to some per cent above the optimum is not: what is cheaper than that is
found exactly, and of the rest it is known that it is dearer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from time import perf_counter

import numpy as np

from pase.analysis.explanation.alternatives import SLACKS, Island, islands
from pase.analysis.explanation.constrained_search import TIE, planned_choice
from pase.costs import Allowance, Problem, TimeUpError
from pase.errors import PlanError
from pase.planning.plan import Plan
from pase.planning.planner import Progress, problem_of_plan
from pase.solver import Marginals, min_marginals, near_optimal
from pase.tables.cost_tables import CostTables

LIMITS = (9.0, 1.0, *reversed(SLACKS))
"""How far above the optimum strategies are looked at, as parts of it; the first that is not too much work."""

MAX_CELLS = 400_000_000
"""Combinations that min-marginals may look at, some seconds' work: this is done once, where it is asked for."""

MOST_CHOICES = 40
"""Configurations of a layer, the cheapest, of which is said what they would cost."""

Change = tuple[int, tuple[int, ...]]
"""A layer, by its number, and the splits that it would have instead of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A configuration of a layer: splits, in the order of its dims; difference: of the least total cost with it to the
    plan's; changes: which other layers differ from the plan in a strategy that costs this.
    """

    splits: tuple[int, ...]
    difference: float
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoices:
    """A layer's cheapest configurations, its own first and then by cost.

    num_configurations: of the layer in all. beyond: by how much more than the plan each of the others costs at least.
    """

    choices: tuple[Choice, ...]
    num_configurations: int
    beyond: float


def every_choice(
    plan: Plan,
    *,
    most: int = MOST_CHOICES,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
) -> tuple[LayerChoices | None, ...]:
    """Return [layers] what their configurations would cost in the cheapest strategy that has them.

    The plan's constraints hold for all. None stands for layers that were not reached within the time limit. Raises
    PlanError where nothing is known: for a plan that is not the optimum, within a memory limit, or where the problem is
    too large, or the time too short.
    """
    if plan.device_memory_bytes is not None:
        raise PlanError(
            "what other configurations would cost is not known of a plan within a memory limit, which binds all layers "
            "together; search without --memory-per-device to have it"
        )
    deadline_s = inf if time_limit_s is None else perf_counter() + time_limit_s
    allowance = Allowance(deadline_s=deadline_s)
    try:
        problem = problem_of_plan(plan, on_progress, allowance=allowance)
        if problem.tables.hiding is not None:
            raise PlanError(
                f"what other configurations would cost is not known under cost model {plan.cost_model!r}, whose costs "
                "do not add up; a plan of 'alpha_beta' has it"
            )
        choice = planned_choice(plan, problem)
        cost = problem.tables.evaluate(choice)
        for slack in LIMITS:
            if on_progress:
                on_progress("looking at every configuration", 0.0)
            found = _within(problem.tables, choice, cost, slack, allowance.check)
            if found is not None:
                return _choices(problem, choice, cost, found, slack, most, deadline_s, on_progress)
    except TimeUpError:
        raise PlanError(
            f"what other configurations would cost is not known: the time limit of {time_limit_s:g} s was reached "
            "before it was worked out of any layer; give more time (--time-limit)"
        ) from None
    raise PlanError("what other configurations would cost is not known: the problem is too large for min-marginals")


_Known = Sequence[tuple[Island, Marginals]]


def _within(
    tables: CostTables, choice: Sequence[int], cost: float, slack: float, check: Callable[[], None]
) -> _Known | None:
    """Return the min-marginals of each island of strategies so near to one; None where that is too much work."""
    kept = near_optimal(tables, cost * (1 + slack), check)
    found = []
    for island in islands(tables, kept):
        # What is not within the limit may count as twice that, so that all costs are finite.
        ceiling = 2 * (1 + slack) * cost or 1.0
        marginals = min_marginals(
            island.tables, island.present(choice), max_cells=MAX_CELLS, ceiling=ceiling, check=check
        )
        if marginals is None:
            return None
        found.append((island, marginals))
    return found


def _choices(
    problem: Problem,
    choice: Sequence[int],
    cost: float,
    known: _Known,
    slack: float,
    most: int,
    deadline_s: float,
    on_progress: Progress | None,
) -> tuple[LayerChoices | None, ...]:
    tables = problem.tables

    @cache
    def splits(vertex: int, configuration: int) -> tuple[int, ...]:
        return tuple(problem.splits(vertex, configuration).values())

    own = [Choice(splits=splits(v, c), difference=0.0, changes=()) for v, c in enumerate(choice)]
    found: list[LayerChoices | None] = [
        LayerChoices(
            choices=(own[v],),
            num_configurations=tables.domain_sizes[v],
            beyond=slack * cost,
        )
        for v in range(len(choice))
    ]
    for island, marginals in known:
        present = island.present(choice)
        for at, vertex in enumerate(island.vertices):
            if on_progress:
                on_progress("looking at every configuration", vertex / len(choice))
            more = marginals.costs[at] - marginals.costs[at][present[at]]
            if more.min() < -TIE * cost:
                raise PlanError(
                    "what other configurations would cost is not known of a plan that is not the cheapest: something "
                    "costs less; search again, without a time limit, and report that plan"
                )
            if perf_counter() > deadline_s:
                found[vertex] = None
                continue
            order = [int(c) for c in np.argsort(more, kind="stable") if c != present[at] and more[c] <= slack * cost]
            listed = [
                Choice(
                    splits=splits(vertex, int(island.kept[at][c])),
                    difference=max(float(more[c]), 0.0),
                    changes=tuple(
                        (island.vertices[u], splits(island.vertices[u], int(island.kept[u][to])))
                        for u, to in sorted(marginals.changes(at, c).items())
                        if u != at
                    ),
                )
                for c in order[: most - 1]
            ]
            found[vertex] = LayerChoices(
                choices=(own[vertex], *listed),
                num_configurations=tables.domain_sizes[vertex],
                beyond=float(more[order[most - 1]]) if len(order) >= most else slack * cost,
            )
    return tuple(found)
