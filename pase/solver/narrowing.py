"""The two moves that every stage of the search is made of: narrow a network by its bound, and finish it exactly."""

from collections.abc import Callable, Sequence

import numpy as np

from pase.solver.bounds import decode, sweep
from pase.solver.classes import ClassAlgebra
from pase.solver.effort import Effort, Outcome
from pase.solver.elimination import Plan, plan_elimination, run_plan
from pase.solver.network import Network

Ordered = Callable[[Network], Sequence[int]]

MAX_SWEEPS = 60
LITTLE_LEFT = 4  # configurations for each live vertex: then elimination is as good as free


def narrow(
    network: Network, effort: Effort, outcome: Outcome, *, max_sweeps: int = MAX_SWEEPS, whole: bool = True
) -> float:
    """Bound, decode and drop configurations until little is left or a pass changes little; return the lower bound.

    whole: the network is the whole problem, so that its bound holds for every strategy.
    """
    best, forward, first = -np.inf, True, max(network.num_configurations(), 1)
    for number in range(max_sweeps):
        before = network.num_configurations()
        effort.progress(f"bounding: {before} configurations of {len(network.live)} layers left", 1 - before / first)
        bound = sweep(network, outcome.incumbent.limit, forward, effort.check)
        effort.sweeps += 1
        if whole:
            outcome.raise_bound(bound - outcome.rounding)
        if bound > outcome.incumbent.limit:
            return bound
        network.fix_singles()
        outcome.offer(*decode(network, not forward))
        effort.holds(network.own_bytes())
        after = network.num_configurations()
        if after <= LITTLE_LEFT * len(network.live):
            return max(best, bound)
        gap = outcome.incumbent.cost - bound
        if number >= 3 and after > 0.95 * before and bound - best < 0.02 * gap:
            return max(best, bound)
        best, forward = max(best, bound), not forward
    return best


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
