"""Which configurations strategies of at most some cost can have: what is left to look at for anything near the optimum.

The rule is that of the search itself (`bounds`): with cost moved between edges and vertices, every strategy in which
vertex v has configuration c costs at least θ_v(c) + Σ over u ≠ v of min θ_u. What exceeds the limit is dropped, so that
every strategy within the limit is among those of what is left.
"""

import numpy as np

from pase.solver.bounds import sweep
from pase.solver.effort import RELATIVE_TOLERANCE
from pase.solver.network import Network
from pase.tables.cost_tables import CostTables, IndexArray, verify_tables

MAX_SWEEPS = 12


def near_optimal(tables: CostTables, limit: float) -> tuple[IndexArray, ...]:
    """Return for each vertex the configurations, ascending, that a strategy of a cost of at most `limit` may have.

    None is missing; there may be others. limit: at least the least cost, or every vertex's are empty.
    """
    verify_tables(tables)
    limit += RELATIVE_TOLERANCE * abs(limit)
    # Costs are not negative: whatever is above the limit may count as twice the limit.
    network = Network.of_tables(tables, 2 * limit if limit > 0 else 1.0)
    for number in range(MAX_SWEEPS):
        before = network.num_configurations()
        if sweep(network, limit, number % 2 == 0, _unlimited) > limit:
            return tuple(np.empty(0, dtype=np.int32) for _ in network.live)
        if number and network.num_configurations() > 0.98 * before:
            break
    low = network.offset + sum((network.least or {}).values())
    kept = []
    for v in network.live:
        total = network.reparametrised(v)
        kept.append(network.origin[v][total <= limit - (low - (network.least or {})[v])].astype(np.int32))
    return tuple(kept)


def _unlimited() -> None:
    """Let the work go on."""
