"""The best price on weight: that at which a strategy that fits a limit and one that does not cost the same.

The least priced cost over all strategies is, as a function of the price, the lower envelope of a line for each
strategy, cost + price × weight; less price × limit it bounds every strategy that fits, best where a line that rises and
one that falls meet. From the two known ones the envelope is followed to that point: each price takes a search.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pase.solver.moves import Choice
from pase.solver.solution import Solution
from pase.solver.weighted import Weighted
from pase.tables.cost_tables import CostTables

MAX_PRICES = 100

ROUNDING = 1e-12
"""Of a priced cost: what is lower by less is not lower."""

SUM_ROUNDING = 1e-13
"""Of a priced cost: by how much two sums of it may differ."""

Solve = Callable[[CostTables], Solution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What is known of a problem with a limit.

    bound: on the cost of every strategy that fits, by the price. priced: its tables at that price. light, heavy: the
    strategies that are equal at it, of which one fits.
    """

    problem: Weighted
    bound: float
    price: float
    priced: CostTables
    light: Choice
    heavy: Choice


def lightest(problem: Weighted, solve: Solve) -> Choice | None:
    """Return a light strategy that fits, None if the lightest is too heavy.

    Of the lightest configurations each vertex has the one with the least layer cost; where that is forbidden by an
    infinite cost, or does not fit for what edges weigh, it takes a search for the least weight.
    """
    if problem.least_weight > problem.limit:
        return None
    tables = problem.tables
    choice = []
    for v, weights in enumerate(problem.weights):
        least = np.flatnonzero(weights == weights.min())
        choice.append(int(least[tables.layer_costs(v)[least].argmin()]))
    if problem.fits(choice) and np.isfinite(tables.evaluate(choice)):
        return tuple(choice)
    found = solve(problem.weight_alone()).choice
    return found if problem.fits(found) else None


def relax(problem: Weighted, light: Choice, heavy: Solution, solve: Solve, most: Callable[[], float]) -> Relaxation:
    """Return the best bound that a price gives, or the first that is not below `most()`.

    light: a strategy that fits. heavy: the optimum without the limit, which does not.
    """
    tables = problem.tables
    known = Relaxation(
        problem=problem, bound=heavy.lower_bound, price=0.0, priced=tables, light=light, heavy=heavy.choice
    )
    best, light, above = known, known.light, known.heavy
    for _ in range(MAX_PRICES):
        if best.bound >= most():
            break
        cost, weight = tables.evaluate(above), problem.weight(above)
        price = max(0.0, (tables.evaluate(light) - cost) / (weight - problem.weight(light)))
        priced = problem.priced(price)
        found = solve(priced)
        bound = found.lower_bound - price * problem.limit - SUM_ROUNDING * (found.cost + price * problem.limit)
        if bound > best.bound:
            best = Relaxation(problem=problem, bound=bound, price=price, priced=priced, light=light, heavy=above)
        if found.cost >= (cost + price * weight) * (1 - ROUNDING):
            break
        if problem.fits(found.choice):
            light = found.choice
        else:
            above = found.choice
    return Relaxation(problem=problem, bound=best.bound, price=best.price, priced=best.priced, light=light, heavy=above)
