"""The two moves that every stage of the search is made of: narrow a network by its bound, and finish it exactly."""

from collections.abc import Callable, Sequence

import numpy as np

from pase.solver.bounds import decode, sweep
from pase.solver.classes import ClassAlgebra
from pase.solver.effort import RELATIVE_TOLERANCE, Effort, Outcome
from pase.solver.elimination import Plan, plan_elimination, run_plan
from pase.solver.network import Network

Ordered = Callable[[Network], Sequence[int]]

MAX_SWEEPS = 60
LOOSE = 32
"""How many times the cost of the best strategy the ceiling may be."""
LITTLE_LEFT = 4  # configurations for each live vertex: then elimination is as good as free


def narrow(
    network: Network, effort: Effort, outcome: Outcome, *, max_sweeps: int = MAX_SWEEPS, whole: bool = True
) -> float:
    """Bound, decode and drop configurations until little is left or a pass changes little; return the lower bound.

    whole: the network is the whole problem, so that its bound holds for every strategy.

    What is rounded away is relative to the largest cost: a ceiling follows the best strategy down.
    """
    first = max(network.num_configurations(), 1)
    bounds = [-np.inf, -np.inf]
    for number in range(max_sweeps):
        if LOOSE * outcome.incumbent.cost < network.ceiling < np.inf:
            network.lower_ceiling(2 * outcome.incumbent.cost)
            bounds = [-np.inf, -np.inf]
        before = network.num_configurations()
        effort.progress(f"bounding: {before} configurations of {len(network.live)} layers left", 1 - before / first)
        forward = number % 2 == 0
        bound = sweep(network, outcome.incumbent.limit, forward, effort.check)
        scale = min(outcome.incumbent.cost, network.ceiling)
        bound -= RELATIVE_TOLERANCE * scale if scale < np.inf else 0.0
        effort.sweeps += 1
        if whole:
            outcome.raise_bound(bound)
        if bound > outcome.incumbent.limit:
            return bound
        network.fix_singles()
        after = network.num_configurations()
        gained = bound - bounds[-2]  # by a pass each way
        bounds.append(max(bound, bounds[-1]))
        is_little = after <= LITTLE_LEFT * len(network.live)
        is_slow = number >= 3 and after > 0.95 * before and gained < 0.02 * (outcome.incumbent.cost - bound)
        # Every second pass is decoded, and the last.
        if number == 0 or not forward or is_little or is_slow:
            cost, chosen = decode(network, not forward)
            if cost < outcome.incumbent.cost:  # it is no higher here than in the tables
                outcome.incumbent.offer(network.complete(chosen))
            effort.holds(network.own_bytes())
        if is_little or (is_slow and gained < 0.02 * (outcome.incumbent.cost - bound)):
            break
    return bounds[-1]


def finish(network: Network, ordered: Ordered, max_operations: int, effort: Effort, outcome: Outcome) -> bool:
    """Eliminate what is left if that is within the limits; return whether it was, and the incumbent is then optimal.

    ordered: gives the sequence in which to eliminate the live vertices of a network.
    """
    outcome.num_configurations_left, outcome.num_vertices_left = network.num_configurations(), len(network.live)
    best = optimal_strategy(network, ordered, max_operations, effort)
    if best is None:
        return False
    outcome.incumbent.settle(best[1])
    outcome.prove()
    return True


def optimal_strategy(
    network: Network, ordered: Ordered, max_operations: int, effort: Effort
) -> tuple[float, dict[int, int]] | None:
    """Return the least cost of a network and a strategy that has it, by elimination; None if beyond the limits."""
    if not network.live:
        return network.offset, network.complete({})
    plan = plan_elimination(network.costs, network.factors(), ordered(network), ClassAlgebra())
    if not fits(plan, max_operations, effort):
        return None
    effort.holds(network.own_bytes() + plan.table_bytes)
    effort.operations += plan.operations
    message = f"eliminating {len(network.live)} layers"
    optimum, chosen = run_plan(plan, effort.check, lambda fraction: effort.progress(message, fraction))
    return optimum + network.offset, network.complete({v: int(network.origin[v][c]) for v, c in chosen.items()})


def fits(plan: Plan, max_operations: int, effort: Effort) -> bool:
    """Return whether a plan stays within the memory limit and the number of combinations to look at."""
    return plan.table_bytes <= effort.memory_limit_bytes and plan.operations <= max_operations
