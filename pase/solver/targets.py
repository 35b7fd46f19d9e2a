"""The cheapest strategy up to a target cost within a limit on weight, or the proof that there is none.

Configurations that no strategy up to the target can have are dropped by their bounds (`bounds`, with the priced costs);
what is left is eliminated with fronts.
"""

import numpy as np

from pase.solver.bounds import sweep
from pase.solver.effort import RELATIVE_TOLERANCE, Effort
from pase.solver.front_elimination import Limits, cheapest_within, num_thinnings
from pase.solver.moves import Choice
from pase.solver.network import Network
from pase.solver.pricing import SUM_ROUNDING, Relaxation

EXACT_SHARE = 0.1
"""Of the rounding allowance: what the slacks of an elimination add up to."""
MAX_SWEEPS = 60


def cheapest_up_to(target: float, part: Relaxation, effort: Effort) -> tuple[float, Choice | None]:
    """Return a bound on the cost of every strategy that fits, and the cheapest if there is one up to a target cost.

    The bound is the target where there is none, otherwise that strategy's cost less a rounding allowance; a strategy
    may be returned that is dearer than the target. Raises TooWideError and TooManyError.
    """
    problem = part.problem
    allowance = EXACT_SHARE * RELATIVE_TOLERANCE * target
    most = target * (1 + RELATIVE_TOLERANCE) + part.price * problem.limit
    # A higher cost, an infinite one too, is as good as any that no strategy within the limits contains.
    network = Network.of_tables(part.priced, 2 * most)
    if not _narrowed(network, most, effort):
        return target, None
    limits = Limits(
        priced=most + SUM_ROUNDING * most,
        weight=problem.limit,
        price=part.price,
        slack=allowance / num_thinnings(problem.tables.num_vertices),
    )
    found = cheapest_within(network, problem, limits, effort)
    if found is None:
        return target, None
    choice = tuple(found[v] for v in range(len(found)))
    return min(target, problem.tables.evaluate(choice) - allowance), choice


def _narrowed(network: Network, limit: float, effort: Effort) -> bool:
    """Drop the configurations of which every strategy costs more than a limit; return whether any strategy is left."""
    best, forward = -np.inf, True
    for number in range(MAX_SWEEPS):
        before = network.num_configurations()
        bound = sweep(network, limit, forward, effort.check)
        effort.sweeps += 1
        if bound > limit:
            return False
        network.fix_singles()
        after = network.num_configurations()
        is_slow = number >= 3 and after > 0.95 * before and bound - best < 0.02 * (limit - bound)
        if after <= 2 * len(network.live) or is_slow:
            break
        best, forward = max(best, bound), not forward
    return True
